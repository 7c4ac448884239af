"""A stored payload's layout is a region like an engine's: by its runs, records convert as the
store converts them."""

from __future__ import annotations

import math

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerserve.kv.frame import PayloadPart, PayloadSection
from ownerserve.store.format.convert import ByteOrder, PayloadLayout, UnitRange, convert
from ownerserve.transfer.layout.joining import join
from ownerserve.transfer.layout.places import RegionPlaces
from ownerserve.transfer.vocabulary import FramePiece

ENTRY_BYTES, LAYERS, ROWS = 8, 2, 24


def layout(entries: int, padding: int, width: int, order: ByteOrder) -> PayloadLayout:
    return PayloadLayout(
        engine="payload",
        engine_version="",
        layout_version=1,
        first_layer=0,
        end_layer=LAYERS,
        shard=0,
        shards=1,
        block_tokens=entries,
        entries=entries,
        entry_bytes=ENTRY_BYTES,
        page_bytes=entries * ENTRY_BYTES + padding,
        scalar="bfloat16",
        scalar_bytes=width,
        byte_order=order,
    )


def places(own: PayloadLayout, unit: int, at: int) -> RegionPlaces:
    """The payload's entries as units of `unit` of them, in memory from `at` on."""
    region = own.region(ROWS // own.entries)
    shape = (LAYERS, unit, ENTRY_BYTES)
    lanes = tuple(
        msgspec.structs.replace(lane, address=lane.address + at) for lane in region.lanes[0]
    )
    section = PayloadSection(region.section.name, (PayloadPart("entries", shape, "uint8"),))
    return RegionPlaces(
        msgspec.structs.replace(region, section=section, lanes=(lanes,), address=at)
    )


sizes = st.sampled_from((1, 2, 3, 4, 8))
paddings = st.sampled_from((0, 1, 7, 64))
orders = st.sampled_from(list(ByteOrder))


@settings(max_examples=60, deadline=None)
@given(
    pair=st.tuples(sizes, sizes),
    padding=st.tuples(paddings, paddings),
    order=st.tuples(orders, orders),
    width=st.sampled_from((1, 2, 4, 8)),
)
def test_runs_of_two_payloads_come_to_what_the_store_converts(
    pair: tuple[int, int],
    padding: tuple[int, int],
    order: tuple[ByteOrder, ByteOrder],
    width: int,
) -> None:
    stored, wanted = (layout(pair[n], padding[n], width, order[n]) for n in range(2))
    units, own_units = ROWS // stored.entries, ROWS // wanted.entries
    memory = np.random.default_rng(1).integers(0, 256, units * stored.unit_bytes, dtype=np.uint8)
    got = convert(
        memory.data,
        stored,
        wanted,
        source=UnitRange(0, units, 0, False),
        target=UnitRange(0, own_units, 0, False),
    )
    unit, far = math.lcm(*pair), 1 << 30
    piece = FramePiece(b"", 0, ROWS // unit, 0, LAYERS)
    copies = join(
        places(wanted, unit, 0).runs(piece, [np.arange(own_units)]),
        places(stored, unit, far).runs(piece, [np.arange(units)]),
    )
    out = np.zeros(own_units * wanted.unit_bytes, np.uint8)
    each = zip(copies.source.tolist(), copies.goal.tolist(), copies.lengths.tolist(), strict=True)
    for there, here, size in each:
        out[here : here + size] = memory[there - far : there - far + size]
    assert isinstance(got, memoryview)
    assert bytes(got) == out.tobytes()
