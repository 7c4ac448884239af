"""A session's home (where its next turn goes) and its owner, told apart, at every message."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ownerserve.kv.ids import Incarnation, SessionId, WorkerId
from ownerserve.kv.messages import PlacementAction, Tier
from ownerserve.kv.wire.status import WorkerLoad
from ownerserve.router.decision import DispatchReason
from ownerserve.router.messages import (
    Aborted,
    Answer,
    Arrive,
    AskRelease,
    Broken,
    Claimed,
    Dispatch,
    Done,
    Down,
    Drain,
    Event,
    Failed,
    Failure,
    FirstByte,
    Gone,
    MovedOn,
    Refuse,
    Reported,
    SessionEnd,
    Stamped,
    WorkerDown,
    WorkerUp,
)
from ownerserve.router.policies import make_policy
from ownerserve.router.requests.body import Usage
from ownerserve.router.settings import Settings
from ownerserve.router.state import RouterState
from ownerserve.router.worker import Receipt
from tests.support.examples import examples
from tests.support.router.fleets import ABLE, unit
from tests.support.router.homes import FORK, NAMES, TIP, Fleet, S, epoch, stamp

Row = tuple[str, Callable[[Receipt], list[Event]], str | None, str | None]
w1, w2 = WorkerId("w1"), WorkerId("w2")
AFTER_A_DISPATCH: tuple[Row, ...] = (
    # what happens to a session of w0 that was sent to w1       home  owner
    ("nothing yet", lambda r: [], "w1", "w0"),
    ("a turn's first byte", lambda r: [FirstByte(r)], "w1", "w1"),
    ("first byte of an error", lambda r: [FirstByte(r, None, Answer.ERROR)], "w0", "w0"),
    ("an error, to its end", lambda r: [FirstByte(r, None, Answer.ERROR), Done(r)], "w0", "w0"),
    ("done at once", lambda r: [Done(r)], "w1", "w1"),
    ("first byte, done", lambda r: [FirstByte(r), Done(r, Usage(1000, 1, 0))], "w1", "w1"),
    ("aborted before a byte", lambda r: [Aborted(r)], "w0", "w0"),
    ("aborted in mid-answer", lambda r: [FirstByte(r), Aborted(r)], "w1", "w1"),
    ("broken before a byte", lambda r: [Broken(r)], "w0", "w0"),
    ("broken in mid-answer", lambda r: [FirstByte(r), Broken(r)], "w1", "w1"),
    ("stale connection: again", lambda r: [Failed(r, Failure.STALE)], "w1", "w0"),
    ("no connection: another", lambda r: [Failed(r, Failure.CONNECT)], "w2", "w0"),
    ("closed: another", lambda r: [Failed(r, Failure.CLOSED)], "w2", "w0"),
    ("no HTTP: another", lambda r: [Failed(r, Failure.MALFORMED)], "w2", "w0"),
    ("refused: another", lambda r: [Failed(r, Failure.REFUSED)], "w2", "w0"),
    ("claimed elsewhere", lambda r: [Claimed(S, unit("w2"), epoch(9))], "w1", "w2"),
    ("then aborted", lambda r: [Claimed(S, unit("w2"), epoch(9)), Aborted(r)], "w2", "w2"),
    ("then answered", lambda r: [Claimed(S, unit("w2"), epoch(9)), FirstByte(r)], "w1", "w1"),
    ("an earlier claim", lambda r: [Claimed(S, unit("w2"), epoch(4))], "w1", "w0"),
    ("a claim of a former life", lambda r: [Claimed(S, unit("w2", 0), epoch(9))], "w1", "w0"),
    ("target down", lambda r: [WorkerDown(w1, Down.UNHEALTHY)], "w0", "w0"),
    ("owner down", lambda r: [WorkerDown(WorkerId("w0"), Down.UNHEALTHY)], "w1", None),
    ("target anew", lambda r: [WorkerUp(w1, 0, Incarnation(2))], "w0", "w0"),
    ("target anew, by a stamp", lambda r: [Stamped(stamp("w1", 2))], "w0", "w0"),
    ("its new life answers", lambda r: [FirstByte(r, stamp("w1", 2))], "w1", "w1"),
    ("its former life answers",
     lambda r: [WorkerUp(w1, 0, Incarnation(2)), FirstByte(r)], "w0", "w0"),
    ("owner anew", lambda r: [WorkerUp(WorkerId("w0"), 0, Incarnation(2))], "w1", None),
    ("owner anew, aborted",
     lambda r: [WorkerUp(WorkerId("w0"), 0, Incarnation(2)), Aborted(r)], None, None),
    ("reports", lambda r: [Reported(unit("w2"), Tier.DEVICE, TIP, 500, S)], "w1", "w0"),
    ("drops", lambda r: [Gone(unit("w0"), Tier.DEVICE, TIP)], "w1", "w0"),
    ("drain", lambda r: [Drain(), Aborted(r)], "w0", "w0"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("events", "home", "owner"), [row[1:] for row in AFTER_A_DISPATCH],
    ids=[row[0] for row in AFTER_A_DISPATCH],
)  # fmt: skip
def test_home_and_owner_after_a_turn_was_sent_away(
    events: Callable[[Receipt], list[Event]], home: str | None, owner: str | None
) -> None:
    fleet = Fleet()
    fleet.turn("w0")
    fleet.tell(Claimed(S, unit("w0"), epoch(5)))
    receipt = fleet.send("w1")
    fleet.policy.to = "w2"  # where another attempt goes
    for event in events(receipt):
        fleet.tell(event)
    assert fleet.places() == (home, owner)
    known = fleet.state.sessions.get(S)
    assert known is not None
    bound = {worker.id: worker.bound_sessions for worker in fleet.state.fleet}
    stored = known.home is not None and known.home.life == known.home_life and known.home.id
    assert bound == {name: int(name == stored) for name in NAMES}


def test_the_next_turn_goes_where_the_tokens_are_when_a_migration_is_aborted() -> None:
    """The session has 110k tokens on a hot w0; nothing of it was moved when the client hung up."""
    state = RouterState(make_policy("ear"))
    for name in NAMES[:2]:
        state.handle(WorkerUp(WorkerId(name), 0, Incarnation(1), ABLE), 0.0)
    first = state.handle(Arrive(S, 440_000), 1.0)
    assert isinstance(first, Dispatch)
    state.handle(FirstByte(first.receipt), 2.0)
    state.handle(Done(first.receipt, Usage(110_000, 10, 0)), 3.0)
    hot = WorkerLoad(unit(first.worker), 4.0, 500_000, 1, 0, 10**12, 10**12)
    state.handle(Stamped(hot), 4.0)
    away = state.handle(Arrive(S, 440_400), 5.0)
    assert isinstance(away, Dispatch)
    assert away.worker != first.worker
    assert away.decision.action is PlacementAction.STATE_MIGRATION
    state.handle(Aborted(away.receipt), 6.0)
    state.check()
    calm = WorkerLoad(unit(first.worker), 7.0, 0, 0, 0, 10**12, 10**12)
    state.handle(Stamped(calm), 7.0)
    back = state.handle(Arrive(S, 440_400), 8.0)
    assert isinstance(back, Dispatch)
    assert (back.worker, back.reason) == (first.worker, DispatchReason.OWNER)
    assert back.decision.cached_tokens == 110_010


def test_a_move_that_came_to_nothing_does_not_cool() -> None:
    """T_cool counts moves: a refused one must not keep the session at its hot owner."""
    state = RouterState(make_policy("ear", Settings(cool_s=100.0)))
    for name in NAMES[:2]:
        state.handle(WorkerUp(WorkerId(name), 0, Incarnation(1), ABLE), 0.0)
    first = state.handle(Arrive(S, 40_000), 1.0)
    assert isinstance(first, Dispatch)
    state.handle(Done(first.receipt, Usage(10_000, 10, 0)), 3.0)
    hot = WorkerLoad(unit(first.worker), 4.0, 500_000, 1, 0, 10**12, 10**12)
    state.handle(Stamped(hot), 4.0)
    for now in (5.0, 6.0):
        away = state.handle(Arrive(S, 40_400), now)
        assert isinstance(away, Dispatch)
        assert (away.reason, away.worker == first.worker) == (DispatchReason.HOT_OWNER, False)
        state.handle(Aborted(away.receipt), now)
    away = state.handle(Arrive(S, 40_400), 7.0)
    assert isinstance(away, Dispatch)
    state.handle(Done(away.receipt, Usage(10_100, 10, 0)), 8.0)
    hot = WorkerLoad(unit(away.worker), 9.0, 500_000, 1, 0, 10**12, 10**12)
    state.handle(Stamped(hot), 9.0)
    state.handle(Stamped(WorkerLoad(unit(first.worker), 9.0, 0, 0, 0, 10**12, 10**12)), 9.0)
    stays = state.handle(Arrive(S, 40_800), 10.0)
    assert isinstance(stays, Dispatch)
    assert (stays.reason, stays.worker) == (DispatchReason.HOT_COOLING, away.worker)


def test_a_refused_turn_is_asked_anew_at_its_owner_and_not_as_one_without() -> None:
    fleet = Fleet()
    fleet.turn("w0")
    away = fleet.send("w1")
    fleet.policy.to = "w0"
    again = fleet.tell(Failed(away, Failure.REFUSED))
    assert isinstance(again, Dispatch)
    asked = fleet.policy.asked[-1]
    assert (asked.home and asked.home.id, asked.turns) == ("w0", 1)
    assert (again.worker, again.decision.cached_tokens) == ("w0", 999)


def test_a_first_turn_that_no_worker_began_is_still_to_come() -> None:
    state = RouterState(make_policy("sticky"))
    for name in NAMES:
        state.handle(WorkerUp(WorkerId(name)), 0.0)
    first = state.handle(Arrive(S, 400), 1.0)
    assert isinstance(first, Dispatch)
    state.handle(Aborted(first.receipt), 2.0)
    again = state.handle(Arrive(S, 400), 3.0)
    assert isinstance(again, Dispatch)
    assert again.reason is DispatchReason.NEW_SESSION


def test_of_two_turns_under_way_the_later_decides() -> None:
    fleet = Fleet()
    fleet.turn("w0")
    first, second = fleet.send("w1"), fleet.send("w2")
    assert fleet.places() == ("w2", "w0")
    fleet.tell(Aborted(first))
    assert fleet.places() == ("w2", "w0")
    third = fleet.send("w1")
    fleet.tell(FirstByte(third))
    assert fleet.places() == ("w1", "w1")
    fleet.tell(FirstByte(second))  # late: a later turn has run since
    assert fleet.places() == ("w1", "w1")


def test_a_turn_that_came_to_nothing_hides_no_earlier_one() -> None:
    fleet = Fleet()
    fleet.turn("w0")
    first, second = fleet.send("w1"), fleet.send("w2")
    fleet.tell(Aborted(second))
    assert fleet.places() == ("w0", "w0")
    fleet.tell(FirstByte(first))
    assert fleet.places() == ("w1", "w1")


def test_pending_work_counts_as_the_sessions_own_only_where_it_waits() -> None:
    """The home is hot by others' work; what the session itself has pending elsewhere is no part."""
    fleet = Fleet()
    fleet.turn("w0")
    fleet.send("w0")
    pending = fleet.state.fleet[WorkerId("w0")].pending_tokens
    assert pending > 0
    fleet.send("w1")  # its home is w1 now, and a second turn waits there
    there = fleet.state.fleet[WorkerId("w1")].pending_tokens
    fleet.send("w1")
    assert [asked.own_pending_tokens for asked in fleet.policy.asked[-2:]] == [pending, there]


