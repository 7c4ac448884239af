"""What sets each policy apart from the others."""

from __future__ import annotations

import pytest

from ownerserve.kv.messages import PlacementAction, Tier
from ownerserve.router.decision import DispatchReason, RoutingRequest
from ownerserve.router.fleet import Fleet
from ownerserve.router.policies import make_policy
from ownerserve.router.sessions import Copy, Use
from ownerserve.router.worker import Profile, Worker, WorkerRole
from tests.support.router.fleets import ABLE, PLAIN, SPEED, fleet_of, load, on, owned, request

PD = [
    Profile(speed=SPEED, actions=ABLE.actions, role=role)
    for role in (WorkerRole.PREFILL, WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.DECODE)
]


def choose(name: str, asked: RoutingRequest, fleet: Fleet) -> tuple[str, DispatchReason]:
    decision = make_policy(name).decide(asked, fleet.candidates(None))
    return decision.worker.id, decision.reason


def test_round_robin_takes_turns_over_whoever_is_up() -> None:
    fleet, policy = fleet_of(*[PLAIN] * 3), make_policy("round_robin")
    candidates = fleet.candidates(None)
    owner = next(iter(fleet))
    order = [policy.decide(owned(owner), candidates).worker.id for _ in range(4)]
    assert order == ["w0", "w1", "w2", "w0"]
    fewer = candidates.without([list(fleet)[1]])
    assert [policy.decide(request(), fewer).worker.id for _ in range(2)] == ["w2", "w0"]


def test_sticky_stays_however_busy_where_others_leave() -> None:
    fleet = fleet_of(*[PLAIN] * 3)
    busy = list(fleet)[1]
    load(busy, pending=10**7)
    turn = owned(busy)
    assert choose("sticky", turn, fleet) == ("w1", DispatchReason.OWNER)
    assert choose("least_load", turn, fleet) == ("w0", DispatchReason.LEAST_LOAD)
    assert choose("ttft_gate", turn, fleet) == ("w0", DispatchReason.HOT_OWNER)
    assert choose("ear", turn, fleet) == ("w0", DispatchReason.HOT_OWNER)


def test_lmetric_weighs_new_tokens_by_batch() -> None:
    fleet = fleet_of(*[PLAIN] * 2)
    owner, other = fleet
    load(owner, sequences=9)
    # 500 new tokens in a batch of ten against 1,500 alone: 5,000 against 1,500 x 1.
    assert choose("lmetric", owned(owner, context=1000), fleet)[0] == other.id
    # A longer context tips it: 5,000 against 10,500.
    assert choose("lmetric", owned(owner, context=10_000), fleet)[0] == owner.id


def test_the_gate_keeps_who_holds_more_than_half() -> None:
    fleet = fleet_of(*[PLAIN] * 2)
    owner, other = fleet
    load(owner, sequences=99)
    assert choose("lmetric_gate", owned(owner, context=1001, new=1000), fleet) == (
        owner.id, DispatchReason.CACHED,
    )  # fmt: skip
    assert choose("lmetric_gate", owned(owner, context=1000, new=1000), fleet)[0] == other.id


def test_kv_aware_trades_cached_share_for_relative_load() -> None:
    fleet = fleet_of(*[PLAIN] * 3)
    owner, _, most = fleet
    load(most, pending=100_000)
    load(owner, pending=60_000)
    assert choose("kv_aware", owned(owner, context=9000, new=1000), fleet)[0] == owner.id
    assert choose("kv_aware", owned(owner, context=5000, new=5000), fleet)[0] == "w1"


def test_llm_d_weighs_the_prefix_three_times() -> None:
    fleet = fleet_of(*[PLAIN] * 2)
    owner, other = fleet
    load(owner, pending=100_000)
    assert choose("llm_d_precise", owned(owner), fleet)[0] == owner.id
    assert choose("llm_d_precise", request(), fleet)[0] == other.id
    # Two thirds held elsewhere cost a point of three; the only queue of all costs another.
    shared = request(10_000, copies=(on(owner, 9000), on(other, 6001)))
    assert choose("llm_d_precise", shared, fleet)[0] == other.id


def test_smetric_keeps_an_owner_that_holds_half_and_answers_in_time() -> None:
    fleet = fleet_of(*[PLAIN] * 3)
    owner = list(fleet)[1]
    assert choose("smetric", owned(owner, context=1001, new=1000), fleet) == (
        owner.id, DispatchReason.OWNER,
    )  # fmt: skip
    load(owner, sequences=1)
    assert choose("smetric", owned(owner, context=1000, new=100_000), fleet)[0] == "w0"
    load(owner, pending=10**7)
    assert choose("smetric", owned(owner), fleet) == ("w0", DispatchReason.HOT_OWNER)


def test_preble_exploits_a_long_prefix_unless_its_holder_is_twice_as_loaded() -> None:
    fleet = fleet_of(*[PLAIN] * 3)
    owner = list(fleet)[1]
    long, short = owned(owner, context=1001, new=1000), owned(owner, context=900, new=100_000)
    assert choose("preble", long, fleet) == (owner.id, DispatchReason.CACHED)
    assert choose("preble", short, fleet)[1] is DispatchReason.SCORE
    load(owner, pending=10**7)
    assert choose("preble", long, fleet) == ("w0", DispatchReason.HOT_OWNER)
    assert choose("preble", short, fleet)[0] == "w0"


