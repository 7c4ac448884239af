"""A gateway in a fault schedule: production's RouterState and `Owners`, without sockets.

    client --take--> gateway --turn--> worker's Place
                        |  Job by Job, as DirectoryLink's thread asks them
                        v
                     World.arrives

`Owners` is driven as `DirectoryLink` drives it: one batch under way, look-ups in the same line, an
answer that does not come in time is `unreachable` for each request. What must hold at every step is
looked at here: a turn waits for the directory no longer than the look-up's patience, neither the
router nor the grants go back to an earlier epoch, nobody speaks for a life that it was not told of
(or that has been replaced, or is silent), nothing is asked in a loop.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from fault_net import Violation

from ownerserve.directory import messages as ask
from ownerserve.kv.epoch import Epoch
from ownerserve.kv.ids import Incarnation, PrefixHash, SessionId, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.status import WorkerLoad
from ownerserve.plan.inputs import Tier
from ownerserve.router.gateway.owners import Owners
from ownerserve.router.gateway.receipts import unit_of
from ownerserve.router.gateway.stamps import Extent
from ownerserve.router.messages import (
    Aborted,
    Arrive,
    Broken,
    Dispatch,
    Done,
    Down,
    Failed,
    Failure,
    FirstByte,
    Refuse,
    Reported,
    SessionEnd,
    Stamped,
    WorkerDown,
    WorkerUp,
)
from ownerserve.router.policies import make_policy
from ownerserve.router.settings import Settings
from ownerserve.router.state import RouterState
from ownerserve.router.usage import Usage

if TYPE_CHECKING:
    from owner_schedules import World

RENEW_S = 0.4
TICK_S = 0.2
"""How often a gateway looks whether anything is due."""
PROBE_S = 0.4
BAD_PROBES = 2
PATIENCE_S = 0.25
TIMEOUT_S = 1.2
"""Of the directory's client: then the batch may be done or not, and is not waited for."""
POLICIES = ("ownerserve", "ear", "sticky", "least_load")
SETTINGS = Settings(cool_s=0.3)
"""Sessions may move often."""
TOKENS = 640
HANG_S = 1.0
LOOPS_MAX = 12
"""Batches in a row, each by what the former one's answers were."""


class Turn(NamedTuple):
    session: SessionId
    parent: SessionId | None = None
    is_final: bool = False


class Job:
    """What the gateway's directory thread has to ask."""

    def __init__(
        self, requests: Sequence[ask.Request], heard: Callable[[Sequence[ask.Outcome]], None]
    ) -> None:
        self.requests = requests
        self.heard = heard
        self.is_given_up = False
        self.is_over = False


class Place:
    """A worker's address: who answers there."""

    def __init__(self, name: str, life: int) -> None:
        self.unit = RoutingUnit(WorkerId(name), 0, Incarnation(life))
        self.is_dead = False
        self.zombie: RoutingUnit | None = None
        """A former life that still answers, beside the present one."""
        self.silent_until_s = 0.0
        self.cut: dict[Gateway, float] = {}
        """Who cannot reach it, and until when."""
        self.pending = 0

    def is_silent_to(self, gateway: Gateway, now_s: float) -> bool:
        return now_s < self.silent_until_s or now_s < self.cut.get(gateway, 0.0)


