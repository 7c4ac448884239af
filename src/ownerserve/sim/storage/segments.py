"""The segments are an SSD's log: where records lie, what a removal leaves behind, what compaction
writes again.

    append ── | seg 0: full, 20 % alive | seg 1: full | seg 2: open ── |
               `── a pass copies what is alive to the end, and drops it

The rules are the store's own (segment size, `reclaim.SPARSE_SHARE`): what a real drive would have
been written for the same records. Owns sizes only; must never know what a record is.
"""

from __future__ import annotations

import msgspec

from ownerserve.store.disk.reclaim import SPARSE_SHARE
from ownerserve.store.disk.superblock import DEFAULT_SEGMENT_BYTES


class SimSegment(msgspec.Struct, eq=False):
    """A segment is one file: the bytes appended so far, and the records in it that are alive."""

    number: int
    size_bytes: int = 0
    live_bytes: int = 0
    alive: dict[bytes, int] = msgspec.field(default_factory=dict)


class Segments:
    """The segments are all those of one drive. `written_bytes` counts compaction too."""

    def __init__(self, segment_bytes: int = DEFAULT_SEGMENT_BYTES) -> None:
        self.appended_bytes = 0
        self.compacted_bytes = 0
        self._segment_bytes = segment_bytes
        self._open = SimSegment(0)
        self._full: dict[int, SimSegment] = {}  # by number
        self._where: dict[bytes, SimSegment] = {}

    @property
    def written_bytes(self) -> int:
        """`written_bytes` counts what was written to the drive."""
        return self.appended_bytes + self.compacted_bytes

    @property
    def occupied_bytes(self) -> int:
        """The bytes that the files take, holes included."""
        return self._open.size_bytes + sum(s.size_bytes for s in self._full.values())

    def append(self, id_: bytes, count: int) -> None:
        """Append a record of `count` bytes."""
        self.appended_bytes += count
        self._place(id_, count)

    def _place(self, id_: bytes, count: int) -> None:
        last = self._open
        if last.size_bytes and last.size_bytes + count > self._segment_bytes:
            if last.live_bytes:
                self._full[last.number] = last
            last = self._open = SimSegment(last.number + 1)
        last.size_bytes += count
        last.live_bytes += count
        last.alive[id_] = count
        self._where[id_] = last

    def remove(self, id_: bytes) -> None:
        """Remove a record: a hole is left, or the whole file goes with its last one."""
        segment = self._where.pop(id_)
        segment.live_bytes -= segment.alive.pop(id_)
        if not segment.live_bytes:
            self._full.pop(segment.number, None)

    def compact(self) -> int:
        """Copy what is alive out of sparse segments, emptiest first; return the bytes written
        again."""
        sparse = [s for s in self._full.values() if s.live_bytes < SPARSE_SHARE * s.size_bytes]
        if len(sparse) < 2:  # one alone would only be moved
            return 0
        before = self.compacted_bytes
        for segment in sorted(sparse, key=lambda s: s.live_bytes):
            del self._full[segment.number]
            for id_, count in segment.alive.items():
                self.compacted_bytes += count
                self._place(id_, count)
        return self.compacted_bytes - before
