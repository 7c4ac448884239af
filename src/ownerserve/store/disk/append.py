"""The appender appends to segments: the only code that writes records.

Owns the open segment, the next offset and the next sequence number. A segment with a failed write
or sync takes no more records: after a failed fdatasync the kernel may have dropped what it held.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress

import msgspec

from ownerserve.kv.units import MIB
from ownerserve.store.disk.home import Home
from ownerserve.store.format.header import BLOCK, RecordHeader, RecordPlace, moved
from ownerserve.store.format.segment import Segment, SegmentHeader
from ownerserve.store.index.reader import Change, IndexEntry, IndexFailed, SegmentRow, SegmentState
from ownerserve.store.index.writer import IndexWriter

WRITE_BYTES = 8 * MIB


class RecordDraft(msgspec.Struct):
    """A draft is a sealed record in its buffer, still without a place."""

    header: RecordHeader
    record: memoryview
    touched_ms: int
    reuse_count: int = 0
    restore_cost_ms: float = 0.0


class Appended(msgspec.Struct):
    """Appended is what one append made durable, and the segments it touched."""

    entries: list[IndexEntry]
    segments: list[SegmentRow]


class Appender:
    """An appender owns the one writer's position in the store: open segment, its end, next sequence
    number.
    """

    def __init__(self, home: Home, next_number: int, next_sequence: int) -> None:
        self._home = home
        self._next_number = next_number
        self._next_sequence = next_sequence
        self._segment: Segment | None = None
        self._end = self._size = 0
        self._unwritten: list[memoryview] = []
        self._written_end = 0
        self._hands: ThreadPoolExecutor | None = None
        self._writes: list[Future[None]] = []
        self._untold: set[int] = set()

    @property
    def busy(self) -> frozenset[int]:
        """Return the segments that may hold records which the index has not heard of, and the open
        one.
        """
        own = {self._segment.number} if self._segment else set()
        return frozenset(self._untold | own)

    @property
    def open_segment(self) -> int | None:
        """Return the number of the segment that takes records; None when none does."""
        return self._segment.number if self._segment else None

    @property
    def end(self) -> int:
        """Return the offset in the open segment at which the next record goes."""
        return self._end

    def resume(self, segment: Segment, end: int) -> None:
        """Go on in a segment that recovery found open. What lay beyond `end` is cut off."""
        size = max(end, self._home.segment_bytes)
        segment.resize(end, size)
        self._segment, self._end, self._size = segment, end, size
        self._written_end = end

    def append(self, drafts: Iterable[RecordDraft], now_ms: int) -> Appended:
        """Make all drafts durable, in as many segments as they need. Raises OSError.

        `drafts` may seal as it goes: a record's digest is made while those before it are written.
        After an OSError some may be on disk whole; none was acknowledged, so either is right.
        Call `told` when the index knows.
        """
        done = Appended([], [])
        try:
            if self._segment is not None:
                self._untold.add(self._segment.number)
            for draft in drafts:
                if self._end + len(draft.record) > self._size:
                    self._finish(done)
                    self._start(len(draft.record), now_ms)
                done.entries.append(self._place(draft))
                if self._end - self._written_end >= WRITE_BYTES:
                    self._write_aside()
            self._sync(done, SegmentState.OPEN)
        except BaseException:
            self.retire()
            raise
        return done

    def told(self) -> None:
        """Note that the index knows all that was appended."""
        self._untold.clear()

    def _write_aside(self) -> None:
        """Write what is placed on a thread of its own; the sync waits for it."""
        assert self._segment is not None
        if self._hands is None:
            self._hands = ThreadPoolExecutor(1, thread_name_prefix="store-append")
        views, self._unwritten = self._unwritten, []
        write = self._hands.submit(self._segment.write, self._written_end, views)
        self._writes.append(write)
        self._written_end = self._end

    def _place(self, draft: RecordDraft) -> IndexEntry:
        """Give a record the next place; it is written with its neighbours, at the sync."""
        assert self._segment is not None
        place = RecordPlace(
            self._home.store_id, self._segment.number, self._end, self._next_sequence
        )
        header = draft.header
        head = header.header_bytes
        draft.record[:head] = moved(draft.record[:head], place)
        self._unwritten.append(draft.record)
        self._next_sequence += 1
        self._end += len(draft.record)
        return IndexEntry(
            meta=header.meta,
            sequence=place.sequence,
            segment=place.segment,
            offset=place.offset,
            header_bytes=head,
            stored_bytes=len(draft.record),
            payload_bytes=header.payload_bytes,
            touched_ms=draft.touched_ms,
            reuse_count=draft.reuse_count,
            restore_cost_ms=draft.restore_cost_ms,
        )

    def _sync(self, done: Appended, state: SegmentState) -> None:
        if self._segment is None:
            return
        if self._writes and self._unwritten:
            self._write_aside()
        elif self._unwritten:
            self._segment.write(self._written_end, self._unwritten)
        self._unwritten, self._written_end = [], self._end
        writes, self._writes = self._writes, []
        wait(writes)
        for write in writes:
            write.result()
        self._segment.sync()
        done.segments.append(SegmentRow(self._segment.number, self._end, self._size, 0, state))

    def _start(self, record_bytes: int, now_ms: int) -> None:
        size = max(self._home.segment_bytes, BLOCK + record_bytes)
        header = SegmentHeader(self._home.store_id, self._next_number, size, now_ms)
        self._next_number += 1  # a number is used once, also when creation fails
        self._segment = Segment.create(self._home.directory, header)
        self._untold.add(self._segment.number)
        self._end, self._size = BLOCK, size
        self._written_end = BLOCK

    def _finish(self, done: Appended) -> None:
        if self._segment is None:
            return
        self._sync(done, SegmentState.FULL)
        self._trim()
        self._segment = None
        self._end = self._size = 0

    def retire(self) -> None:
        """Take no more records in the open segment."""
        wait(self._writes)  # their buffers are about to be somebody else's
        self._segment = None
        self._unwritten, self._writes = [], []
        self._untold.clear()
        self._end = self._size = 0

    def _trim(self) -> None:
        if self._segment is not None and self._end < self._size:
            with suppress(OSError):  # only space is lost
                self._segment.resize(self._end, 0)

    def close(self) -> None:
        """Give back what was preallocated."""
        self._trim()
        self.retire()
        if self._hands is not None:
            self._hands.shutdown()


def record(
    appender: Appender,
    index: IndexWriter,
    drafts: Sequence[RecordDraft],
    *,
    now_ms: int,
    instead_of: Sequence[IndexEntry] = (),
) -> list[IndexEntry]:
    """Append, then tell the index, in place of older copies if any."""
    done = appender.append(drafts, now_ms)
    tell(appender, index, done, instead_of=instead_of)
    return done.entries


def tell(
    appender: Appender, index: IndexWriter, done: Appended, *, instead_of: Sequence[IndexEntry] = ()
) -> None:
    """Tell the index what is durable: the second half of a commit. What stands `instead_of` it is
    doomed from then on. Raises IndexFailed.

    When it can't be told, the segment takes no more records, so that its known end stays before
    these: the next open finds them there.
    """
    try:
        doom = [entry.span for entry in instead_of]
        change = Change(remove=instead_of, add=done.entries, segments=done.segments, doom=doom)
        index.apply(change)
    except IndexFailed:
        appender.retire()
        raise
    appender.told()
