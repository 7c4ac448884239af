"""Requests that no session stands behind go round among workers that are alike: which of them is
listed first is no reason."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from ownerserve.kv.ids import SessionId, WorkerId
from ownerserve.router.messages import Arrive, Dispatch, Done, WorkerUp
from ownerserve.router.policies import ROUTING_POLICIES, make_policy
from ownerserve.router.state import RouterState
from ownerserve.router.worker import DEFAULT_SPEED, Profile

IDLE = tuple(name for name in ROUTING_POLICIES if "pd" not in name)


def fleet(policy: str, *, speeds: tuple[float, ...] = (1.0, 1.0, 1.0)) -> RouterState:
    """Workers whose prefill takes so many times the data sheet's time."""
    state = RouterState(make_policy(policy))
    for number, factor in enumerate(speeds):
        speed = replace(DEFAULT_SPEED, prefill=DEFAULT_SPEED.prefill.scaled(factor))
        up = WorkerUp(WorkerId(f"w{number}"), profile=Profile(speed=speed))
        state.handle(up, 0.0)
    return state


def one_by_one(state: RouterState, count: int, arrive: Arrive) -> list[str]:
    """Where so many requests go, each after the end of the one before."""
    went = []
    for number in range(count):
        outcome = state.handle(arrive, float(number))
        assert isinstance(outcome, Dispatch)
        went.append(str(outcome.worker))
        state.handle(Done(outcome.receipt), number + 0.5)
        state.check()
    return went


@pytest.mark.parametrize("policy", IDLE)
def test_unnamed_requests_go_round_an_idle_fleet(policy: str) -> None:
    """37 of 39 went to the first-listed worker."""
    went = Counter(one_by_one(fleet(policy), 39, Arrive(None, 200)))
    assert set(went.values()) == {13}, went


def test_workers_that_measured_themselves_a_little_apart_are_alike() -> None:
    """Measured speeds of equal machines differ by a few percent, and no two are equal."""
    state = fleet("ownerserve", speeds=(1.01, 1.0, 1.03))
    went = Counter(one_by_one(state, 39, Arrive(None, 200)))
    assert set(went.values()) == {13}, went


def test_a_worker_that_is_much_slower_gets_none_of_an_idle_fleets() -> None:
    state = fleet("ownerserve", speeds=(2.0, 1.0, 1.0))
    assert set(one_by_one(state, 10, Arrive(None, 20_000))) == {"w1", "w2"}


def test_the_same_requests_go_the_same_ways() -> None:
    arrive = Arrive(None, 200)
    assert one_by_one(fleet("ownerserve"), 20, arrive) == one_by_one(
        fleet("ownerserve"), 20, arrive
    )


def test_load_comes_before_whose_turn_it_is() -> None:
    state = fleet("ownerserve", speeds=(1.0, 1.0))
    first = state.handle(Arrive(None, 80_000), 0.0)
    assert isinstance(first, Dispatch) and first.worker == "w0"
    for number in range(3):
        small = state.handle(Arrive(None, 200), 1.0 + number)
        assert isinstance(small, Dispatch) and small.worker == "w1"
        state.handle(Done(small.receipt), 1.5 + number)


def test_sessions_stay_where_they_are_put() -> None:
    """Who is named goes by who is bound already: unnamed requests between change nothing of it."""
    alone, between = fleet("ownerserve"), fleet("ownerserve")
    put = []
    for number in range(9):
        arrive = Arrive(SessionId(f"{number:032x}"), 4000)
        for state in (alone, between):
            outcome = state.handle(arrive, float(number))
            assert isinstance(outcome, Dispatch)
            state.handle(Done(outcome.receipt), number + 0.5)
            put.append(outcome.worker)
        one_by_one(between, 3, Arrive(None, 200))
    assert Counter(put[0::2]) == Counter(put[1::2])
