"""This module turns one layout of a record's payload into another, or says why not; and reads such
a record.

A payload is units of `block_tokens` tokens; a unit holds, for each layer, a page of entries:

    units   |  unit 0                          |  unit 1 ...
    pages   |  layer 0       |  layer 1        |
    entries |  e e e e | pad |  e e e e | pad  |      entry_bytes each, page_bytes together

What may differ between the layout that is stored and the one that is wanted is what can be
undone without knowing the bytes: how many entries share a page, the padding after them, the byte
order of a uniform scalar, and the engine's version while its layout's version is the same. All
else is refused. docs/format.md has the table. How a payload is laid out is a region's lanes
(kv.regions), as an engine's memory is. All but `read_converted` is pure.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import StrEnum
from functools import lru_cache

import msgspec
import numpy as np

from ownerserve.kv.errors import UNREADABLE
from ownerserve.kv.frame import Lane, PayloadPart, PayloadSection
from ownerserve.kv.regions import Region, blocks_of
from ownerserve.store.format.model import (
    ArtifactKind,
    Listed,
    Meta,
    MissReason,
    ReadMiss,
    ReadOutcome,
    ReadPart,
    Want,
)

log = logging.getLogger("ownerserve.store")

FORM = "kv-layout/1"


class Unconvertible(StrEnum):
    """An Unconvertible says why a record can't be had in the wanted layout. Each is a miss."""

    UNKNOWN_FORM = "unknown_form"
    INCONSISTENT = "inconsistent"
    OTHER_ENGINE = "other_engine"
    OTHER_LAYOUT_VERSION = "other_layout_version"
    OTHER_LAYERS = "other_layers"
    OTHER_SHARD = "other_shard"
    OTHER_COMPRESSION = "other_compression"
    OTHER_ENTRY = "other_entry"
    OTHER_SCALAR = "other_scalar"
    MIXED_SCALARS = "mixed_scalars"
    POINT_BLOCK = "point_block"
    UNALIGNED = "unaligned"
    WRONG_LENGTH = "wrong_length"


class ByteOrder(StrEnum):
    """ByteOrder is that of the scalars in an entry."""

    LITTLE = "little"
    BIG = "big"


class PayloadLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A payload layout is a descriptor that can be converted. Every field is stated: a default
    would be a guess.

    `scalar` names the element type; `scalar_bytes` 0 says that an entry mixes types
    (fp8_ds_mla: FP8, BF16 and scales in one), whose byte order can't be turned.
    `entries` are those of one layer in a unit: block_tokens / m for a ratio-m component.
    """

    form: str = FORM
    engine: str
    engine_version: str
    layout_version: int
    first_layer: int
    end_layer: int
    shard: int
    shards: int
    block_tokens: int
    entries: int
    entry_bytes: int
    page_bytes: int
    scalar: str
    scalar_bytes: int
    byte_order: ByteOrder

    @property
    def layers(self) -> int:
        """Count the layers of the payload."""
        return self.end_layer - self.first_layer

    @property
    def unit_bytes(self) -> int:
        """Return the bytes of one unit: a page for each layer."""
        return self.layers * self.page_bytes

    def region(self, units: int) -> Region:
        """Return where a payload of so many units has each layer's entries, from its own begin on.
        The frame that they are compared in has no padding, and scalars little-endian."""
        size, is_big = self.scalar_bytes, self.byte_order is ByteOrder.BIG and self.scalar_bytes > 1
        counts: tuple[int, ...] = (self.entries, self.entry_bytes)
        strides: tuple[int, ...] = (self.entry_bytes, 1)
        if self.scalar_bytes:
            counts = (self.entries, self.entry_bytes // size, size)
            strides = (self.entry_bytes, size, -1 if is_big else 1)
        lanes = tuple(
            Lane(layer * self.page_bytes + is_big * (size - 1), self.unit_bytes, counts, strides, 1)
            for layer in range(self.layers)
        )
        shape = (self.layers, self.entries, self.entry_bytes)
        section = PayloadSection(FORM, (PayloadPart("entries", shape, "uint8"),))
        return Region(section, (lanes,), units, 0, units * self.unit_bytes)

    def encode(self) -> bytes:
        """Return the descriptor's bytes in a record's header; equal layouts have equal bytes."""
        return msgspec.msgpack.encode(self, order="sorted")

    def is_consistent(self) -> bool:
        """Tell whether the fields agree with each other."""
        return (
            min(self.layers, self.block_tokens, self.entries, self.entry_bytes) > 0
            and self.page_bytes >= self.entries * self.entry_bytes
            and self.block_tokens % self.entries == 0
            and 0 <= self.shard < self.shards
            and self.scalar_bytes in (0, 1, 2, 4, 8)
            and (not self.scalar_bytes or self.entry_bytes % self.scalar_bytes == 0)
        )


def decode(descriptor: bytes) -> PayloadLayout | None:
    """Return the layout that a header's descriptor states; None for another form of description."""
    try:
        layout = msgspec.msgpack.decode(descriptor, type=PayloadLayout)
    except UNREADABLE:
        return None
    return layout if layout.form == FORM else None


