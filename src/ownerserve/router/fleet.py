"""The fleet holds all routing units ever seen, in a stable order, the candidates for each model,
and their speeds.

Owns who is up and in which life. A model has candidates of its own: the workers that name it (as
their model or an adapter) and those that name none. So has a request that names no model: all.

A worker is priced at its own speed once it has measured it, before that at its like's. One that has
not run a turn states what it assumes; beside one that has measured itself on a slower or busier
machine it would look many times as fast, and sessions would leave their state for it. Workers of
one spec digest are taken to be alike until they say otherwise. One of them gives the measure: a
fleet of N that measures itself for the first time is not priced anew N x N times.

**Candidates** of one model stand in order of load. That owns the order, not the load. A worker's
key sorts by how long a first prompt would take there (its queue, and its own speed, which tells
GPUs apart), then by who is there already (bound sessions and running turns: without that every
session of an idle fleet starts on the first worker), then by when it last had a request that no
session stands behind (those leave nothing there: without that all of them go to the first worker),
then by stable order, which also names the worker.

    key = (queue_ms + first_prompt_ms) x 1024 | crowd (16 bits) | passed (40 bits) | order (24 bits)

A worker whose load changes only says so; it is put in its place when the order is next asked for.
So a turn that stays with its owner costs the order nothing, and no decision looks at all workers
unless most of them have changed since the last one.

The same order is kept apart by how much room each worker has. A step is an eighth of an octave of
tokens that a worker's free memory still takes at its own bytes a token; the workers of a step stand
in order of load. So the least loaded of all with room is found by a look at the first of each step
above the need: some 80 steps at most, however many workers there are. One of whom its asker says no
is passed over, and the next one of its step looked at: ROOMS_ASKED in all.

    need 100k tokens ──> steps     ... | 92k-100k | 100k-109k | 109k-119k | ...  64M | unknown
                         looked at                  (its own)       x         x    x      x

Of the need's own step nobody is taken: who has room for it has less than a twelfth to spare, and
the context grows with each turn. A worker that has changed is put in its place when the room is
next asked for.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator
from heapq import merge
from itertools import count, islice
from math import inf, log2

from msgspec.structs import replace

from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.ids import WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.status import WorkerLoad
from ownerserve.router.messages import Down, WorkerUp
from ownerserve.router.worker import Profile, Speed, Watch, Worker, WorkerRole

STEPS_AN_OCTAVE = 8
_UNKNOWN = 1 << 12
"""The step of a worker that says nothing of its memory: taken as enough."""


class Rooms:
    """The rooms order workers by step of free memory and, in each step, by key of load."""

    __slots__ = ("_keys", "_place")

    def __init__(self) -> None:
        self._keys: dict[int, list[int]] = {}
        """The keys of a step's workers, least first; no step is empty."""
        self._place: dict[int, tuple[int, int]] = {}
        """Step and key of each worker, by its order."""

    def place(self, workers: Iterable[Worker], key_of: dict[int, int]) -> None:
        """Put workers where the room that they have now belongs, at the key of load in `key_of`."""
        for worker in workers:
            place = _step(room_tokens(worker)), key_of[worker.order]
            if place != self._place.get(worker.order):
                self.discard(worker)
                self._place[worker.order] = place
                insort(self._keys.setdefault(place[0], []), place[1])

    def discard(self, worker: Worker) -> None:
        """Forget a worker that is no candidate any more."""
        place = self._place.pop(worker.order, None)
        if place is None:
            return
        step, key = place
        keys = self._keys[step]
        del keys[bisect_left(keys, key)]
        if not keys:
            del self._keys[step]

    def above(self, tokens: float) -> Iterator[int]:
        """Yield the keys of those whose room lies in a step above that of `tokens`, least
        first."""
        need = _step(tokens)
        return merge(*[keys for step, keys in self._keys.items() if step > need])


