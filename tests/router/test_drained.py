"""A worker that is drained gets no turn; what it has is read from it, until it is gone."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ownerserve.kv.ids import SessionId, WorkerId
from ownerserve.kv.messages import PlacementAction, Tier
from ownerserve.router.decision import DispatchReason
from ownerserve.router.messages import (
    Aborted,
    Answer,
    Arm,
    Arrive,
    Dispatch,
    Down,
    FirstByte,
    LeftToStore,
    LetGo,
    MovedOn,
    Noted,
    Refusal,
    Refuse,
    Reported,
    TakenOver,
    WorkerDown,
)
from ownerserve.router.policies import make_policy
from ownerserve.router.state import RouterState
from tests.support.router.fleets import ABLE, dispatched, raise_up, served

AGENT = SessionId("agent")
LENDS = replace(ABLE, lends=frozenset({Tier.DEVICE}), spec_digest="d")


@pytest.fixture(params=["ear", "ownerserve"])
def state(request: pytest.FixtureRequest) -> RouterState:
    state = RouterState(make_policy(request.param))
    raise_up(state, "w0", "w1", profile=LENDS)
    return state


def drained(state: RouterState, *whys: Down) -> WorkerId:
    """The home of a session with 50,000 tokens, once it was taken out."""
    home = served(state, "agent", 1.0, tokens=50_000).worker
    for why in whys:
        state.handle(WorkerDown(home, why), 2.0)
    return home


@pytest.mark.parametrize("why", [Down.DRAINED, Down.REMOVED])
def test_a_session_takes_its_state_along(state: RouterState, why: Down) -> None:
    home = drained(state, why)
    turn = dispatched(state, "agent", 3.0, prompt_bytes=4 * 50_500)
    source = turn.decision.source
    assert turn.worker != home and source is not None and source.worker is not None
    assert (source.worker.id, source.tier) == (home, Tier.DEVICE)
    assert turn.decision.action is PlacementAction.ARTIFACT_FETCH
    # It is asked to let go as soon as the other one answers.
    began = state.handle(FirstByte(turn.receipt, None, Answer.TURN), 3.1)
    assert isinstance(began, LetGo) and began.source.worker == home


def test_who_lends_nothing_or_is_gone_is_read_by_nobody(state: RouterState) -> None:
    home = drained(state, Down.DRAINED, Down.UNREACHABLE)
    turn = dispatched(state, "agent", 3.0, prompt_bytes=4 * 50_500)
    assert turn.worker != home and turn.decision.source is None
    began = state.handle(FirstByte(turn.receipt, None, Answer.TURN), 3.1)
    assert isinstance(began, Noted)


def test_an_idle_session_is_taken_over_and_its_next_turn_goes_there(state: RouterState) -> None:
    home = drained(state, Down.DRAINED)
    (source,) = [one for one in state.fleet if one.id == home]
    target = state.idle.place(AGENT, source, Arm.MAIN, 3.0)
    assert target is not None and target is not source and target.unit is not None
    state.handle(TakenOver(AGENT, target.unit, home, 49_000), 3.1)
    turn = dispatched(state, AGENT, 4.0, prompt_bytes=4 * 50_500)
    assert (turn.worker, turn.decision.source) == (target.id, None)
    assert turn.decision.cached_tokens == 49_000
    state.handle(FirstByte(turn.receipt, None, Answer.TURN), 4.1)
    assert state.idle.place(AGENT, source, Arm.MAIN, 4.2) is None, "it is not there any more"


def test_one_that_runs_or_went_elsewhere_is_not_taken(state: RouterState) -> None:
    home = drained(state, Down.DRAINED)
    (source,) = [one for one in state.fleet if one.id == home]
    turn = dispatched(state, AGENT, 3.0, prompt_bytes=4 * 50_500)
    assert state.idle.place(AGENT, source, Arm.MAIN, 3.0) is None
    state.handle(FirstByte(turn.receipt, None, Answer.TURN), 3.1)
    session = state.sessions.get(AGENT)
    assert session is not None and session.owner is not None and session.owner.id == turn.worker
    assert source.unit is not None  # a word that comes late, of a session that moved by its turn
    state.handle(TakenOver(AGENT, source.unit, home, 49_000), 3.2)
    assert session.owner.id == turn.worker


def test_nobody_who_has_another_model_takes_it(state: RouterState) -> None:
    home = drained(state, Down.DRAINED)
    (source,) = [one for one in state.fleet if one.id == home]
    (other,) = {"w0", "w1"} - {str(home)}
    raise_up(state, other, profile=replace(LENDS, spec_digest="another"))
    assert state.idle.place(AGENT, source, Arm.MAIN, 3.0) is None


def test_who_lends_nothing_is_not_read(state: RouterState) -> None:
    raise_up(state, "w0", "w1", profile=replace(LENDS, lends=frozenset[Tier]()))
    drained(state, Down.DRAINED)
    turn = dispatched(state, "agent", 3.0, prompt_bytes=4 * 50_500)
    assert turn.decision.source is None and not turn.decision.cached_tokens


def test_what_was_put_away_is_nobodys_until_its_next_turn(state: RouterState) -> None:
    home = drained(state, Down.DRAINED)
    state.handle(Reported(None, Tier.REMOTE, None, 49_000, AGENT), 2.5)
    state.handle(LeftToStore(AGENT, WorkerId("another")), 2.6)
    session = state.sessions.get(AGENT)
    assert session is not None and session.owner is not None, "the word of one who had it before"
    state.handle(LeftToStore(AGENT, home), 3.0)
    assert session.owner is None and session.home is None
    turn = dispatched(state, AGENT, 4.0, prompt_bytes=4 * 50_500)
    source = turn.decision.source
    assert turn.worker != home and source is not None
    assert (source.tier, source.tokens) == (Tier.REMOTE, 49_000)
    assert turn.reason is DispatchReason.RECOVERED


def running(state: RouterState) -> Dispatch:
    """A session's second turn, of whose answer a part is there; its worker is drained."""
    served(state, "agent", 1.0, tokens=5_000)
    turn = dispatched(state, "agent", 2.0, prompt_bytes=4 * 5_500)
    state.handle(FirstByte(turn.receipt, None, Answer.TURN), 2.1)
    state.handle(WorkerDown(turn.worker, Down.DRAINED), 2.2)
    return turn


