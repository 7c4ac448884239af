"""Copies by lists of pieces, against a reference that copies number by number.

Random layouts as vLLM has them, random block tables, every item size, kernel blocks, blocks that
are not to be written, memory in several allocations.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerserve.engines.vllm.layout import copies
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.frame import DENSE
from tests.support.children import importing
from tests.support.vllm_parts import page_play, specs
from tests.support.vllm_parts.page_play import CPU, LAYOUTS, Pages

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / os.environ.get("OWNERSERVE_VLLM_VENV", ".venv-vllm") / "bin/python"


@st.composite
def pages(draw: st.DrawFn) -> Pages:
    block = draw(st.sampled_from([4, 8, 16]))
    return Pages(
        layout=draw(st.sampled_from(sorted(LAYOUTS))),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn])),
        layers=draw(st.integers(1, 3)),
        heads=draw(st.integers(1, 3)),
        dim=draw(st.sampled_from([1, 2, 3, 8, 24, 128])),
        block=block,
        unit=block * draw(st.integers(1, 3)),
        window=draw(st.sampled_from([5, 17, 32])),
        kernel_blocks=draw(st.sampled_from([1, 2, 4])),
        allocations=draw(st.sampled_from(["one", "a layer"])),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=40, deadline=None)
@given(pages())
def test_what_is_read_and_written_is_what_a_plain_loop_copies(played: Pages) -> None:
    page_play.round_trip(played)


@pytest.mark.parametrize("kernel_blocks", [2, 4])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_kernel_blocks_of_every_layout_come_back(layout: str, kernel_blocks: int) -> None:
    """FlashInfer and FlashMLA take shorter blocks than vLLM manages: a page is n pages then."""
    page_play.round_trip(Pages(layout=layout, kernel_blocks=kernel_blocks))


def test_latents_in_kernel_blocks_come_back() -> None:
    page_play.latent_round_trip(kernel_blocks=2)


def test_a_page_that_is_cut_unevenly_is_refused() -> None:
    config = specs.Config([specs.dense(0)], num_blocks=8)
    cache = torch.zeros(16, 2, 32, 16)  # two kernel blocks of 32 in a block of 32
    with pytest.raises(InvalidInput, match="2 kernel blocks"):
        page_play.codec_of(config, dict.fromkeys(specs.layers(0), cache))


def test_a_records_calls_do_not_grow_with_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most two calls a layer move a record of 1,024 scattered tokens; where keys change their
    order, as on a CPU, two for each MiB and each unit's values beside."""
    calls: list[str] = []
    for name in ("take", "put", "move"):
        own = getattr(copies, name)
        monkeypatch.setattr(
            copies, name, lambda *given, own=own, **more: (calls.append(""), own(*given, **more))
        )
    for layout in ("LBNHC", "LBHNC", CPU):
        played = Pages(layout=layout, layers=16, dim=128, block=16, tokens=1024)
        codec = played.codec()
        place = played.place(DENSE, 0, 1024)
        data = bytearray(codec.size(place))
        codec.read(place, memoryview(data))
        most = 2 * played.layers
        if layout == CPU:
            most = 1024 // played.unit * (1 + 2)
        assert 0 < len(calls) <= most
        calls.clear()
        codec.write(place, memoryview(data))
        assert 0 < len(calls) <= most
        calls.clear()


@pytest.mark.vllm
def test_the_kernel_copies_the_same() -> None:
    """The CUDA kernel by Triton's interpreter, on this host's memory, over all layouts."""
    said = in_vllms_environment("kernel_child", TRITON_INTERPRET="1")
    assert said["layouts"] == sorted(LAYOUTS)
    assert said["launches"] > 0


@pytest.mark.vllm
def test_compiled_loops_copy_the_same() -> None:
    """Numba's, over all layouts: rows and axes that change places, in the cache and past it."""
    said = in_vllms_environment("compiled_child")
    assert set(said["calls"]) == {"rows", "rows streamed", "turn", "turn streamed"}


def in_vllms_environment(child: str, **environment: str) -> dict[str, Any]:
    run = subprocess.run(
        [str(PYTHON), "-m", f"tests.support.vllm_parts.{child}"],
        env=importing(**environment),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    said: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return said