def test_after_its_end_a_session_binds_nobody() -> None:
    ends: list[Callable[[Receipt], Event]] = [
        FirstByte, Done, Aborted, Broken, lambda r: Failed(r, Failure.REFUSED),
    ]  # fmt: skip
    for end in ends:
        fleet = Fleet()
        fleet.turn("w0")
        receipt = fleet.send("w1")
        fleet.tell(SessionEnd(S))
        fleet.tell(end(receipt))
        assert fleet.state.sessions.get(S) is None
        assert [worker.bound_sessions for worker in fleet.state.fleet] == [0, 0, 0]


def test_a_session_that_only_its_answer_names_is_owned_by_who_answered() -> None:
    fleet = Fleet()
    fleet.policy.to = "w2"
    first = fleet.tell(Arrive(None, 400))
    assert isinstance(first, Dispatch)
    alias = SessionId("alias/resp_1")
    fleet.tell(Done(first.receipt, None, alias))
    assert fleet.places(alias) == ("w2", "w2")
    receipt = fleet.send("w1", alias)
    assert fleet.places(alias) == ("w1", "w2")
    fleet.tell(Aborted(receipt))
    assert fleet.places(alias) == ("w2", "w2")


class Held(NamedTuple):
    """Who, in which life."""

    worker: str
    life: int