def test_dynamo_credits_slower_tiers_less() -> None:
    fleet = fleet_of(*[PLAIN] * 3)
    _, disk, host = fleet
    asked = request(10_000, copies=(on(disk, 9000, Tier.DISK), on(host, 8000, Tier.HOST)))
    assert choose("dynamo", asked, fleet)[0] == host.id


def test_a_programs_place_expires() -> None:
    fleet = fleet_of(*[PLAIN] * 2)
    owner, other = fleet
    load(owner, pending=1000)
    assert choose("program_ttl", owned(owner, idle_s=119.0), fleet) == (
        owner.id,
        DispatchReason.OWNER,
    )
    assert choose("program_ttl", owned(owner, idle_s=121.0), fleet) == (
        other.id,
        DispatchReason.EXPIRED,
    )


def test_static_pd_sends_all_and_its_delta_sibling_what_is_lacking() -> None:
    fleet = fleet_of(*PD)
    candidates = fleet.candidates(None)
    first_p, second_p, first_d, _ = fleet
    turn = request(10_500, owner=first_d, turns=2, copies=(on(first_d, 10_000), on(second_p, 9900)))
    full = make_policy("static_pd").decide(turn, candidates)
    assert (full.prefill, full.moved_tokens) == (first_p, 10_500)
    delta = make_policy("static_pd_delta").decide(turn, candidates)
    assert (delta.worker, delta.prefill) == (first_d, second_p)
    assert (delta.moved_tokens, delta.cached_tokens) == (500, 9900)
    assert delta.action is PlacementAction.REMOTE_PREFILL


def test_round_robin_pd_rotates_both_halves() -> None:
    fleet, policy = fleet_of(*PD), make_policy("round_robin_pd")
    pairs = [policy.decide(request(), fleet.candidates(None)) for _ in range(4)]
    assert [(one.prefill.id, one.worker.id) for one in pairs if one.prefill] == [
        ("w0", "w2"), ("w1", "w3"), ("w0", "w2"), ("w1", "w3"),
    ]  # fmt: skip


def test_pd_policies_do_not_split_what_the_engine_cannot() -> None:
    fleet = fleet_of(*[PLAIN] * 3)
    for name in ("static_pd", "static_pd_delta", "round_robin_pd"):
        decision = make_policy(name).decide(request(), fleet.candidates(None))
        assert decision.action is PlacementAction.COLOCATED_PREFILL
        assert decision.reason is DispatchReason.NOT_OFFERED


def test_multi_owner_takes_any_holder_until_load_is_uneven() -> None:
    fleet = fleet_of(*[PLAIN] * 3)
    one, two, idle = fleet
    load(one, pending=5000, sequences=3)
    asked = request(1000, copies=(on(one, 900), on(two, 900)))
    assert choose("multi_owner", asked, fleet) == (two.id, DispatchReason.CACHED)
    load(two, sequences=40)
    assert choose("multi_owner", asked, fleet) == (idle.id, DispatchReason.HOT_OWNER)


@pytest.mark.parametrize("name", ["sticky", "ttft_gate", "program_ttl", "ear", "ownerserve"])
def test_who_is_gone_is_told_from_who_is_new(name: str) -> None:
    fleet = fleet_of(*[PLAIN] * 2)
    assert choose(name, request(turns=2), fleet)[1] is DispatchReason.OWNER_LOST
    assert choose(name, request(), fleet)[1] is DispatchReason.NEW_SESSION
    assert choose(name, request(session=None), fleet)[1] is DispatchReason.NO_SESSION


@pytest.mark.parametrize("name", ["sticky", "ear", "ownerserve"])
def test_a_session_starts_on_the_faster_of_two_idle_workers(name: str) -> None:
    slow = Profile(speed=SPEED, kv_bytes_total=0)
    quick = Profile(speed=type(SPEED)(
        prefill=SPEED.prefill.scaled(0.25), step_ms=0.25, step_ms_per_sequence=0.0,
        media=SPEED.media, kv_bytes_per_token=1000.0,
    ))  # fmt: skip
    assert choose(name, request(20_000), fleet_of(slow, slow, quick))[0] == "w2"


KV_AWARE = ("lmetric", "lmetric_gate", "kv_aware", "multi_owner", "preble", "llm_d_precise")


@pytest.mark.parametrize("policy", KV_AWARE)
def test_what_lies_in_host_memory_counts_as_what_lies_on_the_device(policy: str) -> None:
    """A copy that its worker loads sooner than it computes; one that it would leave does not."""
    fleet = fleet_of(*[PLAIN] * 3)
    holder = list(fleet)[1]
    assert choose(policy, held(holder, Tier.HOST), fleet)[0] == holder.id
    assert choose(policy, held(holder, Tier.HOST, use=Use.LEFT), fleet)[0] != holder.id


def held(holder: Worker, tier: Tier, *, use: Use = Use.BY_PRICE) -> RoutingRequest:
    """A turn of 100,000 tokens, all of whose state but 500 lies in one tier of `holder`."""
    copy = Copy(holder, holder.life, tier, 99_500, use)
    return request(100_000, copies=(copy,))
