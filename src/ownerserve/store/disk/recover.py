"""Recovery opens a store: index and segments agree again, whatever the last writer was doing.

    1. segment rows without a file, and files marked DROPPED: forgotten, unlinked
    2. what lies beyond the end that the index knows of each segment: adopted if it verifies whole
       (an acknowledged record whose index row was lost), erased if not (a torn write)
    3. two copies of one record (a compaction cut short): the younger stays if it verifies, the
       other is erased
    4. doomed spans are erased, empty segments dropped, the last open segment is gone on with

With the index lost, all headers of all segments are read, and the payloads of the last one and of
what is there twice; every read verifies payloads anyway.

Numbers of records and segments are given once: the next ones are above those of every header that
is read and above the marks that the index keeps of what it ever heard. So what a power loss brings
back of the index is never taken for what was written since.

What a writer that was killed had asked of the disk, and not synced, is seen here as if it were
durable. It is made so before anything is built on it: names of segments before records go in them
or rows are forgotten, adopted records before their older copies go, the index's removals before
their holes are punched.

`survey` looks the same way at a store that may not be written: what it finds goes into an index
that lies elsewhere, and nothing is erased, cut or synced.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress

import msgspec

from ownerserve.kv.durable import sync_directory
from ownerserve.kv.errors import Corrupt
from ownerserve.store.disk.aio import ReadQueue
from ownerserve.store.disk.append import Appender
from ownerserve.store.disk.gather import BUFFER_BYTES
from ownerserve.store.disk.home import Home
from ownerserve.store.disk.read import OpenSegments, read_all
from ownerserve.store.disk.reclaim import Reclaimer
from ownerserve.store.disk.scan import Ahead, records
from ownerserve.store.format.header import BLOCK, OtherFormat, RecordHeader, decode
from ownerserve.store.format.seal import Keys
from ownerserve.store.format.segment import Segment, segment_path
from ownerserve.store.format.verify import NoKey, check_place, open_chunks, open_header
from ownerserve.store.index.reader import (
    Change,
    DamagedIndex,
    IndexEntry,
    IndexFailed,
    SegmentRow,
    SegmentSpan,
    SegmentState,
)
from ownerserve.store.index.writer import IndexWriter, discard
from ownerserve.store.tiers.buffers import BufferSource

log = logging.getLogger("ownerserve.store")

_BATCH = 1024
MAX_SEQUENCE = 1 << 62
"""A header that says more was not written by a store: it would leave no numbers to go on with."""


class RecoveryReport(msgspec.Struct):
    """A recovery report counts what was found, adopted and mended when a store was opened."""

    index_rebuilt: bool = False
    adopted: int = 0
    torn: int = 0
    duplicates: int = 0
    lost: int = 0
    segments_dropped: int = 0
    temporary_files: int = 0


class Recovered(msgspec.Struct):
    """Recovered holds an open store's parts."""

    index: IndexWriter
    appender: Appender
    reclaimer: Reclaimer
    report: RecoveryReport


def open_index(home: Home, report: RecoveryReport) -> IndexWriter:
    """Open the index, or make a new one where it is missing, damaged or another store's."""
    try:
        index = IndexWriter(home.index_path, home.store_id)
    except IndexFailed:
        discard_index(home)
        index = IndexWriter(home.index_path, home.store_id)
    report.index_rebuilt = index.is_new and bool(home.segment_numbers())
    return index


def discard_index(home: Home) -> None:
    """Remove the index; the next open makes it again from the segments."""
    discard(home.index_path)


def recover(home: Home, keys: Keys, *, segments: OpenSegments, landing: BufferSource) -> Recovered:
    """Open the store for writing. An index that is damaged within is made anew, as one is that
    can't be opened.
    """
    report = RecoveryReport(temporary_files=home.sweep())
    index = open_index(home, report)
    try:
        try:
            hands = _Mending()
            recovery = _Recovery(home, index, keys, report=report, landing=landing, hands=hands)
            return recovery.run(segments)
        except IndexFailed as error:
            if not _is_damaged(index):  # the medium failed, and the index stays
                raise
            log.warning("%s: %s; it is made anew", home.directory, error)
            return rebuild(home, index, keys, segments=segments, landing=landing)
    except BaseException:
        index.close()
        raise


