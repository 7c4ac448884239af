"""Clients ask again for what was refused, or did not begin in time, and at last give up.

    asks ── begins to be answered ──> answered
     ^ `── refused, or nothing in `timeout_s` ──> tries left? ── no ──> over: the turn has failed
     `──── Retry-After, or a backoff ────────────── yes

Owns how often each turn was tried again, and the timers of those that wait. Must never know who
serves. What ended in the middle of an answer nobody asks again for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

from ownerserve.sim.config.clients import ClientSettings
from ownerserve.sim.timeline.heap import Heap, TimedCall
from ownerserve.sim.timeline.turns import SimTurn

Call = Callable[[SimTurn, float], None]


class Clients:
    """The clients of a fleet; `ask` asks for a turn once more, `hang_up` ends a try that took too
    long."""

    def __init__(self, heap: Heap, settings: ClientSettings, *, ask: Call, hang_up: Call) -> None:
        self.waiting = 0
        """Turns that wait for their next try."""
        self._heap = heap
        self._settings = settings
        self._ask = ask
        self._hang_up = hang_up
        self._retries: dict[int, int] = {}
        self._timers: dict[int, TimedCall] = {}

    def asked(self, turn: SimTurn, now: float) -> None:
        """Begin to wait for the turn's answer."""
        timeout_s = self._settings.timeout_s
        if timeout_s is not None:
            call = partial(self._overdue, turn)
            self._timers[turn.number] = self._heap.at(now + timeout_s, call)

    def answered(self, turn: SimTurn) -> None:
        """Wait for it to begin no longer: it has, or never will."""
        timer = self._timers.pop(turn.number, None)
        if timer is not None:
            timer.cancel()

    def retries_of(self, turn: SimTurn) -> int:
        """Return how often the turn was tried again so far."""
        return self._retries.get(turn.number, 0)

    def over(self, turn: SimTurn) -> None:
        """Forget a turn that has ended."""
        self.answered(turn)
        self._retries.pop(turn.number, None)

    def ask_again(self, turn: SimTurn, retry_after_s: float | None, now: float) -> bool:
        """Have the turn asked for once more, later; returns False when its client has given up.
        `retry_after_s`: what it was told with its refusal, if anything."""
        self.answered(turn)
        retries = self._retries.get(turn.number, 0)
        if retries >= self._settings.retries:
            return False
        self._retries[turn.number] = retries + 1
        self.waiting += 1
        chance = Random(f"{turn.number} {retries}").random()
        wait_s = self._settings.wait_s(retries, retry_after_s, chance)
        self._heap.at(now + wait_s, partial(self._again, turn))
        return True

    def _again(self, turn: SimTurn, now: float) -> None:
        self.waiting -= 1
        self._ask(turn, now)

    def _overdue(self, turn: SimTurn, now: float) -> None:
        del self._timers[turn.number]
        self._hang_up(turn, now)