_MUST_EQUAL: tuple[tuple[Unconvertible, Callable[[PayloadLayout], object]], ...] = (
    (Unconvertible.OTHER_ENGINE, lambda layout: layout.engine),
    (Unconvertible.OTHER_LAYOUT_VERSION, lambda layout: layout.layout_version),
    (Unconvertible.OTHER_LAYERS, lambda layout: (layout.first_layer, layout.end_layer)),
    (Unconvertible.OTHER_SHARD, lambda layout: (layout.shard, layout.shards)),
    (Unconvertible.OTHER_COMPRESSION, lambda layout: layout.block_tokens // layout.entries),
    (Unconvertible.OTHER_ENTRY, lambda layout: layout.entry_bytes),
    (Unconvertible.OTHER_SCALAR, lambda layout: (layout.scalar, layout.scalar_bytes)),
)


def obstacle(stored: PayloadLayout, wanted: PayloadLayout) -> Unconvertible | None:
    """Return what stands in the way of any record of `stored` as `wanted`; None when nothing
    does.
    """
    if not (stored.is_consistent() and wanted.is_consistent()):
        return Unconvertible.INCONSISTENT
    for reason, fact in _MUST_EQUAL:
        if fact(stored) != fact(wanted):
            return reason
    if stored.byte_order is not wanted.byte_order and not stored.scalar_bytes:
        return Unconvertible.MIXED_SCALARS
    return None


class UnitRange(msgspec.Struct, frozen=True):
    """A unit range is units [first, end) of a record that begins at token `first_token`; `point`:
    the record is no range of tokens, so its one unit can't be cut otherwise.
    """

    first: int
    end: int
    first_token: int
    point: bool


def source_span(
    stored: PayloadLayout, wanted: PayloadLayout, span: UnitRange, units: int
) -> UnitRange | Unconvertible:
    """Return the units of the stored record (which has `units`) that hold the wanted units `span`.

    stored   |   0   |   1   |   2   |        block 64
    wanted   | 0 | 1 | 2 | 3 | 4 | 5 |        block 32; [1, 4) needs stored [0, 2)
    """
    old, new = stored.block_tokens, wanted.block_tokens
    if old == new:
        whole = 0 <= span.first < span.end <= units
        return span if whole else Unconvertible.UNALIGNED
    if span.point:
        return Unconvertible.POINT_BLOCK
    if span.first_token % old or span.first_token % new or units * old % new:
        return Unconvertible.UNALIGNED
    if not 0 <= span.first < span.end <= units * old // new:
        return Unconvertible.UNALIGNED
    return UnitRange(
        span.first * new // old, -(-span.end * new // old), span.first_token, span.point
    )


def convert(
    payload: memoryview,
    stored: PayloadLayout,
    wanted: PayloadLayout,
    *,
    source: UnitRange,
    target: UnitRange,
) -> memoryview | Unconvertible:
    """Return `target`'s units as `wanted` lays them out, from the stored units `source` in
    `payload`.
    """
    reason = obstacle(stored, wanted)
    if reason is not None:
        return reason
    count = source.end - source.first
    if count < 1 or len(payload) != count * stored.unit_bytes:
        return Unconvertible.WRONG_LENGTH
    skip = target.first * wanted.entries - source.first * stored.entries
    units = target.end - target.first
    rows = slice(skip, skip + units * wanted.entries)
    if skip < 0 or rows.stop > count * stored.entries:
        return Unconvertible.UNALIGNED
    out = np.zeros(units * wanted.unit_bytes, np.uint8)  # padding is zeros
    whole = np.frombuffer(payload, np.uint8)
    own, goal = stored.region(count), wanted.region(units)
    for there, here in zip(own.lanes[0], goal.lanes[0], strict=True):
        into = blocks_of(here, out, units)
        # A layer's entries of neighbouring units, side by side.
        entries = blocks_of(there, whole, count).reshape(-1, *into.shape[2:])
        into[:] = entries[rows].reshape(into.shape)
    return out.data


def read_converted(
    read: Callable[[Want], ReadOutcome], want: Want, record: Listed
) -> ReadPart | ReadMiss:
    """Read `want` in the layout it names, from a record whose catalogue entry is `record`.

    The read path calls this when a tier answers `foreign_layout`. What can't be converted is that
    same miss, and the reason is logged once.

    The part's meta is what the part is, not what is stored: units and descriptor are the wanted.
    """
    stored, wanted = decode(record.meta.descriptor), decode(want.descriptor or b"")
    if stored is None or wanted is None:
        return _refused(want, record, Unconvertible.UNKNOWN_FORM)
    reason = obstacle(stored, wanted) or _misfit(stored, record.meta)
    target = _target(want, record.meta, stored, wanted)
    source = reason or source_span(stored, wanted, target, record.meta.units)
    if isinstance(source, Unconvertible):
        return _refused(want, record, source)
    # What was converted must be what the catalogue described: the header's own word decides.
    outcome = read(Want(want.id, source.first, source.end, record.meta.descriptor))
    if isinstance(outcome, ReadMiss):
        return outcome
    part = outcome.parts[0]
    if (part.meta.units, part.meta.first_token) != (record.meta.units, record.meta.first_token):
        return _refused(want, record, Unconvertible.INCONSISTENT)
    data = convert(part.data, stored, wanted, source=source, target=target)
    if isinstance(data, Unconvertible):
        return _refused(want, record, data)
    units = part.meta.units * stored.block_tokens // wanted.block_tokens
    inner = part.meta.boundaries if units == part.meta.units else b""
    descriptor = want.descriptor or b""
    meta = msgspec.structs.replace(part.meta, descriptor=descriptor, units=units, boundaries=inner)
    return ReadPart(meta, data)


def _misfit(stored: PayloadLayout, meta: Meta) -> Unconvertible | None:
    """Return INCONSISTENT for a range whose blocks are not its tokens: it is described wrongly,
    whatever its bytes are.
    """
    tokens = meta.end_token - meta.first_token
    fits = meta.kind is ArtifactKind.POINT or meta.units * stored.block_tokens == tokens
    return None if fits else Unconvertible.INCONSISTENT


def _target(want: Want, meta: Meta, stored: PayloadLayout, wanted: PayloadLayout) -> UnitRange:
    end = want.end_unit
    if end is None:
        end = meta.units * stored.block_tokens // wanted.block_tokens
    return UnitRange(want.first_unit, end, meta.first_token, meta.kind is ArtifactKind.POINT)


def _refused(want: Want, record: Listed, reason: Unconvertible) -> ReadMiss:
    _tell_once(record.meta.descriptor, want.descriptor or b"", reason)
    return ReadMiss(MissReason.FOREIGN_LAYOUT, want.id)


@lru_cache(maxsize=256)
def _tell_once(stored: bytes, wanted: bytes, reason: Unconvertible) -> None:
    log.warning(
        "records in another layout are not used (%s): stored as %s, wanted as %s",
        reason,
        decode(stored) or stored.hex(),
        decode(wanted) or wanted.hex(),
    )
