"""Seats by model: each model's sessions fill the memory of its own workers, and stand in a line of
their own."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from ownerserve.kv.ids import Incarnation, SessionId, WorkerId
from ownerserve.router.admission import Answer, SeatSettings, SessionAdmission, Wait
from ownerserve.router.entry.fair import Ticket
from ownerserve.router.entry.queue import AdmissionQueue
from ownerserve.router.entry.terms import ENTER, Enter, EnteringTurn, LinePlace, TurnedAway
from ownerserve.router.fleet import Fleet, room_tokens
from ownerserve.router.messages import WorkerUp
from ownerserve.router.worker import Load, Profile, Worker
from tests.support.examples import examples
from tests.support.router.fleets import PLAIN, fleet_of, load

KNOWN = Profile(speed=PLAIN.speed, kv_bytes_total=100_000_000)
"""100,000 tokens of 1,000 bytes."""
A, B = replace(KNOWN, model="a"), replace(KNOWN, model="b")
RULES = SeatSettings(share=1.0, growth_tokens=10_000, idle_s=60.0, patience_s=600.0)


def seats(*profiles: Profile, idle: tuple[int, ...] = ()) -> tuple[SessionAdmission, Fleet]:
    """In front of workers that all have something to do but those of the numbers `idle`."""
    fleet = fleet_of(*profiles)
    for number, worker in enumerate(fleet):
        if number not in idle:
            load(worker, sequences=1)
    return SessionAdmission(fleet, RULES), fleet


def ask(
    room: SessionAdmission, name: str, tokens: int, model: str | None, *, parent: str | None = None
) -> Answer:
    above = None if parent is None else SessionId(parent)
    return room.ask(SessionId(name), tokens, parent=above, now_s=0.0, model=model)


def ticket(answer: Answer) -> Ticket:
    assert isinstance(answer, Wait)
    return answer.ticket


def test_who_waits_for_one_model_does_not_hold_who_comes_for_another() -> None:
    room, _ = seats(A, B)
    assert ask(room, "a1", 80_000, "a") == ENTER
    late_a = ticket(ask(room, "a2", 80_000, "a"))
    assert ask(room, "b1", 80_000, "b") == ENTER
    late_b = ticket(ask(room, "b2", 80_000, "b"))
    last_a = ticket(ask(room, "a3", 1_000, "a"))
    assert room.places() == {
        late_a: LinePlace(1, 2), last_a: LinePlace(2, 2), late_b: LinePlace(1, 1),
    }  # fmt: skip
    assert (room.place(late_b), room.waiting) == (LinePlace(1, 1), 3)
    assert room.due(1.0) == []
    room.over(SessionId("b1"))
    assert room.due(2.0) == [late_b], "what b's worker has is nothing to a's"
    room.over(SessionId("a1"))
    assert room.due(3.0) == [late_a]
    room.check()


def test_memory_of_one_model_that_is_not_known_lets_nobody_in_to_another() -> None:
    room, _ = seats(A, replace(PLAIN, model="b"))
    assert ask(room, "a1", 80_000, "a") == ENTER
    assert all(ask(room, f"b{n}", 80_000, "b") == ENTER for n in range(5))
    assert isinstance(ask(room, "a2", 80_000, "a"), Wait)


def test_an_idle_worker_counts_for_its_own_model_alone() -> None:
    room, _ = seats(A, B, idle=(1,))
    assert ask(room, "a1", 80_000, "a") == ENTER
    late = ticket(ask(room, "a2", 80_000, "a"))
    assert ask(room, "b1", 80_000, "b") == ENTER
    assert room.due(1.0) == []
    assert room.place(late) == LinePlace(1, 1)


def test_adapters_share_the_seats_of_the_model_that_they_adapt() -> None:
    room, _ = seats(replace(A, adapters=frozenset({"x", "y"})), B)
    assert ask(room, "x1", 80_000, "x") == ENTER
    first, second = (ticket(ask(room, f"{model}2", 80_000, model)) for model in ("y", "a"))
    assert room.place(second) == LinePlace(2, 2)
    room.over(SessionId("x1"))
    assert room.due(1.0) == [first]


def test_an_idle_worker_without_the_adapter_takes_nobody_who_asks_for_it() -> None:
    room, _ = seats(replace(A, adapters=frozenset({"x"})), A, idle=(1,))
    assert ask(room, "a1", 190_000, "a") == ENTER
    late = ticket(ask(room, "x1", 80_000, "x"))
    assert room.due(1.0) == []
    behind = ask(room, "a2", 80_000, "a")
    assert behind == ENTER, "the idle one takes it"
    assert room.place(late) == LinePlace(1, 1)


@pytest.mark.parametrize("model", ["of nobody", None])
def test_nobody_is_held_whose_model_no_one_kind_of_worker_serves(model: str | None) -> None:
    room, _ = seats(A, B)
    for name in "ab":
        assert ask(room, name, 100_000, name) == ENTER
    for number in range(5):
        assert ask(room, f"{number}", 80_000, model) == ENTER
        room.ended(SessionId(f"{number}"), 80_000, 1.0)
    room.check()


def test_where_some_workers_name_no_model_nobody_is_held() -> None:
    room, _ = seats(A, KNOWN)
    assert all(isinstance(ask(room, f"{n}", 90_000, "a"), Enter) for n in range(9))
    room.check()


def test_who_names_no_model_has_a_seat_where_there_is_one() -> None:
    room, _ = seats(A)
    assert ask(room, "one", 80_000, None) == ENTER
    assert isinstance(ask(room, "other", 80_000, "a"), Wait)


def test_a_session_counts_where_it_began_whatever_its_fleet_becomes() -> None:
    room, fleet = seats(A)
    assert ask(room, "one", 80_000, None) == ENTER
    fleet.raise_up(WorkerUp(WorkerId("late"), 0, Incarnation(1), B))
    assert ask(room, "one", 90_000, None) == ENTER
    room.check()
    for _ in range(2):
        room.ended(SessionId("one"), 90_000, 1.0)
    room.check()
    assert isinstance(ask(room, "a2", 20_000, "a"), Wait)


def test_who_waits_for_a_model_that_nobody_serves_any_more_goes_on_to_be_refused() -> None:
    room, fleet = seats(A, B)
    for name in "ab":
        assert ask(room, name, 100_000, name) == ENTER
    late_a, late_b = (ticket(ask(room, f"late {name}", 50_000, name)) for name in "ab")
    fleet.take_down(WorkerId("w0"))
    assert room.due(1.0) == [late_a]
    assert room.places() == {late_b: LinePlace(1, 1)}
    fleet.raise_up(WorkerUp(WorkerId("w0"), 0, Incarnation(2), A))
    load(fleet[WorkerId("w0")], sequences=1)
    assert ticket(ask(room, "late a", 50_000, "a")) == late_a, "its place was kept"
    room.check()


def test_a_sub_agent_on_another_model_enters_with_its_parent() -> None:
    room, _ = seats(A, B)
    for name in "ab":
        assert ask(room, name, 100_000, name) == ENTER
    parent = ticket(ask(room, "main", 50_000, "a"))
    child = ticket(ask(room, "sub", 50_000, "b", parent="main"))
    room.over(SessionId("a"))
    assert room.due(1.0) == [parent, child]
    assert ask(room, "sub2", 50_000, "b", parent="main") == ENTER
    room.check()


def test_the_next_moment_is_the_first_of_any_model() -> None:
    room, _ = seats(A, B)
    for name, away_s in (("a", 9.0), ("b", 5.0)):
        assert ask(room, name, 100_000, name) == ENTER
        room.ended(SessionId(name), 100_000, away_s)
    assert room.next_due_s() is None
    late_a = ticket(ask(room, "late a", 50_000, "a"))
    assert room.next_due_s() == 69.0
    late_b = ticket(ask(room, "late b", 50_000, "b"))
    assert room.next_due_s() == 65.0
    assert room.due(65.0) == [late_b]
    assert room.due(69.0) == [late_a]


class Told:
    """An entrant that remembers what it heard."""

    def __init__(self) -> None:
        self.began_s: float | None = None

    def go(self, now_s: float) -> None:
        self.began_s = now_s

    def turned_away(self, no: TurnedAway) -> None:
        raise AssertionError(no)


def test_a_seat_is_of_the_model_that_the_turn_asks_for() -> None:
    """As gateways and simulated fleets ask: through the queue."""
    room, _ = seats(A, B)
    queue, began = AdmissionQueue(room), []
    for name in ("a1", "a2", "b1"):
        turn = EnteringTurn(
            session=SessionId(name), prompt_tokens=80_000, cost_tokens=0, model=name[0]
        )
        told = Told()
        queue.enter(turn, told, now_s=0.0)
        began.append(told.began_s)
    assert began == [0.0, None, 0.0]


class ModelsPlay(RuleBasedStateMachine):
    """Two workers of each of two models, of which some do nothing: nobody waits beside an idle one
    of his model that takes him, nor beyond his place in his model's line."""

    def __init__(self) -> None:
        super().__init__()
        fleet = fleet_of(A, B, A, B)
        self.workers = list(fleet)
        self.room = SessionAdmission(fleet, SeatSettings(patience_s=45.0))
        self.now = 0.0
        self.line: dict[Ticket, tuple[str, str, int, float]] = {}
        """Who waits: name, model, tokens, and until when at most."""
        self.live: dict[str, tuple[Worker, Load]] = {}
        self.count = 0

    def of_model(self, model: str) -> list[Worker]:
        return [one for one in self.workers if one.profile.model == model]

    def in_line(self, model: str) -> list[Ticket]:
        return [at for at, (_, wanted, *_) in self.line.items() if wanted == model]

    def fits(self, model: str, tokens: int) -> bool:
        """Whether an idle worker of the model at which no session lives has room."""
        idle = (w for w in self.of_model(model) if not w.batch and not w.bound_sessions)
        return any(tokens <= room_tokens(worker) for worker in idle)

    def begin(self, name: str, model: str, tokens: int) -> None:
        workers = self.of_model(model)
        idle = [w for w in workers if not w.batch and room_tokens(w) >= tokens]
        nobodys = [w for w in idle if not w.bound_sessions]
        worker = (nobodys or idle or workers)[0]
        work = Load(self.now, 0, tokens)
        worker.add(work)
        worker.bound_sessions += 1
        self.live[name] = worker, work

    def let_in(self) -> None:
        for at in self.room.due(self.now):
            name, model, tokens, _ = self.line[at]
            before = [other for other in self.in_line(model) if other < at]
            fitting = [other for other in before if self.fits(model, self.line[other][2])]
            assert not fitting, "not the first of its model"
            del self.line[at]
            self.begin(name, model, tokens)

    @rule(model=st.sampled_from("ab"), tokens=st.sampled_from([10, 60_000, 90_000, 150_000]))
    def a_session_comes(self, model: str, tokens: int) -> None:
        self.count += 1
        name, fits = f"{model}{self.count}", self.fits(model, tokens)
        ahead = len(self.in_line(model))
        answer = self.room.ask(SessionId(name), tokens, parent=None, now_s=self.now, model=model)
        if isinstance(answer, Enter):
            self.begin(name, model, tokens)
        else:
            assert ahead or not fits, "it waits beside a worker of its model that does nothing"
            self.line[answer.ticket] = name, model, tokens, self.now + 45.0 * (ahead + 1)
            place = self.room.place(answer.ticket)
            assert place == LinePlace(ahead + 1, ahead + 1), "a line of its own"

    @precondition(lambda self: self.live)
    @rule(data=st.data(), is_over=st.booleans())
    def a_turn_ends(self, data: st.DataObject, is_over: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        worker, work = self.live.pop(name)
        worker.take(work)
        self.room.ended(SessionId(name), 0, self.now)
        if is_over:
            worker.bound_sessions -= 1
            self.room.over(SessionId(name))
        self.let_in()

    @precondition(lambda self: self.line)
    @rule(data=st.data())
    def one_hangs_up(self, data: st.DataObject) -> None:
        at = data.draw(st.sampled_from(sorted(self.line)))
        del self.line[at]
        self.room.leave(at, self.now)
        self.let_in()

    @rule(passed_s=st.floats(0.0, 100.0))
    def time_passes(self, passed_s: float) -> None:
        end_s = self.now + passed_s
        while (due_s := self.room.next_due_s()) is not None and due_s <= end_s:
            self.now = max(due_s, self.now)
            self.let_in()
            assert self.room.next_due_s() != due_s, "at that moment something changes"
        self.now = end_s
        self.let_in()

    @invariant()
    def nobody_who_fits_an_idle_worker_of_his_model_waits(self) -> None:
        self.room.check()
        assert self.room.waiting == len(self.line)
        for _, model, tokens, until_s in self.line.values():
            assert until_s > self.now - 1e-6  # sums of the same times in another order
            assert not self.fits(model, tokens)


ModelsPlay.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
TestModelsPlay = ModelsPlay.TestCase
