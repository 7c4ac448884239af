"""A policy over engines that pull: it chooses as ever, and what its choice lacks comes from a peer
where that is cheaper."""

from __future__ import annotations

import msgspec
import pytest

from ownerserve.kv.messages import PlacementAction, Tier
from ownerserve.plan.cost.prices import Medium
from ownerserve.router.decision import Decision, RoutingRequest
from ownerserve.router.fleet import Fleet
from ownerserve.router.policies import make_policy
from ownerserve.router.policies.pulling import Pulling
from ownerserve.router.worker import Profile, Worker
from tests.support.router.fleets import (
    ABLE,
    PLAIN,
    SPEED,
    fleet_of,
    load,
    on,
    owned,
    request,
    stored,
)

BASELINES = ("dynamo", "kv_aware", "llm_d_precise", "lmetric_gate", "preble", "smetric")
PULL, HERE = PlacementAction.ARTIFACT_FETCH, PlacementAction.COLOCATED_PREFILL


def able(peer_bytes_per_ms: float, *, first_ms: float = 0.0) -> Profile:
    media = {**SPEED.media, Tier.PEER: Medium(first_ms, peer_bytes_per_ms)}
    return Profile(speed=msgspec.structs.replace(SPEED, media=media), actions=ABLE.actions)


def chosen(asked: RoutingRequest, fleet: Fleet, policy: str = "least_load") -> Decision:
    """What the pulling policy decides; it may differ from the policy's own by the way alone."""
    candidates = fleet.candidates(None)
    alone = make_policy(policy).decide(asked, candidates)
    pulling = Pulling(make_policy(policy)).decide(asked, candidates)
    assert (pulling.worker, pulling.reason) == (alone.worker, alone.reason)
    if pulling.source is None:
        assert pulling == alone
    return pulling


def busy_owner(profile: Profile, count: int = 3) -> tuple[Fleet, Worker]:
    fleet = fleet_of(*[profile] * count)
    owner = next(iter(fleet))
    load(owner, pending=10**7)
    return fleet, owner


@pytest.mark.parametrize("policy", BASELINES)
def test_what_the_choice_lacks_is_pulled_from_who_has_it(policy: str) -> None:
    """All leave so busy an owner for who has the session's beginning, 8,000 tokens of 10,000."""
    fleet, owner = busy_owner(ABLE, count=2)
    other = list(fleet)[1]
    turn = request(10_500, owner=owner, turns=3, copies=(on(owner, 10_000), on(other, 8000)))
    decision = chosen(turn, fleet, policy)
    assert (decision.worker, decision.action) == (other, PULL)
    assert decision.source == on(owner, 10_000)
    assert (decision.cached_tokens, decision.moved_tokens) == (10_000, 2000)


@pytest.mark.parametrize("policy", BASELINES)
def test_a_turn_at_the_worker_that_has_it_is_what_it_was(policy: str) -> None:
    fleet = fleet_of(*[ABLE] * 3)
    owner = next(iter(fleet))
    assert chosen(owned(owner), fleet, policy).worker is owner


def test_who_has_as_much_itself_pulls_nothing() -> None:
    fleet, owner = busy_owner(ABLE)
    other = list(fleet)[1]
    both = request(10_500, copies=(on(owner, 10_000), on(other, 10_000)), turns=3)
    assert chosen(both, fleet, "lmetric_gate").action is HERE
    assert chosen(owned(owner), fleet, "sticky").action is HERE


def test_just_the_difference_is_pulled_and_priced() -> None:
    """The choice has 9,000 of 10,000 tokens: 10 ms of computing the others against their way."""
    for first_ms, action in ((9.7, PULL), (9.9, HERE)):
        fleet, owner = busy_owner(able(5e6, first_ms=first_ms), count=2)
        other = list(fleet)[1]
        turn = request(10_500, turns=3, copies=(on(owner, 10_000), on(other, 9000)))
        decision = chosen(turn, fleet)
        assert (decision.worker, decision.action) == (other, action)
        assert decision.moved_tokens == (1000 if action is PULL else 0)


@pytest.mark.parametrize(("bytes_per_ms", "action"), [(1.1e5, PULL), (0.9e5, HERE)])
def test_a_way_that_takes_longer_than_computing_is_not_taken(
    bytes_per_ms: float, action: PlacementAction
) -> None:
    """100 tokens a ms are computed, 110 or 90 come."""
    fleet, owner = busy_owner(able(bytes_per_ms))
    assert chosen(owned(owner), fleet).action is action


def test_what_its_own_tiers_or_the_store_give_sooner_is_not_pulled() -> None:
    fleet, owner = busy_owner(ABLE, count=2)
    other = list(fleet)[1]
    shorter = request(10_500, turns=3, copies=(on(owner, 10_000), on(other, 9999, Tier.HOST)))
    assert chosen(shorter, fleet).action is HERE
    # All of it lies in the store too, which gives 500 tokens a ms: the peer gives 5,000.
    asked = request(10_500, turns=3, copies=(on(owner, 10_000), stored(10_000)))
    assert chosen(asked, fleet).action is PULL
    slow, owner = busy_owner(able(4e5), count=2)
    asked = request(10_500, turns=3, copies=(on(owner, 10_000), stored(10_000)))
    assert chosen(asked, slow).action is HERE


def test_a_peer_sends_from_host_memory_and_not_from_a_disk() -> None:
    fleet, owner = busy_owner(ABLE)
    for tier, action in ((Tier.HOST, PULL), (Tier.DISK, HERE)):
        asked = request(10_500, turns=3, copies=(on(owner, 10_000, tier),))
        assert chosen(asked, fleet).action is action


def test_an_engine_that_fetches_nothing_computes() -> None:
    fleet, owner = busy_owner(PLAIN)
    assert chosen(owned(owner), fleet).action is HERE


def test_a_choice_that_brings_state_or_splits_the_turn_is_left_alone() -> None:
    fleet = fleet_of(*[ABLE] * 4)
    owner = next(iter(fleet))
    load(owner, pending=10**7)
    assert chosen(owned(owner), fleet, "ear").action is PlacementAction.STATE_MIGRATION
    assert chosen(owned(owner), fleet, "static_pd").action is PlacementAction.REMOTE_PREFILL
    assert Pulling(make_policy("static_pd")).needs == make_policy("static_pd").needs
