"""A store written by a worker whose records lie otherwise is read right, or refused and counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ownerserve.cache.layout import Component, Layout
from ownerserve.kv.clock import ManualClock
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.frame import PayloadPart
from ownerserve.kv.prefix import hash_prefix, pack
from ownerserve.kv.specs import Coverage
from ownerserve.node.storage.backing import NodeTiers
from ownerserve.node.vocabulary.records import Cell, Parts, RecordNames
from ownerserve.store.disk.tier import DiskTier
from ownerserve.store.format.convert import (
    ByteOrder,
    PayloadLayout,
    Unconvertible,
    decode,
    obstacle,
)
from ownerserve.store.format.model import Meta, MissReason, ReadHit, ReadMiss, Want, WriteDone
from ownerserve.store.tiers.backend import Reservation
from tests.support.node.node_driver import IDENTITY, B

LAYERS, WIDTH, UNITS = 3, 8, 4
ROW = (LAYERS, B, WIDTH)
DENSE: Parts = {
    "dense": (PayloadPart("keys", ROW, "float32"), PayloadPart("values", ROW, "float32")),
    "swa": (PayloadPart("keys", (LAYERS, 5, 1), "float16"),),
}
UNIT_BYTES = 2 * LAYERS * B * WIDTH * 4
SWA_BYTES, SWA_SLOT = LAYERS * 5 * 2, 32
LAYOUT = Layout(
    B,
    (
        Component("dense", Coverage.RANGE, UNIT_BYTES, UNIT_BYTES),
        Component("swa", Coverage.POINT, SWA_SLOT, SWA_BYTES),
    ),
)
NAMES = RecordNames(IDENTITY, LAYOUT, engine="payload/1", blocks=UNITS, parts=DENSE)
DIGESTS = hash_prefix(pack(range(UNITS * B)), B)
STATE = np.random.default_rng(7).standard_normal((2, LAYERS, UNITS * B, WIDTH)).astype("<f4")
"""Keys and values of UNITS * B tokens, without any layout."""


def canonical() -> bytes:
    """The record as kv.frame says it: unit by unit, part by part, layer by layer."""
    blocks = STATE.reshape(2, LAYERS, UNITS, B, WIDTH)
    return b"".join(
        blocks[part, layer, unit].tobytes()
        for unit in range(UNITS)
        for part in range(2)
        for layer in range(LAYERS)
    )


def otherwise(description: PayloadLayout) -> bytes:
    """The same state as a worker of another `description` would write it."""
    order = ">f4" if description.byte_order is ByteOrder.BIG else "<f4"
    rows, out = description.entries, bytearray()
    for first in range(0, UNITS * B, rows):
        for part in range(2):
            for layer in range(LAYERS):
                page = STATE[part, layer, first : first + rows].astype(order).tobytes()
                out += page.ljust(description.page_bytes, b"\xee")
    return bytes(out)


OURS = decode(NAMES.descriptor("dense"))
assert OURS is not None
PAGE = OURS.page_bytes


def but(**changes: object) -> PayloadLayout:
    return msgspec.structs.replace(OURS, **changes)


CONVERTED = {
    "page padding": but(page_bytes=PAGE + 48),
    "byte order": but(byte_order=ByteOrder.BIG),
    "engine version": but(engine_version="0.33"),
    "shorter blocks": but(block_tokens=B // 2, entries=B // 2, page_bytes=PAGE // 2),
    "longer blocks, padded": but(block_tokens=2 * B, entries=2 * B, page_bytes=2 * PAGE + 16),
}
REFUSED = {
    Unconvertible.OTHER_ENGINE: but(engine="pages"),
    Unconvertible.OTHER_LAYOUT_VERSION: but(layout_version=2),
    Unconvertible.OTHER_LAYERS: but(end_layer=LAYERS),
    Unconvertible.OTHER_SHARD: but(shards=2),
    Unconvertible.OTHER_SCALAR: but(scalar="int32"),
}


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[NodeTiers]:
    opened = NodeTiers([DiskTier(tmp_path, ManualClock(1000.0))])
    yield opened
    opened.close()


def write(tiers: NodeTiers, meta: Meta, payload: bytes) -> None:
    reserved = tiers.reserve(meta, len(payload))
    assert isinstance(reserved, Reservation), reserved
    reserved.payload[:] = payload
    [outcome] = tiers.commit([reserved])
    assert isinstance(outcome, WriteDone)


def written_as(description: bytes, units: int = UNITS) -> Meta:
    """The record's metadata from a worker with that descriptor: the id is the same."""
    meta = NAMES.range_meta("dense", Cell(0, UNITS), DIGESTS)
    inner = meta.boundaries if units == UNITS else b""
    return msgspec.structs.replace(meta, descriptor=description, units=units, boundaries=inner)


