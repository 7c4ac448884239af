"""A one-sided mover: a thread of the reader copies out of the peer's memory, which takes no part.

    asker   start, cancel, ended ──> WaitingReads (under a lock) <── thread: take, verdict
    thread  cut ── chunk by chunk: verdict, copier.copy, digest while the chunk is hot ──> end

The peer needs not run for it: a frozen one is read like another. So the thread can't see the
peer's ticket: a `ReadLanded` says that the bytes match their digest, and counts only once the
asker's `More`, asked after it, was told that the ticket stands (docs/protocol.md). The thread
stops between two chunks, hence an end is told when no byte can be written any more.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from itertools import pairwise
from threading import Condition, Thread
from typing import Protocol

import msgspec

from ownerserve.kv.clock import Clock
from ownerserve.kv.units import MIB
from ownerserve.transfer.movers.cuts import Cuts, UnfitSource, cut
from ownerserve.transfer.movers.digests import Digests, RunsMemory, matches
from ownerserve.transfer.movers.waiting import GoOn, WaitingReads
from ownerserve.transfer.vocabulary import (
    Ended,
    Read,
    ReadFailed,
    ReadFailure,
    ReadLanded,
    Runs,
)

log = logging.getLogger("ownerserve.transfer")

CHUNK_BYTES = 1 * MIB
"""What is copied between two looks at cancel and deadline. Of a smaller chunk no more stays in the
cache for the digest, and each call gives up the interpreter lock, which costs up to 5 ms to get
back where another thread computes."""


TELL_S = 0.001
"""How long what landed may wait to be told while more reads are under way: each time it is told
wakes the asker's thread, which costs both threads the interpreter lock."""


class ChunkCopied(msgspec.Struct, frozen=True):
    """The stretches are in the goal."""


class Copier(Protocol):
    """A `Copier` is how bytes are copied out of the peer's memory. One thread uses it."""

    def locate(self, source: Runs) -> Runs | ReadFailure:
        """Return the runs from which `copy` reads, for runs by the peer's addresses."""
        ...

    def copy(self, cuts: Cuts, first: int, end: int, /) -> ChunkCopied | ReadFailure:
        """Copy stretches [first, end). What it returns is said when nothing is written any more."""
        ...

    def lives(self) -> bool:
        """Tell whether the peer has not ended."""
        ...

    def close(self) -> None:
        """Let go of the peer. Nothing is copied any more."""
        ...


class MonotonicClock:
    """The clock of deadlines: seconds that never go back."""

    def now(self) -> float:
        """Return the system's monotonic time."""
        return time.monotonic()


