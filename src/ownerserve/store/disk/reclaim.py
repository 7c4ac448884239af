"""The reclaimer takes records out of segments: erase, drop empty segments, compact sparse ones.

Each step leaves the index true if the process dies after it:

    remove   index: row gone, span doomed -> hole punched -> index: span no longer doomed
    drop     index: segment DROPPED -> file unlinked -> index: segment forgotten
    compact  copies durable -> index: rows point to the copies, the old ones doomed -> drop

What dies in between is finished at the next open (`recover`). A segment that holds what was put
aside stands until that is released; what was moved out of it is erased.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from ownerserve.kv.durable import sync_directory
from ownerserve.kv.errors import Corrupt
from ownerserve.kv.units import MIB
from ownerserve.store.disk.append import Appender, RecordDraft, record
from ownerserve.store.disk.home import Home
from ownerserve.store.disk.read import OnBad, OpenSegments, read_all
from ownerserve.store.disk.scan import header_at
from ownerserve.store.format.header import BLOCK, decode
from ownerserve.store.format.seal import Keys
from ownerserve.store.format.segment import Segment, segment_path
from ownerserve.store.format.verify import NoKey, check_meta, check_place, open_chunks, open_header
from ownerserve.store.index.reader import (
    Change,
    DamagedIndex,
    IndexEntry,
    SegmentRow,
    SegmentSpan,
    SegmentState,
)
from ownerserve.store.index.writer import IndexWriter
from ownerserve.store.tiers.buffers import BufferSource

SPARSE_SHARE = 0.25
_COPY_BYTES = 32 * MIB


def sparse(rows: Iterable[SegmentRow], share: float = SPARSE_SHARE) -> list[SegmentRow]:
    """Return the full segments of which less than `share` is alive, and something is, emptiest
    first. Pure.
    """
    found = [
        row
        for row in rows
        if row.state is SegmentState.FULL and 0 < row.live_bytes < share * row.size_bytes
    ]
    return sorted(found, key=lambda row: row.live_bytes)


class Reclaimer:
    """A reclaimer removes what the index no longer wants. Called under the writer's lock only."""

    def __init__(
        self, home: Home, index: IndexWriter, *, appender: Appender, segments: OpenSegments
    ) -> None:
        self._home = home
        self._index = index
        self._appender = appender
        self._segments = segments

    def remove(self, entries: Sequence[IndexEntry]) -> None:
        """Remove records: they are unreadable at once, and their space is given back, after
        `drop_empty` at latest. Raises DamagedIndex, and removes none, where something else lies in
        the place of one.
        """
        for entry in entries:
            if self._is_misplaced(entry):
                self._index.is_damaged = True
                raise DamagedIndex(f"index: {entry.meta.id.hex()[:16]} does not lie where it says")
        spans = [entry.span for entry in entries]
        self._index.apply(Change(remove=entries, doom=spans))
        self.erase(spans)

    def _is_misplaced(self, entry: IndexEntry) -> bool:
        """Tell whether something else lies where the index has a record. Where a header can't be
        read nothing else does, unless the index says so.
        """
        if entry.offset < BLOCK or entry.offset % BLOCK:
            return True
        try:
            segment = self._segments.get(entry.segment)
            header = header_at(segment, entry.offset, self._home.store_id)
        except FileNotFoundError:
            return False
        except Corrupt:
            return self._index.overlaps(entry)
        found = (header.meta.id, header.record_bytes)
        return found != (entry.meta.id, entry.stored_bytes)

    def erase(self, spans: Sequence[SegmentSpan]) -> None:
        """Punch the holes of doomed spans and note that it is done."""
        by_segment: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for item in spans:
            by_segment[item.segment].append((item.offset, item.length))
        for number, holes in by_segment.items():
            try:
                segment = Segment(segment_path(self._home.directory, number), os.O_RDWR)
            except FileNotFoundError:
                continue
            segment.erase(holes)
            segment.sync()
        self._index.apply(Change(erased=spans))

    def drop_empty(self) -> int:
        """Unlink full segments without a live record, and without one that was put aside; returns
        how many.
        """
        put_aside = {bad.span.segment for bad in self._index.quarantined()}
        busy = self._appender.busy | put_aside
        rows = [
            row
            for row in self._index.segments()
            if row.number not in busy and (row.live_bytes == 0 or row.state is SegmentState.DROPPED)
        ]
        for row in rows:
            self._index.apply(
                Change(segments=[msgspec.structs.replace(row, state=SegmentState.DROPPED)])
            )
            self._segments.drop(row.number)
            segment_path(self._home.directory, row.number).unlink(missing_ok=True)
        if rows:
            sync_directory(self._home.directory / "segments")
            self._index.apply(Change(forget_segments=[row.number for row in rows]))
        return len(rows)

    def compact(
        self, row: SegmentRow, keys: Keys, *, landing: BufferSource, now_ms: int, on_bad: OnBad
    ) -> int:
        """Copy what is alive in a segment to the open one and drop it, or erase what was copied
        where it has to stand; returns the bytes copied.
        """
        copied, moved = 0, list[SegmentSpan]()
        batch: list[tuple[IndexEntry, RecordDraft]] = []
        size = 0
        for entry in list(self._index.walk(segment=row.number)):
            try:
                draft = self.copy_of(entry, keys, landing)
            except Corrupt as error:
                on_bad(entry, str(error))
                continue
            batch.append((entry, draft))
            moved.append(entry.span)
            size += entry.stored_bytes
            if size >= _COPY_BYTES:
                copied += self._move(batch, now_ms)
                batch, size = [], 0
        copied += self._move(batch, now_ms)
        self.drop_empty()
        if segment_path(self._home.directory, row.number).exists():
            self.erase(moved)
        return copied

    def copy_of(self, entry: IndexEntry, keys: Keys, landing: BufferSource) -> RecordDraft:
        """Read a live record into `landing` and verify it, to be appended elsewhere."""
        copy = landing.take(entry.stored_bytes)
        segment = self._segments.get(entry.segment)
        read_all(segment, entry.offset, copy)
        try:
            header, seal = open_header(copy[: entry.header_bytes], keys)
            end = entry.header_bytes + entry.payload_bytes
            # A cipher opens in place; what is moved must stay as it was.
            trial = memoryview(bytearray(copy[entry.header_bytes : end]))
            open_chunks(trial, header, seal)
        except NoKey:
            header = decode(copy[: entry.header_bytes])  # moved unseen; the reader will verify
        check_place(header, self._home.store_id, entry.segment, entry.offset)
        check_meta(header, entry.meta, entry.payload_bytes)
        return RecordDraft(header, copy, entry.touched_ms, entry.reuse_count, entry.restore_cost_ms)

    def _move(self, batch: Sequence[tuple[IndexEntry, RecordDraft]], now_ms: int) -> int:
        if not batch:
            return 0
        old = [entry for entry, _ in batch]
        drafts = [draft for _, draft in batch]
        record(self._appender, self._index, drafts, now_ms=now_ms, instead_of=old)
        return sum(entry.stored_bytes for entry in old)