def want(meta: Meta, first: int = 0, end: int | None = None) -> Want:
    return Want(meta.id, first, end, descriptor=NAMES.descriptor("dense"))


def test_a_tenants_records_describe_themselves_as_well() -> None:
    theirs = NAMES.of(b"t" * 32)
    assert theirs.descriptor("dense") == NAMES.descriptor("dense")


def test_what_a_worker_writes_it_reads_back_as_it_lies(tiers: NodeTiers) -> None:
    meta = written_as(NAMES.descriptor("dense"))
    write(tiers, meta, canonical())
    outcome = tiers.read([want(meta)])
    assert isinstance(outcome, ReadHit)
    assert bytes(outcome.parts[0].data) == canonical()
    assert tiers.counters["converted"] == 0


@pytest.mark.parametrize("name", CONVERTED)
def test_another_layout_of_the_same_state_is_read_right(tiers: NodeTiers, name: str) -> None:
    other = CONVERTED[name]
    meta = written_as(other.encode(), UNITS * B // other.block_tokens)
    write(tiers, meta, otherwise(other))
    for first, end in ((0, UNITS), (1, 3), (UNITS - 1, UNITS)):
        outcome = tiers.read([want(meta, first, end)])
        assert isinstance(outcome, ReadHit), outcome
        size = UNIT_BYTES
        assert bytes(outcome.parts[0].data) == canonical()[first * size : end * size]
    assert tiers.counters["converted"] == 3


@pytest.mark.parametrize("reason", REFUSED)
def test_what_can_not_be_converted_is_a_counted_miss(
    tiers: NodeTiers, reason: Unconvertible
) -> None:
    other = REFUSED[reason]
    assert obstacle(other, OURS) is reason
    meta = written_as(other.encode())
    write(tiers, meta, canonical())
    assert tiers.read([want(meta)]) == ReadMiss(MissReason.FOREIGN_LAYOUT, meta.id)
    assert tiers.counters["foreign"] == 1


def test_the_former_descriptor_is_refused(tiers: NodeTiers) -> None:
    former = msgspec.msgpack.encode(["payload/1", B, [["dense", UNIT_BYTES]]])
    meta = written_as(former)
    write(tiers, meta, canonical())
    assert tiers.read([want(meta)]) == ReadMiss(MissReason.FOREIGN_LAYOUT, meta.id)
    assert tiers.counters["foreign"] == 1


def test_padding_at_the_end_of_a_slot_is_no_part_of_the_state(tiers: NodeTiers) -> None:
    """Point state of 30 bytes in a slot of 32; a worker that pads to 64 wrote it."""
    ours = decode(NAMES.descriptor("swa"))
    assert ours is not None
    assert (ours.entries, ours.entry_bytes, ours.page_bytes) == (1, SWA_BYTES, SWA_SLOT)
    state = bytes(range(SWA_BYTES))
    wider = msgspec.structs.replace(ours, page_bytes=64).encode()
    meta = msgspec.structs.replace(NAMES.point_meta("swa", 4, DIGESTS), descriptor=wider)
    write(tiers, meta, state.ljust(64, b"\xee"))
    outcome = tiers.read([Want(meta.id, descriptor=NAMES.descriptor("swa"))])
    assert isinstance(outcome, ReadHit)
    assert bytes(outcome.parts[0].data) == state.ljust(SWA_SLOT, b"\0")


def test_parts_that_differ_are_one_page_that_nobody_cuts() -> None:
    uneven = (PayloadPart("a", (2, B, 8), "float32"), PayloadPart("b", (2, B, 4), "float32"))
    size = sum(part.padded_bytes for part in uneven)
    layout = Layout(B, (Component("x", Coverage.RANGE, size, size),))
    names = RecordNames(IDENTITY, layout, engine="payload/1", blocks=4, parts={"x": uneven})
    found = decode(names.descriptor("x"))
    assert found is not None and found.is_consistent()
    assert (found.layers, found.entries, found.entry_bytes) == (1, 1, size)


def test_a_layout_without_a_version_is_refused() -> None:
    with pytest.raises(InvalidInput, match="engine"):
        RecordNames(IDENTITY, LAYOUT, engine="payload", blocks=4)
