"""Pieces of every layout, and from every layout to every other: byte for byte what a copy item by
item comes to, within the region, and with no two runs that are one."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerserve.kv.errors import InvalidInput, SpecMismatch
from ownerserve.kv.frame import CSA_INDEX, CSA_MAIN, DENSE, PayloadPart, PayloadSection
from ownerserve.kv.specs import Compressed, Entry, Part, Precision, Role, StateSpec
from ownerserve.transfer.layout.arrays import Pool
from ownerserve.transfer.layout.joining import CopyList, join
from ownerserve.transfer.layout.known import LAYOUTS, paged_rows
from ownerserve.transfer.layout.places import RegionPlaces
from ownerserve.transfer.vocabulary import FramePiece
from tests.support.transfer.naive import WHERE
from tests.support.transfer.sides import (
    ARTIFACT,
    EACH,
    PAIRS,
    Side,
    cases,
    check_runs,
    moved,
)

BASE = 1 << 40
"""Where memory begins that is a number here: nothing is there."""


@pytest.mark.parametrize(("section", "layout"), EACH)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_piece_is_what_its_items_are(section: str, layout: str, data: Any) -> None:
    (side,), piece = data.draw(cases(section, layout))
    runs = side.runs(piece)
    check_runs(side, runs)
    expected = [side.memory[at : at + size].tobytes() for at, size in side.items(piece)]
    assert side.taken(runs) == b"".join(expected)


@pytest.mark.parametrize(("section", "layout", "other"), PAIRS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_a_piece_goes_from_any_layout_into_any_other(
    section: str, layout: str, other: str, data: Any
) -> None:
    (source, goal), piece = data.draw(cases(section, layout, other))
    expected = moved(piece, source, goal)
    copies = join(goal.runs(piece), source.runs(piece))
    for there, here, size in copied(copies, source, goal):
        goal.memory[here : here + size] = source.memory[there : there + size]
    assert np.array_equal(goal.memory, expected)  # what is not of the piece is as it was
    touching = (copies.source[:-1] + copies.lengths[:-1] == copies.source[1:]) & (
        copies.goal[:-1] + copies.lengths[:-1] == copies.goal[1:]
    )
    assert not touching.any()


def copied(copies: CopyList, source: Side, goal: Side) -> list[tuple[int, int, int]]:
    there = copies.source - source.memory.ctypes.data
    here = copies.goal - goal.memory.ctypes.data
    return list(zip(there.tolist(), here.tolist(), copies.lengths.tolist(), strict=True))


def dense(layers: int = 2, tokens: int = 32, heads: int = 2, dim: int = 4) -> PayloadSection:
    shape = (layers, tokens, heads, dim)
    return PayloadSection(
        DENSE, (PayloadPart("keys", shape, "bfloat16"), PayloadPart("values", shape, "bfloat16"))
    )


def places(layout: str, section: PayloadSection, tokens: int, blocks: int = 8) -> RegionPlaces:
    return RegionPlaces(LAYOUTS[layout](Pool(section, blocks, tokens, BASE)))


def test_a_pool_of_whole_slots_is_one_run_where_slots_touch() -> None:
    at = places("slots", dense(), 32)
    runs = at.runs(FramePiece(ARTIFACT, 0, 4, 0, 2), [np.array([2, 3, 4, 7])])
    unit = dense().unit_bytes
    assert runs.addresses.tolist() == [BASE + 2 * unit, BASE + 7 * unit]
    assert runs.lengths.tolist() == [3 * unit, unit]


def test_two_tables_name_the_blocks_of_their_layers() -> None:
    region = LAYOUTS["combined"](Pool(dense(layers=3), 8, 16, BASE))
    at = RegionPlaces(msgspec.structs.replace(region, groups=(0, 1, 0)))
    tables = [np.array([0, 1]), np.array([5, 3])]
    runs = at.runs(FramePiece(ARTIFACT, 0, 1, 0, 3), tables)
    alone = [
        places("combined", dense(layers=3), 16).runs(
            FramePiece(ARTIFACT, 0, 1, layer, layer + 1), [tables[layer == 1]]
        )
        for layer in range(3)
    ]
    keys = [one.addresses[: len(one.addresses) // 2].tolist() for one in alone]
    values = [one.addresses[len(one.addresses) // 2 :].tolist() for one in alone]
    assert runs.addresses.tolist() == list(itertools.chain(*keys, *values))


def test_slots_that_count_backwards_are_found() -> None:
    region = LAYOUTS["slots"](Pool(dense(), 4, 32, BASE))
    size = dense().unit_bytes
    turned = tuple(
        tuple(
            msgspec.structs.replace(lane, address=lane.address + 3 * size, block_bytes=-size)
            for lane in lanes
        )
        for lanes in region.lanes
    )
    at = RegionPlaces(msgspec.structs.replace(region, lanes=turned))
    runs = at.runs(FramePiece(ARTIFACT, 0, 1, 0, 2), [np.array([1])])
    assert (runs.addresses.tolist(), runs.lengths.tolist()) == ([BASE + 2 * size], [size])


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({"end_unit": 3}, [0, 1, 2, 3]),
        ({"first_unit": 1, "end_unit": 1}, [0, 1, 2, 3]),
        ({"end_layer": 3}, [0, 1, 2, 3]),
        ({"first_layer": 2}, [0, 1, 2, 3]),
        ({"end_head": 3}, [0, 1, 2, 3]),
        ({}, [0, 1, 2, 8]),
        ({}, [0, -1, 2, 3]),
    ],
)
def test_what_is_not_there_is_refused(changes: dict[str, Any], ids: list[int]) -> None:
    piece = msgspec.structs.replace(FramePiece(ARTIFACT, 0, 2, 0, 2), **changes)
    with pytest.raises(InvalidInput):
        places("combined", dense(), 16).runs(piece, [np.array(ids)])


@pytest.mark.parametrize("change", ["shorter", "other lanes", "no whole blocks"])
def test_a_region_that_contradicts_itself_is_refused(change: str) -> None:
    region = LAYOUTS["combined"](Pool(dense(), 8, 16, BASE))
    broken = {
        "shorter": msgspec.structs.replace(region, bytes=region.bytes - 1),
        "other lanes": msgspec.structs.replace(region, lanes=region.lanes[:1]),
        "no whole blocks": msgspec.structs.replace(region, section=dense(tokens=24)),
    }[change]
    with pytest.raises(SpecMismatch):
        RegionPlaces(broken)


def test_sides_of_two_lengths_are_no_copy() -> None:
    at = places("combined", dense(), 16)
    one = at.runs(FramePiece(ARTIFACT, 0, 1, 0, 2), [np.array([0, 1, 2, 3])])
    two = at.runs(FramePiece(ARTIFACT, 0, 2, 0, 2), [np.array([0, 1, 2, 3])])
    with pytest.raises(SpecMismatch):
        join(one, two)


def test_every_known_layout_is_tested() -> None:
    assert LAYOUTS.keys() == WHERE.keys() == {layout for _, layout in EACH}


def test_blocks_are_padded_to_what_their_kernel_wants() -> None:
    """DeepSeek-V4's kernels take compressed entries in pages of a multiple of 576 bytes."""
    parts = (
        Part("nope", 448, Precision.FP8),
        Part("rope", 64, Precision.BF16),
        Part("scale", 8, Precision.UE8M0),
    )
    state = StateSpec(Role.CSA_MAIN, Compressed(4, 4), Entry(parts), align_bytes=576)
    entries, size = 16, state.entry.payload_bytes
    section = PayloadSection(CSA_MAIN, (PayloadPart("rows", (2, entries, size), "uint8"),))
    pool = Pool(section, 8, entries, BASE, state.align_bytes)
    runs = RegionPlaces(LAYOUTS["paged_rows"](pool)).runs(
        FramePiece(ARTIFACT, 0, 2, 0, 1), [np.array([3, 4])]
    )
    page = state.padded(entries * size)
    assert page > entries * size
    assert (runs.addresses - BASE).tolist() == [3 * page, 4 * page]
    assert runs.lengths.tolist() == [entries * size] * 2  # padding is nobody's bytes


def test_compressed_entries_and_their_indexer_share_a_page() -> None:
    rows = {CSA_MAIN: 24, CSA_INDEX: 8}
    sections = {
        name: PayloadSection(name, (PayloadPart("rows", (2, 4, size), "uint8"),))
        for name, size in rows.items()
    }
    main = Pool(sections[CSA_MAIN], 4, 4, BASE)
    index = Pool(sections[CSA_INDEX], 4, 4, BASE + 4 * 24)
    page = 4 * (24 + 8)
    piece, ids = FramePiece(ARTIFACT, 0, 1, 1, 2), [np.array([2])]
    found = [
        RegionPlaces(paged_rows.in_page(pool, page)).runs(piece, ids) for pool in (main, index)
    ]
    at = BASE + (4 + 2) * page
    assert [runs.addresses.tolist() for runs in found] == [[at], [at + 4 * 24]]
    assert [runs.lengths.tolist() for runs in found] == [[4 * 24], [4 * 8]]
