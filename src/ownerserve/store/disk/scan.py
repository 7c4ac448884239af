"""A scan walks a segment: every record that stands in it, in order, whatever lies between.

A record is known by a header whose CRC is right and which says that it lies here, in this store;
so neither a payload that looks like a header nor a stray copy is taken for one. Past a damaged
header the walk goes on at the next 4 KiB block that starts one; holes are skipped unread.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from ownerserve.kv.errors import Corrupt
from ownerserve.store.format.header import BLOCK, MAGIC, RecordHeader, decode, peek_bytes
from ownerserve.store.format.segment import Segment, segment_path
from ownerserve.store.format.verify import check_place

WINDOW = 1 << 20
AHEAD = 4


def records(segment: Segment, start: int, store_id: bytes) -> Iterator[RecordHeader]:
    """Yield the headers at and after `start`; payloads are not read."""
    first = mmap.mmap(-1, BLOCK)
    view, offset = memoryview(first), start
    while True:
        try:
            if segment.read(offset, view) < BLOCK:
                return
            header = _header_at(segment, offset, view)
            check_place(header, store_id, segment.number, offset)
        except Corrupt:
            found = _next_header(segment, offset + BLOCK)
            if found is None:
                return
            offset = found
            continue
        yield header
        offset += header.record_bytes


def header_at(segment: Segment, offset: int, store_id: bytes) -> RecordHeader:
    """Return the header of the record that lies at `offset`, a multiple of 4 KiB; its payload is
    not read. Raises Corrupt where none lies, and OSError.
    """
    first = memoryview(mmap.mmap(-1, BLOCK))
    header = _header_at(segment, offset, first[: segment.read(offset, first)])
    check_place(header, store_id, segment.number, offset)
    return header


class Ahead:
    """Walks whole segments before they are asked for, AHEAD at a time, in the order given.

    A walk is a chain, each header says where the next one is, so one alone waits for the medium
    at every record; several side by side do not.
    """

    def __init__(self, directory: Path, numbers: Sequence[int], store_id: bytes) -> None:
        self._directory = directory
        self._store_id = store_id
        self._left = iter(numbers)
        self._walks: dict[int, Future[list[RecordHeader]]] = {}
        self._threads = ThreadPoolExecutor(AHEAD, thread_name_prefix="store-scan")
        for _ in range(AHEAD):
            self._start_next()

    def _start_next(self) -> None:
        number = next(self._left, None)
        if number is not None:
            self._walks[number] = self._threads.submit(self._walk, number)

    def _walk(self, number: int) -> list[RecordHeader]:
        segment = Segment(segment_path(self._directory, number), os.O_RDONLY)
        return list(records(segment, BLOCK, self._store_id))

    def take(self, number: int) -> list[RecordHeader]:
        """Give all records of a segment, once."""
        found = self._walks.pop(number).result()
        self._start_next()
        return found

    def close(self) -> None:
        """Wait for walks that nobody asked for."""
        self._threads.shutdown(cancel_futures=True)


def _header_at(segment: Segment, offset: int, first: memoryview) -> RecordHeader:
    length = peek_bytes(first)
    if length == BLOCK:
        return decode(first)
    whole = memoryview(mmap.mmap(-1, length))
    return decode(whole[: segment.read(offset, whole)])


def _next_header(segment: Segment, offset: int) -> int | None:
    window = mmap.mmap(-1, WINDOW)
    view = memoryview(window)
    while True:
        data_at = segment.next_data(offset)
        if data_at is None:
            return None
        offset = max(offset, data_at - data_at % BLOCK)
        count = segment.read(offset, view)
        for at in range(0, count - BLOCK + 1, BLOCK):
            if view[at : at + 8] == MAGIC:
                return offset + at
        if count < WINDOW:
            return None
        offset += WINDOW
