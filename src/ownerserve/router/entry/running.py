"""The running limit says how many turns the fleet may run at once: so many for each worker that is
up. What comes beyond stands in a fair line, also turns of sessions that were served before.

Workers queue and refuse by themselves, each its own turns in the order of arrival: behind a limit
that is a little above what their batches hold, who is next is decided here, by weight. The turns of
one worker are not counted alone: which of them takes a turn is the policy's business.

Each model has a line of its own, so that nobody waits for workers that could not serve him; models
that the same workers serve take turns. Owns the lines. Who runs is counted by the fleet's own
ledger, so that nothing can leak. Pure.
"""

from __future__ import annotations

from math import exp

from ownerserve.router.entry.fair import FairLine, InLine, Ticket
from ownerserve.router.entry.terms import EnteringTurn, LinePlace
from ownerserve.router.fleet import Fleet

MEMORY_S = 120.0
"""What lies so long back counts for a third in how long turns take."""


class RunningLimit:
    """The limit lets turns in while fewer than `running_max` for each worker are under way."""

    def __init__(self, fleet: Fleet, running_max: int) -> None:
        self._fleet = fleet
        self._running_max = running_max
        self._lines: dict[str | None, FairLine] = {}

    def __len__(self) -> int:
        """Return how many turns stand in line."""
        return sum(map(len, self._lines.values()))

    def takes(self, turn: EnteringTurn) -> bool:
        """Return whether a turn may begin at once: nobody waits before it and a worker is free, or
        none is up, so that it is refused at once."""
        line = self._lines.get(turn.model)
        return not line and self._has_slot(turn.model)

    def charge(self, turn: EnteringTurn) -> None:
        """Count a turn that begins without having stood in line."""
        if self._fleet.candidates(turn.model):
            self._line(turn.model).charge(turn)

    def add(self, one: InLine) -> None:
        """Put a turn in its model's line."""
        self._line(one.turn.model).add(one)

    def leave(self, one: InLine) -> None:
        """Take one out who is not let in."""
        self._line(one.turn.model).leave(one.ticket)

    def next(self) -> Ticket | None:
        """Take out who is next and may begin now; None: nobody may."""
        for model, line in self._lines.items():
            if line and self._has_slot(model):
                self._lines[model] = self._lines.pop(model)  # behind the others: they take turns
                return line.pop(line.first().ticket).ticket
        return None

    def place(self, one: InLine) -> LinePlace:
        """Return where one stands in its model's line."""
        return self._line(one.turn.model).place(one.ticket)

    def places(self) -> dict[Ticket, LinePlace]:
        """Return where each stands in its model's line."""
        return {at: place for line in self._lines.values() for at, place in line.places().items()}

    def ahead(self, turn: EnteringTurn) -> int:
        """Estimate how many of those in line would go before `turn`."""
        line = self._lines.get(turn.model)
        return line.ahead(turn) if line else 0

    def slots(self, model: str | None) -> int:
        """Return how many turns of a model may run at once."""
        return self._running_max * len(self._fleet.candidates(model).serving)

    def _has_slot(self, model: str | None) -> bool:
        serving = self._fleet.candidates(model).serving
        running = sum([worker.requests for worker in serving])
        return not serving or running < self._running_max * len(serving)

    def _line(self, model: str | None) -> FairLine:
        line = self._lines.get(model)
        if line is None:
            line = self._lines[model] = FairLine()
        return line


class TurnPace:
    """The pace is measured: how long a turn runs, from how many run over time and how many end
    (Little's law), the older the less."""

    def __init__(self) -> None:
        self._ran_s = self._ends = self._at_s = 0.0
        self._running = 0

    def note(self, running: int, now_s: float) -> None:
        """Note that so many turns run from now on."""
        passed_s = now_s - self._at_s
        if passed_s > 0.0:
            left = exp(-passed_s / MEMORY_S)
            self._ran_s = self._ran_s * left + self._running * passed_s
            self._ends *= left
            self._at_s = now_s
        self._running = running

    def ended(self) -> None:
        """Note that a turn has ended."""
        self._ends += 1.0

    @property
    def is_measured(self) -> bool:
        """Whether a turn has ended lately."""
        return self._ends >= 1.0

    @property
    def turn_s(self) -> float:
        """How long a turn runs, in seconds; while none has ended, what those that run have run
        together."""
        return self._ran_s / max(self._ends, 1.0)