def room_tokens(worker: Worker) -> float:
    """Return how long a sequence the worker's free memory takes, in tokens; infinite where nothing
    is known of it."""
    free, speed = worker.load.kv_bytes_free, worker.speed
    if free == inf:
        return inf
    if not speed.kv_bytes_per_token:
        return inf if free >= speed.kv_bytes_per_sequence else 0.0
    return (free - speed.kv_bytes_per_sequence) / speed.kv_bytes_per_token


def _step(tokens: float) -> int:
    """Return the step of room that `tokens` lie in."""
    if tokens == inf:
        return _UNKNOWN
    return int(log2(tokens) * STEPS_AN_OCTAVE) + 1 if tokens >= 1.0 else 0


_ORDER = (1 << 24) - 1
_CROWD_MAX = (1 << 16) - 1
_DUE = 80
ALIKE = 1.1
"""Workers whose times are no further apart are taken to be alike: equal machines measure themselves
a few percent apart."""
ALIKE_MAX = 16
"""Among so many it goes round."""
ROOMS_ASKED = 16
"""Among so many one is looked for that may be moved to."""
RESORT_SHARE = 8
"""With more than one in so many changed, all are sorted anew."""


class _Order:
    """An order holds workers sorted by key of load, and puts those that changed in place when
    asked."""

    __slots__ = ("_key_of", "_keys", "_rooms", "_unroomed", "by_order", "watch")

    def __init__(self) -> None:
        self.by_order: dict[int, Worker] = {}
        self.watch = Watch()
        self._keys: list[int] = []
        self._key_of: dict[int, int] = {}
        self._rooms = Rooms()
        self._unroomed: set[Worker] = set()
        """Workers whose room has not been looked at since their load changed."""

    def add(self, worker: Worker) -> None:
        self.place(worker)
        worker.watchers += (self.watch,)

    def place(self, worker: Worker) -> None:
        """Put the worker in as it is now; unlike after `add`, later changes of its load are not
        heard."""
        self.by_order[worker.order] = worker
        self.watch.changed.add(worker)
        self.watch.sequences += worker.batch

    def discard(self, worker: Worker) -> None:
        if self.by_order.pop(worker.order, None) is not None:
            key = self._key_of.pop(worker.order, None)
            if key is not None:
                del self._keys[bisect_left(self._keys, key)]
            self._rooms.discard(worker)
            self._unroomed.discard(worker)
            self.watch.changed.discard(worker)
            self.watch.sequences -= worker.batch
            worker.watchers = tuple(one for one in worker.watchers if one is not self.watch)

    def keys(self) -> list[int]:
        """Put in place whoever changed, and return all keys, least first."""
        keys, key_of, changed = self._keys, self._key_of, self.watch.changed
        if not changed:
            return keys
        if len(changed) * RESORT_SHARE > len(keys):
            for worker in changed:
                key_of[worker.order] = _key(worker)
            keys[:] = sorted(key_of.values())
        else:
            for worker in changed:
                old, new = key_of.get(worker.order), _key(worker)
                if new != old:
                    if old is not None:
                        del keys[bisect_left(keys, old)]
                    insort(keys, new)
                    key_of[worker.order] = new
        self._unroomed |= changed
        changed.clear()
        return keys

    def least(self, count: int) -> list[Worker]:
        by_order = self.by_order
        return [by_order[key & _ORDER] for key in self.keys()[:count]]

    def next_in_turn(self) -> Worker:
        keys = self.keys()
        until = int((keys[0] >> _DUE) * ALIKE) + 1 << _DUE
        alike = (key for key in keys[:ALIKE_MAX] if key < until)
        return self.by_order[min(alike, key=_but_due) & _ORDER]

    def least_with_room(
        self, tokens: float, *, but: Worker | None, takes: Callable[[Worker], bool]
    ) -> Worker | None:
        """Return the least loaded worker with room for so many tokens that `takes` is true of,
        leaving out `but`; None when there is none among the first ROOMS_ASKED."""
        self.keys()
        self._rooms.place(self._unroomed, self._key_of)
        self._unroomed.clear()
        for key in islice(self._rooms.above(tokens), ROOMS_ASKED):
            worker = self.by_order[key & _ORDER]
            if worker is not but and takes(worker):
                return worker
        return None

    def check(self) -> None:
        if self.keys() != sorted(_key(worker) for worker in self.by_order.values()):
            raise InvariantViolated("invariant 5: candidates are out of order")
        if self.watch.sequences != sum(worker.batch for worker in self.by_order.values()):
            raise InvariantViolated("invariant 5: running sequences do not add up")


