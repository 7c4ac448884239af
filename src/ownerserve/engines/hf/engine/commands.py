"""Commands reach the engine thread through one queue, and admission says who is let in.

`Inbox` is the one place that knows whether anybody will answer: it takes commands until the thread
ends, then refuses them with the reason, so that no caller waits for ever. `TurnAdmission` answers
those of the RPC port on the cache's own thread: it translates the scheduler's and the cache's state
into what admission asks, decides nothing, and owns the order of arrivals.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from queue import Empty, SimpleQueue
from threading import Lock

import msgspec

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.metrics import Snapshot
from ownerserve.engines.hf.metrics.status import HfStatus, WorkerIdentity, worker_load
from ownerserve.engines.hf.scheduling.requests import EngineRequest
from ownerserve.engines.hf.scheduling.scheduler import Scheduler
from ownerserve.engines.hf.scheduling.step import RequestRejected
from ownerserve.kv.wire.inventory import Page
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    AskLine,
    Commit,
    ListHeld,
    Probe,
    Reject,
    Release,
    ReleaseSession,
    Reserve,
    RpcAnswer,
    RpcRequest,
    Status,
    StatusIs,
)
from ownerserve.kv.wire.status import WorkerLoad
from ownerserve.node.admission import (
    Admission,
    Levels,
    PlaceTaken,
    Standing,
    probe_seed,
)


class Submit(msgspec.Struct, frozen=True):
    """Command: take this request in."""

    request: EngineRequest
    arrived_s: float


class Abort(msgspec.Struct, frozen=True):
    """Command: give the request up, wherever it is."""

    request_id: str


class LivenessProbe(msgspec.Struct, frozen=True):
    """Command: report the status. The engine thread itself answers, which proves that it still
    takes turns."""

    answer: Future[HfStatus]


class AskCache(msgspec.Struct, frozen=True):
    """Command: give a dated copy of the cache's counters and levels. O(restorable points)."""

    answer: Future[Snapshot]


class AskInventory(msgspec.Struct, frozen=True):
    """Command: give what is held here, of the words after number `after`."""

    after: int
    answer: Future[Page]


class Call(msgspec.Struct, frozen=True):
    """Command: answer this request of the node's RPC port."""

    request: RpcRequest
    answer: Future[RpcAnswer]


class StopLoop(msgspec.Struct, frozen=True):
    """Command: end the thread."""


Command = Submit | Abort | LivenessProbe | AskCache | AskInventory | Call | StopLoop


class EngineDead(RuntimeError):
    """The engine thread has ended and answers nothing any more; `args[0]` says why."""


