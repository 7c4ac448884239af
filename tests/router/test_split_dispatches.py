"""A dispatch that is split counts at both workers; who computed its prompt in truth is known by the
answer of the one that was to have it computed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ownerserve.kv.ids import Incarnation, SessionId, WorkerId
from ownerserve.kv.messages import ExecutionMode, Tier
from ownerserve.router.decision import DispatchReason
from ownerserve.router.messages import ComputedApart, Dispatch, Done, FirstByte, WorkerUp
from ownerserve.router.policies import make_policy
from ownerserve.router.requests.body import Usage
from ownerserve.router.state import RouterState
from ownerserve.router.worker import Worker
from tests.support.router.fleets import PLAIN, dispatched, raise_up

APART, COLD = ExecutionMode.REMOTE_PREFILL, ExecutionMode.COLD_PREFILL


def split() -> tuple[RouterState, Dispatch, Worker]:
    """A state with one split dispatch, and the worker that is to compute its prompt."""
    state = RouterState(make_policy("static_pd"))
    raise_up(state, "a", "b")
    dispatch = dispatched(state, "s", 1.0)
    prefill = dispatch.decision.prefill
    assert prefill is not None
    assert (dispatch.reason, prefill.requests) == (DispatchReason.SPLIT, 1)
    assert prefill.pending_prefill_tokens == dispatch.prefill_tokens
    return state, dispatch, prefill


def ended(state: RouterState, dispatch: Dispatch, holder: Worker) -> int:
    """The tokens that `holder` is known to hold of the session once the turn has ended."""
    state.handle(Done(dispatch.receipt, Usage(1000, 10, 0)), 3.0)
    state.check()
    session = state.sessions.get(SessionId("s"))
    assert session is not None
    assert session.pending == (), "nothing of a turn that is over is kept"
    held = [copy.tokens for copy in session.copies() if copy.worker is holder]
    assert [copy for copy in session.copies() if copy.tier is not Tier.DEVICE] == []
    return max(held, default=0)


@pytest.mark.parametrize("mode", [APART, None])
def test_a_first_byte_says_that_the_prompt_is_computed_apart(mode: ExecutionMode | None) -> None:
    state, dispatch, prefill = split()
    state.handle(FirstByte(dispatch.receipt, mode=mode), 2.0)
    assert (prefill.requests, prefill.pending_prefill_tokens) == (1, 0)
    state.check()
    assert ended(state, dispatch, prefill) == 1000
    assert prefill.requests == 0


@pytest.mark.parametrize("mode", [COLD, ExecutionMode.FETCH, ExecutionMode.DIRECT_APPEND])
def test_who_computed_it_on_the_spot_leaves_nothing_at_the_other(mode: ExecutionMode) -> None:
    state, dispatch, prefill = split()
    state.handle(FirstByte(dispatch.receipt, mode=mode), 2.0)
    assert (prefill.requests, prefill.pending_prefill_tokens) == (0, 0)
    state.check()
    assert ended(state, dispatch, prefill) == 0
    assert all(not worker.requests for worker in state.fleet)


def test_what_the_gateway_heard_itself_of_the_prefill_stands() -> None:
    """Whoever was sent the state by an engine of its own may call that a cold prompt."""
    state, dispatch, prefill = split()
    state.handle(ComputedApart(dispatch.receipt), 1.5)
    state.handle(FirstByte(dispatch.receipt, mode=COLD), 2.0)
    assert (prefill.requests, prefill.pending_prefill_tokens) == (1, 0)
    state.check()
    assert ended(state, dispatch, prefill) == 1000


def test_who_frees_what_it_computed_for_others_is_not_taken_to_hold_it() -> None:
    state, dispatch, prefill = split()
    prefill.profile = replace(prefill.profile, frees_prompts=True)
    state.handle(FirstByte(dispatch.receipt, mode=APART), 2.0)
    assert ended(state, dispatch, prefill) == 0


def test_who_computed_it_and_began_anew_since_holds_nothing() -> None:
    state, dispatch, prefill = split()
    state.handle(FirstByte(dispatch.receipt, mode=APART), 2.0)
    state.handle(WorkerUp(WorkerId(prefill.id), 0, Incarnation(2), PLAIN), 2.5)
    assert ended(state, dispatch, prefill) == 0
