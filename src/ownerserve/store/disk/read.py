"""The disk reader looks up, reads and verifies, all wants or none.

Used by the writer's own tier and by snapshot readers in other processes. Holds the open segments;
never writes. What fails verification is looked up again first: a record that was evicted or moved
in between is an honest miss or a second try, not corruption.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from threading import Lock

from ownerserve.kv.errors import CapacityExceeded, Corrupt
from ownerserve.store.disk.aio import ReadQueue
from ownerserve.store.disk.gather import Item, SegmentRead, buffers, items_of, spans
from ownerserve.store.disk.home import Home
from ownerserve.store.format.header import CHUNK, OtherFormat
from ownerserve.store.format.model import MissReason, ReadHit, ReadMiss, ReadOutcome, ReadPart, Want
from ownerserve.store.format.seal import Keys
from ownerserve.store.format.segment import DirectRead, Segment, segment_path
from ownerserve.store.format.verify import (
    BadRange,
    NoKey,
    check_meta,
    check_place,
    open_chunks,
    open_header,
)
from ownerserve.store.index.reader import IndexEntry, IndexFailed, IndexReader
from ownerserve.store.tiers.buffers import BufferSource

MAX_OPEN_SEGMENTS = 256
TRIES = 3
OnBad = Callable[[IndexEntry, str], None]
OnRead = Callable[[Iterable[IndexEntry]], None]
Read = tuple[Item, ReadPart | Exception]


class Foreign(Corrupt):
    """The record is in a layout that the reader does not take."""


class OpenSegments:
    """OpenSegments keeps segments open for reading, and closes the least recently used first.

    A segment unlinked meanwhile stays readable to who holds it; the last holder closes it.
    """

    def __init__(self, home: Home) -> None:
        self._home = home
        self._open: OrderedDict[int, Segment] = OrderedDict()
        self._lock = Lock()

    def get(self, number: int) -> Segment:
        """Return the segment, opened if need be; raises OSError when it is gone."""
        with self._lock:
            segment = self._open.get(number)
            if segment is None:
                path = segment_path(self._home.directory, number)
                segment = self._open[number] = Segment(path, os.O_RDONLY)
                if len(self._open) > MAX_OPEN_SEGMENTS:
                    self._open.popitem(last=False)
            else:
                self._open.move_to_end(number)
            return segment

    def drop(self, number: int) -> None:
        """Forget a segment that is to be unlinked."""
        with self._lock:
            self._open.pop(number, None)

    def clear(self) -> None:
        """Close all that nobody is reading."""
        with self._lock:
            self._open.clear()


class DiskReader:
    """A disk reader makes verified reads over one index and its segments, from any number of
    threads.
    """

    def __init__(
        self,
        home: Home,
        index: IndexReader,
        keys: Keys,
        *,
        segments: OpenSegments,
        landing: BufferSource,
        listeners: tuple[OnRead, OnBad],
    ) -> None:
        self._home = home
        self._index = index
        self._keys = keys
        self._landing = landing
        self._on_read, self._on_bad = listeners
        self._queue = ReadQueue()
        self.segments = segments

    def read(self, wants: Sequence[Want], landing: BufferSource | None = None) -> ReadOutcome:
        """Read and verify all wants; the answer is all of them, or the first reason why not."""
        outcome: ReadOutcome = ReadMiss(MissReason.ABSENT)
        for _ in range(TRIES):
            outcome, stale = self._try(wants, landing or self._landing)
            if not stale:
                break
        return outcome

    def _try(self, wants: Sequence[Want], landing: BufferSource) -> tuple[ReadOutcome, bool]:
        """Return an outcome, and whether it came from an index row that is no longer true."""
        try:
            entries = self._index.get_many([want.id for want in wants])
        except IndexFailed:
            return ReadMiss(MissReason.IO_ERROR), False
        if len(entries) < len(wants):
            absent = next((want.id for want in wants if want.id not in entries), None)
            if absent is not None:
                return ReadMiss(MissReason.ABSENT, absent), False
        if len(wants) == 1:
            return self._try_one(wants[0], entries, landing)
        items: list[Item] = []
        try:
            items.extend(items_of(wants, entries))
            jobs = [
                (span, buffer)
                for buffer, group in [(landing.take(n), group) for n, group in buffers(items)]
                for span in spans(land(group, buffer))
            ]
        except BadRange:
            return _out_of_range(wants[len(items)], entries), False
        except CapacityExceeded:
            return ReadMiss(MissReason.BUSY, wants[0].id), False
        parts: list[ReadPart | None] = [None] * len(items)
        with closing(self._read(jobs)) as found:
            for item, part in found:
                if not isinstance(part, ReadPart):
                    return self._why(item, part)
                parts[item.at] = part
        self._on_read(entries.values())
        return ReadHit(tuple(part for part in parts if part is not None), "disk"), False

    def _try_one(
        self, want: Want, entries: Mapping[bytes, IndexEntry], landing: BufferSource
    ) -> tuple[ReadOutcome, bool]:
        """Return an outcome as from `_try`, without a queue: half the work where there is one
        record.
        """
        part: ReadPart | Exception
        try:
            (item,) = items_of((want,), entries)
            item.landed = landing.take(item.size)
        except BadRange:
            return _out_of_range(want, entries), False
        except CapacityExceeded:
            return ReadMiss(MissReason.BUSY, want.id), False
        try:
            part = self._alone(item, self.segments.get(item.entry.segment))
        except OSError as error:
            part = error
        if not isinstance(part, ReadPart):
            return self._why(item, part)
        self._on_read((item.entry,))
        return ReadHit((part,), "disk"), False

    def _read(self, jobs: list[tuple[SegmentRead, memoryview]]) -> Generator[Read, None, None]:
        """Yield each item's part as its last span arrives, or what is wrong with it."""
        held: dict[int, Segment] = {}  # a segment's file stays open while one holds it
        loads: list[DirectRead] = []
        for span, buffer in jobs:
            try:
                if span.segment not in held:
                    held[span.segment] = self.segments.get(span.segment)
            except OSError as error:
                yield span.items[0], error
                return
            into = buffer[span.place : span.place + span.length]
            loads.append(held[span.segment].load(span.offset, into))
        with closing(self._queue.run(loads)) as arrivals:
            for index, count in arrivals:
                span = jobs[index][0]
                for item in span.items:
                    item.waiting -= 1
                    if count == span.length and not item.waiting:
                        yield item, self._open(item)
                    elif count != span.length:
                        yield item, self._alone(item, held[span.segment])

    def _alone(self, item: Item, segment: Segment) -> ReadPart | Exception:
        """Read one item alone, after a shared read failed: is this item the bad one?"""
        try:
            for offset, place, length in item.stretches():
                at = place - item.place
                read_all(segment, offset, item.landed[at : at + length])
        except (Corrupt, OSError) as error:
            return error
        return self._open(item)

    def _open(self, item: Item) -> ReadPart | Exception:
        """Return the verified bytes of what has landed, or what is wrong with it."""
        entry, want, landed = item.entry, item.want, item.landed
        head = entry.header_bytes
        try:
            header, seal = open_header(landed[:head], self._keys)
            check_place(header, self._home.store_id, entry.segment, entry.offset)
            check_meta(header, entry.meta, entry.payload_bytes)
            if want.descriptor is not None and want.descriptor != header.meta.descriptor:
                return Foreign("layout descriptor differs")
            payload = landed[head : head + item.end - item.first]
            open_chunks(payload, header, seal, item.first // CHUNK)
        except Corrupt as error:
            return error
        return ReadPart(header.meta, payload[item.low - item.first : item.high - item.first])

    def _why(self, item: Item, error: Exception) -> tuple[ReadMiss, bool]:
        id_ = item.want.id
        assert isinstance(error, Corrupt | OSError)
        if self._moved(item.entry):
            return ReadMiss(MissReason.ABSENT, id_), True
        return ReadMiss(self._blame(item.entry, error), id_), False

    def _moved(self, entry: IndexEntry) -> bool:
        self._index.forget(entry.meta.id)
        try:
            now = self._index.get(entry.meta.id)
        except IndexFailed:
            return False
        return now is None or now.sequence != entry.sequence

    def _blame(self, entry: IndexEntry, error: Corrupt | OSError) -> MissReason:
        if isinstance(error, FileNotFoundError):
            self._on_bad(entry, "segment file is gone")
            return MissReason.CORRUPT
        if isinstance(error, OSError):
            return MissReason.IO_ERROR
        if isinstance(error, OtherFormat):
            return MissReason.OTHER_FORMAT
        if isinstance(error, NoKey):
            return MissReason.NO_KEY
        if isinstance(error, Foreign):
            return MissReason.FOREIGN_LAYOUT
        self._on_bad(entry, str(error))
        return MissReason.CORRUPT

    def close(self) -> None:
        """Let go of the kernel's queues and the segments."""
        self._queue.close()
        self.segments.clear()


def land(group: list[Item], buffer: memoryview) -> list[Item]:
    """Tell each item where in `buffer` it lands."""
    for item in group:
        item.landed = buffer[item.place : item.place + item.size]
    return group


def read_all(segment: Segment, offset: int, into: memoryview) -> None:
    """Fill `into` from `offset` of a segment; raises Corrupt when the segment ends before, or
    OSError.
    """
    if segment.read(offset, into) < len(into):
        raise Corrupt("the segment ends within the record")


def _out_of_range(want: Want, entries: Mapping[bytes, IndexEntry]) -> ReadMiss:
    """Return the miss for units that the record lacks: one in another layout may have them, cut
    otherwise.
    """
    is_foreign = want.descriptor not in (None, entries[want.id].meta.descriptor)
    reason = MissReason.FOREIGN_LAYOUT if is_foreign else MissReason.BAD_RANGE
    return ReadMiss(reason, want.id)
