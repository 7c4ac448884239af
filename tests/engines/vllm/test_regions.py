"""Regions of vLLM's pages: what transfer reads by address is what the codec reads."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from ownerserve.kv.frame import DENSE, WINDOW
from ownerserve.transfer.layout.places import RegionPlaces
from ownerserve.transfer.vocabulary import FramePiece
from tests.support.vllm_parts.page_play import LAYOUTS, Pages

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("allocations", ["one", "a layer"])
@pytest.mark.parametrize("kernel_blocks", [1, 2])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_runs_read_what_the_codec_reads(layout: str, kernel_blocks: int, allocations: str) -> None:
    played = Pages(
        layout=layout, kernel_blocks=kernel_blocks, allocations=allocations, dtype=torch.float32
    )
    codec, units = played.codec(), 3
    place = played.place(DENSE, 0, units * played.unit)
    read = bytearray(codec.size(place))
    codec.read(place, memoryview(read))
    region = codec.regions()[DENSE]
    piece = FramePiece(b"a" * 32, 0, units, 0, played.layers)
    runs = RegionPlaces(region).runs(piece, [np.array(place.blocks[0])])
    each = zip(runs.addresses.tolist(), runs.lengths.tolist(), strict=True)
    assert b"".join(ctypes.string_at(at, size) for at, size in each) == bytes(read)


def test_windows_are_the_codecs() -> None:
    assert WINDOW not in Pages().codec().regions()
