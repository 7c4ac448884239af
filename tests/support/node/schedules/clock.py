"""Virtual time: an event loop that waits for nothing, and threads of which one runs at a time.

VirtualLoop   asyncio, whose time goes on to the next timer at once
Fiber         what would be a store's thread: it waits for a future, and the loop goes on
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import Any, TypeVar

T = TypeVar("T")


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


class Fiber:
    """A call that may wait. `done` is called on the loop with what came of it."""

    def __init__(
        self, loop: VirtualLoop, work: Callable[[], T], done: Callable[[T], object]
    ) -> None:
        self._loop, self._work, self._done = loop, work, done
        self._may_run, self._has_paused = threading.Event(), threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None
        self._is_over = False
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
                    self._loop.call_soon(self._resume)

            late = self._loop.call_later(within_s, resume, None)
            future.add_done_callback(resume)
            self._has_paused.set()
            self._may_run.wait()
            self._may_run.clear()
        return future.result(0)

    def _run(self) -> None:
        self._may_run.wait()
        self._may_run.clear()
        _current.fiber = self
        try:
            self._result = self._work()
        except Exception as error:  # noqa: BLE001  whoever made it hears
            self._error = error
        self._is_over = True
        self._has_paused.set()

    def _resume(self) -> None:
        """Let it run until it waits, or has ended."""
        if self._is_over:
            return
        self._may_run.set()
        self._has_paused.wait()
        self._has_paused.clear()
        if not self._is_over:
            return
        self._thread.join()
        self._loop.fibers.discard(self)
        if self._error is not None:
            raise self._error
        self._done(self._result)


_current = threading.local()


def waited(future: Future[T], within_s: float) -> T:
    """Wait for it on the fiber that calls."""
    fiber: Fiber = _current.fiber
    return fiber.wait(future, within_s)
