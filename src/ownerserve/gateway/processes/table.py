"""The homes' table is memory that all processes of one gateway share: at which process each session
is, and where turns ended of those that have no name.

Owns the memory and its form, and no rule. A key is 64 bits of a digest; what it says are 16 bits
and a process's number. A bucket is eight entries, an entry one word, so that a reader sees an old
or a new one and never half of each; whoever writes holds the lock, which the kernel frees when its
holder is killed. In a full bucket the entry goes that was not read for longest.

    key     | .. not used 8 | tag 40 ........ | bucket 16 |
    entry   | tag 40 ........................ | says 16 | process + 1, 8 |       0: empty

Another key with the same 56 bits (one in 10^11 look-ups of a full table) gets the same answer: a
session is at another process than its digest says, and all processes see it there.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from struct import Struct

import msgspec

WAYS = 8
BUCKETS = 1 << 16
PROCESSES_MAX = 64
_ROW = Struct(f"{WAYS}Q")
_STAMPS = Struct(f"{WAYS}I")
_TAG = ((1 << 40) - 1) << 24


class HomeEntry(msgspec.Struct, frozen=True, gc=False):
    """An entry is what the table has of a key: a process, and up to 16 bits that its writer put."""

    process: int
    says: int


class HomeTable:
    """The table is made before the processes that share it are forked."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, BUCKETS * (_ROW.size + _STAMPS.size))
        self._words = memoryview(self._memory)[: BUCKETS * _ROW.size].cast("Q")
        self._stamps = memoryview(self._memory)[BUCKETS * _ROW.size :].cast("I")
        self._lock = os.memfd_create("ownerserve-homes")
        self._began_s = time.monotonic()

    def get(self, key: int) -> HomeEntry | None:
        """Return what is known of the key."""
        first = (key & (BUCKETS - 1)) * WAYS
        tag = (key << 8) & _TAG
        row = _ROW.unpack_from(self._memory, first * 8)
        for way, word in enumerate(row):
            if word & _TAG == tag and word & 0xFF:
                now = int(time.monotonic() - self._began_s)
                if self._stamps[first + way] != now:
                    self._stamps[first + way] = now
                return HomeEntry((word & 0xFF) - 1, (word >> 8) & 0xFFFF)
        return None

    def put(self, key: int, entry: HomeEntry) -> None:
        """Write the entry, whatever was there; only under `locked`."""
        first = (key & (BUCKETS - 1)) * WAYS
        tag = (key << 8) & _TAG
        row = self._words[first : first + WAYS].tolist()
        ages = self._stamps[first : first + WAYS].tolist()
        way = next((way for way, word in enumerate(row) if word & _TAG == tag and word), None)
        if way is None:
            way = min(range(WAYS), key=lambda way: (row[way] != 0, ages[way]))
        self._words[first + way] = tag | entry.says << 8 | entry.process + 1
        self._stamps[first + way] = int(time.monotonic() - self._began_s)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let no other process write while inside."""
        fcntl.lockf(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)
