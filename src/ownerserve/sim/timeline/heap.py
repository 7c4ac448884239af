"""The heap is simulated time: what happens next, and when.

Owns `now`, which never goes back. Must never know what a call does. Calls at one instant run in
the order in which they were asked for, so a run is the same every time (invariant 8).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from math import inf

import msgspec

from ownerserve.kv.errors import InvariantViolated

Call = Callable[[float], None]


class TimedCall(msgspec.Struct, eq=False):
    """A timed call waits for its instant; its `call` is None once it has happened or was
    cancelled."""

    when_s: float
    call: Call | None

    def cancel(self) -> None:
        """Take the call back. Cancelling what has happened is no error."""
        self.call = None


class Heap:
    """The heap holds calls by their instant, in seconds from the run's start."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._order = 0
        self._left = 0
        self._waiting: list[tuple[float, int, TimedCall]] = []
        self._far: list[tuple[float, int, TimedCall]] = []
        """What was known at the start, the next one last: it need not make the heap deep."""

    def at(self, when_s: float, call: Call) -> TimedCall:
        """Make `call(now)` happen at `when_s`, which must not be past."""
        if when_s < self.now:
            raise InvariantViolated(f"invariant 8: {when_s} s was asked for at {self.now} s")
        entry = TimedCall(when_s, call)
        self._order += 1
        heappush(self._waiting, (when_s, self._order, entry))
        return entry

    def begin_with(self, calls: Iterable[tuple[float, Call]]) -> None:
        """Schedule each call as `at` does; to be called before anything happens."""
        for when_s, call in calls:
            self._order += 1
            self._far.append((max(when_s, self.now), self._order, TimedCall(when_s, call)))
        self._far.sort(reverse=True)

    def next_s(self) -> float | None:
        """Return the instant of the next call, which may be a cancelled one's; None when none
        waits."""
        first = [queue[at][0] for queue, at in ((self._waiting, 0), (self._far, -1)) if queue]
        return min(first, default=None)

    def run(self, until_s: float = inf) -> None:
        """Let everything happen up to and at `until_s`, or until `stop`."""
        self._happen(until_s, sys.maxsize)

    def run_some(self, count: int) -> None:
        """Let the next `count` calls happen, or all when there are fewer, or until `stop`."""
        self._happen(inf, count)

    def _happen(self, until_s: float, count: int) -> None:
        waiting, far = self._waiting, self._far
        self._left = count
        while self._left > 0 and (waiting or far):
            is_far = far and (not waiting or far[-1] < waiting[0])
            when_s, order, entry = far.pop() if is_far else heappop(waiting)
            if when_s > until_s:
                heappush(waiting, (when_s, order, entry))
                return
            call = entry.call
            if call is not None:  # else it was cancelled
                entry.call = None
                self.now = when_s
                self.events += 1
                self._left -= 1
                call(when_s)  # which may stop: last

    def stop(self) -> None:
        """Let nothing more happen before the next `run` or `run_some`; to be called from within a
        call."""
        self._left = 0
