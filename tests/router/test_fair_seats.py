"""Seats before which sessions of several tenants and classes wait: how long each waits at most."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ownerserve.router.admission import SeatSettings, SessionAdmission, Wait
from ownerserve.router.entry.fair import Ticket
from ownerserve.router.entry.terms import SessionClass, TenantTerms
from ownerserve.router.worker import Load, Profile
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


class Newcomer:
    """A session that waits since `since_s`: how many were `let_in` from the line's head meanwhile,
    and which ones that came `later` were the first in line."""

    def __init__(self, session: tuple[str, str], since_s: float) -> None:
        self.session = session
        self.since_s = since_s
        self.let_in = 0
        self.later: set[Ticket] = set()

    def until_s(self) -> float:
        return self.since_s + PATIENCE_S * (self.let_in + len(self.later) + 1)


class TenantsPlay(RuleBasedStateMachine):
    """Sessions of all classes, of tenants of unlike weights, before two workers that work or rest:
    in each `patience_s` the first in line is let in, or one who came later is put first."""

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
        self.note_first()

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
            self.line[answer.ticket] = Newcomer(session, self.now)
            self.note_first()
        else:
            self.live.append(name)

    def look(self) -> None:
        order = list(self.room.places())
        for ticket in self.room.due(self.now):
            self.live.append(self.line.pop(ticket).session[0])
            for other in self.line.values():
                other.let_in += ticket == order[0]
            order.remove(ticket)
        self.note_first()

    def note_first(self) -> None:
        for first in list(self.room.places())[:1]:
            for ticket, one in self.line.items():
                if ticket < first:
                    one.later.add(first)

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
