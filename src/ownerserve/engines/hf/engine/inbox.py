"""Commands to the engine thread, and the queue they come through.

The inbox is the one place that knows whether anybody will answer: it takes commands until the
thread ends, then refuses them with the reason, so that no caller waits for ever.
"""

from __future__ import annotations

from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Lock

import msgspec

from ownerserve.cache.metrics import Snapshot
from ownerserve.engines.hf.metrics.status import HfStatus
from ownerserve.engines.hf.scheduling.requests import EngineRequest
from ownerserve.kv.wire.inventory import Page
from ownerserve.kv.wire.rpc import RpcAnswer, RpcRequest


class Submit(msgspec.Struct, frozen=True):
    request: EngineRequest
    arrived_s: float


class Abort(msgspec.Struct, frozen=True):
    request_id: str


class LivenessProbe(msgspec.Struct, frozen=True):
    """Answered by the engine thread itself: proof that it still takes turns."""

    answer: Future[HfStatus]


class AskCache(msgspec.Struct, frozen=True):
    """A dated copy of the cache's counters and levels. O(restorable points): not for hot paths."""

    answer: Future[Snapshot]


class AskInventory(msgspec.Struct, frozen=True):
    """What is held here, as far as it was said after the word number `after`."""

    after: int
    answer: Future[Page]


class Call(msgspec.Struct, frozen=True):
    """A request of the node's RPC port."""

    request: RpcRequest
    answer: Future[RpcAnswer]


class StopLoop(msgspec.Struct, frozen=True):
    pass


Command = Submit | Abort | LivenessProbe | AskCache | AskInventory | Call | StopLoop


class EngineDead(RuntimeError):
    """The engine thread has ended; `args[0]` says why. Nothing will be answered any more."""


class Inbox:
    """Commands to the engine thread. Closed for good, with the reason, when the thread ends."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Command] = SimpleQueue()
        self._lock = Lock()
        self._closed_because: str | None = None

    @property
    def closed_because(self) -> str | None:
        return self._closed_because

    def put(self, command: Command) -> None:
        """Raises EngineDead when nobody is there to take it."""
        with self._lock:
            if self._closed_because is not None:
                raise EngineDead(self._closed_because)
            self._queue.put(command)

    def take(self, timeout_s: float | None = None) -> Command | None:
        """The next command; waits for one, `timeout_s` at most (then None)."""
        try:
            return self._queue.get(timeout=timeout_s)
        except Empty:
            return None

    def take_ready(self) -> Command | None:
        """The next command, if there is one."""
        try:
            return self._queue.get_nowait()
        except Empty:
            return None

    def close(self, because: str) -> list[Command]:
        """Refuse all further commands; returns those that nobody took."""
        with self._lock:
            self._closed_because = self._closed_because or because
        left = []
        while (command := self.take_ready()) is not None:
            left.append(command)
        return left
