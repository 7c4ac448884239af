"""Virtual time: an event loop that waits for nothing, and threads of which one runs at a time.

VirtualLoop   asyncio, whose time goes on to the next timer at once
Fiber         what would be a thread of a node's: it waits for a future, and the loop goes on
FiberQueue, FiberEvent, FiberThread   what such a thread is made of, in virtual time
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from itertools import count
from queue import Empty
from typing import Any, Generic, TypeVar

T = TypeVar("T")

Soon = Callable[[Callable[[], None]], None]
"""Has something done on the loop, as soon as its process runs."""


class FiberStopped(BaseException):
    """The process that a fiber was in is no more."""


class _Selector(selectors.SelectSelector):
    """Descriptors are numbers that somebody rings; time passes where nobody does."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.rung: set[int] = set()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.rung:
            found = [key for key in self.get_map().values() if key.fd in self.rung]
            self.rung.clear()
            return [(key, selectors.EVENT_READ) for key in found]
        assert timeout is not None, "nothing is due, and somebody waits"
        self.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module. It begins at `time()` 0."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        self._numbers = count(1 << 20)
        super().__init__(self._virtual)
        self.fibers: set[Fiber] = set()
        self.faults: list[BaseException] = []
        """What was raised in it: the first is raised anew, and nothing is run any more."""

    def time(self) -> float:
        return self._virtual.now_s

    def monotonic(self) -> float:
        return self._virtual.now_s

    perf_counter = monotonic

    def _write_to_self(self) -> None:
        """Nobody calls from another thread while this one waits."""

    def number(self) -> int:
        """A descriptor that nobody else has."""
        return next(self._numbers)

    def ring(self, number: int) -> None:
        self._virtual.rung.add(number)

    def run_for(self, seconds: float) -> None:
        self.call_later(seconds, self.stop)
        self.run_forever()
        if self.faults:
            raise self.faults[0]


class Fiber:
    """A call that may wait. `done` is called on the loop with what came of it. `soon`: it goes on
    only then; `of`: whose it is."""

    def __init__(
        self,
        loop: VirtualLoop,
        work: Callable[[], T],
        done: Callable[[T], object],
        *,
        soon: Soon | None = None,
        of: object = None,
    ) -> None:
        self.of = of
        self._loop, self._work, self._done = loop, work, done
        self._soon: Soon = soon or loop.call_soon
        self._may_run, self._has_paused = threading.Lock(), threading.Lock()
        self._may_run.acquire()
        self._has_paused.acquire()
        self._result: Any = None
        self._error: BaseException | None = None
        self._is_over = self._is_stopped = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        loop.fibers.add(self)
        self._thread.start()
        self._resume()

    def wait(self, future: Future[T], within_s: float) -> T:
        """Wait for a future of the loop, in virtual time. Raises as `Future.result` does."""
        if not future.done():
            is_woken = False

            def resume(_: object) -> None:
                nonlocal is_woken
                if not is_woken:
                    is_woken = True
                    late.cancel()
                    self._soon(self._resume)

            late = self._loop.call_later(within_s, resume, None)
            future.add_done_callback(resume)
            self._has_paused.release()
            self._may_run.acquire()
            if self._is_stopped:
                raise FiberStopped
        return future.result(0)

    def stop(self) -> None:
        """Have it end where it waits, as when its process is killed."""
        self._is_stopped = True
        self._resume()

    def _run(self) -> None:
        self._may_run.acquire()
        _current.fiber = self
        try:
            self._result = self._work()
        except FiberStopped:
            pass
        except Exception as error:  # noqa: BLE001  whoever made it hears
            self._error = error
        self._is_over = True
        self._has_paused.release()

    def _resume(self) -> None:
        """Let it run until it waits, or has ended."""
        if self._is_over:
            return
        self._may_run.release()
        self._has_paused.acquire()
        if not self._is_over:
            return
        self._thread.join()
        self._loop.fibers.discard(self)
        if self._error is not None:
            raise self._error
        if not self._is_stopped:
            self._done(self._result)


_current = threading.local()


def waited(future: Future[T], within_s: float) -> T:
    """Wait for it on the fiber that calls."""
    fiber: Fiber = _current.fiber
    return fiber.wait(future, within_s)


def running_for() -> object:
    """Whose fiber calls; None: none does."""
    fiber: Fiber | None = getattr(_current, "fiber", None)
    return None if fiber is None else fiber.of


class FiberQueue(Generic[T]):
    """A `queue.Queue` of which one fiber takes."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._awaited: Future[None] = Future()

    def put(self, item: T) -> None:
        self._items.append(item)
        if not self._awaited.done():
            self._awaited.set_result(None)

    def get(self, timeout: float) -> T:
        if not self._items:
            self._awaited = Future()
            try:
                waited(self._awaited, timeout)
            except NotInTime:
                raise Empty from None
        return self._items.popleft()


class FiberEvent:
    """A `threading.Event` for which a fiber waits."""

    def __init__(self) -> None:
        self._set: Future[bool] = Future()

    def set(self) -> None:
        if not self._set.done():
            self._set.set_result(True)

    def is_set(self) -> bool:
        return self._set.done()

    def wait(self, timeout: float) -> bool:
        try:
            return waited(self._set, timeout)
        except NotInTime:
            return False


class FiberThread:
    """A `threading.Thread` of a process: it stands still with it."""

    def __init__(self, loop: VirtualLoop, work: Callable[[], None], *, soon: Soon, of: object):
        self._loop, self._work, self._soon, self._of = loop, work, soon, of
        self._fiber: Fiber | None = None
        self._is_over = False

    def start(self) -> None:
        self._fiber = Fiber(self._loop, self._work, self._ended, soon=self._soon, of=self._of)

    def is_alive(self) -> bool:
        return self._fiber is not None and not self._is_over

    def join(self, timeout: float) -> None:
        """Nobody waits here: what it still does it does by itself."""

    def stop(self) -> None:
        if self._fiber is not None:
            self._fiber.stop()

    def _ended(self, _: None) -> None:
        self._is_over = True