def _but_due(key: int) -> int:
    """Return what a key sorts by beside the time."""
    return key & ((1 << _DUE) - 1)


def _key(worker: Worker) -> int:
    load = worker.load
    due = int((load.queue_ms + worker.speed.first_prompt_ms) * 1024.0)
    crowd = worker.bound_sessions + worker.batch
    if crowd > _CROWD_MAX:
        crowd = _CROWD_MAX
    return (due << _DUE) | (crowd << 64) | (worker.passed << 24) | worker.order


class Candidates:
    """The candidates are the workers that are up and serve a model; iteration goes over those that
    run turns, in stable order."""

    __slots__ = ("_prefill", "_serving", "_stable", "serving")

    def __init__(
        self,
        workers: Iterable[Worker] = (),
        how: Callable[[_Order, Worker], None] = _Order.add,
    ) -> None:
        self.serving: set[Worker] = set()
        """Workers that run turns. Read it only."""
        self._serving = _Order()
        self._prefill = _Order()
        self._stable: tuple[Worker, ...] | None = None
        for worker in workers:
            self._admit(worker, how)

    def __iter__(self) -> Iterator[Worker]:
        if self._stable is None:  # as for a fleet that grows: sorted once, not for each that joins
            self._stable = tuple(worker for _, worker in sorted(self._serving.by_order.items()))
        return iter(self._stable)

    def __len__(self) -> int:
        return len(self._serving.by_order)

    def __contains__(self, worker: Worker) -> bool:
        return worker in self.serving

    @property
    def mean_batch(self) -> float:
        """The mean number of sequences at the workers that run turns."""
        serving = self._serving
        return serving.watch.sequences / len(serving.by_order)

    def least(self, count: int) -> list[Worker]:
        """Return the `count` least loaded of the workers that run turns, least first."""
        return self._serving.least(count)

    def least_one(self) -> Worker:
        """Return the least loaded of the workers that run turns."""
        serving = self._serving
        return serving.by_order[serving.keys()[0] & _ORDER]

    def next_in_turn(self) -> Worker:
        """Return, of the workers that run turns and are as good as least loaded, the one of whom it
        is the turn: with the fewest there, then without a passing request for the longest."""
        return self._serving.next_in_turn()

    def least_with_room(
        self, tokens: float, *, but: Worker | None, takes: Callable[[Worker], bool]
    ) -> Worker | None:
        """Return the least loaded of the workers that run turns, have room for so many tokens and
        of whom `takes` is true, leaving out `but`; None when there is none among the first
        ROOMS_ASKED."""
        return self._serving.least_with_room(tokens, but=but, takes=takes)

    def least_prefill(self, count: int) -> list[Worker]:
        """Return the `count` least loaded of the workers that prefill for others, least first."""
        return self._prefill.least(count)

    def can_prefill(self, worker: Worker) -> bool:
        """Return whether `worker` is one of those that prefill for others."""
        return self._prefill.by_order.get(worker.order) is worker

    def prefilling(self) -> list[Worker]:
        """Return the workers that prefill for others, in stable order."""
        return [worker for _, worker in sorted(self._prefill.by_order.items())]

    def without(self, tried: Collection[Worker]) -> Candidates:
        """Return these candidates without `tried`: a snapshot, which no worker knows and no change
        follows."""
        others = (worker for worker in self.everyone() if worker not in tried)
        return Candidates(others, _Order.place)

    def everyone(self) -> set[Worker]:
        """Return the workers that run turns and those that prefill for others."""
        return {*self._serving.by_order.values(), *self._prefill.by_order.values()}

    # Kept by the fleet

    def add(self, worker: Worker) -> None:
        """Take in `worker`, which is up, and hear of its changes of load."""
        self._admit(worker, _Order.add)
        self._stable = None

    def discard(self, worker: Worker) -> None:
        """Drop `worker`, which is no candidate any more."""
        self.serving.discard(worker)
        self._serving.discard(worker)
        self._prefill.discard(worker)
        self._stable = None

    def check(self) -> None:
        """Raise InvariantViolated unless both orders are sorted by their workers' present keys."""
        self._serving.check()
        self._prefill.check()

    def _admit(self, worker: Worker, how: Callable[[_Order, Worker], None]) -> None:
        """Put the worker, by `how`, into the order of each thing that its role does."""
        role = worker.profile.role
        if role is not WorkerRole.PREFILL:
            self.serving.add(worker)
            how(self._serving, worker)
        if role is not WorkerRole.DECODE:
            how(self._prefill, worker)


