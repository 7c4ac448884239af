"""The queue before the fleet: who is next, for how long one may wait, and who is turned away."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import SessionId, WorkerId
from ownerserve.router.admission import SeatSettings, SessionAdmission, Wait
from ownerserve.router.entry.fair import FLOWS_MIN, FairLine, InLine, Ticket
from ownerserve.router.entry.limits import LimitKind, RateLimits
from ownerserve.router.entry.queue import STALE_MAX, AdmissionQueue, HeldTurn, QueueSettings
from ownerserve.router.entry.running import RunningLimit, TurnPace
from ownerserve.router.entry.terms import (
    EnteringTurn,
    Priorities,
    SessionClass,
    TenantTerms,
    TurnAwayReason,
    TurnedAway,
)
from ownerserve.router.fleet import Fleet
from ownerserve.router.messages import Down, WorkerUp
from ownerserve.router.worker import Load, Profile, Worker
from tests.support.examples import examples
from tests.support.router.fleets import PLAIN, fleet_of, load

INSIDE, NEW, BATCH = SessionClass.INSIDE, SessionClass.NEW, SessionClass.BATCH


def entering(
    tenant: str = "a",
    cost: int = 100,
    session_class: SessionClass = NEW,
    *,
    weight: float = 1.0,
    came_s: float = 0.0,
    deadline_s: float = inf,
    model: str | None = None,
    session: str | None = None,
    limits: tuple[float | None, float | None] = (None, None),
) -> EnteringTurn:
    return EnteringTurn(
        session=None if session is None else SessionId(session),
        prompt_tokens=cost,
        cost_tokens=cost,
        tenant=tenant,
        terms=TenantTerms(
            name=tenant, weight=weight, requests_per_minute=limits[0], tokens_per_minute=limits[1]
        ),
        session_class=session_class,
        model=model,
        came_s=came_s,
        deadline_s=deadline_s,
    )


@contextmanager
def held_bytes() -> Iterator[Callable[[], int]]:
    """What is held at the end of what was allocated within."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    after: list[int] = []
    try:
        yield lambda: after[0] - before
        after.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()


class Told:
    """An entrant that runs on a worker while it is in, and remembers what it heard."""

    def __init__(self, world: Door) -> None:
        self.world = world
        self.began_s: float | None = None
        self.no: TurnedAway | None = None
        self.work: tuple[Worker, Load] | None = None

    def go(self, now_s: float) -> None:
        assert self.began_s is None and self.no is None, "told once"
        self.began_s = now_s
        worker = min(self.world.fleet, key=lambda one: one.requests)
        if worker.up:
            self.work = worker, Load(now_s, 0, 0)
            worker.add(self.work[1])

    def turned_away(self, no: TurnedAway) -> None:
        assert self.began_s is None and self.no is None, "told once"
        self.no = no


class Door:
    """A queue before workers of which each runs `running_max` turns."""

    def __init__(
        self,
        *,
        workers: int = 1,
        seats: SeatSettings | None = None,
        running_max: int = 2,
        waiting_max: int = 8,
        wait_s: float = 45.0,
    ) -> None:
        self.fleet = fleet_of(*[Profile(speed=PLAIN.speed, kv_bytes_total=100_000_000)] * workers)
        limits = QueueSettings(running_max=running_max, waiting_max=waiting_max, wait_s=wait_s)
        self.seats = None if seats is None else SessionAdmission(self.fleet, seats)
        self.queue = AdmissionQueue(
            self.seats,
            RunningLimit(self.fleet, running_max),
            settings=limits,
            running=lambda: sum(one.requests for one in self.fleet),
        )

    def come(self, turn: EnteringTurn) -> tuple[Told, HeldTurn | None]:
        told = Told(self)
        return told, self.queue.enter(turn, told, now_s=turn.came_s)

    def end(self, told: Told, now_s: float, session: str | None = None) -> None:
        assert told.work is not None
        worker, work = told.work
        worker.take(work)
        told.work = None
        self.queue.ended(None if session is None else SessionId(session), 10, now_s)


