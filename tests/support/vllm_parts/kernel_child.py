"""Runs in vLLM's environment, which has Triton, under its interpreter: the device's copies, over
this host's memory, in every layout."""

from __future__ import annotations

import json
from typing import Any

import torch

from ownerserve.engines.vllm.layout import codec as codec_module
from ownerserve.engines.vllm.layout import kernel
from ownerserve.engines.vllm.layout.device import LIST_BYTES, DeviceCopies
from tests.support.vllm_parts import page_play
from tests.support.vllm_parts.page_play import LAYOUTS, Pages

STAGING_BYTES = 4 * LIST_BYTES
"""The least: a record goes through it in several runs."""


class OnHost(DeviceCopies):
    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), STAGING_BYTES)


def main() -> None:
    launches = 0
    launch = kernel.launch

    def counted(*given: Any, **more: Any) -> None:
        nonlocal launches
        launches += 1
        launch(*given, **more)

    kernel.launch = counted
    codec_module.host_copies = OnHost
    small = {"layers": 2, "heads": 2, "dim": 6, "block": 8, "unit": 16, "window": 12}
    for layout in LAYOUTS:
        for dtype, kernel_blocks in ((torch.bfloat16, 1), (torch.float32, 2), (torch.uint8, 1)):
            kind = torch.float8_e4m3fn if dtype == torch.uint8 else dtype
            played = Pages(layout=layout, dtype=kind, kernel_blocks=kernel_blocks, **small)
            page_play.round_trip(played)
    print(json.dumps({"layouts": sorted(LAYOUTS), "launches": launches}))


if __name__ == "__main__":
    main()
