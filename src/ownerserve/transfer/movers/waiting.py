"""Which reads of a mover wait, which one runs, and which are to end before they are done. Pure.

    WAITING ── take ──> RUNNING ── finished ──> over
       │                   │
       └ cancel, deadline ─┴── cancel, deadline: `verdict` says so between two chunks ──> over

Each read ends once. One that waits ends as soon as it is cancelled or late, also while another
runs: the runner asks `expired` between chunks.
"""

from __future__ import annotations

import heapq
from collections import deque

import msgspec

from ownerserve.transfer.vocabulary import Read, ReadFailed, ReadFailure


class GoOn(msgspec.Struct, frozen=True):
    """The running read goes on."""


class WaitingReads:
    """`WaitingReads` is the book of one mover's reads, first come first served. Owns which of them
    are over."""

    def __init__(self) -> None:
        self._order: deque[int] = deque()
        self._waiting: dict[int, Read] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._running: Read | None = None
        self._cancelled = False

    def __len__(self) -> int:
        return len(self._waiting) + (self._running is not None)

    def start(self, read: Read) -> None:
        """Take a read that is to be made."""
        running = self._running.number if self._running else None
        assert read.number not in self._waiting and read.number != running, "numbers are used once"
        self._waiting[read.number] = read
        self._order.append(read.number)
        heapq.heappush(self._deadlines, (read.deadline_s, read.number))

    def cancel(self, number: int) -> list[ReadFailed]:
        """Return the end of a read that waited; one that runs is stopped by its next `verdict`."""
        if self._running is not None and self._running.number == number:
            self._cancelled = True
        return self._end(number, ReadFailure.CANCELLED)

    def cancel_all(self) -> list[ReadFailed]:
        """Return the ends of all that wait; the one that runs is stopped by its next `verdict`."""
        self._cancelled = self._running is not None
        return [end for n in tuple(self._waiting) for end in self._end(n, ReadFailure.CANCELLED)]

    def expired(self, now_s: float) -> list[ReadFailed]:
        """Return the ends of those that waited until their deadline."""
        ended: list[ReadFailed] = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, number = heapq.heappop(self._deadlines)
            ended += self._end(number, ReadFailure.LATE)
        return ended

    def _end(self, number: int, reason: ReadFailure) -> list[ReadFailed]:
        return [ReadFailed(number, reason)] if self._waiting.pop(number, None) else []

    def take(self) -> Read | None:
        """Return the read to be made now, which runs from now on; None: none waits."""
        assert self._running is None, "one read at a time"
        while self._order:
            read = self._waiting.pop(self._order.popleft(), None)
            if read is not None:
                self._running, self._cancelled = read, False
                return read
        return None

    def verdict(self, now_s: float) -> GoOn | ReadFailed:
        """Tell whether the running read goes on, asked between its chunks and after the last."""
        assert self._running is not None
        if self._cancelled:
            return ReadFailed(self._running.number, ReadFailure.CANCELLED)
        if self._running.deadline_s <= now_s:
            return ReadFailed(self._running.number, ReadFailure.LATE)
        return GoOn()

    def finished(self) -> None:
        """Forget the running read: its end is told."""
        assert self._running is not None
        self._running = None

    def check(self) -> None:
        """Assert that what waits has its turn and its deadline, and does not run."""
        assert set(self._waiting) <= set(self._order)
        assert set(self._waiting) <= {number for _, number in self._deadlines}
        assert self._running is None or self._running.number not in self._waiting