def test_a_fair_line_serves_by_weight() -> None:
    """A has twice B's weight: of equal turns it gets two for each of B's."""
    line = FairLine()
    for number in range(30):
        tenant = "ab"[number % 2]
        turn = entering(tenant, 100, weight=2.0 if tenant == "a" else 1.0)
        line.add(InLine(Ticket(number), turn))
    expected = [one.ticket for one in line.in_order()]
    served = []
    for _ in range(15):
        one = line.first()
        served.append(one)
        line.pop(one.ticket)
    assert [one.ticket for one in served] == expected[:15]
    assert sum(one.turn.tenant == "a" for one in served) == 10


def test_small_turns_do_not_stand_behind_a_giant_of_another_tenant() -> None:
    """Deficit round robin with a quantum as long as the longest turn would serve `giants` first."""
    line = FairLine()
    for number in range(5):
        line.add(InLine(Ticket(number), entering("giants", 200_000)))
    line.pop(Ticket(0))
    for number in range(10, 110):
        line.add(InLine(Ticket(number), entering("small", 1_000)))
    assert all(one.turn.tenant == "small" for one in list(line.in_order())[:99])


def test_a_tenants_classes_share_what_it_has() -> None:
    """Of its 21 parts inside has 16, new 4 and batch 1; none starves."""
    line = FairLine()
    for number in range(210):
        line.add(InLine(Ticket(number), entering("a", 100, (INSIDE, NEW, BATCH)[number % 3])))
    served = [line.pop(line.first().ticket).turn.session_class for _ in range(84)]
    assert [served.count(one) for one in (INSIDE, NEW, BATCH)] == [64, 16, 4]


def test_nobody_saves_up_and_nobody_pays_for_what_was_free() -> None:
    line = FairLine()
    for _ in range(50):
        line.charge(entering("busy", 1_000))  # alone, while there was room
    line.add(InLine(Ticket(1), entering("busy", 1_000)))
    for number in range(2, 6):
        line.add(InLine(Ticket(number), entering("fresh", 1_000)))
    order = [one.turn.tenant for one in line.in_order()]
    assert order.index("busy") <= 2, "what it took before is forgotten but for the last turn"
    assert order.count("fresh") == 4


def test_who_went_by_just_now_stands_behind_who_did_not() -> None:
    line = FairLine()
    for _ in range(50):
        line.charge(entering("busy", 1_000))
    line.charge(entering("b", 1_000))
    line.add(InLine(Ticket(1), entering("b", 1_000)))
    line.add(InLine(Ticket(2), entering("c", 1_000)))
    assert line.first().turn.tenant == "c"


def test_a_class_that_was_away_has_saved_nothing_up() -> None:
    line = FairLine()
    for number in range(150):
        line.add(InLine(Ticket(number), entering("a", 100, INSIDE)))
    for _ in range(100):
        line.pop(line.first().ticket)
    for number in range(200, 220):
        line.add(InLine(Ticket(number), entering("a", 100, BATCH)))
    served = [line.pop(line.first().ticket).turn.session_class for _ in range(17)]
    assert served.count(BATCH) <= 2


COSTS = st.integers(1, 5_000)
TENANTS = {"a": 1.0, "b": 1.0, "c": 3.0, "d": 0.5}


Flow = tuple[str, str]
"""A tenant, and one of its classes or "", itself."""


