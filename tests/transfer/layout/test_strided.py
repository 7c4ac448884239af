"""Blocks brought from one layout to another in one pass, and by way of an arena in raw order."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerserve.kv.errors import InvalidInput, SpecMismatch
from ownerserve.kv.frame import DENSE, PayloadPart, PayloadSection
from ownerserve.transfer.layout.arrays import Pool
from ownerserve.transfer.layout.forms import staged
from ownerserve.transfer.layout.heads import heads_of, with_heads
from ownerserve.transfer.layout.known import LAYOUTS
from ownerserve.transfer.layout.places import RegionPlaces
from ownerserve.transfer.layout.strided import StridedCopies
from ownerserve.transfer.vocabulary import FramePiece
from tests.support.transfer.sides import ARTIFACT, EACH, PAIRS, Side, cases, moved


def tables(side: Side) -> list[np.ndarray]:
    return [np.array(side.ids)]


@pytest.mark.parametrize(("section", "layout", "other"), PAIRS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_blocks_come_in_one_pass(section: str, layout: str, other: str, data: Any) -> None:
    (source, goal), piece = data.draw(cases(section, layout, other))
    expected = moved(piece, source, goal)
    heads = range(piece.first_head, piece.end_head)
    here, there = (
        with_heads(side.places.region, heads) if heads.stop else side.places.region
        for side in (goal, source)
    )
    copies = StridedCopies(here, there)
    try:
        copies.copy(piece, tables(goal), tables(source))
    except SpecMismatch:  # blocks of, say, 2 and 3 tokens
        steps = {side.pool.block_tokens for side in (goal, source)}
        assert max(steps) % min(steps) or "tiled" in (layout, other)
        return
    assert np.array_equal(goal.memory, expected)


@pytest.mark.parametrize(("section", "layout"), EACH)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_what_was_read_in_raw_order_goes_on_from_an_arena(
    section: str, layout: str, data: Any
) -> None:
    (source, goal), piece = data.draw(cases(section, layout, "slots"))
    piece = msgspec.structs.replace(piece, first_head=0, end_head=0)
    expected = moved(piece, source, goal)
    raw = msgspec.structs.replace(piece, form=source.places.form)
    arena = np.frombuffer(bytearray(source.taken(source.runs(raw))), np.uint8)
    layers = range(piece.first_layer, piece.end_layer)
    units = piece.end_unit - piece.first_unit
    read = staged(source.places.region, layers, address=arena.ctypes.data, units=units)
    assert read.bytes == len(arena)
    here = goal.places.region
    cut = tuple(lanes[layers.start : layers.stop] for lanes in here.lanes)
    mine = msgspec.structs.replace(here, section=read.section, lanes=cut)
    own = np.array(goal.ids)[piece.first_unit : piece.end_unit]
    StridedCopies(mine, read).copy(
        FramePiece(ARTIFACT, 0, units, 0, len(layers)), [own], [np.arange(units)]
    )
    assert np.array_equal(goal.memory, expected)


def test_layers_that_lie_anywhere_are_copied_one_by_one() -> None:
    shape = (3, 4, 2, 3)
    parts = tuple(PayloadPart(name, shape, "float32") for name in ("keys", "values"))
    pools = [Pool(PayloadSection(DENSE, parts), 5, 4, 0)] * 2
    memory = [
        np.random.default_rng(1).integers(0, 256, LAYOUTS[name](pool).bytes, dtype=np.uint8)
        for name, pool in zip(("combined", "slots"), pools, strict=True)
    ]
    source, goal = (
        LAYOUTS[name](msgspec.structs.replace(pool, address=data.ctypes.data))
        for name, pool, data in zip(("combined", "slots"), pools, memory, strict=True)
    )
    lanes = tuple((own[1], own[0], own[2]) for own in source.lanes)
    other = msgspec.structs.replace(source, lanes=lanes)
    piece, there, here = FramePiece(ARTIFACT, 0, 2, 0, 3), np.array([4, 1]), np.array([0, 3])
    StridedCopies(goal, other).copy(piece, [here], [there])

    def taken(places: RegionPlaces, ids: np.ndarray, data: np.ndarray) -> bytes:
        runs = places.runs(piece, [ids])
        begins = (runs.addresses - data.ctypes.data).tolist()
        each = zip(begins, runs.lengths.tolist(), strict=True)
        return b"".join(data[at : at + size].tobytes() for at, size in each)

    expected = taken(RegionPlaces(other), there, memory[0])
    assert taken(RegionPlaces(goal), here, memory[1]) == expected


@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_what_is_not_there_is_refused(data: Any) -> None:
    (source, goal), piece = data.draw(cases(DENSE, "combined", "combined"))
    copies = StridedCopies(source.places.region, source.places.region)
    own = tables(source)
    for wrong in (own[0] - source.pool.blocks, own[0] + source.pool.blocks):
        with pytest.raises(InvalidInput, match="block ids"):
            copies.copy(piece, [wrong], own)
    beyond = msgspec.structs.replace(piece, end_unit=len(own[0]) + 1)
    with pytest.raises(InvalidInput, match="units"):
        copies.copy(beyond, own, own)
    heads = heads_of(goal.places.region.section)
    if heads > 1:
        with pytest.raises(SpecMismatch):
            StridedCopies(with_heads(goal.places.region, range(1)), source.places.region)