def requests(state: RouterState) -> dict[WorkerId, int]:
    return {one.id: one.requests for one in state.fleet}


def test_a_turn_that_moves_amid_its_answer_counts_where_it_goes_on(state: RouterState) -> None:
    turn = running(state)
    known = state.sessions.get(AGENT)
    assert known is not None
    turns = known.turns
    target = state.idle.place_running(Arrive(AGENT, 4 * 5_500), turn.decision.worker, 2.3)
    assert target is not None and target.id != turn.worker and target.unit is not None
    gone_on = state.handle(MovedOn(turn.receipt, target.unit), 2.4)
    assert isinstance(gone_on, Dispatch)
    assert (gone_on.worker, gone_on.reason) == (target.id, DispatchReason.MOVED)
    assert gone_on.decision.reason is DispatchReason.MOVED
    assert requests(state) == {turn.worker: 0, target.id: 1}
    assert known.turns == turns, "it is the same turn"
    began = state.handle(FirstByte(gone_on.receipt, None, Answer.TURN), 2.5)
    assert isinstance(began, LetGo) and began.source.worker == turn.worker
    assert known.owner is target
    state.handle(Aborted(gone_on.receipt), 2.6)
    state.check()


def test_a_turn_whose_target_is_gone_by_then_is_broken(state: RouterState) -> None:
    turn = running(state)
    target = state.idle.place_running(Arrive(AGENT, 4 * 5_500), turn.decision.worker, 2.3)
    assert target is not None and target.unit is not None
    state.handle(WorkerDown(target.id, Down.UNREACHABLE), 2.35)
    assert state.handle(MovedOn(turn.receipt, target.unit), 2.4) == Refuse(Refusal.NO_WORKER)
    assert not any(requests(state).values()) and state.account.broken == 1
    state.check()


def test_a_turn_of_which_nobody_has_anything_is_asked_elsewhere_then(state: RouterState) -> None:
    """Its answer is not streamed: it can be computed anew."""
    raise_up(state, "w2", profile=LENDS)
    turn = dispatched(state, "agent", 1.0, prompt_bytes=4 * 500)
    state.handle(WorkerDown(turn.worker, Down.DRAINED), 1.1)
    target = state.idle.place_running(Arrive(AGENT, 4 * 500), turn.decision.worker, 1.2)
    assert target is not None and target.unit is not None
    state.handle(WorkerDown(target.id, Down.UNREACHABLE), 1.3)
    again = state.handle(MovedOn(turn.receipt, target.unit), 1.4)
    assert isinstance(again, Dispatch) and again.worker not in (turn.worker, target.id)
    state.handle(Aborted(again.receipt), 1.5)
    state.check()
