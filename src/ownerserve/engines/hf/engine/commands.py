"""The engine thread is asked through one queue of commands and answers in one call per step: both
sides of that, and the admission that says who is let in.

`AsyncEngine` is the asyncio side: it owns the engine thread and the open streams, and never touches
the runner, the scheduler or the cache. `Inbox` is the one place that knows whether anybody will
answer: it takes commands until the thread ends, then refuses them with the reason, so that no
caller waits for ever. `TurnAdmission` answers those of the RPC port on the cache's own thread: it
translates the scheduler's and the cache's state into what admission asks, decides nothing, and owns
the order of arrivals.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from queue import Empty, Queue
from threading import Lock
from typing import Protocol

import msgspec

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.metrics import Snapshot
from ownerserve.engines.hf.metrics.status import HfStatus
from ownerserve.engines.hf.scheduling.requests import LAST, EngineRequest, StreamEvent
from ownerserve.engines.hf.scheduling.scheduler import Scheduler
from ownerserve.engines.hf.scheduling.step import RequestRejected
from ownerserve.kv.wire.inventory import Page
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    AskLender,
    AskLine,
    AskPrefix,
    AskSession,
    AskTokens,
    Commit,
    DropTurn,
    EndPrefill,
    HandOver,
    ListHeld,
    MoveTurn,
    Prefill,
    Probe,
    Reject,
    Release,
    ReleaseSession,
    Reserve,
    RpcAnswer,
    RpcRequest,
    Status,
    StatusIs,
    StopTurn,
    Suspend,
    Take,
    TakePrefix,
)
from ownerserve.kv.wire.status import WorkerLoad
from ownerserve.node.admission import (
    Admission,
    Levels,
    PlaceTaken,
    Standing,
    probe_seed,
)
from ownerserve.node.ownership.inventory import Inventory
from ownerserve.node.ownership.news import NewsWaiters

logger = logging.getLogger(__name__)

JOIN_S = 30.0
"""How long a stop waits for the step in progress."""

DeliverEvents = Callable[[Sequence[tuple[str, StreamEvent]]], None]
"""Takes (request id, event) pairs; called on the engine thread."""


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


class CacheWork(msgspec.Struct, frozen=True):
    """Command: do this with the cache, between two steps."""

    run: Callable[[], object]
    answer: Future[object]


class StopLoop(msgspec.Struct, frozen=True):
    """Command: end the thread."""


Command = Submit | Abort | LivenessProbe | AskCache | AskInventory | Call | CacheWork | StopLoop


class EngineDead(RuntimeError):
    """The engine thread has ended and answers nothing any more; `args[0]` says why."""


class Inbox:
    """The `Inbox` queues commands to the engine thread. It is closed for good, with the reason,
    when the thread ends."""

    def __init__(self) -> None:
        self._queue: Queue[Command] = Queue()  # a SimpleQueue can sleep past its timeout
        self._lock = Lock()
        self._closed_because: str | None = None

    @property
    def closed_because(self) -> str | None:
        """`closed_because` says why nobody takes commands any more; None while somebody does."""
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
        load: Callable[[], WorkerLoad],
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`load` tells the worker's load when it is asked for over RPC."""
        self.admission = Admission(cache.sessions)
        self._cache = cache
        self._scheduler = scheduler
        self._load = load
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
            case AskPrefix() | AskLender() | Prefill() | EndPrefill():
                return Reject(WorkerRefusal.MALFORMED)  # nothing is lent here
            case AskSession() | HandOver() | Suspend() | Take():
                return Reject(WorkerRefusal.MALFORMED)  # nor moved
            case StopTurn() | MoveTurn() | DropTurn():
                return Reject(WorkerRefusal.MALFORMED)  # nor amid a turn
            case AskTokens() | TakePrefix():
                return Reject(WorkerRefusal.MALFORMED)  # nor copied

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
        tokens = len(request.prompt) + request.new_tokens - 1
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
        return kept > 0 and self._cache.lends.room.obtainable_blocks() - kept < blocks

    def revoke(self) -> bool:
        return self.admission.revoke()

    # ---- parts

    def _levels(self) -> Levels:
        load, limits = self._scheduler.load(), self._scheduler.limits
        blocks = (
            self._cache.lends.room.obtainable_blocks() - load.growth_blocks - load.queued_blocks
        )
        return Levels(
            waiting=load.waiting,
            max_waiting=limits.max_waiting,
            pending_prefill_tokens=load.pending_prefill_tokens,
            room_tokens=blocks * self._block,
            sequence_tokens=limits.sequence_tokens,
            queued_tokens=load.queued_blocks * self._block,
            capacity_tokens=self._cache.occupancy.most_blocks * self._block,
            block_tokens=self._block,
        )


# ---- the asyncio side


class LoopPort(Protocol):
    """A `LoopPort` is what the asyncio side needs of `loop.StepLoop`."""

    inbox: Inbox
    latest: WorkerLoad
    standing: Standing
    step_s: float

    @property
    def inventory(self) -> Inventory:
        """`inventory` is what is held here."""
        ...

    def run(self, deliver: DeliverEvents) -> None:
        """Serve on the calling thread until told to stop."""
        ...