class PresumedSpeeds:
    """The presumed speeds hold, for each spec digest, the worker that gives the measure and the
    speed that it told last."""

    def __init__(self) -> None:
        self._by_digest: dict[str, tuple[Worker, Speed]] = {}

    def speed_of(self, profile: Profile) -> Speed:
        """Return the speed that a worker of this profile is priced at.

        What state takes in its memory and over its media is always the worker's own statement.
        """
        known = self._by_digest.get(profile.spec_digest)
        if profile.is_measured or known is None:
            return profile.speed
        like, own = known[1], profile.speed
        steps = own if profile.are_steps_measured else like
        return replace(
            own,
            prefill=own.prefill if profile.is_prefill_measured else like.prefill,
            step_ms=steps.step_ms,
            step_ms_per_sequence=steps.step_ms_per_sequence,
        )

    def settle(self, digest: str, workers: Iterable[Worker]) -> bool:
        """Take in that something of the workers of this digest changed, and return whether that
        changes what others are presumed to be.

        The worker that gives the measure does so while it is up, of this digest and measured; then
        the first such one of `workers` does. While there is none, what was measured last counts. A
        worker that states no digest is like none.
        """
        if not digest:
            return False
        known = self._by_digest.get(digest)
        giver = None if known is None else known[0]
        if giver is None or not _gives(giver, digest):
            giver = next((worker for worker in workers if _gives(worker, digest)), None)
        if giver is None:
            return False
        self._by_digest[digest] = giver, giver.profile.speed
        return known is None or known[1] != giver.profile.speed


def _gives(worker: Worker, digest: str) -> bool:
    """Return whether a worker may give the measure for a digest."""
    profile = worker.profile
    return worker.up and profile.is_measured and profile.spec_digest == digest


_OPERATORS = (Down.DRAINED, Down.REMOVED)
"""Why a worker is down that answers, and whose operator wants no new turn there."""
_SILENCE = (Down.UNREACHABLE, Down.UNHEALTHY)
"""Why a worker is down of whom nothing else is known than that it did not answer."""


