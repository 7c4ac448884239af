"""The worker's side performs commands: it reads, verifies and writes; copies and stores.

Owns the store (this rank's shard of it) and the threads that touch it. The engine's thread only
hands over commands and collects what is done.

    readers   one batch of a load after another: read, verify, write into blocks (readers.py)
    saver     copy out of blocks, make durable (saver.py)

Bytes are written into blocks only after their digest was checked: those of host memory bite by
bite, each by the reader that writes it. A load that fails in any part
is reported as failed when its last write is done, never before: then nobody writes there any more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Condition
from typing import Any, Protocol, TypeAlias

import msgspec

from ownerserve.engines.vllm.layout.codec import PageCodec
from ownerserve.engines.vllm.worker_commands import (
    BlockPlace,
    LoadInto,
    LoadResult,
    WorkerCommands,
    WorkerStepReport,
)
from ownerserve.engines.vllm.worker_side.readers import Readers
from ownerserve.engines.vllm.worker_side.saver import Saver
from ownerserve.engines.vllm.worker_side.stage import Stage
from ownerserve.engines.vllm.worker_side.streams import CopyStream
from ownerserve.kv.errors import Corrupt, OwnerServeError
from ownerserve.kv.messages import Tier
from ownerserve.node.storage.backing import Backing, NodeTiers
from ownerserve.node.transfers.bringing import BringNews
from ownerserve.node.transfers.peers import Peers
from ownerserve.node.vocabulary.settings import BRINGS_AT_ONCE
from ownerserve.plan.cost.events import Loaded
from ownerserve.store.format.model import MissReason, ReadHit, Want
from ownerserve.store.tiers.memory import HeldPart

log = logging.getLogger("vllm.ownerserve")

BATCH_BYTES = 16 << 20
"""A reader's bite: what of a load is in host memory at once, for each reader."""
WRITE_BYTES = 4 << 20
"""What one reader writes into blocks before another one may have the next: records of some hundred
megabytes are written by all of them."""
IDLE_WAIT_S = 0.001
"""How long a step that computes nothing waits for a completion, instead of spinning."""
LOAD_WAIT_S = 0.004
"""The same while something is being loaded, whose end is heard of at once; a request that comes
meanwhile and wants nothing of us waits no longer than that."""


NO_REPORT = WorkerStepReport()


class Morsel(msgspec.Struct, frozen=True, eq=False):
    """A `Morsel` is a place and the bytes to write there, once `check` has been called; it raises
    LoadMissed."""

    place: BlockPlace
    data: memoryview
    check: Callable[[], None]


Bite: TypeAlias = list[Morsel]
"""What one reader checks and writes before another one may have the next."""


class LoadMissed(Exception):
    """A `LoadMissed` ends a part of a load that can't be brought: `reason`, and the record's id
    where there is one."""

    def __init__(self, reason: MissReason, id_: bytes = b"") -> None:
        super().__init__(reason)
        self.reason, self.id = reason, id_


class Loading(msgspec.Struct, eq=False):
    """A `Loading` is a load under way; `left` batches and bites are not done. Guarded by the
    worker's condition."""

    load: LoadInto
    until_s: float
    began_s: float
    left: int
    reason: str = ""
    failed_id: bytes = b""
    batches: Sequence[tuple[int, int]] = ()
    """Its wants, as they are read together."""


class BringsHere(Protocol):
    """What `BringsHere` brings of peers into this process (node.transfers.bringing, lending.py)."""

    @property
    def peers(self) -> Peers:
        """Return what other workers hold, as this rank reads it."""
        ...

    def take(self) -> BringNews:
        """Return what was counted since the last call."""
        ...

    def stop(self) -> None:
        """Bring nothing any more; who waits for something hears."""
        ...