class FairPlay(RuleBasedStateMachine):
    """A fair line against what fairness is, by an account of its own: in any stretch of time in
    which two tenants wait without a break, what each was given over its weight differs by no more
    than the longest turn of each over its weight. The classes of one tenant in the same way."""

    def __init__(self) -> None:
        super().__init__()
        self.line = FairLine()
        self.number = 0
        self.waiting: dict[Ticket, EnteringTurn] = {}
        self.given: dict[Flow, float] = {}
        """What a flow was given over its weight, since it began to wait."""
        self.longest: dict[Flow, float] = {}
        self.since: dict[tuple[Flow, Flow], tuple[float, float]] = {}
        """Of each two flows that wait: what each had when the later of them began to."""

    @staticmethod
    def flows(turn: EnteringTurn) -> list[tuple[Flow, float]]:
        share = turn.terms.priorities.of(turn.session_class)
        return [
            ((turn.tenant, ""), turn.terms.weight),
            ((turn.tenant, turn.session_class), share),
        ]

    def backlogged(self) -> set[Flow]:
        return {flow for turn in self.waiting.values() for flow, _ in self.flows(turn)}

    def pairs(self) -> set[tuple[Flow, Flow]]:
        """Two tenants, or two classes of one tenant."""
        flows = self.backlogged()
        return {
            (one, other)
            for one in flows
            for other in flows
            if one < other and bool(one[1]) is bool(other[1]) and (not one[1] or one[0] == other[0])
        }

    def note(self) -> None:
        present = self.pairs()
        for pair in set(self.since) - present:
            del self.since[pair]
        for pair in present - set(self.since):
            self.since[pair] = (self.given.get(pair[0], 0.0), self.given.get(pair[1], 0.0))

    def count(self, turn: EnteringTurn) -> None:
        for flow, weight in self.flows(turn):
            self.given[flow] = self.given.get(flow, 0.0) + turn.cost_tokens / weight

    @rule(
        tenant=st.sampled_from(sorted(TENANTS)),
        cost=COSTS,
        session_class=st.sampled_from(list(SessionClass)),
        times=st.integers(1, 4),
    )
    def comes(self, tenant: str, cost: int, session_class: SessionClass, times: int) -> None:
        for _ in range(times):
            self.number += 1
            turn = entering(tenant, cost, session_class, weight=TENANTS[tenant])
            self.line.add(InLine(Ticket(self.number), turn))
            self.waiting[Ticket(self.number)] = turn
            for flow, weight in self.flows(turn):
                self.longest[flow] = max(self.longest.get(flow, 0.0), cost / weight)
        self.note()

    @precondition(lambda self: not self.waiting)
    @rule(tenant=st.sampled_from(sorted(TENANTS)), cost=COSTS)
    def goes_by(self, tenant: str, cost: int) -> None:
        turn = entering(tenant, cost, weight=TENANTS[tenant])
        self.line.charge(turn)
        for flow, weight in self.flows(turn):
            self.longest[flow] = max(self.longest.get(flow, 0.0), cost / weight)

    @precondition(lambda self: self.waiting)
    @rule(times=st.integers(1, 6))
    def is_served(self, times: int) -> None:
        for _ in range(min(times, len(self.waiting))):
            one = self.line.first()
            flow = self.flows(one.turn)[1][0]
            mine = [t for t, turn in self.waiting.items() if self.flows(turn)[1][0] == flow]
            assert one.ticket == min(mine), "in the order of arrival within a class"
            assert one.ticket == next(iter(self.line.in_order())).ticket
            assert self.line.pop(one.ticket) is one
            self.count(self.waiting.pop(one.ticket))
            self.note()
            self.is_fair()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def hangs_up(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.line.leave(ticket) is not None
        assert self.line.leave(ticket) is None
        del self.waiting[ticket]
        self.note()

    @invariant()
    def is_fair(self) -> None:
        assert len(self.line) == len(self.waiting)
        assert {one.ticket for one in self.line.in_order()} == set(self.waiting)
        for (one, other), (had, other_had) in self.since.items():
            got = self.given.get(one, 0.0) - had
            other_got = self.given.get(other, 0.0) - other_had
            bound = self.longest[one] + self.longest[other]
            assert abs(got - other_got) <= bound + 1e-6, (one, other, got, other_got)


FairPlay.TestCase.settings = settings(
    max_examples=examples(60),
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],  # of a busy machine
)
TestFairPlay = FairPlay.TestCase


