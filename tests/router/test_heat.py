"""EAR: stays, leaves, cools, gets stuck, never thrashes (seed 002 §4.3 and §6)."""

from __future__ import annotations

import pytest

from ownerserve.kv.messages import PlacementAction, Tier
from ownerserve.router.decision import Decision, DispatchReason, RoutingRequest
from ownerserve.router.fleet import Fleet
from ownerserve.router.messages import Stamped
from ownerserve.router.policies import make_policy
from ownerserve.router.settings import Settings
from ownerserve.router.state import RouterState
from ownerserve.router.worker import Profile, Worker
from tests.support.router.fleets import (
    ABLE,
    GIB,
    PLAIN,
    SPEED,
    dispatched,
    fleet_of,
    load,
    on,
    owned,
    raise_up,
    request,
    served,
    status,
    stored,
)  # fmt: skip

SETTINGS = Settings(hot_ms=100.0, hot_ratio=2.0, cool_s=30.0)
HOT = 20_000  # 200 ms at 100 tokens a ms


def decide(asked: RoutingRequest, fleet: Fleet, name: str = "ear") -> Decision:
    return make_policy(name, SETTINGS).decide(asked, fleet.candidates(None))


def pair(profile: Profile = ABLE, count: int = 2) -> tuple[Fleet, list[Worker]]:
    fleet = fleet_of(*[profile] * count)
    return fleet, list(fleet)


@pytest.mark.parametrize("name", ["ear", "ownerserve"])
def test_below_t_hot_a_session_stays_and_above_it_migrates(name: str) -> None:
    fleet, (owner, other) = pair()
    load(owner, pending=9000)
    assert decide(owned(owner), fleet, name).reason is DispatchReason.OWNER
    load(owner, pending=HOT)
    moved = decide(owned(owner), fleet, name)
    assert (moved.worker, moved.reason) == (other, DispatchReason.HOT_OWNER)
    assert moved.action is PlacementAction.STATE_MIGRATION
    assert moved.source is not None
    assert (moved.source.worker, moved.cached_tokens, moved.moved_tokens) == (owner, 10_000, 10_000)


@pytest.mark.parametrize("name", ["ear", "ownerserve"])
def test_who_does_not_own_a_session_hands_none_over(name: str) -> None:
    """Its home has the state as a guest: the owner is gone. A copy is all that can be brought."""
    fleet, (home, other) = pair()
    load(home, pending=HOT)
    turn = request(10_500, owner=None, home=home, turns=3, copies=(on(home, 10_000),))
    moved = decide(turn, fleet, name)
    assert (moved.worker, moved.action) == (other, PlacementAction.ARTIFACT_FETCH)
    handed_over = decide(owned(home), fleet, name)
    assert handed_over.action is PlacementAction.STATE_MIGRATION


def test_without_a_mover_it_fetches_and_says_what_it_wants() -> None:
    fetcher = Profile(speed=SPEED, actions=ABLE.actions - {PlacementAction.STATE_MIGRATION})
    fleet, (owner, other) = pair(fetcher)
    load(owner, pending=HOT)
    moved = decide(owned(owner), fleet)
    assert moved.action is PlacementAction.ARTIFACT_FETCH
    assert moved.wanted is not None
    assert (moved.wanted.source, moved.wanted.target) == (owner, other)


def test_without_any_transfer_it_computes_anew_only_if_that_ends_earlier() -> None:
    fleet, (owner, other) = pair(PLAIN)
    load(owner, pending=HOT)
    short = decide(owned(owner, context=10_000), fleet)  # 105 ms there, 200 + 5 ms here
    assert (short.worker, short.action) == (other, PlacementAction.COLOCATED_PREFILL)
    giant = decide(owned(owner, context=500_000), fleet)  # 5 s there
    assert (giant.worker, giant.reason) == (owner, DispatchReason.HOT_TOO_DEAR), (
        "the other has room"
    )
    assert giant.wanted is not None  # whoever migrates may do it in the tool gap


def test_a_copy_in_the_shared_store_is_a_way_out() -> None:
    fleet, (owner, other) = pair(Profile(
        speed=SPEED,
        actions=PLAIN.actions | {PlacementAction.TAIL_RECOMPUTE},
    ))  # fmt: skip
    load(owner, pending=HOT)
    turn = request(500_500, owner=owner, turns=3, copies=(on(owner, 500_000), stored(499_000)))
    moved = decide(turn, fleet)
    assert (moved.worker, moved.action) == (other, PlacementAction.TAIL_RECOMPUTE)
    assert moved.source is not None
    assert moved.source.tier is Tier.REMOTE