class WorkerSide:
    """A `WorkerSide` is the worker's side of one rank."""

    def __init__(
        self,
        backing: Backing | None,
        codec: PageCodec,
        stream: CopyStream,
        *,
        readers: int,
        stage: Stage | None = None,
        rank: str = "",
    ) -> None:
        """Start the saver and `readers` reading threads. `backing` None: the medium is not to be
        had, and everything is a miss. `stage`: that of a pipeline which this worker is in. `rank`:
        what this one is called among several."""
        self._backing = backing
        self._tiers = backing.tiers if backing is not None else None
        self._codec = codec
        self._stream = stream
        self._stage, self._rank = stage, rank
        self._changed = Condition()
        self._loading: dict[int, Loading] = {}
        self._done: list[LoadResult] = []
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._readers = Readers(readers)
        self._bringing: BringsHere | None = None
        self._bringers = Readers(0)
        self._saver = Saver(self._tiers, codec, stream, changed=self._changed)

    def bring_by(self, bringing: BringsHere) -> None:
        """Bring what peers offer too; call it before the first load."""
        if self._tiers is not None:
            self._bringing, self._tiers.peers = bringing, bringing.peers
            self._bringers = Readers(BRINGS_AT_ONCE)  # a bring waits, as no reader should

    # -- the engine's thread -------------------------------------------------------------------

    def load(self, commands: WorkerCommands) -> None:
        """Begin the step's loads; give up those that nobody waits for."""
        if not (commands.loads or commands.drops or commands.failures):
            return
        for load in commands.loads:
            self._begin(load)
        with self._changed:
            for operation_id in commands.drops:
                loading = self._loading.get(operation_id)
                if loading is not None:
                    self._cancel(loading)
            self._received.update(commands.failures)
            self._failed.update(commands.failures)

    def save(self, commands: WorkerCommands) -> None:
        """Hand over the step's saves, whose forward is queued, so that its blocks are as they will
        be."""
        saves, stage = commands.saves, self._stage
        if saves and stage is not None:
            self._saver.refuse([save for save in saves if not stage.fits(save.place)])
            saves = tuple(stage.save(save) for save in saves if stage.fits(save.place))
        if saves:
            self._saver.order(saves)

    def results(self, commands: WorkerCommands | None) -> tuple[set[str], set[str]]:
        """Return the requests whose load is over since the last call, and those of them whose load
        has failed. An idle step waits a moment for news."""
        if not (self._loading or self._saver.is_busy or self._received):
            return set(), set()
        with self._changed:
            busy = self._loading or self._saver.is_busy
            if commands is not None and commands.is_idle and busy and not self._has_news():
                self._changed.wait(LOAD_WAIT_S if self._loading else IDLE_WAIT_S)
            received, self._received = self._received, set()
            failed, self._failed = self._failed, set()
        return received, failed

    def report(self) -> WorkerStepReport:
        """Return what was done since the last report."""
        lost = self._tiers.losses.take() if self._tiers is not None else None
        if not (lost or self._done or self._saver.has_news):
            return NO_REPORT
        with self._changed:
            saved = self._saver.take()
            stored = saved.stored_bytes
            report = WorkerStepReport(
                loads=tuple(self._done),
                copied=tuple(saved.copied),
                kept=tuple(saved.kept),
                not_kept=tuple(saved.not_kept),
                stored_bytes=stored,
                lost=() if lost is None else (lost,),
                by_rank=((self._rank, stored),) if self._rank and stored else (),
                brought=() if self._bringing is None else (self._bringing.take(),),
            )
            self._done = []
        return report

    def close(self) -> None:
        """Finish the saves under way, cancel the loads, and let another writer in."""
        self._saver.close()
        with self._changed:
            for loading in self._loading.values():
                self._cancel(loading)
        if self._bringing is not None:
            self._bringing.stop()  # who waits for a peer hears
        self._bringers.close()
        self._readers.close()
        if self._backing is not None:
            self._backing.close()

    def _cancel(self, loading: Loading) -> None:
        """Let the load end without what is not brought yet; a peer is not waited for."""
        loading.reason = loading.reason or MissReason.CANCELLED
        if self._bringing is not None and loading.load.offers:
            for first, end in loading.batches:
                wants = loading.load.wants[first:end]
                if not self._is_awaited(wants):
                    self._bringing.peers.give_up(wants)

    def _is_awaited(self, wants: Sequence[Want]) -> bool:
        """Tell whether a load that is not given up wants the same: another turn's, which begins
        alike."""
        return any(
            tuple(one.load.wants[first:end]) == tuple(wants)
            for one in self._loading.values()
            if not one.reason
            for first, end in one.batches
        )

    def _has_news(self) -> bool:
        return bool(self._received or self._done or self._saver.has_news)

    # -- loads ---------------------------------------------------------------------------------

    def _begin(self, load: LoadInto) -> None:
        now = time.monotonic()
        if self._stage is not None:
            if not self._stage.fits(*load.places):
                with self._changed:
                    loading = Loading(load, now, now, 0, MissReason.FOREIGN_LAYOUT)
                    self._loading[load.operation_id] = loading
                    self._over(loading)
                return
            load = self._stage.load(load)
        batches = _ranges([self._codec.size(place) for place in load.places], BATCH_BYTES)
        loading = Loading(load, now + load.deadline_s, now, len(batches), batches=batches)
        with self._changed:
            self._loading[load.operation_id] = loading
        readers = self._readers
        if load.offers and self._bringing is not None:
            self._bringing.peers.learn(load.offers)
            for first, end in batches:
                self._bringing.peers.expect(load.wants[first:end])
            readers = self._bringers
        ready = self._stream.mark()  # zeroing of these blocks may be queued
        for first, end in batches:
            readers.submit(partial(self._bring, loading, first, end, ready))

    def _bring(self, loading: Loading, first: int, end: int, ready: Any) -> None:
        """Read and verify one batch of a load, and write it, or let all readers do so."""
        with self._part_of(loading):
            if loading.reason:
                return
            if time.monotonic() > loading.until_s:
                raise LoadMissed(MissReason.DEADLINE)
            if self._tiers is None:
                raise LoadMissed(MissReason.ABSENT)
            wants, places = loading.load.wants[first:end], loading.load.places[first:end]
            own, *others = self._bites(places, _found(self._tiers, wants))
            if others:
                with self._changed:
                    loading.left += len(others)
                self._readers.submit_first(
                    partial(self._write, loading, bite, ready) for bite in others
                )
            self._write_now(own, ready)

    def _write(self, loading: Loading, bite: Bite, ready: Any) -> None:
        """Write a bite of what was read and verified, unless the load has failed meanwhile."""
        with self._part_of(loading):
            if not loading.reason:
                self._write_now(bite, ready)

    def _write_now(self, bite: Bite, ready: Any) -> None:
        with self._stream.copying_in(ready):
            for piece in bite:
                piece.check()
                self._codec.write(piece.place, piece.data)

    def _bites(self, places: Sequence[BlockPlace], found: Sequence[Found]) -> list[Bite]:
        """Return what was found in bites of about WRITE_BYTES."""
        pieces: Bite = []
        for place, (data, check) in zip(places, found, strict=True):
            at = 0
            for part, bytes_ in self._codec.cut(place, data, most_bytes=WRITE_BYTES):
                pieces.append(Morsel(part, bytes_, partial(check, at, at + len(bytes_))))
                at += len(bytes_)
        sizes = [len(piece.data) for piece in pieces]
        return [pieces[first:end] for first, end in _ranges(sizes, WRITE_BYTES)]

    @contextmanager
    def _part_of(self, loading: Loading) -> Iterator[None]:
        """Enter one of the load's `left` parts, the root of a reader's work: what goes wrong in it
        is this load's failure, and when the last part is left the load is over."""
        reason, failed_id = "", b""
        try:
            yield
        except LoadMissed as missed:
            reason, failed_id = missed.reason, missed.id
        except Exception as error:  # the root of a reader's work
            if not isinstance(error, OwnerServeError):
                log.exception("load %s failed", loading.load.request_id)
            reason = MissReason.IO_ERROR
        with self._changed:
            if reason and not loading.reason:
                loading.reason, loading.failed_id = reason, failed_id
            loading.left -= 1
            if not loading.left:
                self._over(loading)
                self._changed.notify_all()

    def _over(self, loading: Loading) -> None:
        load = loading.load
        self._received.add(load.request_id)
        del self._loading[load.operation_id]
        if loading.reason:
            self._failed.add(load.request_id)
            result = LoadResult(
                load.operation_id,
                load.request_id,
                reason=loading.reason,
                failed_id=loading.failed_id,
            )
        else:
            result = LoadResult(
                load.operation_id,
                load.request_id,
                ids=tuple(want.id for want in load.wants),
                bytes=sum(self._codec.size(place) for place in load.places),
                # What a peer took says nothing of the store.
                ms=0.0 if load.offers else (time.monotonic() - loading.began_s) * 1e3,
            )
        self._done.append(result)


