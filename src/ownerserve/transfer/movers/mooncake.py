"""The mover over Mooncake's Transfer Engine: its threads write, so it can't be fenced. Arena only.

    asker      start, cancel ──> WaitingReads <── watcher: deadlines, ends of batches, ends
    watcher ── a batch of DESCRIPTORS_MAX ──> submitter: the engine's call, which may block
    engine     reads into the arena on threads of its own

What was measured of it (docs/evidence/transfer.md): a batch that failed goes on writing, and so
does one whose peer was frozen, once it runs again. So a read that ends amid a batch ends
`ReadUnproven`; `ReadQuiet` follows when the engine says that all of its descriptors have landed,
and never where it says that the batch failed. It has no authentication: who reaches its port reads
what is registered.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Protocol

import msgspec

from ownerserve.transfer.movers.cuts import UnfitSource, cut
from ownerserve.transfer.movers.digests import Digests, digest_of, matches
from ownerserve.transfer.movers.waiting import WaitingReads
from ownerserve.transfer.vocabulary import (
    Ended,
    Read,
    ReadFailed,
    ReadFailure,
    ReadLanded,
    ReadQuiet,
    ReadUnproven,
)

log = logging.getLogger("ownerserve.transfer")

DESCRIPTORS_MAX = 512
"""Over 1,024 queued for a peer, the engine refuses and writes all the same."""
LOOK_S = 0.0005
"""How often a batch under way is looked at, and the deadlines with it."""
JOIN_S = 1.0
_RUNS, _LANDED, _FAILED = range(3)


class MooncakeEngine(Protocol):
    """What this mover needs of mooncake.engine.TransferEngine, which knows the arena already."""

    def batch_transfer_sync_read(
        self, peer: str, goals: list[int], sources: list[int], lengths: list[int], /
    ) -> int:
        """Read a batch; returns 0 when all of it has landed. May block for 30 s. (Its asynchronous
        calls say that a batch is done when its first descriptor is: measured.)"""
        ...


class _Batch(msgspec.Struct):
    """One batch of a read; `status` is what is known of it."""

    number: int
    goals: list[int]
    sources: list[int]
    lengths: list[int]
    status: int = _RUNS


class MooncakeMover:
    """A `MooncakeMover` reads from one peer, by its engine's name. Owns its threads, not the
    engine."""

    def __init__(self, engine: MooncakeEngine, peer: str, digests: Digests) -> None:
        self._engine, self._peer, self._digests = engine, peer, digests
        self._reads = WaitingReads()
        self._lock = Lock()
        self._ended: list[Ended] = []
        self._unproven: list[_Batch] = []
        self._closing = False
        self._changed = Event()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._submitted: SimpleQueue[_Batch | None] = SimpleQueue()
        self._threads = [
            Thread(target=self._submit, name="submit-mooncake", daemon=True),
            Thread(target=self._run, name="move-mooncake", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def name(self) -> str:
        """Return the road's name, a label of metrics."""
        return "mooncake"

    @property
    def is_fenced(self) -> bool:
        """Tell that the engine may write after a read's end."""
        return False

    @property
    def is_signed(self) -> bool:
        """Tell that a ReadLanded says nothing of the ticket: the asker's `More` does."""
        return False

    def start(self, read: Read) -> None:
        """Begin the read; its end comes from `ended`."""
        with self._lock:
            if self._closing:
                self._tell([ReadFailed(read.number, ReadFailure.CANCELLED)])
                return
            self._reads.start(read)
        self._changed.set()

    def cancel(self, number: int) -> None:
        """Have the read end soon."""
        with self._lock:
            self._tell(self._reads.cancel(number))

    def ended(self) -> list[Ended]:
        """Return the ends that came since the last call."""
        with self._lock:
            told, self._ended = self._ended, []
            if told and self._event >= 0:
                os.eventfd_read(self._event)
            return told

    def fileno(self) -> int:
        """Return the eventfd that is readable while `ended` has something to tell; -1 once
        closed."""
        return self._event

    def close(self) -> None:
        """End all reads, as CANCELLED, and the threads; a call of the engine that does not return
        keeps its own for as long. Batches under way stay unproven for ever."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._tell(self._reads.cancel_all())
        self._changed.set()
        self._submitted.put(None)
        self._threads[1].join()
        self._threads[0].join(JOIN_S)
        with self._lock:
            os.close(self._event)
            self._event = -1

    def _tell(self, ends: Sequence[Ended]) -> None:
        """Have `ended` tell them. The lock is held."""
        if ends and not self._ended and self._event >= 0:
            os.eventfd_write(self._event, 1)
        self._ended += ends

    def _submit(self) -> None:
        while (batch := self._submitted.get()) is not None:
            try:
                failed = self._engine.batch_transfer_sync_read(
                    self._peer, batch.goals, batch.sources, batch.lengths
                )
            except Exception:  # the thread's root, and another's library
                log.exception("Mooncake refuses a batch")
                failed = _FAILED
            batch.status = _FAILED if failed else _LANDED

    def _run(self) -> None:
        while (read := self._next()) is not None:
            try:
                end = self._bring(read)
            except Exception:  # the thread's root: nothing is known of what was begun
                log.exception("a read by mooncake failed")
                end = ReadUnproven(read.number, ReadFailure.UNABLE)
            with self._lock:
                self._reads.finished()
                self._tell([end])

    def _next(self) -> Read | None:
        """Wait for a read to make; None: the mover is closed."""
        while True:
            self._changed.clear()
            with self._lock:
                self._tell(self._reads.expired(time.monotonic()))
                if self._closing:
                    return None
                read = self._reads.take()
            if read is not None:
                return read
            self._prove()
            self._changed.wait(LOOK_S if self._unproven else None)

    def _bring(self, read: Read) -> ReadLanded | ReadFailed | ReadUnproven:
        if read.source is None:
            return ReadFailed(read.number, ReadFailure.UNABLE)
        cuts = cut(read.goal, read.source, chunk_bytes=max(read.goal.bytes, 1))
        if isinstance(cuts, UnfitSource):
            return ReadFailed(read.number, ReadFailure.REFUSED)
        for first in range(0, len(cuts.goals), DESCRIPTORS_MAX):
            some = slice(first, first + DESCRIPTORS_MAX)
            goals, sources = cuts.goals[some], cuts.sources[some, 0].tolist()
            batch = _Batch(read.number, goals[:, 0].tolist(), sources, goals[:, 1].tolist())
            refused = self._verdict()
            if refused is not None:  # every descriptor so far has landed: nobody writes
                return ReadFailed(read.number, refused)
            self._submitted.put(batch)
            failed = self._landed(batch)
            if failed is not None:
                return ReadUnproven(read.number, failed)
        if not matches(read.digest, digest_of(read.goal, self._digests)):
            return ReadFailed(read.number, ReadFailure.CORRUPT)
        return ReadLanded(read.number, read.goal.bytes)

    def _landed(self, batch: _Batch) -> ReadFailure | None:
        """Wait until the batch has landed; else say why not, and it is unproven."""
        while True:
            status = batch.status
            if status == _LANDED:
                return None
            if status != _RUNS:
                return ReadFailure.PEER_LOST
            refused = self._verdict()
            if refused is not None:
                self._unproven.append(batch)
                return refused
            self._prove()
            time.sleep(LOOK_S)

    def _prove(self) -> None:
        """Tell of what is quiet now; forget what failed, which is never known to be."""
        still: list[_Batch] = []
        for batch in self._unproven:
            status = batch.status
            if status == _RUNS:
                still.append(batch)
            elif status == _LANDED:
                with self._lock:
                    self._tell([ReadQuiet(batch.number)])
        self._unproven = still

    def _verdict(self) -> ReadFailure | None:
        with self._lock:
            now_s = time.monotonic()
            self._tell(self._reads.expired(now_s))
            verdict = self._reads.verdict(now_s)
        return verdict.reason if isinstance(verdict, ReadFailed) else None