class Inbox:
    """The `Inbox` queues commands to the engine thread. It is closed for good, with the reason,
    when the thread ends."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Command] = SimpleQueue()
        self._lock = Lock()
        self._closed_because: str | None = None

    @property
    def closed_because(self) -> str | None:
        return self._closed_because

    def put(self, command: Command) -> None:
        """Queue the command. Raises EngineDead when nobody is there to take it."""
        with self._lock:
            if self._closed_because is not None:
                raise EngineDead(self._closed_because)
            self._queue.put(command)

    def take(self, timeout_s: float | None = None) -> Command | None:
        """Return the next command; wait for one for `timeout_s` seconds at most (None: without
        end), then return None."""
        try:
            return self._queue.get(timeout=timeout_s)
        except Empty:
            return None

    def take_ready(self) -> Command | None:
        """Return the next command, or None where none is queued; never waits."""
        try:
            return self._queue.get_nowait()
        except Empty:
            return None

    def close(self, because: str) -> list[Command]:
        """Refuse all further commands and return those that nobody took. The first `because`
        stays."""
        with self._lock:
            self._closed_because = self._closed_because or because
        left = []
        while (command := self.take_ready()) is not None:
            left.append(command)
        return left


class LetIn(msgspec.Struct, frozen=True):
    """A `LetIn` says that a request may enter the queue, at place `order` among arrivals.
    `is_promised`: its room was reserved."""

    order: int
    is_promised: bool


class TurnAdmission:
    """`TurnAdmission` lets turns in as the scheduler and the cache stand.

    It keeps promised room from turns that stand behind it (step.Promises).
    """

    def __init__(
        self,
        cache: HeteroCache,
        scheduler: Scheduler,
        identity: WorkerIdentity,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.admission = Admission(cache.sessions)
        self._cache = cache
        self._scheduler = scheduler
        self._identity = identity
        self._now = now
        self._block = cache.layout.block_tokens
        self._orders = count(1)
        scheduler.promises = self

    # ---- asked over RPC

    def answer(self, request: RpcRequest) -> RpcAnswer:
        """Return the worker's answer to a request of its RPC port."""
        now, admission = self._now(), self.admission
        match request:
            case Status():
                return StatusIs(self._load())
            case Probe(wanted):
                return probe_seed(wanted, self.standing())
            case Reserve(turn_id, wanted):
                order = next(self._orders)
                return admission.reserve(
                    turn_id, wanted, levels=self._levels(), now=now, order=order
                )
            case Commit(reservation):
                return admission.commit(reservation, now)
            case Release(reservation):
                return admission.release(reservation)
            case ReleaseSession(session_id=session_id):
                return admission.release_session(session_id)
            case ListHeld():
                raise AssertionError("the loop answers it")
            case AskLine():
                return Reject(WorkerRefusal.MALFORMED)  # each answer of this engine says it

    def standing(self) -> Standing:
        """Return what seeds are judged by: a copy that any thread may read."""
        return self.admission.standing(self._levels(), self._now())

    def wait_s(self) -> float | None:
        """Return the seconds until a place ends by itself, whose room others may wait for; None: no
        place is open."""
        at_s = self.admission.next_expiry_s()
        return None if at_s is None else max(0.0, at_s - self._now())

    # ---- turns that are here

    def let_in(self, request: EngineRequest) -> LetIn | RequestRejected:
        """Judge a request before any work is done for it, and use up its place.

        One that names no open place is refused: whoever reserved it has been told that it is gone,
        and may have gone elsewhere. So is one that is longer than its place and than what is left.
        """
        tokens = len(request.prompt) + request.stopping.max_tokens - 1
        if request.reservation is None:
            refusal = self.standing().judge_append(tokens) if request.is_judged else None
            if refusal is not None:
                return RequestRejected(
                    refusal, f"{tokens} tokens do not fit beside those that wait"
                )
            return LetIn(next(self._orders), is_promised=False)
        place = self.admission.arrived(request.reservation, self._now())
        if not isinstance(place, PlaceTaken):
            number = request.reservation
            message = f"reservation {number} is not open here: it was used, released or has expired"
            return RequestRejected(place.reason, message)
        whole = -(-tokens // self._block) * self._block
        if tokens > place.tokens and whole > self.standing().spare_tokens:
            message = f"{tokens} tokens are more than the {place.tokens} that were promised room"
            return RequestRejected(WorkerRefusal.NO_ROOM, message)
        return LetIn(place.order, is_promised=True)

    # ---- step.Promises

    def withholds(self, blocks: int, order: int) -> bool:
        kept = self.admission.withheld_tokens(order, self._block) // self._block
        return kept > 0 and self._cache.occupancy.obtainable_blocks() - kept < blocks

    def revoke(self) -> bool:
        return self.admission.revoke()

    # ---- parts

    def _levels(self) -> Levels:
        load, limits = self._scheduler.load(), self._scheduler.limits
        blocks = self._cache.occupancy.obtainable_blocks() - load.growth_blocks - load.queued_blocks
        return Levels(
            waiting=load.waiting,
            max_waiting=limits.max_waiting,
            pending_prefill_tokens=load.pending_prefill_tokens,
            room_tokens=blocks * self._block,
            sequence_tokens=limits.sequence_tokens,
            queued_tokens=load.queued_blocks * self._block,
            capacity_tokens=self._cache.occupancy.blocks.capacity * self._block,
            block_tokens=self._block,
        )

    def _load(self) -> WorkerLoad:
        return worker_load(
            self._identity, self._cache, load=self._scheduler.load(), as_of_s=time.time()
        )