Found: TypeAlias = tuple[memoryview, Callable[[int, int], None]]
"""The bytes of a want, and what verifies a range of them."""


def _found(tiers: NodeTiers, wants: Sequence[Want]) -> list[Found]:
    """Return the wants' bytes. What lies in host memory is verified bite by bite as it is written,
    by whoever has it in his processor's cache; all else was verified as it was read. Raises
    LoadMissed."""
    held = tiers.hold(wants)
    if held is not None:
        return [
            (part.data, partial(_check, tiers, part, want.id))
            for part, want in zip(held, wants, strict=True)
        ]
    outcome = tiers.read(wants)
    if not isinstance(outcome, ReadHit):
        raise LoadMissed(outcome.reason, outcome.id)
    return [(part.data, _checked) for part in outcome.parts]


def _check(tiers: NodeTiers, part: HeldPart, id_: bytes, low: int, high: int) -> None:
    started_s = time.perf_counter()
    try:
        part.check(low, high)
    except Corrupt as error:
        raise LoadMissed(MissReason.CORRUPT, id_) from error
    took_ms = (time.perf_counter() - started_s) * 1e3
    tiers.timings.append(Loaded(Tier.HOST, high - low, took_ms))


def _checked(low: int, high: int) -> None:
    """Do nothing: the bytes were verified as they were read."""


def _ranges(sizes: Sequence[int], most_bytes: int) -> list[tuple[int, int]]:
    """Return index ranges of about `most_bytes` each."""
    ranges, first, held = [], 0, 0
    for index, size in enumerate(sizes):
        if held and held + size > most_bytes:
            ranges.append((first, index))
            first, held = index, 0
        held += size
    if held:
        ranges.append((first, len(sizes)))
    return ranges
