"""Reading a store on disk: look up, read, verify, all wants or none.

Used by the writer's own tier and by snapshot readers in other processes. Holds the open segments;
never writes. What fails verification is looked up again first: a record that was evicted or moved
in between is an honest miss or a second try, not corruption.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import msgspec

from ownerserve.kv.errors import CapacityExceeded, Corrupt
from ownerserve.kv.units import MIB
from ownerserve.store.buffers import Landing
from ownerserve.store.header import CHUNK, Header, OtherFormat, aligned
from ownerserve.store.home import Home
from ownerserve.store.index import Entry, IndexFailed, IndexReader
from ownerserve.store.model import Hit, Miss, MissReason, Part, ReadOutcome, Want
from ownerserve.store.seal import Keys, Seal
from ownerserve.store.segment import Segment, segment_path
from ownerserve.store.verify import (
    BadRange,
    NoKey,
    check_meta,
    check_place,
    chunk_span,
    open_chunks,
    open_header,
    span_of,
)

MAX_OPEN_SEGMENTS = 256
TRIES = 3
MAX_RUN_BYTES = 8 * MIB
PARALLEL_BYTES = MIB // 2
PARALLEL_RUNS = 4
OnBad = Callable[[Entry, str], None]
OnRead = Callable[[Iterable[Entry]], None]


class Foreign(Corrupt):
    """A layout that the reader does not take."""


class Item(msgspec.Struct, frozen=True):
    """The `at`-th want of a read, and where its record lies."""

    at: int
    entry: Entry
    want: Want

    def joins(self, run: list[Item]) -> bool:
        """Does this whole record start where the run of whole records ends?"""
        before, entry = run[-1].entry, self.entry
        return (
            (before.segment, before.offset + before.stored_bytes) == (entry.segment, entry.offset)
            and self._is_whole
            and run[-1]._is_whole
            and entry.offset + entry.stored_bytes - run[0].entry.offset <= MAX_RUN_BYTES
        )

    @property
    def _is_whole(self) -> bool:
        return self.want.first_unit == 0 and self.want.end_unit in (None, self.entry.meta.units)


Found = list[Part | Exception]


class OpenSegments:
    """Segments open for reading, least recently used closed first.

    A segment unlinked meanwhile stays readable to who holds it; the last holder closes it.
    """

    def __init__(self, home: Home) -> None:
        self._home = home
        self._open: OrderedDict[int, Segment] = OrderedDict()
        self._lock = Lock()

    def get(self, number: int) -> Segment:
        """The segment, opened if need be; OSError when it is gone."""
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
    """Verified reads over one index and its segments; any number of threads."""

    def __init__(
        self,
        home: Home,
        index: IndexReader,
        keys: Keys,
        *,
        segments: OpenSegments,
        landing: Landing,
        listeners: tuple[OnRead, OnBad],
    ) -> None:
        self._home = home
        self._index = index
        self._keys = keys
        self._landing = landing
        self._on_read, self._on_bad = listeners
        self._pool = ThreadPoolExecutor(PARALLEL_RUNS, thread_name_prefix="store-io")
        self.segments = segments

    def read(self, wants: Sequence[Want], landing: Landing | None = None) -> ReadOutcome:
        """All wants, each verified, or the first reason why not."""
        outcome: ReadOutcome = Miss(MissReason.ABSENT)
        for _ in range(TRIES):
            outcome, stale = self._try(wants, landing or self._landing)
            if not stale:
                break
        return outcome

    def _try(self, wants: Sequence[Want], landing: Landing) -> tuple[ReadOutcome, bool]:
        """An outcome, and whether it came from an index row that is no longer true."""
        try:
            entries = self._index.get_many([want.id for want in wants])
        except IndexFailed:
            return Miss(MissReason.IO_ERROR), False
        absent = next((want.id for want in wants if want.id not in entries), None)
        if absent is not None:
            return Miss(MissReason.ABSENT, absent), False
        items = [Item(at, entries[want.id], want) for at, want in enumerate(wants)]
        parts: list[Part | None] = [None] * len(items)
        for run, found in self._each(neighbours(items), landing):
            for item, part in zip(run, found, strict=True):
                if not isinstance(part, Part):
                    return self._why(item, part)
                parts[item.at] = part
        self._on_read(entries.values())
        return Hit(tuple(part for part in parts if part is not None), "disk"), False

    def _each(self, runs: list[list[Item]], landing: Landing) -> Iterator[tuple[list[Item], Found]]:
        """Runs and what was found, read side by side when that is worth the hand-over."""
        size = sum(item.entry.stored_bytes for run in runs for item in run)
        if len(runs) == 1 or size < PARALLEL_BYTES:
            return ((run, self._read_run(run, landing)) for run in runs)
        found = self._pool.map(lambda run: self._read_run(run, landing), runs)
        return zip(runs, found, strict=True)

    def _read_run(self, run: list[Item], landing: Landing) -> Found:
        """Each item's part, or what is wrong with it; nothing after the first that is wrong."""
        records: list[memoryview] = []
        if len(run) > 1:
            try:
                records = self._fetch(run, landing)
            except (Corrupt, CapacityExceeded, OSError):
                records = []  # one by one will tell which of them it is
        found: Found = []
        for position, item in enumerate(run):
            try:
                if records:
                    part = self._open(item.entry, item.want, records[position])
                else:
                    part = self.read_one(item.entry, item.want, landing)
                found.append(part)
            except (Corrupt, CapacityExceeded, OSError) as error:
                found.append(error)
                return found + [error] * (len(run) - len(found))
        return found

    def _fetch(self, run: list[Item], landing: Landing) -> list[memoryview]:
        """Neighbouring records by one read."""
        start = run[0].entry.offset
        whole = landing.take(run[-1].entry.offset + run[-1].entry.stored_bytes - start)
        read_all(self.segments.get(run[0].entry.segment), start, whole)
        places = [(item.entry.offset - start, item.entry.stored_bytes) for item in run]
        return [whole[low : low + size] for low, size in places]

    def _why(self, item: Item, error: Exception) -> tuple[Miss, bool]:
        id_ = item.want.id
        if isinstance(error, BadRange):
            return Miss(MissReason.BAD_RANGE, id_), False
        if isinstance(error, CapacityExceeded):
            return Miss(MissReason.BUSY, id_), False
        assert isinstance(error, Corrupt | OSError)
        if self._moved(item.entry):
            return Miss(MissReason.ABSENT, id_), True
        return Miss(self._blame(item.entry, error), id_), False

    def _moved(self, entry: Entry) -> bool:
        self._index.forget(entry.meta.id)
        try:
            now = self._index.get(entry.meta.id)
        except IndexFailed:
            return False
        return now is None or now.sequence != entry.sequence

    def _blame(self, entry: Entry, error: Corrupt | OSError) -> MissReason:
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

    def read_one(self, entry: Entry, want: Want, landing: Landing) -> Part:
        """Verified bytes of one want, or what is wrong as an exception."""
        low, high = span_of(want, entry.meta.units, entry.payload_bytes)
        first, end = chunk_span(low, high, entry.payload_bytes)
        segment, head = self.segments.get(entry.segment), entry.header_bytes
        if (first, end) == (0, entry.payload_bytes):
            record = landing.take(entry.stored_bytes)
            read_all(segment, entry.offset, record)
            return self._open(entry, want, record)
        header_view = self._landing.take(head)
        chunks = landing.take(aligned(end - first))
        read_all(segment, entry.offset, header_view)
        read_all(segment, entry.offset + head + first, chunks)
        header, seal = self._open_header(entry, want, header_view)
        chunks = chunks[: end - first]
        open_chunks(chunks, header, seal, first // CHUNK)
        return Part(header.meta, chunks[low - first : high - first])

    def _open(self, entry: Entry, want: Want, record: memoryview) -> Part:
        """Verified bytes of a want in a whole record."""
        low, high = span_of(want, entry.meta.units, entry.payload_bytes)
        header, seal = self._open_header(entry, want, record[: entry.header_bytes])
        payload = record[entry.header_bytes : entry.header_bytes + entry.payload_bytes]
        open_chunks(payload, header, seal)
        return Part(header.meta, payload[low:high])

    def _open_header(self, entry: Entry, want: Want, view: memoryview) -> tuple[Header, Seal]:
        header, seal = open_header(view, self._keys)
        check_place(header, self._home.store_id, entry.segment, entry.offset)
        check_meta(header, entry.meta, entry.payload_bytes)
        if want.descriptor is not None and want.descriptor != header.meta.descriptor:
            raise Foreign("layout descriptor differs")
        return header, seal

    def close(self) -> None:
        """Stop the threads and let go of the segments."""
        self._pool.shutdown()
        self.segments.clear()


def neighbours(items: Sequence[Item]) -> list[list[Item]]:
    """Wants in the order they lie on disk, whole records that touch each other together. Pure.

    What is spilled together is written together, so a restorable point is often one read.
    """
    runs: list[list[Item]] = []
    for item in sorted(items, key=lambda item: (item.entry.segment, item.entry.offset)):
        if runs and item.joins(runs[-1]):
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs


def read_all(segment: Segment, offset: int, into: memoryview) -> None:
    if segment.read(offset, into) < len(into):
        raise Corrupt("the segment ends within the record")
