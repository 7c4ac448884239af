"""This module puts the router's admission on the heap: a session's first turn waits there for a
seat.

Owns the timer by which time alone lets somebody in. Who may enter is decided by SessionAdmission,
and AdmissionQueue has those who wait. Without admission everybody goes on at once.
"""

from __future__ import annotations

from collections.abc import Callable

from ownerserve.kv.ids import SessionId
from ownerserve.router.admission import AdmissionQueue, SessionAdmission, forked_from
from ownerserve.sim.timeline.heap import Heap, TimedCall
from ownerserve.sim.timeline.turns import SimTurn

Arrival = Callable[[SimTurn, float], None]


class SimAdmissionQueue:
    """The queue stands in front of one simulated router."""

    def __init__(self, heap: Heap, admission: SessionAdmission | None) -> None:
        self._queue = AdmissionQueue(admission)
        self._admission = admission
        self._heap = heap
        self._timer: TimedCall | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def enter(self, turn: SimTurn, go: Arrival, now: float) -> None:
        """Call `go(turn, now)` at once, or when there is a seat."""
        main = SessionId(turn.name.partition("/")[0])
        parent = forked_from(
            main if main != turn.name else None,
            turn.parent,
            shared=turn.shared_tokens,
            prompt=turn.prompt_tokens,
        )
        ticket = self._queue.enter(
            turn.name, turn.prompt_tokens, lambda at: go(turn, at), parent=parent, now_s=now
        )
        if ticket is not None:
            self._arm(now)

    def ended(self, turn: SimTurn, now: float) -> None:
        """Note that a turn is over: its context is known, and perhaps a seat is free."""
        if self._admission is None:
            return
        if turn.is_last:
            self._queue.over(turn.name, now)
        else:
            self._queue.ended(turn.name, turn.prompt_tokens + turn.output_tokens, now)
        self._arm(now)

    def _look(self, now: float) -> None:
        self._queue.look(now)
        self._arm(now)

    def _arm(self, now: float) -> None:
        due_s = None if self._admission is None else self._admission.next_due_s()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due_s is not None:
            # The heap counts in floats: an instant that rounds to now must not spin.
            self._timer = self._heap.at(max(due_s, now + 0.001), self._look)
