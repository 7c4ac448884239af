"""RouterState as scenarios, and the account under any order of events."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.ids import Incarnation, SessionId, WorkerId
from ownerserve.kv.messages import ExecutionMode, Tier
from ownerserve.router.decision import DispatchReason
from ownerserve.router.messages import (
    Aborted,
    Arrive,
    Broken,
    ComputedApart,
    Dispatch,
    Done,
    Down,
    Drain,
    Failed,
    Failure,
    FirstByte,
    Gone,
    Misjudged,
    NotComputedApart,
    Refusal,
    Refuse,
    SessionEnd,
    Unpromised,
    WorkerDown,
    WorkerLeft,
    WorkerUp,
)
from ownerserve.router.policies import make_policy
from ownerserve.router.requests.body import Usage
from ownerserve.router.sessions import SessionTable
from ownerserve.router.state import RetryBudget, RouterState
from ownerserve.router.worker import Receipt
from tests.support.examples import examples
from tests.support.router.fleets import ABLE

W = [WorkerId(f"w{number}") for number in range(3)]
S, T = SessionId("s"), SessionId("t")


def fleet(workers: int = 2, retries: RetryBudget | None = None) -> RouterState:
    state = RouterState(make_policy("sticky"), retries=retries)
    for worker in W[:workers]:
        state.handle(WorkerUp(worker), 0.0)
    return state


def arrive(state: RouterState, session: SessionId | None = S, prompt_bytes: int = 400) -> Dispatch:
    outcome = state.handle(Arrive(session, prompt_bytes), 1.0)
    assert isinstance(outcome, Dispatch)
    return outcome


def turn(state: RouterState, session: SessionId | None = S, *, prompt_bytes: int = 400) -> Dispatch:
    """A whole turn whose prompt took 2 bytes a token."""
    dispatch = arrive(state, session, prompt_bytes)
    state.handle(FirstByte(dispatch.receipt), 2.0)
    state.handle(Done(dispatch.receipt, Usage(prompt_bytes // 2, 10, 0)), 3.0)
    state.check()
    return dispatch


def test_retries_leave_nothing_behind() -> None:
    """Each is decided over what is left of the fleet: a snapshot that no worker goes on telling."""
    state = fleet(3)
    before = [len(worker.watchers) for worker in state.fleet]
    for number in range(20):
        dispatch = arrive(state, SessionId(f"s{number}"))
        again = state.handle(Failed(dispatch.receipt, Failure.CLOSED), 1.0)
        assert isinstance(again, Dispatch)
        assert again.worker != dispatch.worker
        state.handle(Done(again.receipt), 1.0)
        state.check()
    assert [len(worker.watchers) for worker in state.fleet] == before


def test_a_late_word_of_a_former_life_changes_nothing() -> None:
    state = fleet(2)
    for incarnation in (4, 5):
        state.handle(WorkerUp(W[0], 0, Incarnation(incarnation)), 0.0)
    worker = state.fleet[W[0]]
    life = worker.life
    state.handle(WorkerUp(W[0], 0, Incarnation(4)), 1.0)
    assert (worker.incarnation, worker.life) == (5, life)
    assert worker.up


def test_a_worker_that_was_down_begins_anew_under_a_clock_that_was_set_back() -> None:
    state = fleet(2)
    state.handle(WorkerUp(W[0], 0, Incarnation(5)), 0.0)
    worker = state.fleet[W[0]]
    life = worker.life
    state.handle(WorkerDown(W[0], Down.UNHEALTHY), 2.0)
    state.handle(WorkerUp(W[0], 0, Incarnation(4)), 3.0)
    assert (worker.up, worker.incarnation, worker.life) == (True, 4, life + 1)
    state.handle(WorkerDown(W[0], Down.UNHEALTHY), 4.0)
    state.handle(WorkerUp(W[0], 0, Incarnation(4)), 5.0)
    assert (worker.up, worker.life) == (True, life + 1), "the same life, heard again"


def test_turns_of_a_session_stay_on_their_worker() -> None:
    state = fleet(3)
    first = turn(state)
    assert first.reason is DispatchReason.NEW_SESSION
    for other in range(4):
        turn(state, SessionId(f"other-{other}"))
    again = turn(state)
    assert (again.worker, again.reason) == (first.worker, DispatchReason.OWNER)


def test_the_session_teaches_its_ratio_and_what_its_owner_holds() -> None:
    state = fleet()
    assert arrive(state, T, 400).prefill_tokens == 100  # 4 bytes a token until it is known
    turn(state, S, prompt_bytes=400)  # 200 tokens + 10 of output are at the owner
    assert arrive(state, S, 460).prefill_tokens == 230 - 210


def test_load_is_counted_at_dispatch_and_released_in_two_parts() -> None:
    state = fleet(1)
    worker = state.fleet[W[0]]
    dispatch = arrive(state)
    assert (worker.requests, worker.pending_prefill_tokens, worker.held_tokens) == (1, 100, 100)
    state.handle(FirstByte(dispatch.receipt), 2.0)
    assert (worker.requests, worker.pending_prefill_tokens, worker.held_tokens) == (1, 0, 100)
    state.handle(Done(dispatch.receipt), 3.0)
    assert (worker.requests, worker.pending_prefill_tokens, worker.held_tokens) == (0, 0, 0)


@pytest.mark.parametrize("end", [Done, Broken, Aborted, lambda r: Failed(r, Failure.CLOSED)])
def test_a_receipt_is_given_back_once(end) -> None:  # type: ignore[no-untyped-def]
    state = fleet(1)
    dispatch = arrive(state)
    state.handle(end(dispatch.receipt), 2.0)
    state.check()
    for late in (Done, Broken, Aborted, FirstByte, lambda r: Failed(r, Failure.CONNECT)):
        with pytest.raises(InvariantViolated, match="invariant 5"):
            state.handle(late(dispatch.receipt), 3.0)
    state.check()


def test_a_lost_worker_loses_its_bindings_but_not_its_live_requests() -> None:
    state = fleet()
    owner = turn(state).worker
    live = arrive(state)
    state.handle(WorkerDown(owner, Down.UNHEALTHY), 4.0)
    state.check()
    assert state.fleet[owner].requests == 1
    moved = arrive(state)
    assert (moved.worker != owner, moved.reason) == (True, DispatchReason.OWNER_LOST)
    assert moved.prefill_tokens == 200  # the new owner holds nothing
    state.handle(Done(live.receipt, Usage(200, 1, 0)), 5.0)
    state.handle(WorkerUp(owner), 6.0)
    assert arrive(state).worker == moved.worker  # back, but no longer the owner


def test_a_refused_connection_takes_the_worker_out_and_tries_the_next() -> None:
    state = fleet(3)
    first = arrive(state)
    second = state.handle(Failed(first.receipt, Failure.CONNECT), 2.0)
    assert isinstance(second, Dispatch)
    assert (second.reason, second.attempt) == (DispatchReason.RETRY_OTHER_WORKER, 2)
    assert second.worker != first.worker
    assert not state.fleet[first.worker].up
    state.handle(Done(second.receipt), 3.0)
    assert arrive(state).worker == second.worker  # the session moved with the retry


def test_a_stale_connection_is_retried_at_the_same_worker_once() -> None:
    state = fleet(2, RetryBudget(purse_max=0.0))
    first = arrive(state)
    second = state.handle(Failed(first.receipt, Failure.STALE), 2.0)
    assert isinstance(second, Dispatch)
    assert (second.worker, second.reason) == (first.worker, DispatchReason.RETRY_NEW_CONNECTION)
    third = state.handle(Failed(second.receipt, Failure.STALE), 2.0)
    assert third == Refuse(Refusal.RETRY_BUDGET)
    state.check()


def test_a_worker_that_refuses_stays_up_and_the_next_is_asked() -> None:
    state = fleet(2)
    first = turn(state).worker
    live = arrive(state)
    again = state.handle(Failed(live.receipt, Failure.REFUSED), 5.0)
    assert isinstance(again, Dispatch)
    assert again.worker != first
    assert (state.fleet[first].up, state.fleet[first].requests) == (True, 0)
    assert state.account.failures[Failure.REFUSED] == 1
    state.check()


def test_when_all_were_tried_the_client_is_told() -> None:
    state = fleet(2)
    first = arrive(state)
    second = state.handle(Failed(first.receipt, Failure.CLOSED), 2.0)
    assert isinstance(second, Dispatch)
    assert state.handle(Failed(second.receipt, Failure.CLOSED), 2.0) == Refuse(Refusal.ALL_TRIED)
    assert (state.account.rejected, state.live) == (1, 0)
    state.check()


class Counted(RetryBudget):
    """A budget that tells how many requests it has heard of."""

    earned = 0

    def earn(self) -> None:
        self.earned += 1
        super().earn()


def test_a_turn_without_a_promise_is_one_request_and_is_sent_once_more() -> None:
    budget = Counted()
    state = fleet(2, budget)
    owner = turn(state).worker
    first = arrive(state)
    second = state.handle(Unpromised(first.receipt), 2.0)
    assert isinstance(second, Dispatch)
    assert (second.worker != owner, second.reason) == (True, DispatchReason.RETRY_OTHER_WORKER)
    third = state.handle(Unpromised(second.receipt), 2.0)
    assert isinstance(third, Dispatch)
    assert (third.worker, third.reason, third.attempt) == (owner, DispatchReason.RETRY_UNASKED, 3)
    assert (budget.earned, state.account.received, state.account.rejected) == (2, 2, 0)
    state.check()
    fourth = state.handle(Unpromised(third.receipt), 2.0)
    assert isinstance(fourth, Dispatch) and fourth.worker != owner
    assert state.handle(Unpromised(fourth.receipt), 2.0) == Refuse(Refusal.ALL_TRIED), "once"
    assert (state.account.received, state.account.done, state.account.rejected) == (2, 1, 1)
    state.check()


def test_a_turn_without_a_promise_is_sent_on_when_the_retries_are_used_up() -> None:
    state = fleet(3, RetryBudget(purse_max=0.0))
    again = state.handle(Unpromised(arrive(state).receipt), 2.0)
    assert isinstance(again, Dispatch) and again.reason is DispatchReason.RETRY_UNASKED
    for worker in W:
        state.handle(WorkerDown(worker, Down.UNHEALTHY), 3.0)
    assert isinstance(state.handle(Unpromised(again.receipt), 4.0), Refuse)
    state.check()


def test_a_turn_that_counted_on_what_is_not_there_is_decided_anew() -> None:
    budget = Counted(purse_max=0.0)
    state = fleet(2, budget)
    for worker in W[:2]:
        state.handle(WorkerUp(worker, 0, Incarnation(4)), 0.0)
    owner = turn(state).worker
    first = arrive(state, prompt_bytes=600)
    assert first.decision.cached_tokens > 0
    state.handle(Gone(state.fleet[owner].unit, Tier.DEVICE, session=S), 2.0)
    second = state.handle(Misjudged(first.receipt), 2.0)
    assert isinstance(second, Dispatch)
    assert (second.worker, second.decision.cached_tokens, second.attempt) == (owner, 0, 2)
    assert second.reason is second.decision.reason, "it was not tried before"
    assert (budget.earned, state.account.received) == (2, 2)
    assert not state.account.failures.total()
    state.check()
    for worker in W[:2]:
        state.handle(WorkerDown(worker, Down.UNHEALTHY), 3.0)
    assert state.handle(Misjudged(second.receipt), 4.0) == Refuse(Refusal.NO_WORKER)
    state.check()


def test_retries_are_a_share_of_requests() -> None:
    state = fleet(3, RetryBudget(share=0.2, purse_max=1.0))
    retried = 0
    for number in range(100):
        dispatch = arrive(state, SessionId(f"n{number}"))
        retry = state.handle(Failed(dispatch.receipt, Failure.CLOSED), 2.0)
        if isinstance(retry, Dispatch):
            retried += 1
            state.handle(Done(retry.receipt), 3.0)
    assert 19 <= retried <= 21
    state.check()


def test_without_workers_and_while_draining_requests_are_refused() -> None:
    assert fleet(0).handle(Arrive(S, 1), 0.0) == Refuse(Refusal.NO_WORKER)
    state = fleet()
    live = arrive(state)
    state.handle(Drain(), 1.0)
    assert state.handle(Arrive(S, 1), 1.0) == Refuse(Refusal.DRAINING)
    state.handle(Done(live.receipt), 2.0)
    state.check()


def test_an_ended_session_starts_anew() -> None:
    state = fleet()
    turn(state)
    state.handle(SessionEnd(S), 4.0)
    assert arrive(state).reason is DispatchReason.NEW_SESSION
    state.check()


def test_a_retry_of_a_session_that_ended_meanwhile_binds_nobody() -> None:
    state = fleet()
    live = arrive(state)
    state.handle(SessionEnd(S), 2.0)
    again = state.handle(Failed(live.receipt, Failure.STALE), 3.0)
    assert isinstance(again, Dispatch)
    assert [worker.bound_sessions for worker in state.fleet] == [0, 0]
    state.handle(Done(again.receipt, Usage(100, 10, 0)), 4.0)
    state.check()


def test_a_turn_may_name_its_session_by_the_last_answers_id() -> None:
    state = fleet(3)
    alias_1, alias_2 = SessionId("alias/resp_1"), SessionId("alias/resp_2")
    first = arrive(state, None)
    state.handle(Done(first.receipt, None, alias_1), 2.0)
    second = arrive(state, alias_1)
    assert (second.worker, second.reason) == (first.worker, DispatchReason.OWNER)
    state.handle(Done(second.receipt, None, alias_2), 3.0)
    assert arrive(state, alias_2).worker == first.worker
    assert len(state.sessions) == 1
    state.check()


def test_sessions_are_bounded_and_forgotten_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    ten = partial(SessionTable, limit=10)
    monkeypatch.setattr("ownerserve.router.state.SessionTable", ten)
    state = fleet()
    for number in range(50):
        turn(state, SessionId(f"n{number}"))
    assert len(state.sessions) == 10
    for number in range(20):
        state.handle(Arrive(SessionId(f"late{number}"), 1), 1e6 + number)
    assert all(name.startswith("late") for name, _ in state.sessions.items())
    state.check()


def test_a_worker_that_left_is_forgotten_and_may_come_anew() -> None:
    state = fleet()
    first = arrive(state)
    state.handle(WorkerDown(first.worker, Down.REMOVED), 2.0)
    with pytest.raises(InvariantViolated, match="before it is empty"):
        state.handle(WorkerLeft(first.worker), 2.0)
    state.handle(Done(first.receipt), 3.0)
    state.handle(WorkerLeft(first.worker), 3.0)
    assert first.worker not in {worker.id for worker in state.fleet}
    assert arrive(state).worker != first.worker
    state.handle(WorkerUp(first.worker), 4.0)
    assert len(state.fleet.up) == 2
    state.check()


class AnyOrder(RuleBasedStateMachine):
    """Events in any order a runtime could send them: the account stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.state = RouterState(make_policy("ownerserve"))
        self.open: list[Receipt] = []
        self.now = 0.0

    def note(self, outcome: object) -> None:
        self.now += 1.0
        if isinstance(outcome, Dispatch):
            assert outcome.prefill_tokens >= 1
            self.open.append(outcome.receipt)

    @rule(worker=st.sampled_from(W))
    def up(self, worker: WorkerId) -> None:
        self.note(self.state.handle(WorkerUp(worker), self.now))

    @rule(worker=st.sampled_from(W))
    def down(self, worker: WorkerId) -> None:
        self.note(self.state.handle(WorkerDown(worker, Down.UNHEALTHY), self.now))

    @rule(worker=st.sampled_from(W))
    def leave(self, worker: WorkerId) -> None:
        self.note(self.state.handle(WorkerDown(worker, Down.REMOVED), self.now))
        if not any(one.requests for one in self.state.fleet if one.id == worker):
            self.note(self.state.handle(WorkerLeft(worker), self.now))

    @rule(session=st.sampled_from([None, *map(SessionId, "abc")]), size=st.integers(0, 9999))
    def arrive(self, session: SessionId | None, size: int) -> None:
        self.note(self.state.handle(Arrive(session, size), self.now))

    @rule(session=st.sampled_from([*map(SessionId, "abc")]))
    def end_session(self, session: SessionId) -> None:
        self.note(self.state.handle(SessionEnd(session), self.now))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def first_byte(self, data: st.DataObject) -> None:
        self.note(self.state.handle(FirstByte(data.draw(st.sampled_from(self.open))), self.now))

    @precondition(lambda self: self.open)
    @rule(
        data=st.data(),
        how=st.sampled_from([Done, Broken, Aborted, Unpromised, Misjudged, *Failure]),
    )
    def end(self, data: st.DataObject, how) -> None:  # type: ignore[no-untyped-def]
        receipt = data.draw(st.sampled_from(self.open))
        self.open.remove(receipt)
        if isinstance(how, Failure):
            self.note(self.state.handle(Failed(receipt, how), self.now))
        elif how is Done:
            usage, alias = Usage(50, 5, 40), data.draw(st.sampled_from([None, SessionId("c")]))
            self.note(self.state.handle(Done(receipt, usage, alias), self.now))
        else:
            self.note(self.state.handle(how(receipt), self.now))

    @invariant()
    def whole(self) -> None:
        self.state.check()
        assert self.state.live == len(self.open)


