"""This oracle has a receding horizon: at each eviction it knows the true time of every
conversation's next turn.

Belady's rule, online: what no conversation will read at this worker goes first, then what is wanted
latest, in the fleet's own caches and block by block as ever. A conversation's place is where its
last turn ran, and its state elsewhere is worth nothing. Routing, and who is let in, are the fleet's
own: before each decision the router is told what truly lies where.

Each part of that knowledge can be had alone, to see what it is worth (`Knows`). Owns when
conversations come back. No bound in the strict sense: in closed loop whatever is decided changes
what comes when, and the rule plans for one device at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import ClassVar

import msgspec

from ownerserve.cache.policies.base import Candidate, EvictionPolicy, Key
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import Tier
from ownerserve.router.messages import Gone, Reported
from ownerserve.router.state import RouterState
from ownerserve.sim.timeline.turns import SimTurn
from ownerserve.sim.worker.worker import SimWorker
from ownerserve.sim.workload import WorkloadDriver
from ownerserve.sim.workload.driver import ReleaseKey

NOW = -inf


class Knows(msgspec.Struct, frozen=True):
    """This struct says which parts of the true knowledge a fleet is given.

    `next_use`: evictors know when each conversation goes on; `places`: a worker forgets one that
    has gone on elsewhere; `residents`: before each decision the router is told what lies where.
    """

    next_use: bool = True
    places: bool = True
    residents: bool = True


PARTS = {
    "horizon": Knows(),
    "next-use": Knows(places=False, residents=False),
    "places": Knows(next_use=False, residents=False),
    "residents": Knows(next_use=False, places=False),
    "places-residents": Knows(next_use=False),
}
"""By the name that Setup.oracle has."""


class NextUse(EvictionPolicy):
    """This eviction order knows `next_s`, by conversation; whoever is not in it never comes back.

    A tail is wanted by who stands at its end: nobody else reads that far.
    """

    name: ClassVar[str] = "next-use"

    def __init__(self, next_s: Mapping[str, float]) -> None:
        self._next_s = next_s

    def key(self, candidate: Candidate) -> Key:
        """Return the candidate's place in the order; the lowest goes first."""
        heat = candidate.heat
        next_s = self._next_s
        soonest = min([next_s.get(name, inf) for name in heat.anchors or ()], default=inf)
        return (-soonest, heat.last_s)


class Foresight:
    """The foresight knows when each live conversation goes on. It changes nothing but what caches
    remember of sessions."""

    def __init__(
        self,
        workload: WorkloadDriver,
        workers: Sequence[SimWorker],
        router_of: Callable[[SimTurn], RouterState],
        *,
        knows: Knows,
    ) -> None:
        self.next_s: dict[str, float] = {}
        self._workload = workload
        self._workers = workers
        self._router_of = router_of
        self._knows = knows

    def arrived(self, turn: SimTurn, now: float) -> None:
        """Note that a turn arrived: its state is wanted now, and the router is told where it
        lies."""
        self.next_s[turn.name] = NOW
        router = self._router_of(turn)
        session = router.sessions.get(turn.name)
        prefix = None if session is None else session.prefix
        if prefix is None or prefix.hash is None or not self._knows.residents:
            return
        for worker in self._workers:
            tokens = worker.resident_units(turn.prompt) * worker.unit_tokens
            told: Reported | Gone = Gone(worker.unit, Tier.DEVICE, prefix.hash)
            if tokens:
                told = Reported(worker.unit, Tier.DEVICE, prefix.hash, tokens)
            router.handle(told, now)

    def runs_at(self, turn: SimTurn, worker: SimWorker) -> None:
        """Drop a session where it will not come back to: an oracle knows that too."""
        for other in self._workers if self._knows.places else ():
            session = other.cache.sessions.get(turn.name)
            if other is not worker and session is not None and not session.running:
                other.cache.sessions.release(turn.name)

    def over(self, turn: SimTurn, releases: Sequence[tuple[float, ReleaseKey]], now: float) -> None:
        """Note, from a turn's end and its `releases`, when conversations go on: the released ones
        and its own, whose next turn may wait for others as long as it was recorded to."""
        next_s = self._workload.next_release_s(turn, now)
        if next_s is None:
            self.next_s.pop(turn.name, None)
        else:
            self.next_s[turn.name] = next_s
        for when_s, release in releases:
            name = self._workload.conversation(release)
            if name in self.next_s:
                self.next_s[name] = when_s
        self._look_at(turn.name)

    def _look_at(self, name: SessionId) -> None:
        """Have evictors look at a conversation's state, which may be worth less than before."""
        for worker in self._workers:
            worker.cache.residents.reorder(name)