class OneSidedMover:
    """A `OneSidedMover` is a Mover (port.py) whose one thread copies by a `Copier`, which it owns.

    `copier` may be why there is none: each read then ends so, at once, and there is no thread.
    """

    def __init__(
        self,
        name: str,
        copier: Copier | ReadFailure,
        *,
        digests: Digests,
        clock: Clock | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._name = name
        self._copier = copier
        self._digests = digests
        self._clock = clock or MonotonicClock()
        self._chunk_bytes = chunk_bytes
        self._reads = WaitingReads()
        self._ended: list[Ended] = []
        self._untold_s: float | None = None
        """Since when something landed that the eventfd does not say yet."""
        self._signalled = False
        self._closing = False
        self._changed = Condition()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._threads: list[Thread] = []
        if not isinstance(copier, ReadFailure):
            runner = Thread(target=self._run, args=(copier,), name=f"move-{name}", daemon=True)
            self._threads.append(runner)
            runner.start()

    @property
    def name(self) -> str:
        """Return the road's name, a label of metrics."""
        return self._name

    @property
    def is_fenced(self) -> bool:
        """Tell that no byte is written after a read's end: its thread is the only writer."""
        return True

    @property
    def is_signed(self) -> bool:
        """Tell that a ReadLanded says nothing of the ticket: the asker's `More` does."""
        return False

    def start(self, read: Read) -> None:
        """Begin the read; its end comes from `ended`."""
        with self._changed:
            if isinstance(self._copier, ReadFailure):
                self._tell([ReadFailed(read.number, self._copier)])
            elif self._closing:
                self._tell([ReadFailed(read.number, ReadFailure.CANCELLED)])
            else:
                self._reads.start(read)
                self._changed.notify()

    def cancel(self, number: int) -> None:
        """Have the read end soon, as CANCELLED or as it ends anyway."""
        with self._changed:
            self._tell(self._reads.cancel(number))

    def ended(self) -> list[Ended]:
        """Return the ends that came since the last call. Any thread may call."""
        with self._changed:
            told, self._ended = self._ended, []
            if self._signalled:
                os.eventfd_read(self._event)
            self._signalled, self._untold_s = False, None
            return told

    def fileno(self) -> int:
        """Return the eventfd that is readable while `ended` has something to tell (TELL_S after it
        landed, while more is under way); -1 once closed."""
        return self._event

    def close(self) -> None:
        """End all reads as CANCELLED and the thread. What `ended` has not told yet it still does;
        the eventfd is closed, hence must be watched by nobody any more."""
        with self._changed:
            self._closing = True
            self._tell(self._reads.cancel_all())
            self._changed.notify()
        for thread in self._threads:
            thread.join()
        with self._changed:
            if self._event >= 0:
                os.close(self._event)
                self._event, self._signalled = -1, False

    def _tell(self, ends: Sequence[Ended]) -> None:
        """Have `ended` tell them. The lock is held."""
        self._ended += ends
        if ends:
            self._signal()

    def _signal(self) -> None:
        """Have the eventfd say that there is something to tell. The lock is held."""
        if not self._signalled and self._event >= 0:
            os.eventfd_write(self._event, 1)
            self._signalled = True

    def _landed(self, end: ReadLanded, now_s: float) -> None:
        """Have `ended` tell it, and the eventfd say so soon. The lock is held."""
        self._ended.append(end)
        if self._untold_s is None:
            self._untold_s = now_s
        self._signal_in_time(now_s)

    def _signal_in_time(self, now_s: float) -> None:
        """Signal what has waited for TELL_S, or at once when no read is left. The lock is held."""
        if self._untold_s is not None and (
            not len(self._reads) or now_s - self._untold_s >= TELL_S
        ):
            self._signal()

    def _run(self, copier: Copier) -> None:
        while (read := self._next()) is not None:
            try:
                end = self._bring(copier, read)
            except Exception:  # the thread's root: a read that fails must not end the others
                log.exception("a read by %s failed", self._name)
                end = ReadFailed(read.number, ReadFailure.UNABLE)
            with self._changed:
                self._reads.finished()
                if isinstance(end, ReadLanded):
                    self._landed(end, self._clock.now())
                else:
                    self._tell([end])
        copier.close()

    def _next(self) -> Read | None:
        """Wait for a read to make; None: the mover is closed."""
        with self._changed:
            while not self._closing:
                self._tell(self._reads.expired(self._clock.now()))
                read = self._reads.take()
                if read is not None:
                    return read
                self._changed.wait()
            return None

    def _verdict(self) -> GoOn | ReadFailed:
        """Look between two chunks at what was cancelled and what is late."""
        with self._changed:
            now_s = self._clock.now()
            self._tell(self._reads.expired(now_s))
            self._signal_in_time(now_s)
            return self._reads.verdict(now_s)

    def _bring(self, copier: Copier, read: Read) -> ReadLanded | ReadFailed:
        """Fill the read's goal; what it returns is told when this thread writes there no more."""
        begun = self._verdict()
        if isinstance(begun, ReadFailed):
            return begun
        if not copier.lives():
            return ReadFailed(read.number, ReadFailure.PEER_LOST)
        if read.source is None:  # no address, no one-sided read
            return ReadFailed(read.number, ReadFailure.UNABLE)
        source = copier.locate(read.source)
        if isinstance(source, ReadFailure):
            return ReadFailed(read.number, source)
        cuts = cut(read.goal, source, chunk_bytes=self._chunk_bytes)
        if isinstance(cuts, UnfitSource):
            return ReadFailed(read.number, ReadFailure.REFUSED)
        return self._fill(copier, read, cuts)

    def _fill(self, copier: Copier, read: Read, cuts: Cuts) -> ReadLanded | ReadFailed:
        hasher, memory = self._digests.begin(), RunsMemory(read.goal)
        for (first, end), landed in zip(pairwise(cuts.chunks), cuts.landings(), strict=True):
            copied = copier.copy(cuts, first, end)
            if isinstance(copied, ReadFailure):
                return ReadFailed(read.number, copied)
            for address, length in landed:
                hasher.update(memory.at(address, length))
            verdict = self._verdict()
            if isinstance(verdict, ReadFailed):
                return verdict
        if not copier.lives():  # while it lived its pid was its own
            return ReadFailed(read.number, ReadFailure.PEER_LOST)
        if not matches(read.digest, hasher.digest()):
            return ReadFailed(read.number, ReadFailure.CORRUPT)
        return ReadLanded(read.number, read.goal.bytes)