AnyOrder.TestCase.settings = settings(
    max_examples=examples(25), stateful_step_count=30, deadline=None
)
TestAnyOrder = AnyOrder.TestCase


class SplitInAnyOrder(AnyOrder):
    """The same, of dispatches that count at two workers."""

    def __init__(self) -> None:
        super().__init__()
        self.state = RouterState(make_policy("static_pd"))
        self.split: set[Receipt] = set()

    @rule(data=st.data(), mode=st.sampled_from([None, *ExecutionMode]))
    @precondition(lambda self: self.open)
    def says_what_came(self, data: st.DataObject, mode: ExecutionMode | None) -> None:
        receipt = data.draw(st.sampled_from(self.open))
        self.split.discard(receipt)
        self.note(self.state.handle(FirstByte(receipt, mode=mode), self.now))

    def note(self, outcome: object) -> None:
        super().note(outcome)
        if isinstance(outcome, Dispatch) and outcome.decision.prefill is not None:
            self.split.add(outcome.receipt)

    @rule(worker=st.sampled_from(W))
    def up(self, worker: WorkerId) -> None:
        self.note(self.state.handle(WorkerUp(worker, profile=ABLE), self.now))

    @precondition(lambda self: self.split & set(self.open))
    @rule(data=st.data())
    def prefilled(self, data: st.DataObject) -> None:
        receipt = data.draw(st.sampled_from(sorted(self.split & set(self.open))))
        self.note(self.state.handle(ComputedApart(receipt), self.now))

    @precondition(lambda self: self.split & set(self.open))
    @rule(data=st.data(), failure=st.sampled_from(Failure))
    def not_prefilled(self, data: st.DataObject, failure: Failure) -> None:
        receipt = data.draw(st.sampled_from(sorted(self.split & set(self.open))))
        self.split.remove(receipt)
        went_on = self.state.handle(NotComputedApart(receipt, failure), self.now)
        assert (went_on.receipt, went_on.decision.prefill) == (receipt, None)
        assert went_on.decision.worker.pending_prefill_tokens >= went_on.prefill_tokens