@pytest.mark.parametrize("name", ["ear", "ownerserve"])
def test_it_stays_while_it_cools(name: str) -> None:
    fleet, (owner, other) = pair()
    load(owner, pending=HOT)
    stays = decide(owned(owner, since_move_s=29.0), fleet, name)
    assert (stays.worker, stays.reason) == (owner, DispatchReason.HOT_COOLING)
    assert decide(owned(owner, since_move_s=31.0), fleet, name).worker is other


@pytest.mark.parametrize("name", ["ear", "ownerserve"])
def test_a_fleet_that_is_hot_everywhere_keeps_still(name: str) -> None:
    fleet, (owner, other) = pair()
    load(owner, pending=HOT)
    load(other, pending=HOT * 6 // 10)  # less busy, but not by the relative term
    assert decide(owned(owner), fleet, name).worker is owner
    assert decide(owned(owner), fleet, name).reason is DispatchReason.OWNER


@pytest.mark.parametrize("name", ["ear", "ownerserve"])
def test_a_target_must_have_room(name: str) -> None:
    small = Profile(speed=SPEED, actions=ABLE.actions, kv_bytes_total=GIB)
    fleet, (owner, _) = pair(small)
    load(owner, pending=HOT)
    stays = decide(owned(owner, context=2_000_000), fleet, name)  # 2 GB
    assert (stays.worker, stays.reason) == (owner, DispatchReason.HOT_NO_TARGET)
    assert decide(owned(owner, context=500_000), fleet, name).worker is not owner


@pytest.mark.parametrize("name", ["ear", "ownerserve"])
def test_a_session_does_not_flee_from_itself(name: str) -> None:
    """One giant session whose own parallel requests make its owner hot (seed 002 §6)."""
    fleet, (owner, _) = pair()
    load(owner, pending=HOT)
    assert decide(owned(owner, own_pending_tokens=HOT), fleet, name).worker is owner
    assert decide(owned(owner, own_pending_tokens=1000), fleet, name).worker is not owner


@pytest.mark.parametrize("name", ["ear", "ownerserve"])
def test_the_least_busy_worker_with_room_is_the_target(name: str) -> None:
    fleet, (owner, second, third) = pair(count=3)
    load(owner, pending=HOT)
    load(second, pending=2000)
    load(third, pending=500)
    assert decide(owned(owner), fleet, name).worker is third


def test_ownerserve_also_leaves_a_crowd_that_only_decodes() -> None:
    """No prefill is pending anywhere: EAR sees nothing, the cost of a large batch does."""
    slow_steps = Profile(speed=type(SPEED)(
        prefill=SPEED.prefill, step_ms=1.0, step_ms_per_sequence=0.5, media=SPEED.media,
        kv_bytes_per_token=1000.0,
    ), actions=ABLE.actions)  # fmt: skip
    fleet, (owner, other) = pair(slow_steps)
    load(owner, sequences=20)
    assert decide(owned(owner), fleet, "ear").worker is owner
    assert decide(owned(owner), fleet, "ownerserve").worker is other
    load(other, sequences=20)
    assert decide(owned(owner), fleet, "ownerserve").worker is owner


def test_a_long_session_beside_an_idle_worker_says_that_leaving_takes_too_long() -> None:
    """Workers that state what they offer today move nothing. The other had 60 GB free, and the
    reason said that nobody has room."""
    state = RouterState(make_policy("ear", Settings()))
    raise_up(state, "w0", "w1", profile=Profile(kv_bytes_total=80 * GIB))
    first = served(state, "s", 1.0, tokens=110_000)
    for worker in ("w0", "w1"):
        pending = 200_000 if worker == first.worker else 0
        state.handle(Stamped(status(worker, 2.5, pending=pending)), 2.5)
    second = dispatched(state, "s", 3.0, prompt_bytes=443_000)
    assert (second.worker, second.reason) == (first.worker, DispatchReason.HOT_TOO_DEAR)


def test_ownerserve_that_prices_leaving_and_stays_says_so_too() -> None:
    fleet, (owner, _) = pair(PLAIN)
    load(owner, pending=HOT)
    stays = decide(owned(owner, context=500_000), fleet, "ownerserve")
    assert (stays.worker, stays.reason) == (owner, DispatchReason.HOT_TOO_DEAR)
