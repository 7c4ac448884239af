"""Runs in vLLM's environment, which has Numba: a host's copies by compiled loops, in every layout,
every length of words, with and without whole squares, and so many bytes that they are streamed."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import torch

from ownerserve.engines.vllm.layout import compiled
from ownerserve.engines.vllm.layout.copies import host_copies
from tests.support.vllm_parts import page_play
from tests.support.vllm_parts.page_play import CPU, LAYOUTS, Pages

CALLS: Counter[str] = Counter()


def counted(name: str) -> None:
    loop = getattr(compiled, name)

    def call(*given: Any) -> None:
        CALLS[f"{name} streamed" if given[-1] else name] += 1
        loop(*given)

    setattr(compiled, name, call)


def build_another_engine() -> None:
    """As far as vLLM then looks for its kernels in all modules, of which Numba's are some now."""
    from vllm.platforms import current_platform

    look = getattr(current_platform, "register_triton_kernel_overrides", None)
    if look is not None:  # 0.30 does not look
        look()


def main() -> None:
    assert isinstance(host_copies(), compiled.CompiledCopies)
    build_another_engine()
    for name in ("rows", "turn"):
        counted(name)
    small = {"layers": 2, "heads": 2, "window": 12}
    for layout in LAYOUTS:
        for dtype, kernel_blocks in ((torch.bfloat16, 1), (torch.float32, 2), (torch.uint8, 1)):
            kind = torch.float8_e4m3fn if dtype == torch.uint8 else dtype
            for dim, block in ((6, 8), (16, 32), (24, 64), (1, 32)):
                played = Pages(
                    layout=layout,
                    dtype=kind,
                    kernel_blocks=kernel_blocks,
                    dim=dim,
                    block=block,
                    unit=2 * block,
                    **small,
                )
                page_play.round_trip(played)
    compiled.STREAMED_BYTES = 1
    for layout in ("LBNHC", "LBHNC", CPU):
        for seed in range(4):
            kind = torch.float32
            page_play.round_trip(
                Pages(layout=layout, dtype=kind, dim=32, block=32, unit=64, seed=seed)
            )
    page_play.latent_round_trip(kernel_blocks=2)
    print(json.dumps({"calls": CALLS}))


if __name__ == "__main__":
    main()