class Gateway:
    """One life of a gateway process, without its sockets."""

    def __init__(self, world: World, number: int) -> None:
        rng = world.net.rng
        self.world, self.number = world, number
        policy = make_policy(world.policy or rng.choice(POLICIES), SETTINGS)
        self.state = RouterState(policy, settings=SETTINGS)
        self.owners = Owners(renew_s=RENEW_S)
        self.is_dead = False
        self.is_paused = False
        self.woke_s = 0.0
        self.asked = 0
        """Batches since it was last at rest, or waited in vain."""
        self.alive: dict[WorkerId, RoutingUnit] = {}
        """What it was told of workers, by this schedule."""
        self.epochs: dict[SessionId, list[Epoch | None]] = {}
        """The latest that its router followed and that its grants named."""
        self._bad: Counter[WorkerId] = Counter()
        self._pending: dict[Place, int] = {}
        """What its stamps said last: another word is only worth its while when it changed."""
        self._backlog: list[Callable[[], None]] = []
        self._jobs: deque[Job] = deque()
        self._is_asking = False
        self._channel_s = 0.0
        self._prompts = count()
        self._probe()
        self._tick()

    def do(self, action: Callable[[], None]) -> None:
        """Now, or when it wakes; never once it is dead."""
        if self.is_dead:
            return
        if self.is_paused:
            self._backlog.append(action)
        else:
            action()

    def pause(self, pause_s: float) -> None:
        self.is_paused = True
        self.world.net.after(pause_s, self._wake)

    def _wake(self) -> None:
        self.is_paused, self.woke_s = False, self.world.net.now_s
        backlog, self._backlog = self._backlog, []
        for action in backlog:
            self.do(action)

    def _tick(self) -> None:
        if not self.is_dead:
            self.world.net.after(TICK_S, self._tick)
            if not self.is_paused:
                self._ask_soon()

    # ---- turns

    def take(self, turn: Turn) -> None:
        """A client asks."""
        self.do(partial(self._take, turn))

    def _take(self, turn: Turn) -> None:
        taken_s = self.world.net.now_s
        if self.state.sessions.get(turn.session) is None:
            self._look_up(turn, taken_s)
        else:
            self._decide(turn, taken_s)

    def _look_up(self, turn: Turn, taken_s: float) -> None:
        requests = [self.owners.question(turn.session)]

        def heard(outcomes: Sequence[ask.Outcome]) -> None:
            if not job.is_given_up:
                job.is_given_up = True
                self._hear(requests, outcomes)
                self._decide(turn, taken_s)

        def give_up() -> None:
            if not job.is_given_up:
                job.is_given_up = True
                self.world.counts["look-ups given up"] += 1
                self._decide(turn, taken_s)

        job = Job(requests, heard)
        self.world.net.after(PATIENCE_S, partial(self.do, give_up))
        self._submit(job)

    def _decide(self, turn: Turn, taken_s: float) -> None:
        world = self.world
        if world.net.now_s > max(taken_s, self.woke_s) + PATIENCE_S + 1e-6:
            raise Violation(f"a turn of {turn.session} waited for the directory")
        shared = None if turn.parent is None else 2000
        arrive = Arrive(turn.session, 4000, parent=turn.parent, shared_bytes=shared)
        outcome = self.state.handle(arrive, world.net.now_s)
        if isinstance(outcome, Refuse) and any(worker.up for worker in self.state.fleet):
            raise Violation(f"a turn of {turn.session} was refused: {outcome.refusal}")
        self._follow(turn, outcome)

    def _follow(self, turn: Turn, outcome: Dispatch | Refuse) -> None:
        if isinstance(outcome, Refuse):
            if turn.session in self.world.last:
                self.world.refused(turn, self)
            return
        unit = unit_of(outcome.decision.worker)
        assert unit is not None and outcome.session == turn.session
        delay_s = self.world.net.rng.choice((0.001, 0.02, 0.2))
        self.world.net.after(delay_s, partial(self._reaches, turn, outcome, unit, 0.0))

    def _reaches(self, turn: Turn, dispatch: Dispatch, unit: RoutingUnit, hung_s: float) -> None:
        """At whoever lives at the worker's address now."""
        world = self.world
        place = world.places[unit.worker]
        if place.is_silent_to(self, world.net.now_s) and hung_s < HANG_S:
            again = partial(self._reaches, turn, dispatch, unit, hung_s + 0.3)
            world.net.after(0.3, again)
        elif place.is_silent_to(self, world.net.now_s):
            self.do(partial(self._fails, turn, dispatch, Failure.CLOSED))
        elif place.is_dead:
            self.do(partial(self._fails, turn, dispatch, Failure.CONNECT))
        elif unit not in (place.unit, place.zombie):
            self.do(partial(self._is_another, turn, dispatch, place))
        else:
            self.do(partial(self._begins, turn, dispatch, unit))

    def _is_another(self, turn: Turn, dispatch: Dispatch, place: Place) -> None:
        """Another life is there, refuses the turn, and its refusal tells so."""
        self.state.handle(Stamped(_status(place, self.world.net.now_s)), self.world.net.now_s)
        self._fails(turn, dispatch, Failure.REFUSED)

    def _fails(self, turn: Turn, dispatch: Dispatch, failure: Failure) -> None:
        event = Failed(dispatch.receipt, failure)
        self._follow(turn, self.state.handle(event, self.world.net.now_s))

    def _begins(self, turn: Turn, dispatch: Dispatch, unit: RoutingUnit) -> None:
        """The first byte, with the worker's word on the prompt."""
        world, now_s = self.world, self.world.net.now_s
        self.state.handle(FirstByte(dispatch.receipt), now_s)
        worker = dispatch.decision.worker
        if worker.up and unit_of(worker) == unit:
            known = self.alive.get(unit.worker)
            if known is None or known.incarnation < unit.incarnation:
                self.alive[unit.worker] = unit  # a stamp told of this life before any probe
            self.owners.runs_at(turn.session, unit, parent=turn.parent)
            world.ran(turn, self, unit)
            self._ask_soon()
        if world.net.rng.random() < world.tells[turn.session]:
            tip = PrefixHash(f"{turn.session}/{next(self._prompts)}".encode().ljust(32))
            self.state.handle(Reported(unit, Tier.DEVICE, tip, TOKENS, turn.session), now_s)
            world.tips[turn.session].append(tip)
            self.owners.stands_on(turn.session, unit, Extent(tip, TOKENS))
            self._ask_soon()
        end = partial(self.do, partial(self._ends, turn, dispatch, unit))
        world.net.after(world.net.rng.choice((0.0, 0.1, 0.8)), end)

    def _ends(self, turn: Turn, dispatch: Dispatch, unit: RoutingUnit) -> None:
        world, now_s, receipt = self.world, self.world.net.now_s, dispatch.receipt
        place = world.places[unit.worker]
        if place.is_dead or unit not in (place.unit, place.zombie):
            self.state.handle(Broken(receipt), now_s)
        elif not turn.is_final and world.net.rng.random() < 0.1:
            self.state.handle(Aborted(receipt), now_s)
        else:
            self.state.handle(Done(receipt, Usage(1000, 20, 500)), now_s)
            if turn.is_final:
                self.state.handle(SessionEnd(turn.session), now_s)
                self.epochs.pop(turn.session, None)
                self.owners.ends(turn.session)
                world.ended(turn, self)
                self._ask_soon()

    # ---- workers

    def _probe(self) -> None:
        if not self.is_dead:
            self.world.net.after(PROBE_S, self._probe)
            self.do(self._probe_all)

    def _probe_all(self) -> None:
        now_s = self.world.net.now_s
        for worker, place in self.world.places.items():
            if not place.is_dead and not place.is_silent_to(self, now_s):
                self._bad[worker] = 0
                self._hears(place, now_s)
                continue
            self._bad[worker] += 2 if place.is_dead else 1
            if self._bad[worker] >= BAD_PROBES:
                self.state.handle(WorkerDown(worker, Down.UNHEALTHY), now_s)
                self.alive.pop(worker, None)
                self.owners.silent(worker)

    def _hears(self, place: Place, now_s: float) -> None:
        unit = place.unit
        if place.zombie is not None and self.world.net.rng.random() < 0.5:
            unit = place.zombie
        self.state.handle(WorkerUp(unit.worker, 0, unit.incarnation), now_s)
        if place.pending != self._pending.get(place):
            self._pending[place] = place.pending
            self.state.handle(Stamped(_status(place, now_s)), now_s)
        known = self.alive.get(unit.worker)
        if known is None or known.incarnation < unit.incarnation:
            self.alive[unit.worker] = unit
        self.owners.lives(unit)
        self._ask_soon()

    # ---- the directory

    def _ask_soon(self) -> None:
        if not self._is_asking:
            self._is_asking = True
            self._ask()

    def _ask(self) -> None:
        requests = self.owners.due(self.world.net.now_s)
        if not requests:
            self._is_asking, self.asked = False, 0
            return
        self.asked += 1
        if self.asked > LOOPS_MAX and self.world.net.now_s > self.world.net.heal_s + TIMEOUT_S:
            raise Violation(f"gateway {self.number} asks in a loop: {requests}")
        for request in requests:
            if isinstance(request, ask.Register | ask.RenewLease):
                self._look_at_life(request)
        self._submit(Job(requests, partial(self._answered, requests)))

    def _look_at_life(self, request: ask.Register | ask.RenewLease) -> None:
        unit = request.unit
        if self.alive.get(unit.worker) != unit:
            raise Violation(f"gateway {self.number} speaks for {unit}, which it has not heard")

    def _answered(self, requests: Sequence[ask.Request], outcomes: Sequence[ask.Outcome]) -> None:
        self._hear(requests, outcomes)
        self._ask()

    def _hear(self, requests: Sequence[ask.Request], outcomes: Sequence[ask.Outcome]) -> None:
        now_s = self.world.net.now_s
        for claimed in self.owners.answered(requests, outcomes):
            self.state.handle(claimed, now_s)
        for request in requests:
            session = getattr(request, "session_id", None)
            if session is not None:
                self._look_at_epochs(session)

    def _look_at_epochs(self, session: SessionId) -> None:
        """Neither the router nor the grants go back."""
        known, grant = self.state.sessions.get(session), self.owners.grants.get(session)
        now = (known and known.epoch, grant and grant.epoch)
        before = self.epochs.setdefault(session, [None, None])
        for index, (was, epoch) in enumerate(zip(before, now, strict=True)):
            if epoch is None:
                continue
            if was is not None and epoch < was:
                raise Violation(f"gateway {self.number} went back to {epoch} of {session}")
            before[index] = epoch

    def _submit(self, job: Job) -> None:
        self._jobs.append(job)
        if len(self._jobs) == 1:
            self._start(job)

    def _start(self, job: Job) -> None:
        """The thread's next: over the network, in the order sent."""
        world, net = self.world, self.world.net
        net.after(TIMEOUT_S, partial(self.do, partial(self._times_out, job)))
        if world.loses():
            world.counts["batches lost"] += 1
            return
        self._channel_s = max(self._channel_s, net.now_s + world.delay_s())
        net.at(self._channel_s, partial(world.arrives, self, job))

    def _times_out(self, job: Job) -> None:
        if not job.is_over:
            self.asked = 0  # time has passed: that is no loop
            self.heard(job, [ask.Refused(ask.Refusal.UNREACHABLE) for _ in job.requests])

    def heard(self, job: Job, outcomes: Sequence[ask.Outcome]) -> None:
        """The first answer counts."""
        if job.is_over:
            return
        job.is_over = True
        self._jobs.popleft()
        while self._jobs and self._jobs[0].is_given_up:
            self._jobs.popleft()
        if self._jobs:
            self._start(self._jobs[0])
        job.heard(outcomes)


def _status(place: Place, now_s: float) -> WorkerLoad:
    return WorkerLoad(place.unit, now_s, place.pending, 0, 0, 0, 0)
