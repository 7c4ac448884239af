"""Forms say how blocks lie apart from where: two sides of one form move blocks as they are.

    frame order    a unit part by part, layer by layer: rows of few bytes where an engine keeps
                   keys beside values, or heads outside of tokens
    raw order      a unit span by span, and in a span block by block, each in the memory's order

A `RawSpan` is lanes that fill one stretch of a block without a gap, so raw order has the same bytes
as the frame's, none of padding or of another's. Lanes that do so with nobody are a span each,
without bytes of its own, and lie as in the frame.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import msgspec

from ownerserve.kv.frame import Lane, PayloadSection
from ownerserve.kv.regions import Region

DOMAIN = b"ownerserve/block-form/1\n"


class RawSpan(msgspec.Struct, frozen=True):
    """A `RawSpan` is `lanes`, each as (part, layer), that fill `bytes` of a block from `address` on
    (of block 0); 0: they do not."""

    address: int
    bytes: int
    lanes: tuple[tuple[int, int], ...]


class _Stretch(msgspec.Struct):
    begin: int
    end: int
    filled: int
    lanes: list[tuple[int, int]]

    @property
    def is_full(self) -> bool:
        return self.filled == self.end - self.begin


def spans_of(region: Region, layers: range) -> list[RawSpan]:
    """Return the spans of the region's `layers`, in the order of their first lanes."""
    whole = len(layers) == region.section.layers
    series: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for part, lanes in enumerate(region.lanes):
        for layer in range(len(lanes)) if whole else layers:
            key = region.table(layer), lanes[layer].block_bytes
            series.setdefault(key, []).append((part, layer))
    spans = list[RawSpan]()
    for (_, block_bytes), own in series.items():
        for stretch in _stretches(region, own):
            ordered = tuple(sorted(stretch.lanes))
            size = stretch.end - stretch.begin
            if stretch.is_full and size <= abs(block_bytes):
                spans.append(RawSpan(stretch.begin, size, ordered))
            else:
                spans += [RawSpan(_of(region, lane).address, 0, (lane,)) for lane in ordered]
    return sorted(spans, key=lambda span: span.lanes[0])


def form_of(region: Region) -> bytes:
    """Return the SHA-256 of all that decides the raw order of a region's bytes."""
    section = region.section
    facts = [
        [section.name, [[list(part.shape), part.dtype] for part in section.parts]],
        [
            [span.bytes > 0, [_fact(region, lane, span) for lane in span.lanes]]
            for span in spans_of(region, range(section.layers))
        ],
    ]
    return hashlib.sha256(DOMAIN + msgspec.json.encode(facts)).digest()


def _fact(region: Region, at: tuple[int, int], span: RawSpan) -> list[object]:
    lane = _of(region, at)
    known = [*at, region.table(at[1]), region.blocks_a_unit(*at)]
    if not span.bytes:
        return list(known)
    axes = [axis for axis in zip(lane.counts, lane.strides, strict=True) if axis[0] > 1]
    return [*known, lane.address - span.address, lane.item_bytes, axes]


def _of(region: Region, at: tuple[int, int]) -> Lane:
    part, layer = at
    return region.lanes[part][layer]


def _stretches(region: Region, own: Sequence[tuple[int, int]]) -> list[_Stretch]:
    """Return the lanes as stretches of memory: those that overlap are one, and so are full ones
    that touch."""
    found = list[_Stretch]()
    lanes = [(_of(region, at), at) for at in own]
    for lane, at in sorted(lanes, key=lambda one: one[0].address + one[0].reach[0]):
        low, end = lane.reach
        new = _Stretch(lane.address + low, lane.address + end, lane.bytes, [at])
        if found and new.begin < found[-1].end:
            _grow(found[-1], new)
        else:
            found.append(new)
    merged = list[_Stretch]()
    for one in found:
        touches = bool(merged) and merged[-1].end == one.begin
        if touches and merged[-1].is_full and one.is_full:
            _grow(merged[-1], one)
        else:
            merged.append(one)
    return merged


def _grow(stretch: _Stretch, other: _Stretch) -> None:
    stretch.end = max(stretch.end, other.end)
    stretch.filled += other.filled
    stretch.lanes += other.lanes


def staged(region: Region, layers: range, *, address: int, units: int) -> Region:
    """Return where so many units' `layers` lie after they were read in raw order to `address`: a
    region of whole units, 0, 1, ..., whose lanes count the engine's blocks by an axis more."""
    placed, at = dict[tuple[int, int], Lane](), address
    for span in spans_of(region, layers):
        count = region.blocks_a_unit(*span.lanes[0])
        for lane_at in span.lanes:
            lane = _of(region, lane_at)
            size, strides = span.bytes, lane.strides
            begin = at + lane.address - span.address
            if not span.bytes:
                begin, size, strides = at, lane.bytes, _in_order(lane)
            counts = (count, *lane.counts)
            placed[lane_at] = Lane(begin, 0, counts, (size, *strides), lane.item_bytes)
        at += size * count
    unit_bytes, parts = at - address, region.section.parts
    lanes = tuple(
        tuple(
            msgspec.structs.replace(placed[part, layer], block_bytes=unit_bytes) for layer in layers
        )
        for part in range(len(parts))
    )
    cut = tuple(
        msgspec.structs.replace(part, shape=(len(layers), *part.shape[1:])) for part in parts
    )
    section = PayloadSection(region.section.name, cut)
    return Region(section, lanes, units, address, units * unit_bytes)


def _in_order(lane: Lane) -> tuple[int, ...]:
    behind = [math.prod(lane.counts[at + 1 :]) for at in range(len(lane.counts))]
    return tuple(lane.item_bytes * items for items in behind)
