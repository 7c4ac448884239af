"""The asyncio side of the engine submits requests, reads their events, and asks how the engine is.

Owns the engine thread and the open streams. Never touches the runner, the scheduler or the cache:
commands go in through the loop's inbox, events come back in one call per step.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import suppress

from ownerserve.cache.metrics import Snapshot
from ownerserve.engines.hf.engine.commands import (
    Abort,
    AskCache,
    AskInventory,
    Call,
    EngineDead,
    LivenessProbe,
    StopLoop,
    Submit,
)
from ownerserve.engines.hf.engine.loop import StepLoop
from ownerserve.engines.hf.metrics.status import HfStatus
from ownerserve.engines.hf.scheduling.requests import (
    EngineRequest,
    RequestFailed,
    RequestFinished,
    StreamEvent,
)
from ownerserve.kv.wire.inventory import Page
from ownerserve.kv.wire.rpc import Probe, RpcAnswer, RpcRequest
from ownerserve.kv.wire.status import WorkerLoad
from ownerserve.node.admission import Standing, probe_seed

logger = logging.getLogger(__name__)

JOIN_S = 30.0
"""How long a stop waits for the step in progress."""


class RequestStream:
    """A `RequestStream` gives the events of one request, in order. It ends after RequestFinished or
    RequestFailed."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._events: asyncio.Queue[StreamEvent] = asyncio.Queue()

    def push(self, event: StreamEvent) -> None:
        self._events.put_nowait(event)

    async def next(self) -> StreamEvent:
        """Wait for the next event and return it; not to be called again after the last."""
        return await self._events.get()

    async def __aiter__(self) -> AsyncIterator[StreamEvent]:
        while True:
            event = await self.next()
            yield event
            if isinstance(event, RequestFinished | RequestFailed):
                return


class AsyncEngine:
    """An `AsyncEngine` is the engine as asyncio code uses it; it is started and stopped on the
    event loop that uses it."""

    def __init__(self, loop: StepLoop) -> None:
        self._steps = loop
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

    async def inventory(self, after: int, timeout_s: float) -> Page:
        """Return a page of what is held here, of the words after number `after`; raises as `status`
        does."""
        answer: Future[Page] = Future()
        self._steps.inbox.put(AskInventory(after, answer))
        return await asyncio.wait_for(asyncio.wrap_future(answer), timeout_s)

    def call(self, request: RpcRequest) -> Future[RpcAnswer]:
        """Answer a request of the node's RPC port; any thread may call. Raises EngineDead.

        A probe is answered at once, by what the last step left.
        """
        answer: Future[RpcAnswer] = Future()
        if isinstance(request, Probe):
            answer.set_result(probe_seed(request.wanted, self.standing))
            return answer
        self._steps.inbox.put(Call(request, answer))
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
            if isinstance(event, RequestFinished | RequestFailed):
                del self._streams[request_id]