SplitInAnyOrder.TestCase.settings = AnyOrder.TestCase.settings
TestSplitInAnyOrder = SplitInAnyOrder.TestCase


def test_a_split_dispatch_counts_where_its_prompt_is_computed_until_it_is() -> None:
    state = RouterState(make_policy("static_pd"))
    for worker in W:
        state.handle(WorkerUp(worker, profile=ABLE), 0.0)
    first, second = arrive(state), arrive(state, SessionId("other"))
    where = [dispatch.decision.prefill for dispatch in (first, second)]
    assert None not in where
    state.handle(ComputedApart(first.receipt), 1.0)
    assert sum(worker.pending_prefill_tokens for worker in state.fleet) == second.prefill_tokens
    went_on = state.handle(NotComputedApart(second.receipt, Failure.CLOSED), 2.0)
    assert (went_on.reason, went_on.attempt) == (DispatchReason.NOT_SPLIT, second.attempt)
    assert went_on.decision.worker.pending_prefill_tokens == went_on.prefill_tokens
    assert state.live == 2
    state.check()
    for receipt in (first.receipt, second.receipt):
        state.handle(Done(receipt, Usage(50, 5, 0)), 3.0)
    with pytest.raises(InvariantViolated):
        state.handle(ComputedApart(first.receipt), 4.0)
    assert (state.live, state.account.finished) == (0, 2)
    state.check()