def _is_damaged(index: IndexWriter) -> bool:
    if not index.is_damaged:
        with suppress(DamagedIndex):
            index.check()
    return index.is_damaged


def rebuild(
    home: Home, index: IndexWriter, keys: Keys, *, segments: OpenSegments, landing: BufferSource
) -> Recovered:
    """Make a damaged index anew, in place, from the segments. Raises OSError and IndexFailed; the
    index is then still known as damaged.
    """
    index.make_anew()
    report, hands = RecoveryReport(index_rebuilt=True), _Mending()
    recovery = _Recovery(home, index, keys, report=report, landing=landing, hands=hands)
    parts = recovery.run(segments)
    index.is_damaged = False
    return parts


def survey(home: Home, keys: Keys, *, landing: BufferSource) -> tuple[IndexWriter, RecoveryReport]:
    """Bring the index at `home.index_path`, which is not the store's own, up to what the segments
    hold; the store is only read. Raises IndexFailed where there is no room for it.
    """
    report = RecoveryReport()
    index = open_index(home, report)
    try:
        index.check()
    except DamagedIndex:
        index.close()
        discard_index(home)
        index = open_index(home, report)
    try:
        recovery = _Recovery(home, index, keys, report=report, landing=landing, hands=_Looking())
        recovery.scan()
    except BaseException:
        index.close()
        raise
    return index, report


class _Mending:
    """Mending hands make the segments agree with the index: those of the store's one writer."""

    flags = os.O_RDWR

    def erase(self, segment: Segment, offset: int, length: int) -> None:
        """Make a torn record unreadable."""
        segment.erase([(offset, length)])

    def sync(self, segment: Segment) -> None:
        """Make what is adopted durable, before what it replaces is erased."""
        segment.sync()

    def sync_names(self, home: Home) -> None:
        """Make the segments' names durable: who made or unlinked one may have died before that."""
        sync_directory(home.directory / "segments")

    def trim(self, segment: Segment, end: int) -> None:
        """Give back what is preallocated beyond `end`."""
        if segment.size() > end:
            segment.resize(end, 0)


class _Looking(_Mending):
    """Looking hands leave the segments as they are."""

    flags = os.O_RDONLY

    def erase(self, segment: Segment, offset: int, length: int) -> None:
        """Leave the torn record: it is in no index."""

    def sync(self, segment: Segment) -> None:
        """Leave it: nothing is erased for it."""

    def sync_names(self, home: Home) -> None:
        """Leave them: no record goes where they say."""

    def trim(self, segment: Segment, end: int) -> None:
        """Leave it."""


