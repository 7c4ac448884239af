"""All routing units ever seen, in a stable order, the candidates for each model, and their speeds.

Owns who is up and in which life. A model has candidates of its own: the workers that name it (as
their model or an adapter) and those that name none. So has a request that names no model: all.

A worker is priced at its own speed once it has measured it, before that at its like's. One that has
not run a turn states what it assumes; beside one that has measured itself on a slower or busier
machine it would look many times as fast, and sessions would leave their state for it. Workers of
one spec digest are taken to be alike until they say otherwise. One of them gives the measure: a
fleet of N that measures itself for the first time is not priced anew N x N times.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.ids import WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.status import WorkerLoad
from ownerserve.router.candidates import Candidates
from ownerserve.router.messages import WorkerUp
from ownerserve.router.worker import Profile, Speed, Worker


class PresumedSpeeds:
    """The worker that gives the measure for each spec digest, and its speed when last told."""

    def __init__(self) -> None:
        self._by_digest: dict[str, tuple[Worker, Speed]] = {}

    def speed_of(self, profile: Profile) -> Speed:
        """What a worker of this profile is priced at. What state takes in its memory and over its
        media is always its own statement."""
        known = self._by_digest.get(profile.spec_digest)
        if profile.is_measured or known is None:
            return profile.speed
        like = known[1]
        return replace(
            profile.speed,
            prefill=like.prefill,
            step_ms=like.step_ms,
            step_ms_per_sequence=like.step_ms_per_sequence,
        )

    def measured(self, worker: Worker) -> bool:
        """Take in a worker's statement; whether it changes what others are presumed to be.

        A worker that states no digest is like none. The first that measured itself gives the
        measure until it is down.
        """
        profile = worker.profile
        digest = profile.spec_digest
        if not profile.is_measured or not digest:
            return False
        known = self._by_digest.get(digest)
        if known is not None:
            giver, speed = known
            if (giver is not worker and giver.up) or speed == profile.speed:
                return False
        self._by_digest[digest] = worker, profile.speed
        return True


class Fleet:
    """Routing units by (worker, dp_rank)."""

    def __init__(self) -> None:
        self._workers: dict[tuple[WorkerId, int], Worker] = {}
        self._all = Candidates()
        self._nameless = Candidates()
        """Workers that name no model, and so may serve any."""
        self._by_model: dict[str, Candidates] = {}
        self._presumed = PresumedSpeeds()

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __getitem__(self, worker: WorkerId) -> Worker:
        """The first rank of `worker`."""
        return self._workers[worker, 0]

    @property
    def up(self) -> tuple[Worker, ...]:
        """Workers that run turns and may be chosen, in the order in which they first came."""
        return tuple(self._all)

    def candidates(self, model: str | None) -> Candidates:
        """Workers that may serve a request for `model`; None when the request names none."""
        if model is None:
            return self._all
        return self._by_model.get(model, self._nameless)

    def find(self, unit: RoutingUnit) -> Worker | None:
        """The unit in this very life, or None."""
        known = self._workers.get((unit.worker, unit.dp_rank))
        return known if known is not None and known.incarnation == unit.incarnation else None

    def heard(self, status: WorkerLoad, now_s: float) -> None:
        """A worker's word on its load. It also tells of a restart, earlier than any probe."""
        unit = status.unit
        known = self._workers.get((unit.worker, unit.dp_rank))
        if known is None:
            return
        if known.incarnation is None:
            known.incarnation = unit.incarnation
        elif unit.incarnation > known.incarnation:
            known.begin_life(unit.incarnation)
        if unit.incarnation == known.incarnation:
            known.stamp(status, now_s)

    def raise_up(self, event: WorkerUp) -> None:
        """A unit answers. It lives anew with a later incarnation; after it was down with any other,
        for its host's clock may have been set back, or without one."""
        place = event.worker, event.dp_rank
        known = self._workers.get(place)
        if known is None:
            known = Worker(event.worker, len(self._workers), dp_rank=event.dp_rank)
            self._workers[place] = known
        if _is_former_life(event, known):
            return  # a late word: it says nothing of the present one
        if _is_another_life(event, known):
            known.begin_life(event.incarnation)
        elif event.incarnation is not None:
            known.incarnation = event.incarnation
        if known.up and event.profile in (None, known.profile):
            return
        self._leave(known)
        if event.profile is not None:
            known.become(event.profile, self._presumed.speed_of(event.profile))
        known.up = True
        self._join(known)
        if event.profile is not None and self._presumed.measured(known):
            self._price_unmeasured(event.profile)

    def take_down(self, worker: WorkerId) -> list[Worker]:
        """The worker's units that were up; none when there is nothing to do."""
        units = [unit for unit in self._workers.values() if unit.id == worker and unit.up]
        for unit in units:
            unit.up = False
            self._leave(unit)
        return units

    def check(self) -> None:
        """Raise InvariantViolated unless every order is sorted and complete."""
        for pool in (self._all, self._nameless, *self._by_model.values()):
            pool.check()
        up = {worker for worker in self._workers.values() if worker.up}
        if self._all.everyone() != up:
            raise InvariantViolated("invariant 5: the candidates are not those that are up")

    def _price_unmeasured(self, like: Profile) -> None:
        """Workers of its kind that have not measured themselves are priced anew."""
        for worker in self._workers.values():
            profile = worker.profile
            if profile.is_measured or profile.spec_digest != like.spec_digest:
                continue
            if worker.up:
                self._leave(worker)
            worker.become(profile, self._presumed.speed_of(profile))
            if worker.up:
                self._join(worker)

    def _join(self, worker: Worker) -> None:
        self._all.add(worker)
        names = worker.profile.names - {""}
        if not names:
            for pool in (self._nameless, *self._by_model.values()):
                pool.add(worker)
        for name in sorted(names):
            if name not in self._by_model:
                self._by_model[name] = Candidates(self._nameless.everyone())
            self._by_model[name].add(worker)

    def _leave(self, worker: Worker) -> None:
        for pool in (self._all, self._nameless, *self._by_model.values()):
            pool.discard(worker)


def _is_former_life(event: WorkerUp, known: Worker) -> bool:
    """Only of a worker that is up: one that was down may have an earlier clock."""
    if event.incarnation is None or known.incarnation is None:
        return False
    return known.up and event.incarnation < known.incarnation


def _is_another_life(event: WorkerUp, known: Worker) -> bool:
    """Without two incarnations to compare, one that was down is taken to have restarted."""
    if event.incarnation is None or known.incarnation is None:
        return not known.up
    return event.incarnation != known.incarnation