def test_turns_beyond_the_limit_wait_and_each_end_lets_one_in() -> None:
    door = Door()
    first, second = (door.come(entering(session="s")) for _ in range(2))
    assert first[0].began_s == second[0].began_s == 0.0 and first[1] is None
    late, held = door.come(entering(session_class=INSIDE, came_s=1.0))
    assert late.began_s is None and held is not None and len(door.queue) == 1
    door.end(first[0], 2.5)
    assert late.began_s == 2.5 and not held.waits and len(door.queue) == 0


def test_a_turn_past_its_deadline_is_turned_away_and_never_kept() -> None:
    door = Door()
    running = [door.come(entering())[0] for _ in range(2)]
    by_client, _ = door.come(entering(deadline_s=5.0, came_s=1.0))
    by_default, _ = door.come(entering(came_s=1.0))
    assert door.queue.next_due_s(1.0) == 2.0, "workers may come up meanwhile"
    door.queue.look(4.9)
    assert by_client.no is None
    door.queue.look(5.0)
    assert by_client.no is not None and by_client.no.reason is TurnAwayReason.DEADLINE_PAST
    door.queue.look(45.9)
    assert by_default.no is None
    door.queue.look(46.0)
    assert by_default.no is not None and not len(door.queue)
    door.end(running[0], 50.0)
    assert by_default.began_s is None


def test_a_deadline_that_cant_be_met_is_told_at_once_by_the_measured_pace() -> None:
    """Two run 10 s each: one ends every 5 s. Who comes third waits for 15 s."""
    door = Door()
    for number in range(4):
        told = [door.come(entering(came_s=10.0 * number))[0] for _ in range(2)]
        for one in told:
            door.end(one, 10.0 * (number + 1))
    running = [door.come(entering(came_s=40.0))[0] for _ in range(2)]
    for _ in range(2):
        assert door.come(entering(came_s=40.0))[1] is not None
    hasty, _ = door.come(entering(came_s=40.0, deadline_s=52.0))
    assert hasty.no is not None and hasty.no.reason is TurnAwayReason.DEADLINE_UNMET
    assert hasty.no.retry_after_s == pytest.approx(3.0, abs=0.5), "15 s less the 12 it has"
    patient, held = door.come(entering(came_s=40.0, deadline_s=57.0))
    assert held is not None and patient.no is None
    for one in running:
        door.end(one, 50.0)


def test_nothing_measured_turns_nobody_away_early() -> None:
    door = Door()
    for _ in range(2):
        door.come(entering())
    told, held = door.come(entering(came_s=30.0, deadline_s=31.0))
    assert held is not None and told.no is None


def test_a_full_queue_pushes_out_of_whoever_has_most_of_it() -> None:
    door = Door()
    for _ in range(2):
        door.come(entering("flood"))
    flood = [door.come(entering("flood", came_s=1.0))[0] for _ in range(20)]
    assert [one.no is None for one in flood] == [True] * 8 + [False] * 12
    assert {one.no.reason for one in flood if one.no} == {TurnAwayReason.QUEUE_FULL}
    other = [door.come(entering("other", came_s=2.0))[0] for _ in range(6)]
    assert [one.no is None for one in other] == [True] * 4 + [False] * 2
    assert [one.no is None for one in flood[:8]] == [True] * 4 + [False] * 4, "the newest go"
    heavy = [door.come(entering("heavy", weight=2.0, came_s=3.0))[0] for _ in range(6)]
    assert [one.no is None for one in heavy] == [True] * 4 + [False] * 2
    assert len(door.queue) == 8


def test_in_a_full_queue_background_work_goes_first() -> None:
    door = Door(waiting_max=3)
    for _ in range(2):
        door.come(entering())
    batch = [door.come(entering(session_class=BATCH))[0] for _ in range(3)]
    _, held = door.come(entering(session_class=INSIDE))
    assert held is not None and batch[2].no is not None and batch[1].no is None


