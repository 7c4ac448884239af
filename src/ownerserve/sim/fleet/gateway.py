"""A simulated gateway is a router and what stands around it: the queue before it, what it hears of
owners, and the lines on which it hears workers.

    turns of its sessions ──> queue ──> RouterState <── stamps on its own turns' answers
                                            ^  ^─────── residency news, on a line of its own
                                            `────────── of several: each worker's load, each period

Owns what one gateway knows. Of several each has its own sessions, and of the others' turns it knows
what workers say. One alone sees every turn and asks nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from ownerserve.router.entry.queue import AdmissionQueue
from ownerserve.router.messages import Dispatch, Down, Stamped, WorkerDown, WorkerUp
from ownerserve.router.state import RouterState
from ownerserve.router.worker import Profile
from ownerserve.sim.fleet import gauge
from ownerserve.sim.fleet.admission import SimAdmissionQueue
from ownerserve.sim.fleet.claims import Claims
from ownerserve.sim.fleet.ownership import SimOwnership
from ownerserve.sim.fleet.told import ResidencyNews
from ownerserve.sim.timeline.heap import Heap
from ownerserve.sim.worker.worker import SimWorker


class GapListener(Protocol):
    """A gap listener moves state between turns (gap_moves.py)."""

    def sent(self, dispatch: Dispatch, now: float) -> None:
        """Take in what the turn's decision wanted."""

    def joined(self, now: float) -> None:
        """Hear that a worker came up."""


class SimGateway:
    """A gateway is wired by `build`, which gives it its `admission`, its `news` and its `gaps`."""

    def __init__(
        self,
        heap: Heap,
        router: RouterState,
        ownership: SimOwnership,
        *,
        workers: Sequence[SimWorker],
    ) -> None:
        self.router = router
        self.claims = Claims(heap, router, ownership, workers=workers)
        self.admission = SimAdmissionQueue(heap, AdmissionQueue(None), router.sessions)
        self.news: ResidencyNews | None = None
        """What carries to the router what workers say that they hold; None: it hears no word."""
        self.gaps: GapListener | None = None
        """What moves between turns; None: nothing does."""
        self._heap = heap
        self._workers = workers

    def up(self, worker: SimWorker, profile: Profile | None, now: float) -> None:
        """Hear that a worker is up. `profile` None: as in its former life."""
        told = WorkerUp(worker.name, incarnation=worker.incarnation, profile=profile)
        self.router.handle(told, now)
        if self.news is not None:
            self.news.join(worker)
        if self.gaps is not None:
            self.gaps.joined(now)

    def down(self, worker: SimWorker, now: float) -> None:
        """Hear that a worker's connections are broken."""
        self.router.handle(WorkerDown(worker.name, Down.UNREACHABLE), now)

    def probe(self, first_s: float, every_s: float) -> None:
        """Ask every worker for its load at `first_s`, and again after each period."""
        self._heap.at(first_s, partial(self._probe, every_s))

    def _probe(self, every_s: float, now: float) -> None:
        for worker in self._workers:
            if worker.is_up:
                self.router.handle(Stamped(gauge.status(worker, now)), now)
        self.probe(now + every_s, every_s)
