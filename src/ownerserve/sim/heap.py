"""Simulated time: what happens next, and when.

Owns `now`, which never goes back. Must never know what a call does. Calls at one instant run in
the order in which they were asked for, so a run is the same every time (invariant 8).
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf

import msgspec

from ownerserve.kv.errors import InvariantViolated

Call = Callable[[float], None]


class Entry(msgspec.Struct, eq=False):
    """A call that waits for its instant; None once it has happened or was cancelled."""

    when_s: float
    call: Call | None

    def cancel(self) -> None:
        """It does not happen. Cancelling what has happened is no error."""
        self.call = None


class Heap:
    """Calls by their instant, in seconds from the run's start."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._order = 0
        self._left = 0
        self._waiting: list[tuple[float, int, Entry]] = []

    def at(self, when_s: float, call: Call) -> Entry:
        """Make `call(now)` happen at `when_s`, which must not be past."""
        if when_s < self.now:
            raise InvariantViolated(f"invariant 8: {when_s} s was asked for at {self.now} s")
        entry = Entry(when_s, call)
        self._order += 1
        heappush(self._waiting, (when_s, self._order, entry))
        return entry

    def next_s(self) -> float | None:
        """The instant of the next call, if any waits (it may be a cancelled one's)."""
        return self._waiting[0][0] if self._waiting else None

    def run(self, until_s: float = inf) -> None:
        """Let everything happen up to and at `until_s`, or until `stop`."""
        waiting = self._waiting
        self._left = 1
        while self._left and waiting and waiting[0][0] <= until_s:
            self._next()

    def run_some(self, count: int) -> None:
        """Let the next `count` calls happen, or all when there are fewer, or until `stop`."""
        waiting = self._waiting
        self._left = count
        while self._left > 0 and waiting:
            happened = self._next()  # which may stop: not in one line with the subtraction
            self._left -= happened

    def stop(self) -> None:
        """From within a call: nothing more happens before the next `run` or `run_some`."""
        self._left = 0

    def _next(self) -> int:
        """Take the next entry; 1 when it had a call, 0 when that was cancelled."""
        when_s, _, entry = heappop(self._waiting)
        call, entry.call = entry.call, None
        if call is None:
            return 0
        self.now = when_s
        self.events += 1
        call(when_s)
        return 1