def test_who_hangs_up_is_forgotten() -> None:
    door = Door()
    running = [door.come(entering())[0] for _ in range(2)]
    gone, held = door.come(entering(came_s=1.0))
    stays, _ = door.come(entering(came_s=1.0))
    assert held is not None
    door.queue.leave(held, 2.0)
    door.queue.leave(held, 2.0)
    door.end(running[0], 3.0)
    assert gone.began_s is None and stays.began_s == 3.0


def test_models_do_not_wait_for_each_others_workers() -> None:
    fleet = Fleet()
    for name in ("m", "n"):
        fleet.raise_up(WorkerUp(WorkerId(f"w{name}"), profile=Profile(model=name)))
    limit = RunningLimit(fleet, 1)
    workers = {worker.profile.model: worker for worker in fleet}
    load(workers["m"], sequences=1)
    assert not limit.takes(entering(model="m"))
    assert limit.takes(entering(model="n"))
    limit.add(InLine(Ticket(1), entering(model="m")))
    assert limit.next() is None and limit.takes(entering(model="n"))
    assert limit.takes(entering(model="nobody's")), "it is refused at once"


def test_models_that_the_same_workers_serve_take_turns() -> None:
    """A flood for one model (an adapter of an engine that has several) keeps no other waiting."""
    fleet = Fleet()
    fleet.raise_up(WorkerUp(WorkerId("w"), profile=Profile(model="m", adapters=frozenset("n"))))
    limit = RunningLimit(fleet, 1)
    for number in range(6):
        limit.add(InLine(Ticket(number), entering(model="m")))
    for number in range(6, 9):
        limit.add(InLine(Ticket(number), entering(model="n")))
    served = [limit.next() for _ in range(9)]
    assert served == [0, 6, 1, 7, 2, 8, 3, 4, 5]


def test_keys_that_are_made_up_do_not_fill_the_line() -> None:
    """Without a tenants file each new key is a tenant: who took most is remembered longest."""
    line = FairLine()
    line.charge(entering("greedy", 1_000_000))
    with held_bytes() as held:
        for number in range(5 * FLOWS_MIN):
            line.charge(entering(f"made up {number}"))
    assert held() < 1024 * 1.5 * FLOWS_MIN
    line.add(InLine(Ticket(1), entering("greedy")))
    line.add(InLine(Ticket(2), entering("new")))
    assert line.first().ticket == 2


def test_nobody_overtakes_the_line_when_a_worker_comes_up() -> None:
    door = Door(running_max=1)
    door.come(entering())
    first, _ = door.come(entering(came_s=1.0))
    profile = Profile(speed=PLAIN.speed)
    door.fleet.raise_up(WorkerUp(WorkerId("late"), profile=profile))
    second, held = door.come(entering(came_s=1.5))
    assert second.began_s is None and held is not None
    assert door.queue.next_due_s(1.5) == 2.5
    door.queue.look(2.5)
    assert first.began_s == 2.5 and second.began_s is None


def test_when_no_worker_is_up_nobody_waits() -> None:
    door = Door()
    told = [door.come(entering(came_s=1.0))[0] for _ in range(4)]
    assert told[3].began_s is None
    (worker,) = door.fleet
    door.fleet.take_down(worker.id, Down.REMOVED)
    door.queue.look(2.0)
    assert [one.began_s for one in told] == [1.0, 1.0, 2.0, 2.0], "to be refused by the router"


def test_a_drained_gateway_lets_all_go() -> None:
    door = Door()
    told = [door.come(entering())[0] for _ in range(5)]
    door.queue.let_all_in(1.0)
    assert [one.began_s for one in told] == [0.0, 0.0, 1.0, 1.0, 1.0] and not len(door.queue)