class _Recovery:
    """A recovery does the work of opening one store; the object lives no longer than that."""

    def __init__(
        self,
        home: Home,
        index: IndexWriter,
        keys: Keys,
        *,
        report: RecoveryReport,
        landing: BufferSource,
        hands: _Mending,
    ) -> None:
        self._home = home
        self._hands = hands
        self._index = index
        self._keys = keys
        self._report = report
        self._landing = landing
        self._next_sequence = 1
        self._unnumbered: list[IndexEntry] = []
        """Scanned records whose number is another's: they get new ones when all are known."""
        self._queue = ReadQueue()

    def run(self, segments: OpenSegments) -> Recovered:
        """Make index and segments agree, and return what goes on from there."""
        index = self._index
        numbers, last = self.scan()
        next_number = max([index.highest_segment(), *numbers]) + 1
        appender = Appender(self._home, next_number, self._next_sequence)
        if last is not None and last[1].state is SegmentState.OPEN:
            appender.resume(last[0], last[1].end)
        reclaimer = Reclaimer(self._home, index, appender=appender, segments=segments)
        if doomed := index.doomed():
            index.settle()  # who doomed them may have died before its sync
            reclaimer.erase(doomed)
        self._report.segments_dropped += reclaimer.drop_empty()
        return Recovered(index, appender, reclaimer, self._report)

    def scan(self) -> tuple[list[int], tuple[Segment, SegmentRow] | None]:
        """Bring the index up to what the segments hold; returns their numbers, and the last one."""
        index = self._index
        numbers = self._home.segment_numbers()
        rows = {row.number: row for row in index.segments()}
        if rows.keys() != set(numbers):
            self._hands.sync_names(self._home)
        self._forget_lost(set(rows) - set(numbers))
        last: tuple[Segment, SegmentRow] | None = None
        self._ahead = Ahead(
            self._home.directory, numbers[:-1] if index.is_new else (), self._home.store_id
        )
        with closing(self._ahead), closing(self._queue):
            for number in numbers:
                row = rows.get(number)
                if row is not None and row.state is SegmentState.DROPPED:
                    continue
                last = self._adopt_segment(number, row, is_last=number == numbers[-1])
            self._next_sequence = max(index.highest_sequence() + 1, self._next_sequence)
            self._adopt_unnumbered()
        return numbers, last

    def _forget_lost(self, numbers: set[int]) -> None:
        for number in numbers:
            entries = list(self._index.walk(segment=number))
            self._report.lost += len(entries)
            self._index.apply(Change(remove=entries, forget_segments=[number]))

    def _adopt_segment(
        self, number: int, row: SegmentRow | None, *, is_last: bool
    ) -> tuple[Segment, SegmentRow] | None:
        segment = Segment(segment_path(self._home.directory, number), self._hands.flags)
        if row is not None and row.state is SegmentState.FULL and segment.size() <= row.end:
            return segment, row  # closed in order: nothing can lie beyond its end
        try:
            size = segment.read_header().size_bytes
        except OtherFormat:
            return None  # a newer release's: neither read nor touched
        except Corrupt:
            size = segment.size()  # records know where they lie: the header is not needed
        end = row.end if row else BLOCK
        deep = is_last or not self._index.is_new
        batch: list[IndexEntry] = []
        state = SegmentState.OPEN if is_last and size else SegmentState.FULL
        if row is not None and row.state is SegmentState.FULL:
            state = SegmentState.FULL
        fresh = SegmentRow(number, end, size, 0, state)
        self._index.apply(Change(segments=[fresh]))
        for header in self._whole(segment, end, deep=deep):
            end = header.place.offset + header.record_bytes
            if header.place.sequence <= MAX_SEQUENCE:
                self._next_sequence = max(self._next_sequence, header.place.sequence + 1)
            batch.append(_entry(header))
            if len(batch) >= _BATCH:
                self._adopt_synced(segment, batch)
                batch = []
        self._adopt_synced(segment, batch)
        fresh = msgspec.structs.replace(fresh, end=end)
        self._index.apply(Change(segments=[fresh]))
        if state is SegmentState.FULL:
            self._hands.trim(segment, end)
        return segment, fresh

    def _whole(self, segment: Segment, start: int, *, deep: bool) -> Iterator[RecordHeader]:
        """Yield the records from `start`; with `deep`, only those whose payload verifies too: the
        others are erased.
        """
        if not deep:
            yield from self._ahead.take(segment.number)
            return
        for group in _groups(records(segment, start, self._home.store_id)):
            good = self._verified(segment, group)
            for header in group:
                if header.place.offset in good:
                    yield header
                else:
                    self._report.torn += 1
                    self._hands.erase(segment, header.place.offset, header.record_bytes)

    def _verified(self, segment: Segment, group: list[RecordHeader]) -> set[int]:
        """Return the offsets of the records whose header and payload are right."""
        rooms = [self._landing.take(header.record_bytes) for header in group]
        loads = [
            segment.load(header.place.offset, room)
            for header, room in zip(group, rooms, strict=True)
        ]
        good = set()
        with closing(self._queue.run(loads)) as arrivals:
            for index, count in arrivals:
                if count < 0:
                    raise OSError(-count, os.strerror(-count), str(segment.path))
                if count == len(rooms[index]) and self._is_right(rooms[index], group[index]):
                    good.add(group[index].place.offset)
        return good

    def _is_right(self, record: memoryview, header: RecordHeader) -> bool:
        try:
            _, seal = open_header(record[: header.header_bytes], self._keys)
            end = header.header_bytes + header.payload_bytes
            open_chunks(record[header.header_bytes : end], header, seal)
        except NoKey:
            return True
        except Corrupt:
            return False
        return True

    def _adopt_synced(self, segment: Segment, batch: list[IndexEntry]) -> None:
        """Add records scanned in `segment`, durable before what they replace is erased: whoever
        wrote them may have died before its sync.
        """
        if batch:
            self._hands.sync(segment)
            self._adopt(batch)

    def _adopt(self, batch: list[IndexEntry]) -> None:
        """Add scanned records. Of two copies the younger stays, if it verifies; of two records with
        one number the later found waits for another.
        """
        standing = self._index.get_many([entry.meta.id for entry in batch])
        winners: dict[bytes, IndexEntry] = {}
        losers: list[SegmentSpan] = []
        replaced: list[IndexEntry] = []
        for entry in batch:
            rival = winners.get(entry.meta.id) or standing.get(entry.meta.id)
            if rival is None:
                winners[entry.meta.id] = entry
                continue
            if rival.span == entry.span:
                continue  # the index knew it after all
            stays, goes = self._judged(rival, entry)
            if stays is entry:
                winners[entry.meta.id] = entry
            self._report.duplicates += 1
            losers.append(goes.span)
            if standing.get(goes.meta.id) is goes:
                replaced.append(goes)
        numbered = self._numbered(winners.values(), free={entry.sequence for entry in replaced})
        self._report.adopted += len(numbered)
        self._index.apply(Change(add=numbered, remove=replaced, doom=losers))

    def _numbered(self, entries: Iterable[IndexEntry], *, free: set[int]) -> list[IndexEntry]:
        """Return those of `entries` whose number is theirs alone; the others wait in `_unnumbered`.
        `free`: numbers that the index is about to lose.
        """
        entries = list(entries)
        asked = [entry.sequence for entry in entries if entry.sequence < self._next_sequence]
        taken = self._index.sequences_among(asked) - free
        own = []
        for entry in entries:
            if entry.sequence in taken or entry.sequence >= self._next_sequence:
                self._unnumbered.append(entry)
            else:
                own.append(entry)
                taken.add(entry.sequence)
        return own

    def _adopt_unnumbered(self) -> None:
        """Add what waits for a number. The index's one then differs from the header's."""
        waiting, self._unnumbered = self._unnumbered, []
        for entry in waiting:
            self._next_sequence += 1
            self._adopt([msgspec.structs.replace(entry, sequence=self._next_sequence - 1)])

    def _judged(self, one: IndexEntry, other: IndexEntry) -> tuple[IndexEntry, IndexEntry]:
        """Return which of two copies stays and which goes: the older stays only where it verifies
        and the younger does not.
        """
        older, younger = sorted((one, other), key=lambda entry: entry.sequence)
        if self._stands(younger) or not self._stands(older):
            return younger, older
        return older, younger

    def _stands(self, entry: IndexEntry) -> bool:
        """Tell whether the record of `entry` lies where it says, as it was sealed."""
        record = self._landing.take(entry.stored_bytes)
        segment = Segment(segment_path(self._home.directory, entry.segment), os.O_RDONLY)
        try:
            read_all(segment, entry.offset, record)
            header = decode(record[: entry.header_bytes])
            check_place(header, self._home.store_id, entry.segment, entry.offset)
        except Corrupt:
            return False
        return header.meta.id == entry.meta.id and self._is_right(record, header)


def _groups(headers: Iterator[RecordHeader]) -> Iterator[list[RecordHeader]]:
    """Yield headers in order, in groups whose records are at most 8 MiB together, or one record."""
    group, size = list[RecordHeader](), 0
    for header in headers:
        if group and size + header.record_bytes > BUFFER_BYTES:
            yield group
            group, size = [], 0
        group.append(header)
        size += header.record_bytes
    if group:
        yield group


def _entry(header: RecordHeader) -> IndexEntry:
    place = header.place
    return IndexEntry(
        meta=header.meta,
        sequence=place.sequence,
        segment=place.segment,
        offset=place.offset,
        header_bytes=header.header_bytes,
        stored_bytes=header.record_bytes,
        payload_bytes=header.payload_bytes,
        touched_ms=header.created_ms,
    )
