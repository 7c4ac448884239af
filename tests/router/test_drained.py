"""A worker that is drained gets no turn; what it has is read from it, until it is gone."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ownerserve.kv.ids import WorkerId
from ownerserve.kv.messages import PlacementAction, Tier
from ownerserve.router.messages import Answer, Down, FirstByte, LetGo, Noted, WorkerDown
from ownerserve.router.policies import make_policy
from ownerserve.router.state import RouterState
from tests.support.router.fleets import ABLE, dispatched, raise_up, served

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


def test_who_lends_nothing_is_not_read(state: RouterState) -> None:
    raise_up(state, "w0", "w1", profile=replace(LENDS, lends=frozenset[Tier]()))
    drained(state, Down.DRAINED)
    turn = dispatched(state, "agent", 3.0, prompt_bytes=4 * 50_500)
    assert turn.decision.source is None and not turn.decision.cached_tokens