def test_a_turn_with_a_seat_that_is_turned_away_gives_it_back() -> None:
    door = Door(running_max=1, seats=SeatSettings(share=1.0, growth_tokens=0, idle_s=600.0))
    first, _ = door.come(entering(session="s1", cost=60_000))
    assert first.began_s == 0.0
    second, held = door.come(entering(session="s2", cost=30_000, came_s=1.0, deadline_s=3.0))
    assert held is not None and held.seat is None, "it has its seat, and waits for a place"
    assert door.seats is not None
    door.queue.look(3.0)
    assert second.no is not None
    door.seats.check()
    third, held = door.come(entering(session="s3", cost=35_000, came_s=4.0))
    assert held is not None and held.seat is None, "there is room for it again"
    door.end(first, 5.0, "s1")
    assert third.began_s == 5.0
    door.seats.check()


def test_who_waits_for_a_seat_is_served_by_weight_too() -> None:
    """A flood of one tenant's sessions stood before everybody else's for its whole patience."""
    rules = SeatSettings(share=1.0, growth_tokens=0, patience_s=600.0)
    fleet = fleet_of(Profile(speed=PLAIN.speed, kv_bytes_total=100_000_000))
    room = SessionAdmission(fleet, rules)
    for worker in fleet:
        load(worker, sequences=1)
    room.ask(SessionId("in"), 95_000, parent=None, now_s=0.0)
    for number in range(20):
        room.ask(SessionId(f"f{number}"), 90_000, parent=None, now_s=1.0, tenant="flood")
    one = room.ask(SessionId("o"), 90_000, parent=None, now_s=2.0, tenant="other")
    assert isinstance(one, Wait)
    for inside in ("in", "f0"):
        room.over(SessionId(inside))
        (ticket,) = room.due(10.0)
    assert ticket == one.ticket, "second, behind one of the flood's twenty"


def test_the_pace_is_what_a_turn_takes() -> None:
    pace = TurnPace()
    pace.note(0, 0.0)
    for number in range(200):
        pace.note(4, 2.5 * number)  # four run, one ends every 2.5 s: 10 s each
        pace.note(4, 2.5 * (number + 1))
        pace.ended()
    assert pace.turn_s == pytest.approx(10.0, rel=0.05)
    assert pace.is_measured


class QueuePlay(RuleBasedStateMachine):
    """Any order of arrivals, ends, hang-ups and waits: nobody is told twice, nobody is kept past a
    deadline, nobody waits beside a free place, the queue is bounded, and who is refused for a full
    queue has no less of it, for its weight, than anybody else."""

    def __init__(self) -> None:
        super().__init__()
        self.door = Door(workers=2, running_max=2, waiting_max=6, wait_s=20.0)
        self.now_s = 0.0
        self.waiting: list[tuple[Told, HeldTurn]] = []
        self.running: list[Told] = []

    def settle(self) -> None:
        for told, held in list(self.waiting):
            if told.began_s is not None:
                self.running.append(told)
            if told.began_s is not None or told.no is not None:
                self.waiting.remove((told, held))
                assert not held.waits

    @rule(
        tenant=st.sampled_from(sorted(TENANTS)),
        cost=COSTS,
        session_class=st.sampled_from(list(SessionClass)),
        deadline=st.none() | st.floats(0.1, 40.0),
    )
    def comes(
        self, tenant: str, cost: int, session_class: SessionClass, deadline: float | None
    ) -> None:
        turn = entering(
            tenant,
            cost,
            session_class,
            weight=TENANTS[tenant],
            came_s=self.now_s,
            deadline_s=inf if deadline is None else self.now_s + deadline,
        )
        told, held = self.door.come(turn)
        if held is not None:
            self.waiting.append((told, held))
        elif told.began_s is not None:
            self.running.append(told)
        else:
            assert told.no is not None and 1.0 <= told.no.retry_after_s <= 600.0
            if told.no.reason is TurnAwayReason.QUEUE_FULL:
                has = dict.fromkeys(TENANTS, 0.0)
                for other in self.door.queue.waiting():
                    has[other.turn.tenant] += 1 / TENANTS[other.turn.tenant]
                assert has[tenant] + 1 / TENANTS[tenant] >= max(has.values()) - 1e-9
        self.settle()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        told = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.door.end(told, self.now_s)
        self.settle()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def hangs_up(self, data: st.DataObject) -> None:
        told, held = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        self.door.queue.leave(held, self.now_s)
        assert told.began_s is None and told.no is None

    @rule(seconds=st.floats(0.01, 15.0))
    def time_passes(self, seconds: float) -> None:
        """As a runtime's timer: it looks whenever the queue says that something is due."""
        until_s = self.now_s + seconds
        while True:
            due_s = self.door.queue.next_due_s(self.now_s)
            if due_s is None or due_s > until_s:
                break
            self.now_s = max(due_s, self.now_s)
            self.door.queue.look(self.now_s)
        self.now_s = until_s
        self.settle()

    @invariant()
    def is_whole(self) -> None:
        queue = self.door.queue
        assert len(queue) == len(self.waiting) <= 6
        assert sum(one.requests for one in self.door.fleet) == len(self.running) <= 4
        if self.waiting:
            assert len(self.running) == 4, "nobody waits beside a free place"
        for told, held in self.waiting:
            assert told.no is None and held.waits
            until_s = min(held.turn.deadline_s, held.turn.came_s + 20.0)
            assert self.now_s < until_s, "nobody is kept past a deadline"


