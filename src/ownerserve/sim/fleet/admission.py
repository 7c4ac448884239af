"""This module puts the router's queue on the heap: turns wait there for a seat, or for the place of
a running one.

Owns the timer by which time alone lets somebody in or turns somebody away. Who may enter is decided
by the queue and its gates (router.entry). Without them everybody goes on at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ownerserve.kv.ids import SessionId
from ownerserve.router.admission import forked_from
from ownerserve.router.entry.queue import AdmissionQueue, HeldTurn
from ownerserve.router.entry.terms import (
    EnteringTurn,
    TurnedAway,
    absent_tokens,
    class_of,
    expected_cost,
)
from ownerserve.router.sessions import SessionTable
from ownerserve.sim.timeline.heap import Heap, TimedCall
from ownerserve.sim.timeline.turns import SimTurn

Arrival = Callable[[SimTurn, float], None]
TurnedBack = Callable[[SimTurn, float, float], None]
"""Called with the seconds after which the turn may come again, too."""


class SimEntrant:
    """An entrant is a simulated turn, and what it does when it is let in, or turned away."""

    def __init__(self, turn: SimTurn, go: Arrival, turned_away: TurnedBack, heap: Heap) -> None:
        self._turn = turn
        self._go = go
        self._turned_away = turned_away
        self._heap = heap

    def go(self, now_s: float) -> None:
        """Let the turn arrive at the router."""
        self._go(self._turn, now_s)

    def turned_away(self, no: TurnedAway) -> None:
        """End the turn, which its client is told no."""
        self._turned_away(self._turn, no.retry_after_s, self._heap.now)


class SimAdmissionQueue:
    """The queue stands in front of one simulated router, whose `sessions` say what a turn is
    expected to take."""

    def __init__(self, heap: Heap, queue: AdmissionQueue, sessions: SessionTable) -> None:
        self._queue = queue
        self._heap = heap
        self._sessions = sessions
        self._timer: TimedCall | None = None
        self._away: set[int] = set()
        """Turns that were turned away, or whose client hung up, and are not over."""
        self._held: dict[int, HeldTurn] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def enter(self, turn: SimTurn, go: Arrival, turned_away: TurnedBack, *, now: float) -> None:
        """Call `go(turn, now)` at once or when the turn is let in, or `turned_away(turn,
        retry_after_s, now)`."""
        if self._queue.is_open:
            go(turn, now)
            return
        self._away.discard(turn.number)  # it comes again
        let_in = partial(self._let_in, go)
        entrant = SimEntrant(turn, let_in, partial(self._turned_away, turned_away), self._heap)
        main = SessionId(turn.name.partition("/")[0])
        parent = forked_from(
            main if main != turn.name else None,
            turn.parent,
            shared=turn.shared_tokens,
            prompt=turn.prompt_tokens,
        )
        known = self._sessions.get(turn.name)
        entering = EnteringTurn(
            session=turn.name,
            prompt_tokens=turn.prompt_tokens,
            cost_tokens=expected_cost(turn.prompt_tokens, known),
            absent_tokens=absent_tokens(turn.prompt_tokens, known),
            parent=parent,
            session_class=class_of(
                known, None if parent is None else self._sessions.get(parent), is_batch=False
            ),
            came_s=now,
        )
        held = self._queue.enter(entering, entrant, now_s=now)
        if held is not None:
            self._held[turn.number] = held
            self._arm(now)

    def leave(self, turn: SimTurn, now: float) -> bool:
        """Take a turn out whose client hangs up; returns False when it does not wait here."""
        held = self._held.pop(turn.number, None)
        if held is None:
            return False
        self._queue.leave(held, now)
        self._away.add(turn.number)
        self._arm(now)
        return True

    def stopped(self, turn: SimTurn, now: float) -> None:
        """Note that a try of the turn is over, and that it comes again."""
        if not self._queue.is_open and turn.number not in self._away:
            self._queue.ended(turn.name, turn.prompt_tokens, now)
            self._arm(now)

    def answered(self, answer_s: float, refilled_s: float) -> None:
        """Note how long an answer took, and its engine to bring back what was there before."""
        if self._queue.seats is not None:
            self._queue.seats.stay.answered(answer_s, refilled_s)

    def ended(self, turn: SimTurn, now: float) -> None:
        """Note that a turn is over: its context is known, and perhaps there is room."""
        if self._queue.is_open:
            return
        if turn.number in self._away:
            self._away.discard(turn.number)
            if turn.is_last:
                self._queue.over(turn.name, now)
        elif turn.is_last:
            self._queue.ended_last(turn.name, now)
        else:
            self._queue.ended(turn.name, turn.prompt_tokens + turn.output_tokens, now)
        self._arm(now)

    def _let_in(self, then: Arrival, turn: SimTurn, now: float) -> None:
        self._held.pop(turn.number, None)
        then(turn, now)

    def _turned_away(
        self, then: TurnedBack, turn: SimTurn, retry_after_s: float, now: float
    ) -> None:
        self._held.pop(turn.number, None)
        self._away.add(turn.number)
        then(turn, retry_after_s, now)

    def _look(self, now: float) -> None:
        self._queue.look(now)
        self._arm(now)

    def _arm(self, now: float) -> None:
        due_s = self._queue.next_due_s(now)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due_s is not None:
            # The heap counts in floats: an instant that rounds to now must not spin.
            self._timer = self._heap.at(max(due_s, now + 0.001), self._look)
