"""A mover over an engine that is not ours, whose writer can't be fenced: it reads into an arena.

    asker     start, cancel ──> WaitingReads <── watcher: deadlines, ends of batches, ends
    watcher ── one batch after another ──> caller: the engine's calls, which may block
    engine    writes into the arena, on threads of its own or while it is called

| a batch is | leaves by | then its read is |
|---|---|---|
| QUEUED | the read ends before its turn came; the engine takes it not | failed: nobody writes |
| BEGUN | all of it landed | one batch further; after the last one landed, or corrupt |
| BEGUN | the read ends: cancelled, late | unproven; quiet when all of the batch landed after all |
| BEGUN | the engine says that it failed | unproven, for ever: some of it may be written yet |

A call that does not return is waited for by the caller alone: ends are told in time.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from enum import Enum
from itertools import pairwise
from queue import Empty, Queue
from threading import Event, Lock, Thread
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ownerserve.kv.units import MIB
from ownerserve.transfer.movers.arena import StagingMemory
from ownerserve.transfer.movers.cuts import Cuts, UnfitSource, cut
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
BATCH_BYTES = 16 * MIB
"""A batch is that long at most, of that many descriptors: what a read that ends amid leaves to an
engine that can't be stopped."""
LOOK_S, LOOK_UNPROVEN_S = 0.0005, 0.02
"""How often a batch is looked at that a read waits for, and one that none does any more."""
TICK_S = 0.01
"""How late a deadline or a cancel may be seen."""
JOIN_S = 1.0


class BatchState(Enum):
    """A `BatchState` is what an engine says of a batch that was begun."""

    UNDER_WAY = "under way"
    LANDED = "landed"  # every byte of it, and nobody writes
    FAILED = "failed"  # not all of it; some may be written yet


class Batch(msgspec.Struct, frozen=True, eq=False):
    """A `Batch` is what an engine reads at once: int64 [n, 2], an address and its bytes each, in
    the arena (`goals`) and at the peer (`sources`)."""

    goals: NDArray[np.int64]
    sources: NDArray[np.int64]


class BatchUnderWay(Protocol):
    """A `BatchUnderWay` is the engine's own name for a batch that was begun. Whoever lets go of one
    that has not landed may free what the engine still uses."""

    def look(self) -> BatchState:
        """Return what the engine says of it now. Some engines move bytes meanwhile."""
        ...


class BatchEngine(Protocol):
    """A `BatchEngine` reads from one peer. One thread calls it; what it raises is FAILED."""

    def begin(self, batch: Batch, /) -> BatchUnderWay | ReadFailure:
        """Begin to read the batch; may block. A ReadFailure says that nothing of it was begun, and
        why."""
        ...


class _Step(Enum):
    QUEUED, BEGUN, LANDED, FAILED, REFUSED, WITHDRAWN = range(6)


class _Asked(msgspec.Struct, eq=False):
    """A batch of a read, and how far it is; the mover's lock guards all but what is of the caller:
    `under_way`."""

    number: int
    batch: Batch
    step: _Step = _Step.QUEUED
    refused: ReadFailure | None = None
    is_unproven: bool = False
    under_way: BatchUnderWay | None = None


