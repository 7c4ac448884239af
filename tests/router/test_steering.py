"""Who decides: arms are stable shares, apart where they have workers of their own, and a shadow
changes nothing."""

from __future__ import annotations

import pytest

from ownerserve.kv.ids import SessionId, WorkerId
from ownerserve.router.messages import (
    Arm,
    Arrive,
    Dispatch,
    Done,
    Down,
    Failed,
    Failure,
    WorkerDown,
    WorkerUp,
)
from ownerserve.router.policies import make_policy
from ownerserve.router.requests.body import Usage
from ownerserve.router.rollout.shadow import Shadow, ShadowCounts
from ownerserve.router.rollout.steering import Steering, arm_of
from ownerserve.router.settings import DEFAULTS
from ownerserve.router.state import RouterState
from tests.support.router.fleets import load

NAMES = [SessionId(f"{number:032x}") for number in range(2000)]
A, B, C = (WorkerId(name) for name in ("a:1", "b:1", "c:1"))


def state_of(*workers: WorkerId, policy: str = "least_load") -> RouterState:
    state = RouterState(make_policy(policy))
    for worker in workers:
        state.handle(WorkerUp(worker), 0.0)
    return state


def turn(
    state: RouterState, session: SessionId, *, now: float, arm: Arm = Arm.MAIN, tokens: int = 4000
) -> Dispatch:
    """One whole turn of a session, whose prompt has `tokens`."""
    dispatch = state.handle(Arrive(session, tokens * 4, arm=arm), now)
    assert isinstance(dispatch, Dispatch)
    usage = Usage(tokens, 0, 10)
    state.handle(Done(dispatch.receipt, usage), now)
    return dispatch


def test_a_share_is_of_sessions_and_grows_without_letting_one_out() -> None:
    inside: set[SessionId] = set()
    for share in (0.0, 0.01, 0.1, 0.5, 1.0):
        now = {name for name in NAMES if arm_of(name, share) is Arm.CANARY}
        assert inside <= now
        assert abs(len(now) - share * len(NAMES)) <= 0.05 * len(NAMES)
        inside = now
    assert len(inside) == len(NAMES)


def test_the_canarys_policy_decides_for_the_canary_alone() -> None:
    state = state_of(A, B)
    state.steer(Steering(policy=make_policy("sticky"), canary=make_policy("least_load")), DEFAULTS)
    reasons = {turn(state, NAMES[0], now=n, arm=Arm.MAIN).reason for n in range(1, 4)}
    assert "least_load" not in reasons
    reasons = {turn(state, NAMES[1], now=n, arm=Arm.CANARY).reason for n in range(4, 7)}
    assert reasons == {"least_load"}
    state.check()


def test_arms_with_workers_of_their_own_keep_apart_and_help_each_other_out() -> None:
    state = state_of(A, B, C)
    apart = Steering(policy=make_policy("least_load"), canary_workers=frozenset({C}))
    state.steer(apart, DEFAULTS)
    seen = {arm: {turn(state, name, now=1.0, arm=arm).worker for name in NAMES[:9]} for arm in Arm}
    assert seen == {Arm.MAIN: {A, B}, Arm.CANARY: {C}}

    dispatch = state.handle(Arrive(NAMES[20], 400, arm=Arm.CANARY), 2.0)
    assert isinstance(dispatch, Dispatch) and dispatch.worker == C
    again = state.handle(Failed(dispatch.receipt, Failure.CLOSED), 2.0)
    assert isinstance(again, Dispatch) and again.worker in (A, B), "all of its own were tried"
    state.handle(Done(again.receipt), 2.0)

    state.handle(WorkerDown(C, Down.UNHEALTHY), 3.0)
    assert turn(state, NAMES[21], now=3.0, arm=Arm.CANARY).worker in (A, B)
    state.check()


@pytest.mark.parametrize("shadow", ["ownerserve", "round_robin"])
def test_a_shadow_changes_nothing_that_is_done(shadow: str) -> None:
    def placed(state: RouterState) -> list[WorkerId]:
        turns = [(name, now) for now in range(1, 8) for name in NAMES[:12]]
        return [turn(state, name, now=float(now)).worker for name, now in turns]

    plain, watched = state_of(A, B, C), state_of(A, B, C)
    counts = ShadowCounts()
    beside = Shadow(shadow, make_policy(shadow), settings=DEFAULTS, counts=counts)
    watched.steer(Steering(policy=make_policy("least_load"), shadow=beside), DEFAULTS)
    assert placed(watched) == placed(plain)
    assert counts.compared == 7 * 12


def test_regret_is_what_leaving_the_state_costs() -> None:
    """A session's state lies at A, which is busy enough that least load takes B: the owner's price
    is less by the prefill that B makes again."""
    state, counts = state_of(A, B), ShadowCounts()
    first = turn(state, NAMES[0], now=1.0, tokens=60_000)
    beside = Shadow("ownerserve", make_policy("ownerserve"), settings=DEFAULTS, counts=counts)
    state.steer(Steering(policy=make_policy("least_load"), shadow=beside), DEFAULTS)
    load(state.fleet[first.worker], pending=50)
    away = turn(state, NAMES[0], now=2.0, tokens=60_010)
    assert away.worker != first.worker
    told = away.decision.beside
    assert told is not None and told.worker.id == first.worker
    assert told.regret_ms == pytest.approx(told.worker.speed.prefill.ms(60_000, 0), rel=0.2)
    assert counts.shadow_cached_tokens - counts.live_cached_tokens >= 59_000
    assert counts.regret_ms == {told.reason: told.regret_ms} and not counts.gain_ms


def test_agreement_costs_nothing() -> None:
    state, counts = state_of(A, B), ShadowCounts()
    beside = Shadow("ownerserve", make_policy("ownerserve"), settings=DEFAULTS, counts=counts)
    state.steer(Steering(policy=make_policy("ownerserve"), shadow=beside), DEFAULTS)
    for now in range(1, 6):
        dispatch = turn(state, NAMES[0], now=float(now))
        assert dispatch.decision.beside is not None
        assert dispatch.decision.beside.regret_ms == 0.0
    assert counts.agreed.total() == 5 and not counts.differed
