"""The ownership directory in a simulated fleet: the gateway's Owners and one DirectoryState.

Owns the batch under way. Both are the production classes; only the way between them is modelled:
`delay_s` there and back. A directory that is lost answers nothing until it is back, under a new
term and with an empty memory.
"""

from __future__ import annotations

from collections.abc import Callable

from ownerserve.directory.messages import Refused
from ownerserve.directory.records import Key
from ownerserve.directory.state import DirectoryState
from ownerserve.kv.epoch import Term
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.router.gateway.owners import Owners
from ownerserve.router.gateway.stamps import Extent
from ownerserve.router.messages import Claimed
from ownerserve.sim.heap import Heap

LEASE_S = 60.0
"""Longer than a live fleet's, so that renewals do not outnumber turns on a trace of days."""
SWEEP_S = 3600.0
SWEEP_RECORDS = 500
"""So many are looked at so often: a live gateway sweeps in parts too. What a sweep cleans up has
been silent for a day."""


class Ownership:
    """What the fleet tells the directory, and hears of it."""

    def __init__(
        self, heap: Heap, tell: Callable[[Claimed, float], object], *, delay_s: float
    ) -> None:
        self.state = DirectoryState(Term(1, 0), lease_s=LEASE_S, open_at_s=0.0)
        self.owners = Owners(renew_s=LEASE_S / 5)
        self._heap = heap
        self._tell = tell
        self._delay_s = delay_s
        self._is_asking = False
        self._is_up = True
        self._swept_s = 0.0
        self._to_sweep: list[Key] = []

    def lives(self, unit: RoutingUnit, now: float) -> None:
        """A worker is up, in this life."""
        self.owners.lives(unit)
        self._ask_soon(now)

    def silent(self, unit: RoutingUnit) -> None:
        """A worker is down."""
        self.owners.silent(unit.worker)

    def runs_at(
        self, session: SessionId, unit: RoutingUnit, *, parent: SessionId | None, now: float
    ) -> None:
        """A worker began to answer a turn."""
        self.owners.runs_at(session, unit, parent=parent)
        if self.owners.has_wishes:  # else the session is where it was: there is nothing to say
            self._ask_soon(now)

    def stands_on(
        self, session: SessionId, unit: RoutingUnit, extent: Extent, *, now: float
    ) -> None:
        """A worker holds the prompt of a turn."""
        self.owners.stands_on(session, unit, extent)
        self._ask_soon(now)

    def ends(self, session: SessionId, now: float) -> None:
        """The session is over."""
        self.owners.ends(session)
        self._ask_soon(now)

    def lose(self) -> None:
        """The directory dies, and forgets."""
        self._is_up = False

    def restore(self, now: float) -> None:
        """It is back, under a later term; workers' leases of before may still run."""
        self._is_up = True
        term = self._next_term()
        self.state = DirectoryState(term, lease_s=LEASE_S, open_at_s=now + LEASE_S)

    def _ask_soon(self, now: float) -> None:
        if not self._is_asking:
            self._is_asking = True
            self._heap.at(now + self._delay_s, self._ask)

    def _ask(self, now: float) -> None:
        self._is_asking = False
        if not self._is_up:
            return
        requests = self.owners.due(now)
        outcomes, state = [], self.state
        has_refused = False
        for request in requests:
            if state.is_behind(request):
                state.start_term(self._next_term(), open_at_s=now + LEASE_S)
            outcome = state.handle(request, now)
            has_refused = has_refused or isinstance(outcome, Refused)
            outcomes.append(outcome)
        for news in self.owners.answered(requests, outcomes):
            self._tell(news, now)
        if has_refused:
            self._heap.at(now + 1.0, self._again)
        if now - self._swept_s >= SWEEP_S:
            self._swept_s = now
            self._sweep(now)

    def _sweep(self, now: float) -> None:
        if not self._to_sweep:
            self._to_sweep = self.state.keys()
            self._to_sweep.reverse()  # taken from the end: there may be millions
        part = self._to_sweep[: -SWEEP_RECORDS - 1 : -1]
        del self._to_sweep[-SWEEP_RECORDS:]
        self.state.sweep(part, now)

    def _next_term(self) -> Term:
        """One directory alone: ordinals tell its memories apart, so no nonce has to be drawn."""
        return Term(self.state.term.ordinal + 1, 0)

    def _again(self, now: float) -> None:
        self._ask_soon(now)
