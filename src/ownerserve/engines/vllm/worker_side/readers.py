"""Readers are the threads of one rank that bring loads: they read records, and write them into
blocks.

A record is read whole by one thread, since its bytes are verified together, and written in bites by
all of them. Bites go before what is still to be read: so no more records are in host memory at once
than there are threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from threading import Condition, Thread
from typing import TypeAlias

Work: TypeAlias = Callable[[], None]


class Readers:
    """`Readers` are threads that do what they are given: what is first, and then the rest, in
    order. The work handles its own exceptions."""

    def __init__(self, count: int) -> None:
        """Start `count` threads."""
        self._changed = Condition()
        self._first: deque[Work] = deque()
        self._rest: deque[Work] = deque()
        self._is_closed = False
        self._threads = [
            Thread(target=self._run, name=f"ownerserve-read-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        """Return how many threads there are."""
        return len(self._threads)

    def submit(self, work: Work) -> None:
        """Do the work after all that was given before."""
        with self._changed:
            self._rest.append(work)
            self._changed.notify()

    def submit_first(self, works: Iterable[Work]) -> None:
        """Do these before what was given by `submit` and is not begun."""
        with self._changed:
            before = len(self._first)
            self._first.extend(works)
            self._changed.notify(len(self._first) - before)

    def close(self) -> None:
        """Do all that was given, and end the threads."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            work()

    def _next(self) -> Work | None:
        """Wait for work and return it; None: there is none and none will come."""
        with self._changed:
            while not (self._first or self._rest or self._is_closed):
                self._changed.wait()
            waiting = self._first or self._rest
            return waiting.popleft() if waiting else None