class Facts:
    """The two facts of one session, kept as plainly as they can be said."""

    def __init__(self) -> None:
        self.owner: Held | None = None
        self.heading: tuple[Receipt, Held] | None = None
        self.answered_by = 0

    @property
    def home(self) -> Held | None:
        return self.heading[1] if self.heading else self.owner


class AnyOrder(RuleBasedStateMachine):
    """Every event in any order, beside the plain facts."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet()
        self.lives = dict.fromkeys(NAMES, 1)
        self.facts: dict[SessionId, Facts] = {}
        self.open: dict[Receipt, tuple[Facts, Held]] = {}
        self.unanswered: set[Receipt] = set()
        self.epoch = 0

    def sent(self, outcome: object, session: SessionId) -> None:
        if isinstance(outcome, Refuse):
            return
        assert isinstance(outcome, Dispatch)
        facts = self.facts.get(session) or Facts()
        held = Held(outcome.worker, self.lives[outcome.worker])
        if session in self.facts:
            facts.heading = (outcome.receipt, held)
        self.open[outcome.receipt] = (facts, held)
        self.unanswered.add(outcome.receipt)

    def nothing_came(self, receipt: Receipt, facts: Facts) -> None:
        if receipt in self.unanswered:
            self.unanswered.remove(receipt)
            if facts.heading and facts.heading[0] == receipt:
                facts.heading = None

    def answers(self, receipt: Receipt) -> None:
        facts, held = self.open[receipt]
        if receipt not in self.unanswered:
            return
        if self.lives[held.worker] != held.life:
            self.nothing_came(receipt, facts)
            return
        self.unanswered.remove(receipt)
        if receipt >= facts.answered_by:
            facts.answered_by, facts.owner = receipt, held
        if facts.heading and facts.heading[0] == receipt:
            facts.heading = None

    @rule(session=st.sampled_from([S, FORK]), to=st.sampled_from(NAMES))
    def arrive(self, session: SessionId, to: str) -> None:
        self.fleet.policy.to = to
        parent = S if session == FORK else None
        outcome = self.fleet.tell(Arrive(session, 4000, None, parent, 2000))
        if isinstance(outcome, Dispatch):
            self.facts.setdefault(session, Facts())
        self.sent(outcome, session)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), answer=st.sampled_from(Answer),
          named=st.sampled_from([None, *NAMES]), by=st.sampled_from([-1, 0, 1]))  # fmt: skip
    def first_byte(self, data: st.DataObject, answer: Answer, named: str | None, by: int) -> None:
        receipt = data.draw(st.sampled_from(sorted(self.open)))
        facts, _ = self.open[receipt]
        session = next((name for name, one in self.facts.items() if one is facts), None)
        if named is None or session is None:
            self.fleet.tell(FirstByte(receipt, None, answer))
            self.begins(receipt, answer)
            return
        told, before = epoch(self.epoch + by), self.fleet.state.sessions.get(session)
        known, claimant = before and before.epoch, Held(named, self.lives[named])
        is_behind = facts.owner == claimant or receipt < facts.answered_by
        claimed = Claimed(session, unit(named, claimant.life), told)
        self.fleet.tell(FirstByte(receipt, None, answer, claimed=claimed))
        self.begins(receipt, answer)
        is_news = known is None or told > known
        if answer is Answer.TURN and is_behind:
            is_news = False
        if is_news or (not (known and told < known) and self.is_lost(facts)):
            facts.owner = claimant
        self.epoch += max(by, 0)

    def begins(self, receipt: Receipt, answer: Answer) -> None:
        if answer is Answer.TURN:
            self.answers(receipt)
        else:
            self.nothing_came(receipt, self.open[receipt][0])

    def is_lost(self, facts: Facts) -> bool:
        """Nobody lives where the session was sent, nor where it is."""
        fleet, places = self.fleet.state.fleet, (facts.home, facts.owner)
        return not any(
            one and fleet[WorkerId(one.worker)].up and self.lives[one.worker] == one.life
            for one in places
        )

    @precondition(lambda self: self.open)
    @rule(data=st.data(), how=st.sampled_from([Aborted, Broken, Done]))
    def end(self, data: st.DataObject, how: Callable[[Receipt], Event]) -> None:
        receipt = data.draw(st.sampled_from(sorted(self.open)))
        self.fleet.tell(how(receipt))
        if how is Done:
            self.answers(receipt)
        self.nothing_came(receipt, self.open.pop(receipt)[0])

    @precondition(lambda self: self.open)
    @rule(data=st.data(), failure=st.sampled_from(Failure), to=st.sampled_from(NAMES))
    def fail(self, data: st.DataObject, failure: Failure, to: str) -> None:
        receipt = data.draw(st.sampled_from(sorted(self.open)))
        facts, _ = self.open.pop(receipt)
        self.nothing_came(receipt, facts)
        self.fleet.policy.to = to
        session = next((name for name, one in self.facts.items() if one is facts), None)
        outcome = self.fleet.tell(Failed(receipt, failure))
        if isinstance(outcome, Dispatch) and outcome.session in self.facts:
            session = outcome.session  # it may have ended, and come back
        self.sent(outcome, session or SessionId("gone"))

    @rule(session=st.sampled_from([S, FORK]), worker=st.sampled_from(NAMES),
          by=st.sampled_from([-1, 1]))  # fmt: skip
    def claim(self, session: SessionId, worker: str, by: int) -> None:
        facts = self.facts.setdefault(session, Facts())
        known, told = self.fleet.state.sessions.get(session), epoch(self.epoch + by)
        before = None if known is None else known.epoch
        is_lost = known is None or known.live_home is None
        self.fleet.tell(Claimed(session, unit(worker, self.lives[worker]), told))
        if before is None or told > before or (told == before and is_lost):
            facts.owner = Held(worker, self.lives[worker])
        self.epoch += max(by, 0)

    @rule(worker=st.sampled_from(NAMES), is_new=st.booleans())
    def up(self, worker: str, is_new: bool) -> None:
        self.lives[worker] += is_new
        self.fleet.tell(WorkerUp(WorkerId(worker), 0, Incarnation(self.lives[worker])))

    @rule(worker=st.sampled_from(NAMES))
    def down(self, worker: str) -> None:
        self.fleet.tell(WorkerDown(WorkerId(worker), Down.UNHEALTHY))

    @rule(session=st.sampled_from([S, FORK]))
    def over(self, session: SessionId) -> None:
        self.fleet.tell(SessionEnd(session))
        self.facts.pop(session, None)

    @invariant()
    def both_facts_are_as_told(self) -> None:
        sessions = self.fleet.state.sessions
        assert {name for name, _ in sessions.items()} == set(self.facts)
        for name, session in sessions.items():
            facts = self.facts[name]
            assert _held(session.owner, session.owner_life) == facts.owner
            assert _held(session.home, session.home_life) == facts.home


def _held(worker: object, life: int) -> Held | None:
    return None if worker is None else Held(worker.id, life)  # type: ignore[attr-defined]


AnyOrder.TestCase.settings = settings(
    max_examples=examples(40), stateful_step_count=30, deadline=None
)
TestAnyOrder = AnyOrder.TestCase


def test_an_epoch_that_is_heard_again_moves_no_session_that_has_a_home() -> None:
    """An answer of the owner to an earlier turn is late: the newest turn runs elsewhere."""
    fleet = Fleet()
    fleet.turn("w0")
    fleet.tell(Claimed(S, unit("w0"), epoch(5), 1))
    fleet.turn("w1")
    fleet.tell(Claimed(S, unit("w0"), epoch(5), 2))
    assert fleet.places() == ("w1", "w1")
    known = fleet.state.sessions.get(S)
    assert known is not None and known.grant is not None
    assert (known.grant.owner.id, known.grant.version) == ("w0", 2)
    fleet.tell(WorkerDown(w1, Down.UNHEALTHY))
    fleet.tell(Claimed(S, unit("w0"), epoch(5), 2))
    assert fleet.places() == ("w0", "w0")


def names(worker: str, counter: int, life: int = 1) -> Claimed:
    return Claimed(S, unit(worker, life), epoch(counter))


NAMED_BY_AN_ANSWER = {
    # whom the answer of w1 to a turn of w0's session names               home  owner  granted to
    "whom it left, under a later epoch": (names("w0", 6), "w1", "w1", "w0"),
    "whom it left, under the known epoch": (names("w0", 5), "w1", "w1", "w0"),
    "itself": (names("w1", 6), "w1", "w1", "w1"),
    "another: it was moved by another gateway": (names("w2", 6), "w2", "w2", "w2"),
    "another, under an earlier epoch": (names("w2", 4), "w1", "w1", "w0"),
    "a former life": (names("w2", 6, 0), "w1", "w1", "w0"),
}


@pytest.mark.parametrize("row", NAMED_BY_AN_ANSWER)
def test_whom_an_answer_names_has_the_session_unless_it_left_there_by_that_turn(row: str) -> None:
    claimed, home, owner, granted = NAMED_BY_AN_ANSWER[row]
    fleet = Fleet()
    fleet.turn("w0")
    fleet.tell(Claimed(S, unit("w0"), epoch(5)))
    fleet.tell(FirstByte(fleet.send("w1"), claimed=claimed))
    assert fleet.places() == (home, owner)
    known = fleet.state.sessions.get(S)
    assert known is not None and known.grant is not None
    assert known.grant.owner.id == granted


def test_a_turn_that_goes_on_elsewhere_is_not_sent_back_by_its_second_legs_word() -> None:
    """Who is drained still owns the session; the next turn goes where the answer ended."""
    fleet = Fleet()
    fleet.turn("w0")
    receipt = fleet.send("w0")
    fleet.tell(FirstByte(receipt))
    fleet.tell(WorkerDown(WorkerId("w0"), Down.DRAINED))
    moved = fleet.tell(MovedOn(receipt, unit("w1")))
    assert isinstance(moved, Dispatch) and moved.worker == "w1"
    fleet.tell(FirstByte(moved.receipt, claimed=names("w0", 5)))
    assert fleet.places() == ("w1", "w1")
    asked = fleet.tell(Done(moved.receipt, Usage(1000, 10, 0)))
    assert asked == AskRelease(S, unit("w0"), epoch(5), unit("w1"))


def test_the_former_owners_late_answer_does_not_bring_the_session_back() -> None:
    """Two turns are under way; that which was sent later was answered first, and elsewhere."""
    fleet = Fleet()
    fleet.turn("w0")
    first, second = fleet.send("w0"), fleet.send("w1")
    fleet.tell(FirstByte(second))
    fleet.tell(FirstByte(first, claimed=names("w0", 5)))
    assert fleet.places() == ("w1", "w1")
    fleet.tell(Done(first, Usage(1000, 10, 0)))
    asked = fleet.tell(Done(second, Usage(1000, 10, 0)))
    assert asked == AskRelease(S, unit("w0"), epoch(5), unit("w1"))


def test_whom_an_error_names_has_the_session() -> None:
    """Nothing of the turn ran there: what it says of the owner is all that is news."""
    fleet = Fleet()
    fleet.turn("w0")
    fleet.tell(FirstByte(fleet.send("w1"), None, Answer.ERROR, claimed=names("w2", 6)))
    assert fleet.places() == ("w2", "w2")
