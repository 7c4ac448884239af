"""This module tells where the bytes of a read lie in the segments and where they land in memory.
Pure.

    segment   | header A | payload A | header B | payload B |   ...   | header C | ... chunk 3 ... |
    memory    | header A | payload A | header B | payload B | header C | chunk 3 |
    spans     |---------------- one ------------------------| |-- two --|-------|

A record lands as its header and the whole chunks that its want covers. What was spilled together
lies together: neighbours are one span up to JOIN_BYTES, so that small records cost one read for
many; a long one is cut at CUT_BYTES, so that several reads of it are in the air.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from ownerserve.kv.units import KIB, MIB
from ownerserve.store.format.header import aligned
from ownerserve.store.format.model import Want
from ownerserve.store.format.verify import chunk_span, span_of
from ownerserve.store.index.reader import IndexEntry

BUFFER_BYTES = 8 * MIB
JOIN_BYTES = 512 * KIB
CUT_BYTES = 2 * MIB


class Item(msgspec.Struct, eq=False, gc=False):
    """An item is the `at`-th want of a read and its record.

    Of payload bytes [low, high) it serves; it reads and verifies [first, end), whole chunks.
    `landed` is its header and those chunks; `waiting` counts its spans that are not read yet.
    """

    at: int
    entry: IndexEntry
    want: Want
    low: int
    high: int
    first: int
    end: int
    place: int = 0
    landed: memoryview = memoryview(b"")
    waiting: int = 0

    @property
    def size(self) -> int:
        """Return the bytes it takes in memory, a multiple of 4 KiB."""
        return self.entry.header_bytes + aligned(self.end - self.first)

    def stretches(self) -> Iterator[tuple[int, int, int]]:
        """Iterate over what it reads: (offset in the segment, offset in memory, length)."""
        entry, place = self.entry, self.place
        head, body = entry.header_bytes, aligned(self.end - self.first)
        if self.first == 0:
            yield entry.offset, place, head + body
        else:
            yield entry.offset, place, head
            yield entry.offset + head + self.first, place + head, body


class SegmentRead(msgspec.Struct, eq=False, gc=False):
    """A segment read brings `length` bytes at `offset` of a segment to `place` in the buffer."""

    segment: int
    offset: int
    place: int
    length: int
    items: list[Item]


def items_of(wants: Sequence[Want], entries: Mapping[bytes, IndexEntry]) -> Iterator[Item]:
    """Make one item for each want; raises BadRange for units that the record does not have."""
    for at, want in enumerate(wants):
        entry = entries[want.id]
        low, high = span_of(want, entry.meta.units, entry.payload_bytes)
        yield Item(at, entry, want, low, high, *chunk_span(low, high, entry.payload_bytes))


def buffers(items: Sequence[Item]) -> Iterator[tuple[int, list[Item]]]:
    """Place items in buffers, in the order they lie on disk; yields (bytes of the buffer, its
    items).
    """
    size, group = 0, list[Item]()
    for item in sorted(items, key=_lie) if len(items) > 1 else items:
        length = item.size
        if group and size + length > BUFFER_BYTES:
            yield size, group
            size, group = 0, []
        item.place = size
        size += length
        group.append(item)
    yield size, group


def _lie(item: Item) -> tuple[int, int, int]:
    return item.entry.segment, item.entry.offset, item.first


def spans(group: Sequence[Item]) -> list[SegmentRead]:
    """Return the reads of one buffer's items; sets what each item waits for."""
    found: list[SegmentRead] = []
    for item in group:
        segment = item.entry.segment
        for offset, place, length in item.stretches():
            last = found[-1] if found else None
            if (
                last is not None
                and (last.segment, last.offset + last.length) == (segment, offset)
                and last.length + length <= JOIN_BYTES
                and item is not last.items[-1]
            ):
                last.length += length
                last.items.append(item)
                item.waiting += 1
                continue
            for cut in range(0, length, CUT_BYTES):
                size = min(CUT_BYTES, length - cut)
                found.append(SegmentRead(segment, offset + cut, place + cut, size, [item]))
                item.waiting += 1
    return found
