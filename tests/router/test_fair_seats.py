"""Seats before which sessions of several tenants and classes wait: how long each waits at most."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ownerserve.router.admission import SeatSettings, SessionAdmission, Wait
from ownerserve.router.entry.fair import Ticket
from ownerserve.router.entry.terms import SessionClass, TenantTerms
from ownerserve.router.worker import Load, Profile, Worker
from tests.router.test_seats import s
from tests.support.examples import examples
from tests.support.router.fleets import PLAIN, fleet_of

KNOWN = Profile(speed=PLAIN.speed, kv_bytes_total=100_000_000)
"""100,000 tokens of 1,000 bytes."""
PATIENCE_S = 45.0
RULES = SeatSettings(growth_tokens=0, idle_s=60.0, patience_s=PATIENCE_S)
WEIGHTS = {"small": 0.25, "plain": 1.0, "large": 8.0}
FRESH = "fresh"
"""A tenant that was never seen before: a key that no file names is one."""


def full() -> tuple[SessionAdmission, Worker, Load]:
    """Seats before a worker that does the work given, for a session that leaves 5,000 tokens."""
    fleet = fleet_of(KNOWN)
    (worker,), work = fleet, Load(0.0, 0, 10)
    worker.add(work)
    worker.bound_sessions = 1
    room = SessionAdmission(fleet, RULES)
    room.ask(s("inside"), 95_000, parent=None, now_s=0.0)
    return room, worker, work


def new(room: SessionAdmission, name: str, tenant: str, now_s: float) -> Ticket:
    answer = room.ask(s(name), 50_000, parent=None, now_s=now_s, tenant=tenant)
    assert isinstance(answer, Wait)
    return answer.ticket


def test_tenants_that_were_never_seen_before_keep_nobody_waiting_for_ever() -> None:
    """By the fair line alone each of them went before the second session of one that had one."""
    room, _, _ = full()
    first, second = (new(room, name, "a", 0.0) for name in ("a1", "a2"))
    others = []
    for number in range(4):
        others.append(new(room, f"n{number}", f"tenant {number}", number * PATIENCE_S))
        due_s = (number + 1) * PATIENCE_S
        assert room.next_due_s() == due_s
        assert room.due(due_s - 1.0) == []
        assert room.due(due_s) == [[first, second, *others][number]]


def test_one_at_a_time_is_let_in_without_room_wherever_it_stands() -> None:
    """All whose patience was over were let in at once behind one that no idle worker took."""
    room, worker, work = full()
    tickets = [new(room, f"a{number}", "a", 0.0) for number in range(4)]
    assert room.due(PATIENCE_S) == tickets[:1]
    new(room, "b", "b", PATIENCE_S + 1.0)
    worker.take(work)
    assert room.due(2 * PATIENCE_S) == tickets[1:2]
    assert room.impatient == 2


class Newcomer:
    """A session that waits since `since_s` behind so many who came `before` it."""

    def __init__(self, session: tuple[str, str], since_s: float, before: int) -> None:
        self.session = session
        self.since_s = since_s
        self.before = before

    def until_s(self) -> float:
        return self.since_s + PATIENCE_S * (self.before + 1)


class TenantsPlay(RuleBasedStateMachine):
    """Sessions of all classes, of tenants of unlike weights, before two workers that work or rest:
    behind N who came before one waits for (N + 1) times `patience_s` at most, however many later
    ones the fair line lets in, and no two are let in without room at once."""

    def __init__(self) -> None:
        super().__init__()
        fleet = fleet_of(KNOWN, KNOWN)
        self.workers = list(fleet)
        self.work: dict[int, Load] = {}
        self.room = SessionAdmission(fleet, RULES)
        self.now = 0.0
        self.count = 0
        self.line: dict[Ticket, Newcomer] = {}
        self.gone: list[tuple[str, str]] = []
        self.live: list[str] = []
        self.impatient_s = -PATIENCE_S
        """When one was let in without room last."""
        for at, worker in enumerate(self.workers):
            worker.bound_sessions = 1
            self.a_worker_begins_or_ends_its_work(at)

    @rule(at=st.integers(0, 1))
    def a_worker_begins_or_ends_its_work(self, at: int) -> None:
        work = self.work.pop(at, None)
        if work is not None:
            self.workers[at].take(work)
            self.look()
            return
        self.work[at] = Load(self.now, 0, 10)
        self.workers[at].add(self.work[at])

    @rule(
        tenant=st.sampled_from([*WEIGHTS, FRESH]),
        of_class=st.sampled_from(list(SessionClass)),
        tokens=st.sampled_from([1, 30_000, 60_000, 90_000, 150_000]),
    )
    def a_session_comes(self, tenant: str, of_class: SessionClass, tokens: int) -> None:
        self.count += 1
        name = f"n{self.count}"
        self.ask((name, name if tenant == FRESH else tenant), of_class, tokens)

    @precondition(lambda self: self.gone)
    @rule(data=st.data(), tokens=st.sampled_from([1, 60_000]))
    def one_tries_again(self, data: st.DataObject, tokens: int) -> None:
        session = self.gone.pop(data.draw(st.integers(0, len(self.gone) - 1)))
        self.ask(session, SessionClass.NEW, tokens)

    @precondition(lambda self: self.line)
    @rule(data=st.data())
    def one_hangs_up(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.line)))
        self.gone.append(self.line.pop(ticket).session)
        self.room.leave(ticket, self.now)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), is_over=st.booleans())
    def a_turn_ends(self, data: st.DataObject, is_over: bool) -> None:
        name = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.room.ended(s(name), 0, self.now)
        if is_over:
            self.room.over(s(name))
        self.look()

    @rule(passed_s=st.floats(0.0, 100.0))
    def time_passes(self, passed_s: float) -> None:
        end_s = self.now + passed_s
        while (due_s := self.room.next_due_s()) is not None and due_s <= end_s:
            self.now = max(due_s, self.now)
            self.look()
            assert self.room.next_due_s() != due_s, "at that moment something changes"
        self.now = end_s
        self.look()

    def ask(self, session: tuple[str, str], of_class: SessionClass, tokens: int) -> None:
        name, tenant = session
        answer = self.room.ask(
            s(name), tokens, parent=None, now_s=self.now, tenant=tenant,
            terms=TenantTerms(weight=WEIGHTS.get(tenant, 1.0)), session_class=of_class,
        )  # fmt: skip
        if isinstance(answer, Wait):
            for ticket, one in self.line.items():
                one.before += answer.ticket < ticket  # it has its place back
            before = sum(ticket < answer.ticket for ticket in self.line)
            self.line[answer.ticket] = Newcomer(session, self.now, before)
        else:
            self.live.append(name)

    def look(self) -> None:
        impatient = self.room.impatient
        for ticket in self.room.due(self.now):
            self.live.append(self.line.pop(ticket).session[0])
        if self.room.impatient > impatient:
            assert self.room.impatient == impatient + 1
            assert self.now >= self.impatient_s + PATIENCE_S
            self.impatient_s = self.now

    @invariant()
    def books_agree_and_nobody_waits_beyond_his_bound(self) -> None:
        self.room.check()
        assert self.room.places().keys() == self.line.keys()
        for one in self.line.values():
            assert self.now <= one.until_s() + 1e-6  # sums of the same times in another order


TenantsPlay.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
TestTenantsPlay = TenantsPlay.TestCase