class RequestStream:
    """A `RequestStream` gives the events of one request, in order. It ends after a last one."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._events: asyncio.Queue[StreamEvent] = asyncio.Queue()

    def push(self, event: StreamEvent) -> None:
        """Append an event for the stream's reader."""
        self._events.put_nowait(event)

    async def next(self) -> StreamEvent:
        """Wait for the next event and return it; not to be called again after the last."""
        return await self._events.get()

    async def __aiter__(self) -> AsyncIterator[StreamEvent]:
        while True:
            event = await self.next()
            yield event
            if isinstance(event, LAST):
                return


class AsyncEngine:
    """An `AsyncEngine` is the engine as asyncio code uses it; it is started and stopped on the
    event loop that uses it."""

    def __init__(self, loop: LoopPort) -> None:
        self._steps = loop
        self._news: NewsWaiters | None = None
        self._streams: dict[str, RequestStream] = {}
        self._thread: threading.Thread | None = None
        self._asyncio: asyncio.AbstractEventLoop | None = None

    @property
    def latest(self) -> WorkerLoad:
        """`latest` is the load after the last step: dated, but at once."""
        return self._steps.latest

    @property
    def dead_because(self) -> str | None:
        """`dead_because` says why the engine thread ended; None while it runs."""
        return self._steps.inbox.closed_because

    def start(self) -> None:
        """Start the engine thread."""
        self._asyncio = asyncio.get_running_loop()
        self._news = NewsWaiters(self._steps.inventory)
        # Daemon: a second Ctrl-C must end the process even in the middle of a long step.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End the engine thread after its present step; open streams get a last event."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with suppress(EngineDead):  # it has ended by itself
            self._steps.inbox.put(StopLoop())
        await asyncio.to_thread(thread.join, JOIN_S)

    def submit(self, request: EngineRequest) -> RequestStream:
        """Enter a request and return the stream of its events. Raises EngineDead."""
        stream = RequestStream(request.request_id)
        self._streams[request.request_id] = stream
        try:
            self._steps.inbox.put(Submit(request, time.monotonic()))
        except EngineDead:
            del self._streams[request.request_id]
            raise
        return stream

    def abort(self, request_id: str) -> None:
        """Give a request up; its stream gets no more events. One that has ended is no error."""
        if self._streams.pop(request_id, None) is None:
            return
        with suppress(EngineDead):  # and with it the request
            self._steps.inbox.put(Abort(request_id))

    async def status(self, timeout_s: float) -> HfStatus:
        """Return the engine thread's own answer. Raises EngineDead, or TimeoutError where it takes
        longer than `timeout_s`."""
        answer: Future[HfStatus] = Future()
        self._steps.inbox.put(LivenessProbe(answer))
        return await asyncio.wait_for(asyncio.wrap_future(answer), timeout_s)

    async def cache(self, timeout_s: float) -> Snapshot:
        """Return the cache's counters and levels, from the engine thread; raises as `status`
        does."""
        answer: Future[Snapshot] = Future()
        self._steps.inbox.put(AskCache(answer))
        return await asyncio.wait_for(asyncio.wrap_future(answer), timeout_s)

    @property
    def standing(self) -> Standing:
        """`standing` is what seeds are judged by, after the last step: dated, but at once."""
        return self._steps.standing

    def step_s(self) -> float:
        """Return the seconds that the last step took."""
        return self._steps.step_s

    async def inventory(self, after: int, timeout_s: float, *, wait_s: float = 0.0) -> Page:
        """Return a page of what is held here, of the words after number `after`, waiting for one up
        to `wait_s` seconds; raises as `status` does."""
        if wait_s > 0 and self._news is not None and self.dead_because is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.wrap_future(self._news.wait(after)), wait_s)
        answer: Future[Page] = Future()
        self._steps.inbox.put(AskInventory(after, answer))
        return await asyncio.wait_for(asyncio.wrap_future(answer), timeout_s)

    def call(self, request: RpcRequest) -> Future[RpcAnswer]:
        """Answer a request of the node's RPC port; any thread may call. Raises EngineDead.

        A probe that names no session is answered at once, by what the last step left.
        """
        answer: Future[RpcAnswer] = Future()
        if isinstance(request, Probe) and request.session_id is None:
            answer.set_result(probe_seed(request.wanted, self.standing))
            return answer
        self._steps.inbox.put(Call(request, answer))
        return answer

    def between_steps(self, work: Callable[[], object]) -> Future[object]:
        """Have `work` done on the engine's thread, between two steps; any thread may call. Raises
        EngineDead."""
        answer: Future[object] = Future()
        self._steps.inbox.put(CacheWork(work, answer))
        return answer

    def _run(self) -> None:
        assert self._asyncio is not None
        loop = self._asyncio

        def deliver(events: Sequence[tuple[str, StreamEvent]]) -> None:
            try:
                loop.call_soon_threadsafe(self._deliver, events)
            except RuntimeError:
                logger.warning("the event loop closed before the engine was stopped")

        self._steps.run(deliver)

    def _deliver(self, events: Sequence[tuple[str, StreamEvent]]) -> None:
        for request_id, event in events:
            stream = self._streams.get(request_id)
            if stream is None:
                continue  # given up meanwhile
            stream.push(event)
            if isinstance(event, LAST):
                del self._streams[request_id]
