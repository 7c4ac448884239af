"""The worker's side performs commands: it reads, verifies and writes; copies and stores.

Owns the store (this rank's shard of it) and the threads that touch it. The engine's thread only
hands over commands and collects what is done.

    readers   one batch of a load after another: read, verify, write into blocks
    saver     copy out of blocks, make durable (saver.py)

Bytes are written into blocks only after their digest was checked. A load that fails in any part
is reported as failed when its last write is done, never before: then nobody writes there any more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import Any

import msgspec

from ownerserve.engines.vllm.layout.codec import PageCodec
from ownerserve.engines.vllm.worker_commands import (
    LoadInto,
    LoadResult,
    WorkerCommands,
    WorkerStepReport,
)
from ownerserve.engines.vllm.worker_side.saver import Saver
from ownerserve.engines.vllm.worker_side.streams import CopyStream
from ownerserve.kv.errors import OwnerServeError
from ownerserve.node.storage.backing import Backing
from ownerserve.store.format.model import MissReason, ReadHit

log = logging.getLogger("vllm.ownerserve")

BATCH_BYTES = 16 << 20
"""A reader's bite: what of a load is in host memory at once, for each reader."""
IDLE_WAIT_S = 0.001
"""How long a step that computes nothing waits for a completion, instead of spinning."""


NO_REPORT = WorkerStepReport()


class Loading(msgspec.Struct, eq=False):
    """A `Loading` is a load under way; `left` batches are not done. Guarded by the worker's
    condition."""

    load: LoadInto
    until_s: float
    began_s: float
    left: int
    reason: str = ""
    failed_id: bytes = b""


class WorkerSide:
    """A `WorkerSide` is the worker's side of one rank."""

    def __init__(
        self, backing: Backing | None, codec: PageCodec, stream: CopyStream, *, readers: int
    ) -> None:
        """Start the saver and `readers` reading threads. `backing` None: the medium is not to be
        had, and everything is a miss."""
        self._backing = backing
        self._tiers = backing.tiers if backing is not None else None
        self._codec = codec
        self._stream = stream
        self._changed = Condition()
        self._loading: dict[int, Loading] = {}
        self._done: list[LoadResult] = []
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="ownerserve-read")
        self._saver = Saver(self._tiers, codec, stream, changed=self._changed)

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
                if loading is not None and not loading.reason:
                    loading.reason = MissReason.CANCELLED
            self._received.update(commands.failures)
            self._failed.update(commands.failures)

    def save(self, commands: WorkerCommands) -> None:
        """Hand over the step's saves, whose forward is queued, so that its blocks are as they will
        be."""
        if commands.saves:
            self._saver.order(commands.saves)

    def results(self, commands: WorkerCommands | None) -> tuple[set[str], set[str]]:
        """Return the requests whose load is over since the last call, and those of them whose load
        has failed. An idle step waits a moment for news."""
        if not (self._loading or self._saver.is_busy or self._received):
            return set(), set()
        with self._changed:
            busy = self._loading or self._saver.is_busy
            if commands is not None and commands.is_idle and busy and not self._has_news():
                self._changed.wait(IDLE_WAIT_S)
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
            report = WorkerStepReport(
                loads=tuple(self._done),
                copied=tuple(saved.copied),
                kept=tuple(saved.kept),
                not_kept=tuple(saved.not_kept),
                stored_bytes=saved.stored_bytes,
                lost=() if lost is None else (lost,),
            )
            self._done = []
        return report

    def close(self) -> None:
        """Finish the saves under way, cancel the loads, and let another writer in."""
        self._saver.close()
        with self._changed:
            for loading in self._loading.values():
                loading.reason = loading.reason or MissReason.CANCELLED
        self._readers.shutdown(wait=True)
        if self._backing is not None:
            self._backing.close()

    def _has_news(self) -> bool:
        return bool(self._received or self._done or self._saver.has_news)

    # -- loads ---------------------------------------------------------------------------------

    def _begin(self, load: LoadInto) -> None:
        now = time.monotonic()
        batches = list(_batches([self._codec.size(place) for place in load.places]))
        loading = Loading(load, now + load.deadline_s, now, len(batches))
        with self._changed:
            self._loading[load.operation_id] = loading
        ready = self._stream.mark()  # zeroing of these blocks may be queued
        for first, end in batches:
            self._readers.submit(self._bring, loading, first, end, ready)

    def _bring(self, loading: Loading, first: int, end: int, ready: Any) -> None:
        """Read, verify and write one batch of a load; the root of a reader's work."""
        reason: str = ""
        failed_id = b""
        try:
            reason, failed_id = self._read(loading, first, end, ready)
        except Exception as error:  # the root of a reader's work: it is this load's failure
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

    def _read(self, loading: Loading, first: int, end: int, ready: Any) -> tuple[str, bytes]:
        if loading.reason:
            return loading.reason, b""
        if time.monotonic() > loading.until_s:
            return MissReason.DEADLINE, b""
        if self._tiers is None:
            return MissReason.ABSENT, b""
        outcome = self._tiers.read(loading.load.wants[first:end])
        if not isinstance(outcome, ReadHit):
            return outcome.reason, outcome.id
        with self._stream.copying_in(ready):
            for place, part in zip(loading.load.places[first:end], outcome.parts, strict=True):
                self._codec.write(place, part.data)
        return "", b""

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
                ms=(time.monotonic() - loading.began_s) * 1e3,
            )
        self._done.append(result)


def _batches(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return index ranges of about BATCH_BYTES each."""
    ranges, first, held = [], 0, 0
    for index, size in enumerate(sizes):
        if held and held + size > BATCH_BYTES:
            ranges.append((first, index))
            first, held = index, 0
        held += size
    if held:
        ranges.append((first, len(sizes)))
    return ranges