class Fleet:
    """The fleet holds every routing unit that was seen and has not left for good, by (worker,
    dp_rank), and the candidates for each model."""

    def __init__(self) -> None:
        self._workers: dict[tuple[WorkerId, int], Worker] = {}
        self._all = Candidates()
        self._nameless = Candidates()
        """Workers that name no model, and so may serve any."""
        self._by_model: dict[str, Candidates] = {}
        self._presumed = PresumedSpeeds()
        self._places = count()

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __getitem__(self, worker: WorkerId) -> Worker:
        """Return the first rank of `worker`; raises KeyError when it was never seen."""
        return self._workers[worker, 0]

    @property
    def up(self) -> tuple[Worker, ...]:
        """The workers that run turns and may be chosen, in the order in which they first came."""
        return tuple(self._all)

    def candidates(self, model: str | None) -> Candidates:
        """Return the workers that may serve a request for `model`; None: the request names none."""
        if model is None:
            return self._all
        return self._by_model.get(model, self._nameless)

    def down(self, model: str | None) -> Candidates:
        """Return those who served `model` (None: any) and are down for their silence alone: a
        snapshot, of whom to ask when nobody is up."""
        silent = (worker for worker in self._workers.values() if worker.is_silent)
        serving = (worker for worker in silent if _serves(worker.profile, model))
        return Candidates(serving, _Order.place)

    def find(self, unit: RoutingUnit) -> Worker | None:
        """Return the unit if it is known in this very life, else None."""
        known = self._workers.get((unit.worker, unit.dp_rank))
        return known if known is not None and known.incarnation == unit.incarnation else None

    def heard(self, status: WorkerLoad, now_s: float) -> None:
        """Take in a worker's word on its load; it also tells of a restart, earlier than any
        probe."""
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
        """Take in that a unit answers.

        It lives anew with a later incarnation; after it was down also with any other, for its
        host's clock may have been set back, or without one. Who tells no life and fell silent has
        begun one with that (`take_down`).
        """
        place = event.worker, event.dp_rank
        known = self._workers.get(place)
        if known is None:
            known = Worker(event.worker, next(self._places), dp_rank=event.dp_rank)
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
        before = known.profile.spec_digest
        if event.profile is not None:
            known.become(event.profile, self._presumed.speed_of(event.profile))
        known.up, known.is_silent, known.is_drained = True, False, False
        self._join(known)
        self._settle({before, known.profile.spec_digest})

    def take_down(self, worker: WorkerId, why: Down = Down.REMOVED) -> list[Worker]:
        """Take the worker's units out for the reason `why`, and return those that were up.

        One that fell silent and tells no life is taken to have ended the one that it had: what is
        answered at its address from now on is of the next, before a probe finds it up or after.
        """
        known = [unit for unit in self._workers.values() if unit.id == worker]
        units = [unit for unit in known if unit.up]
        if why not in _SILENCE:
            for unit in known:
                unit.is_silent = False
        for unit in known:
            unit.is_drained = why in _OPERATORS and (unit.up or unit.is_drained)
        for unit in units:
            unit.up, unit.is_silent = False, why in _SILENCE
            self._leave(unit)
            if unit.is_silent and unit.incarnation is None:
                unit.begin_life(None)
        self._settle({unit.profile.spec_digest for unit in units})
        return units

    def forget(self, worker: WorkerId) -> None:
        """Forget the worker's units, which are down for good. Raises InvariantViolated while one is
        up or a dispatch counts there."""
        places = [place for place, unit in self._workers.items() if unit.id == worker]
        for place in places:
            unit = self._workers[place]
            if unit.up or unit.requests:
                raise InvariantViolated(f"invariant 5: {worker} is forgotten before it is empty")
        for place in places:
            del self._workers[place]

    def check(self) -> None:
        """Raise InvariantViolated unless every order is sorted and complete."""
        for pool in (self._all, self._nameless, *self._by_model.values()):
            pool.check()
        up = {worker for worker in self._workers.values() if worker.up}
        if self._all.everyone() != up:
            raise InvariantViolated("invariant 5: the candidates are not those that are up")

    def _settle(self, digests: Iterable[str]) -> None:
        """Price anew the workers of these digests that have not measured themselves, where they
        are presumed to be otherwise now."""
        for digest in digests:
            if not self._presumed.settle(digest, self._workers.values()):
                continue
            for worker in self._workers.values():
                profile = worker.profile
                if profile.is_measured or profile.spec_digest != digest:
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


def _serves(profile: Profile, model: str | None) -> bool:
    """Return whether a worker of this profile may serve a request for `model`."""
    names = profile.names - {""}
    return model is None or not names or model in names


def _is_former_life(event: WorkerUp, known: Worker) -> bool:
    """Return whether the event speaks of an earlier life of a worker that is up; one that was down
    may come back with an earlier clock."""
    if event.incarnation is None or known.incarnation is None:
        return False
    return known.up and event.incarnation < known.incarnation


def _is_another_life(event: WorkerUp, known: Worker) -> bool:
    """Return whether the event begins another life; without two incarnations to compare, a worker
    that was down is taken to have restarted."""
    if event.incarnation is None and known.incarnation is None and known.is_silent:
        return False  # it began as the worker fell silent
    if event.incarnation is None or known.incarnation is None:
        return not known.up
    return event.incarnation != known.incarnation