class UnfencedMover:
    """An `UnfencedMover` is a Mover (port.py) whose engine may write after a read's end: each goal
    has to lie in `arena`, or its read ends UNABLE. Owns its two threads, neither engine nor arena.

    `engine` may be why there is none: each read then ends so.
    """

    def __init__(
        self,
        name: str,
        engine: BatchEngine | ReadFailure,
        *,
        arena: StagingMemory,
        digests: Digests,
    ) -> None:
        self._name, self._engine = name, engine
        self._arena, self._digests = arena, digests
        self._reads = WaitingReads()
        self._lock = Lock()
        self._ended: list[Ended] = []
        self._unproven: list[_Asked] = []
        self._closing = False
        self._changed = Event()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._queue: Queue[_Asked | None] = Queue()  # a SimpleQueue can sleep past its timeout
        self._watcher = Thread(target=self._run, name=f"move-{name}", daemon=True)
        self._caller = Thread(target=self._call, name=f"call-{name}", daemon=True)
        self._watcher.start()
        self._caller.start()

    @property
    def name(self) -> str:
        """Return the road's name, a label of metrics."""
        return self._name

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
        self._changed.set()

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
        keeps its own for as long. What has not landed by then stays unproven for ever."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._tell(self._reads.cancel_all())
        self._changed.set()
        self._watcher.join()
        self._queue.put(None)
        self._caller.join(JOIN_S)
        self._prove()
        with self._lock:
            os.close(self._event)
            self._event = -1

    def _tell(self, ends: Sequence[Ended]) -> None:
        """Have `ended` tell them. The lock is held."""
        if ends and not self._ended and self._event >= 0:
            os.eventfd_write(self._event, 1)
        self._ended += ends

    # The watcher.

    def _run(self) -> None:
        while (read := self._next()) is not None:
            try:
                end = self._bring(read)
            except Exception:  # the thread's root: nothing is known of what was begun
                log.exception("a read by %s failed", self._name)
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
            self._changed.wait()

    def _bring(self, read: Read) -> ReadLanded | ReadFailed | ReadUnproven:
        begun = self._verdict()
        if begun is not None:
            return ReadFailed(read.number, begun)
        if isinstance(self._engine, ReadFailure):
            return ReadFailed(read.number, self._engine)
        if read.source is None or not self._arena.holds(read.goal):
            return ReadFailed(read.number, ReadFailure.UNABLE)
        cuts = cut(read.goal, read.source, chunk_bytes=BATCH_BYTES)
        if isinstance(cuts, UnfitSource):
            return ReadFailed(read.number, ReadFailure.REFUSED)
        for batch in _batches(cuts):
            stopped = self._brought(_Asked(read.number, batch))
            if stopped is not None:
                return stopped
        if not matches(read.digest, digest_of(read.goal, self._digests)):
            return ReadFailed(read.number, ReadFailure.CORRUPT)
        return ReadLanded(read.number, read.goal.bytes)

    def _brought(self, asked: _Asked) -> ReadFailed | ReadUnproven | None:
        """Have the batch read, and wait until it has landed: None. Else the end of its read; every
        batch before this one has landed."""
        self._queue.put(asked)
        while True:
            self._changed.clear()
            with self._lock:
                step, refused = asked.step, asked.refused
            if step is _Step.FAILED:
                return ReadUnproven(asked.number, ReadFailure.PEER_LOST)
            if step is _Step.REFUSED and refused is not None:
                return ReadFailed(asked.number, refused)
            verdict = self._verdict()
            if step is _Step.LANDED:
                return None if verdict is None else ReadFailed(asked.number, verdict)
            if verdict is not None:
                return self._left(asked, verdict)
            self._prove()
            self._changed.wait(TICK_S)

    def _left(self, asked: _Asked, verdict: ReadFailure) -> ReadFailed | ReadUnproven:
        """Return the end of a read that waits for the batch no longer."""
        with self._lock:
            if asked.step is _Step.QUEUED:
                asked.step = _Step.WITHDRAWN
                return ReadFailed(asked.number, verdict)
            asked.is_unproven = True
        self._unproven.append(asked)
        return ReadUnproven(asked.number, verdict)

    def _prove(self) -> None:
        """Tell of what is quiet now; forget what failed, which is never known to be."""
        with self._lock:
            ended = [one for one in self._unproven if one.step is not _Step.BEGUN]
            self._tell([ReadQuiet(one.number) for one in ended if one.step is not _Step.FAILED])
        self._unproven = [one for one in self._unproven if one not in ended]

    def _verdict(self) -> ReadFailure | None:
        """Return why the running read ends now, if it does; tells of those that waited too long."""
        with self._lock:
            now_s = time.monotonic()
            self._tell(self._reads.expired(now_s))
            verdict = self._reads.verdict(now_s)
        return verdict.reason if isinstance(verdict, ReadFailed) else None

    # The caller.

    def _call(self) -> None:
        begun: list[_Asked] = []
        while True:
            with suppress(Empty):
                asked = self._queue.get(timeout=self._pause_s(begun))
                if asked is None:
                    break
                self._begin(asked)
                begun.append(asked)
            for one in begun:
                self._look(one)
            begun = [one for one in begun if one.step is _Step.BEGUN]
        for one in begun:  # nobody looks any more
            self._arena.keep(one.under_way)

    def _pause_s(self, begun: Sequence[_Asked]) -> float | None:
        """Return how long nothing need be looked at; None: until something is asked."""
        if not begun:
            return None
        with self._lock:
            all_unproven = all(one.is_unproven for one in begun)
        return LOOK_UNPROVEN_S if all_unproven else LOOK_S

    def _begin(self, asked: _Asked) -> None:
        with self._lock:
            if asked.step is _Step.WITHDRAWN:
                return
            asked.step = _Step.BEGUN
        assert not isinstance(self._engine, ReadFailure)
        try:
            began = self._engine.begin(asked.batch)
        except Exception:  # another's library
            log.exception("a batch by %s failed", self._name)
            self._is(asked, _Step.FAILED)
            return
        if isinstance(began, ReadFailure):
            asked.refused = began
            self._is(asked, _Step.REFUSED)
        else:
            asked.under_way = began

    def _look(self, asked: _Asked) -> None:
        if asked.under_way is None or asked.step is not _Step.BEGUN:
            return
        try:
            state = asked.under_way.look()
        except Exception:  # another's library
            log.exception("a batch by %s failed", self._name)
            state = BatchState.FAILED
        if state is BatchState.FAILED:
            self._arena.keep(asked.under_way)
        if state is not BatchState.UNDER_WAY:
            self._is(asked, _Step.LANDED if state is BatchState.LANDED else _Step.FAILED)

    def _is(self, asked: _Asked, step: _Step) -> None:
        with self._lock:
            asked.step = step
        self._changed.set()


def _batches(cuts: Cuts) -> Iterator[Batch]:
    """Yield the stretches in their order, in batches; those of no byte are left out."""
    for begin, end in pairwise(cuts.chunks):
        some = np.flatnonzero(cuts.goals[begin:end, 1]) + begin
        for first in range(0, len(some), DESCRIPTORS_MAX):
            at = some[first : first + DESCRIPTORS_MAX]
            yield Batch(cuts.goals[at], cuts.sources[at])