QueuePlay.TestCase.settings = settings(
    max_examples=examples(60),
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow],  # of a busy machine
)
TestQueuePlay = QueuePlay.TestCase


def test_a_rate_limit_says_exactly_when_there_is_enough() -> None:
    limits, terms = RateLimits(), TenantTerms(requests_per_minute=60, tokens_per_minute=6000)
    for _ in range(60):
        assert limits.look("a", terms, 10, now_s=0.0) is None
        limits.take("a", terms, 10, now_s=0.0)
    over = limits.look("a", terms, 10, now_s=0.25)
    assert over is not None and over.kind is LimitKind.REQUESTS
    assert over.retry_after_s == pytest.approx(0.75)
    assert limits.look("a", terms, 10, now_s=0.25 + over.retry_after_s + 1e-9) is None
    assert limits.look("b", terms, 10, now_s=0.0) is None, "another tenant's is its own"
    limits.settle("a", terms, 11_400, now_s=1.0)  # its answers were long: it is in debt
    over = limits.look("a", terms, 10, now_s=1.0)
    assert over is not None and over.kind is LimitKind.TOKENS
    assert over.retry_after_s == pytest.approx((6010 - 100) / 100)
    states = limits.states("a", terms, 1.0)
    assert [(one.kind, one.left) for one in states] == [("requests", 1.0), ("tokens", 0.0)]
    limits.settle("a", terms, -100_000, now_s=1.0)
    assert limits.states("a", terms, 1.0)[1].left == 6000, "no more than a minute's worth"


def test_a_turn_longer_than_a_minutes_worth_goes_when_the_bucket_is_full() -> None:
    limits, terms = RateLimits(), TenantTerms(tokens_per_minute=1000)
    assert limits.look("a", terms, 5000, now_s=0.0) is None
    limits.take("a", terms, 5000, now_s=0.0)
    over = limits.look("a", terms, 5000, now_s=0.0)
    assert over is not None and over.retry_after_s == pytest.approx(300.0)


def test_new_limits_hold_at_once() -> None:
    limits = RateLimits()
    for _ in range(10):
        limits.take("a", TenantTerms(requests_per_minute=60), 1, now_s=0.0)
    over = limits.look("a", TenantTerms(requests_per_minute=5), 1, now_s=0.0)
    assert over is not None and over.retry_after_s == pytest.approx(72.0)


