"""Where a session's first turn waits for a seat: router.seats on the heap.

Owns the turns that wait. Who may enter is decided by Seats; here time passes, and those that were
named go on their way. Without seats everybody goes on at once.
"""

from __future__ import annotations

from collections.abc import Callable

from ownerserve.kv.ids import SessionId
from ownerserve.router.seats import Enter, Seats, Ticket
from ownerserve.sim.timeline.heap import Heap, TimedCall
from ownerserve.sim.timeline.turns import SimTurn

Go = Callable[[SimTurn, float], None]


class SimAdmissionQueue:
    """In front of one router."""

    def __init__(self, heap: Heap, seats: Seats | None) -> None:
        self.seats = seats
        self._heap = heap
        self._waiting: dict[Ticket, tuple[SimTurn, Go]] = {}
        self._timer: TimedCall | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, turn: SimTurn, go: Go, now: float) -> None:
        """`go(turn, now)`, now or when there is a seat."""
        if self.seats is None:
            go(turn, now)
            return
        main = SessionId(turn.name.partition("/")[0])
        parent = main if main != turn.name else None
        if parent is None and 2 * turn.shared_tokens >= turn.prompt_tokens:
            parent = turn.parent  # a fork that shares most of its prompt
        answer = self.seats.ask(turn.name, turn.prompt_tokens, parent=parent, now_s=now)
        if isinstance(answer, Enter):
            go(turn, now)
            return
        self._waiting[answer.ticket] = turn, go
        self._arm(now)

    def ended(self, turn: SimTurn, now: float) -> None:
        """A turn is over: its context is known, and perhaps a seat is free."""
        if self.seats is None:
            return
        if turn.is_last:
            self.seats.over(turn.name)
        else:
            self.seats.ended(turn.name, turn.prompt_tokens + turn.output_tokens, now)
        self._look(now)

    def _look(self, now: float) -> None:
        assert self.seats is not None
        for ticket in self.seats.due(now):
            turn, go = self._waiting.pop(ticket)
            go(turn, now)
        self._arm(now)

    def _arm(self, now: float) -> None:
        assert self.seats is not None
        due_s = self.seats.next_due_s()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due_s is not None:
            # The heap counts in floats: an instant that rounds to now must not spin.
            self._timer = self._heap.at(max(due_s, now + 0.001), self._look)
