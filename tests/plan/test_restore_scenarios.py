"""The restores that decide whether a hybrid cache is worth having, one scenario each."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from ownerserve.kv.messages import RestoreAction, Tier
from ownerserve.plan.cost.events import Loaded
from ownerserve.plan.cost.model import CostModel
from ownerserve.plan.explain import summary
from ownerserve.plan.inputs import (
    Backlog,
    Exactness,
    ModelState,
    Piece,
    Point,
    RangeSpan,
    RestoreQuery,
)
from ownerserve.plan.outcome import Basis, Why
from ownerserve.plan.restore import Planner

DEVICE, HOST, DISK, REMOTE = Tier.DEVICE, Tier.HOST, Tier.DISK, Tier.REMOTE
MISSING = ("swa", "csa_overlap")


def actions(planner: Planner, query: RestoreQuery, costs: CostModel) -> list[str]:
    return [str(step.action) for step in planner.plan(query, costs.prices()).chosen.steps]


def branch(position: int, tokens: int) -> RestoreQuery:
    """Global KV is on the device up to `position`; nobody kept point state there."""
    return RestoreQuery(
        tokens=tokens, spans=(RangeSpan(0, position),), points=(Point(position, (), MISSING),)
    )


def test_a_branch_at_1100_of_a_cached_1537_prompt_is_replayed_and_not_prefilled(
    world: SimpleNamespace, costs: CostModel
) -> None:
    # research/hybrid-kv.md §3: vLLM finds 0 cached tokens here, 4 blocks of global KV present.
    tiny_v4 = ModelState(
        layers=6,
        block_tokens=256,
        range_bytes_per_token=500.0,
        point_bytes=100_000,
        exact_replay_tokens=6 * 127,
        bounded_replay_tokens=128,
    )
    plan = Planner(tiny_v4, world.full).plan(branch(1024, 1110), costs.prices())
    assert plan.chosen.position == 1024
    assert plan.chosen.computed_from == 1024 - 762
    assert plan.chosen.exactness is Exactness.EXACT
    assert [step.action for step in plan.chosen.steps] == ["replay", "prefill"]
    assert plan.reuse_benefit_ms > 0


def test_on_v4_pro_the_same_short_branch_ties_with_a_prefill_and_keeps_the_sealed_blocks(
    world: SimpleNamespace, costs: CostModel
) -> None:
    # 1,024 < 7,747: the replay starts at 0, computes what a prefill does and overwrites nothing.
    plan = Planner(world.v4_pro, world.full).plan(branch(1024, 1110), costs.prices())
    assert plan.chosen.computed_from == 0
    assert [step.action for step in plan.chosen.steps] == ["replay", "prefill"]
    assert plan.reuse_benefit_ms == pytest.approx(0.0, abs=1e-6)


def test_a_90k_branch_on_v4_pro_replays_7747_tokens(
    world: SimpleNamespace, costs: CostModel
) -> None:
    plan = Planner(world.v4_pro, world.full).plan(branch(92_160, 92_918), costs.prices())
    assert plan.chosen.computed_tokens == 7747 + 758
    assert plan.chosen.terms.ttft_ms < 0.25 * plan.prefill_ttft_ms


def test_gemma_from_a_slow_tier_is_prefilled_since_its_replay_is_dearer(
    world: SimpleNamespace, costs: CostModel
) -> None:
    # 60,000 tokens: 4.9 GB of global KV to load and still 53,196 tokens to replay.
    spans = (RangeSpan(0, 60_000, (Piece(REMOTE, 60_000 * 81_920),)),)
    query = RestoreQuery(tokens=60_500, spans=spans, points=(Point(60_000, (), ("swa",)),))
    planner = Planner(world.gemma, world.serial)
    assert actions(planner, query, costs) == ["prefill"]
    explained = planner.explain(query, costs.prices())
    replay = next(option for option in explained.alternatives if option.position == 60_000)
    assert replay.computed_from == 60_000 - 53_196
    assert replay.terms.total_ms > explained.plan.chosen.terms.total_ms


def test_no_replay_is_offered_by_an_engine_that_cannot(
    world: SimpleNamespace, costs: CostModel
) -> None:
    vllm_like = msgspec.structs.replace(world.full, can_replay=False)
    planner = Planner(world.v4_pro, vllm_like)
    explained = planner.explain(branch(92_160, 92_918), costs.prices())
    assert [step.action for step in explained.plan.chosen.steps] == ["prefill"]
    assert {item.why for item in explained.not_offered} == {
        Why.POINT_STATE_MISSING,
        Why.ENGINE_CANNOT_REPLAY,
    }


def test_recurrent_state_is_never_replayed(world: SimpleNamespace, costs: CostModel) -> None:
    query = RestoreQuery(
        tokens=65_000,
        spans=(RangeSpan(0, 64_000),),
        points=(Point(64_000, (), ("recurrent",)), Point(32_000, (Piece(HOST, 77_000_000),))),
        allowed=Exactness.BOUNDED_REPLAY,
    )
    planner = Planner(world.qwen_next, world.full)
    chosen = planner.plan(query, costs.prices()).chosen
    assert (chosen.position, chosen.checkpoint) == (32_000, 32_000)
    explained = planner.explain(query, costs.prices())
    assert all(
        step.action != "replay" for option in explained.alternatives for step in option.steps
    )
    assert Why.RECURRENT_HAS_NO_REPLAY in {item.why for item in explained.not_offered}


def test_a_missing_point_is_reached_from_an_earlier_checkpoint(
    world: SimpleNamespace, costs: CostModel
) -> None:
    # The range state is resident and memory has a price: replaying shares it, a prefill copies it.
    query = RestoreQuery(
        tokens=92_918,
        spans=(RangeSpan(0, 92_160),),
        points=(Point(92_160, (), MISSING), Point(90_112, (Piece(HOST, 5_140_000),))),
        hbm_ms_per_gib=100.0,
    )
    chosen = Planner(world.v4_pro, world.full).plan(query, costs.prices()).chosen
    assert (chosen.position, chosen.computed_from, chosen.checkpoint) == (92_160, 90_112, 90_112)
    assert [step.action for step in chosen.steps] == ["load_point", "replay", "prefill"]


def test_bounded_replay_needs_to_be_asked_for_and_says_that_it_is_approximate(
    world: SimpleNamespace, costs: CostModel
) -> None:
    planner = Planner(world.v4_pro, world.full)
    query = branch(92_160, 92_918)
    exact = planner.explain(query, costs.prices())
    assert all(option.exactness is Exactness.EXACT for option in exact.alternatives)
    assert Why.APPROXIMATE_NOT_ASKED in {item.why for item in exact.not_offered}
    asked = msgspec.structs.replace(query, allowed=Exactness.BOUNDED_REPLAY)
    chosen = planner.plan(asked, costs.prices()).chosen
    assert chosen.exactness is Exactness.BOUNDED_REPLAY
    assert chosen.position - chosen.computed_from == 128


def test_a_pending_load_is_waited_for_only_while_that_is_cheaper(
    world: SimpleNamespace, costs: CostModel
) -> None:
    def query(ready_ms: float) -> RestoreQuery:
        late = RangeSpan(40_960, 92_160, (Piece(DEVICE, 51_200 * 5511, ready_ms),))
        return RestoreQuery(
            tokens=92_918, spans=(RangeSpan(0, 40_960), late), points=(Point(92_160), Point(40_960))
        )

    planner = Planner(world.v4_pro, world.serial)
    soon = planner.plan(query(30.0), costs.prices()).chosen
    assert soon.position == 92_160
    assert soon.terms.load_ms == pytest.approx(30.0)
    assert planner.plan(query(60_000.0), costs.prices()).chosen.position == 40_960


def test_loads_hide_behind_the_queue_only_where_space_can_be_reserved(
    world: SimpleNamespace, costs: CostModel
) -> None:
    query = RestoreQuery(
        tokens=11_000,
        spans=(RangeSpan(0, 10_240, (Piece(DISK, 10_240 * 5511),)),),
        points=(Point(10_240, (Piece(DISK, 5_140_000),)),),
        backlog=Backlog(prefill_tokens=8_000, requests=2, context_tokens=4_000),
    )
    no_overlap = msgspec.structs.replace(world.serial, can_reserve=True)
    hidden = Planner(world.v4_pro, no_overlap).plan(query, costs.prices()).chosen.terms
    exposed = Planner(world.v4_pro, world.serial).plan(query, costs.prices()).chosen.terms
    assert hidden.queue_ms == exposed.queue_ms > 100
    assert hidden.load_ms == 0.0
    assert hidden.hidden_ms == pytest.approx(exposed.load_ms)
    assert exposed.hidden_ms == 0.0


def test_layerwise_overlap_leaves_one_layer_of_load_before_and_the_rest_as_stall(
    world: SimpleNamespace, costs: CostModel
) -> None:
    query = RestoreQuery(
        tokens=92_918,
        spans=(RangeSpan(0, 92_160, (Piece(DISK, 92_160 * 5511),)),),
        points=(Point(92_160, (Piece(DISK, 5_140_000),)),),
    )
    serial = Planner(world.v4_pro, world.serial).plan(query, costs.prices()).chosen.terms
    layered = Planner(world.v4_pro, world.full).plan(query, costs.prices()).chosen.terms
    load = serial.load_ms
    assert (serial.stall_ms, serial.hidden_ms) == pytest.approx((0.0, 0.0))
    assert layered.load_ms == pytest.approx(load / 61)
    assert layered.load_ms + layered.stall_ms + layered.hidden_ms == pytest.approx(load)
    assert layered.ttft_ms == pytest.approx(load + layered.recompute_ms / 61)


def test_an_engine_with_one_hit_length_cannot_mix_resident_and_loaded_state(
    world: SimpleNamespace, costs: CostModel
) -> None:
    one_length = msgspec.structs.replace(world.full, per_group_hit=False, can_replay=False)
    point = Point(92_160, (Piece(HOST, 5_140_000),))
    resident = RestoreQuery(tokens=92_918, spans=(RangeSpan(0, 92_160),), points=(point,))
    planner = Planner(world.v4_pro, one_length)
    assert actions(planner, resident, costs) == ["prefill"]
    omitted = planner.explain(resident, costs.prices()).not_offered
    assert Why.ONE_HIT_LENGTH in {item.why for item in omitted}
    movable = msgspec.structs.replace(
        resident, spans=(RangeSpan(0, 92_160, (Piece(HOST, 92_160 * 5511),)),)
    )
    assert actions(planner, movable, costs) == ["load_global", "load_point", "prefill"]
    # The engine's own hit needs no mixing.
    own = RestoreQuery(tokens=92_918, spans=(RangeSpan(0, 92_160),), points=(Point(92_160),))
    assert actions(planner, own, costs) == ["prefill"]
    assert planner.plan(own, costs.prices()).chosen.position == 92_160


def test_state_that_lands_in_host_memory_pays_a_second_hop(
    world: SimpleNamespace, costs: CostModel
) -> None:
    via_host = msgspec.structs.replace(world.serial, landing_tier=HOST)
    query = RestoreQuery(
        tokens=10_500,
        spans=(RangeSpan(0, 10_240, (Piece(DISK, 50_000_000),)),),
        points=(Point(10_240),),
    )
    direct = Planner(world.dense, world.serial).plan(query, costs.prices()).chosen.terms.load_ms
    hopped = Planner(world.dense, via_host).plan(query, costs.prices()).chosen.terms.load_ms
    assert hopped - direct == pytest.approx(costs.load(HOST, 50_000_000).ms)


def test_the_last_token_is_always_computed(world: SimpleNamespace, costs: CostModel) -> None:
    query = RestoreQuery(tokens=1024, spans=(RangeSpan(0, 1024),), points=(Point(1024), Point(896)))
    planner = Planner(world.v4_pro, world.full)
    assert planner.plan(query, costs.prices()).chosen.position == 896
    explained = planner.explain(query, costs.prices())
    assert (1024, Why.LAST_TOKEN_IS_COMPUTED) in {
        (one.position, one.why) for one in explained.not_offered
    }
    assert max(way.position for way in explained.alternatives) == 896


def test_the_tail_that_was_computed_once_is_named_apart_from_what_is_new(
    world: SimpleNamespace, costs: CostModel
) -> None:
    query = RestoreQuery(
        tokens=2000, spans=(RangeSpan(0, 1024),), points=(Point(1024),), known_tokens=1100
    )
    steps = Planner(world.v4_pro, world.full).plan(query, costs.prices()).chosen.steps
    assert [(s.action, s.start, s.end) for s in steps] == [
        (RestoreAction.RECOMPUTE_TAIL, 1024, 1100),
        (RestoreAction.PREFILL, 1100, 2000),
    ]


def test_untrusted_loads_do_not_decide_where_they_could_decide_wrongly(
    world: SimpleNamespace, costs: CostModel
) -> None:
    # Estimates for the remote tier swing by a factor of ten either way (seed 002: 10-21x).
    size = 10_240 * 98_304
    for i in range(40):
        costs.observe(Loaded(REMOTE, size, 1000.0 * (10.0 if i % 2 else 0.1)))
    query = RestoreQuery(
        tokens=10_500,
        spans=(RangeSpan(0, 10_240, (Piece(REMOTE, size),)),),
        points=(Point(10_240),),
    )
    planner = Planner(world.dense, world.serial)
    plan = planner.plan(query, costs.prices())
    assert plan.basis is Basis.OBSERVABLES
    assert plan.chosen.position == 10_240  # fewest tokens to compute
    # Where even ten times the price changes nothing, the price still decides.
    resident = RestoreQuery(tokens=10_500, spans=(RangeSpan(0, 10_240),), points=(Point(10_240),))
    assert planner.plan(resident, costs.prices()).basis is Basis.COST


def test_a_plan_says_what_it_does_in_one_line(world: SimpleNamespace, costs: CostModel) -> None:
    line = summary(Planner(world.v4_pro, world.full).plan(branch(92_160, 92_918), costs.prices()))
    assert line.startswith("replay 7,747 + prefill from 92,160; ttft ")
    assert line.endswith("; by cost")


def test_a_tier_without_a_price_is_not_offered(world: SimpleNamespace, costs: CostModel) -> None:
    spans = (RangeSpan(0, 5_120), RangeSpan(5_120, 10_240, (Piece(Tier.PEER, 1),)))
    query = RestoreQuery(
        tokens=10_500, spans=spans, points=(Point(10_240), Point(5_120, (Piece(Tier.PEER, 1),)))
    )
    planner = Planner(world.dense, world.full)
    whys = {item.why for item in planner.explain(query, costs.prices()).not_offered}
    assert whys == {Why.RANGE_STATE_MISSING, Why.NO_MEDIUM}