@pytest.mark.parametrize("wrong", [0.0, -1.0, inf])
def test_terms_are_more_than_nothing(wrong: float) -> None:
    with pytest.raises(InvalidInput):
        TenantTerms(weight=wrong)
    with pytest.raises(InvalidInput):
        TenantTerms(requests_per_minute=wrong)
    with pytest.raises(InvalidInput):
        TenantTerms(tokens_per_minute=wrong)
    with pytest.raises(InvalidInput):
        Priorities(batch=0.0)
    with pytest.raises(InvalidInput):
        QueueSettings(running_max=0)


def seats_only(waiting_max: int = 8) -> AdmissionQueue:
    """A queue before a worker whose memory one session fills, for 600 s of patience."""
    fleet = fleet_of(Profile(speed=PLAIN.speed, kv_bytes_total=100_000_000))
    for worker in fleet:
        load(worker, sequences=1)
    rules = SeatSettings(share=1.0, growth_tokens=0, patience_s=600.0)
    queue = AdmissionQueue(
        SessionAdmission(fleet, rules), settings=QueueSettings(waiting_max=waiting_max)
    )
    inside = Inside()
    queue.enter(entering(session="in", cost=95_000), inside, now_s=0.0)
    assert inside.said == ["go"]
    return queue


class Inside:
    """An entrant that only remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def go(self, now_s: float) -> None:
        self.said.append("go")

    def turned_away(self, no: TurnedAway) -> None:
        self.said.append(f"{no.reason} {no.retry_after_s:g}")


def test_a_deadline_ends_the_wait_for_a_seat_too() -> None:
    queue = seats_only()
    hasty, patient = Inside(), Inside()
    for told, deadline_s in ((hasty, 10.0), (patient, inf)):
        turn = entering(session=f"{deadline_s}", cost=90_000, deadline_s=deadline_s)
        assert queue.enter(turn, told, now_s=0.0) is not None
    assert queue.next_due_s(0.0) == 10.0 and len(queue) == 2
    queue.look(10.0)
    assert hasty.said == ["deadline_past 590"] and len(queue) == 1
    queue.ended_last(SessionId("in"), 20.0)
    assert patient.said == ["go"], "nobody stands before it any more"


def test_the_wait_for_seats_is_bounded_too() -> None:
    """Who is one too many hears when the next of those that wait goes."""
    queue = seats_only(waiting_max=2)
    told = [Inside() for _ in range(3)]
    for number, one in enumerate(told):
        turn = entering(session=f"{number}", cost=90_000, came_s=100.0 * number)
        queue.enter(turn, one, now_s=turn.came_s)
    assert [one.said for one in told] == [[], [], ["queue_full 400"]]
    queue.let_past_seats(300.0)
    assert [one.said for one in told[:2]] == [["go"], ["go"]] and not len(queue)


def test_a_turn_past_its_deadline_does_not_begin_though_there_is_room() -> None:
    door = Door(seats=SeatSettings(share=1.0, growth_tokens=0))
    late, held = door.come(entering(session="s", cost=10, came_s=7.0, deadline_s=6.5))
    assert held is None and late.began_s is None
    assert late.no is not None and late.no.reason is TurnAwayReason.DEADLINE_PAST
    assert door.seats is not None
    door.seats.check()
    big, _ = door.come(entering(session="big", cost=100_000, came_s=8.0))
    assert big.began_s == 8.0, "its seat is free"


def test_deadlines_of_those_who_hung_up_are_not_kept() -> None:
    queue = seats_only()
    stays = Inside()
    queue.enter(entering(session="stays", cost=90_000, deadline_s=50.0), stays, now_s=0.0)
    with held_bytes() as held:
        for number in range(8 * STALE_MAX):
            turn = entering(session="goes", cost=90_000, deadline_s=3600.0 + number)
            waits = queue.enter(turn, Inside(), now_s=0.0)
            assert waits is not None
            queue.leave(waits, 0.0)
    assert held() < 128 * 2 * STALE_MAX
    queue.look(50.0)
    assert stays.said and not len(queue)
