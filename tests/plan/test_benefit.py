"""What an artifact is worth: by it stores admit and evict, and memory gets its price."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ownerserve.kv.messages import Tier
from ownerserve.kv.units import GIB
from ownerserve.plan.benefit import (
    Benefit,
    eviction_weights,
    hbm_price,
    point_benefit,
    range_benefit,
)
from ownerserve.plan.cost.model import CostModel
from ownerserve.plan.inputs import Piece, Point, RangeSpan, RestoreQuery
from ownerserve.plan.restore import Planner


def held(tier: Tier) -> RestoreQuery:
    return RestoreQuery(
        tokens=92_918,
        spans=(RangeSpan(0, 92_160, (Piece(tier, 92_160 * 5511),)),),
        points=(Point(92_160, (Piece(tier, 5_140_000),)),),
    )


def test_a_hit_is_worth_what_it_saves_against_a_prefill(
    world: SimpleNamespace, costs: CostModel
) -> None:
    planner = Planner(world.v4_pro, world.serial)
    plan = planner.plan(held(Tier.DISK), costs.prices())
    terms = plan.chosen.terms
    whole = costs.prefill(92_918, 0).ms
    assert plan.reuse_benefit_ms == pytest.approx(
        whole - terms.load_ms - terms.recompute_ms - terms.stall_ms
    )


def test_a_point_is_worth_the_replay_that_it_spares_and_the_range_far_more(
    world: SimpleNamespace, costs: CostModel
) -> None:
    planner = Planner(world.v4_pro, world.serial)
    query, prices = held(Tier.DISK), costs.prices()
    point = point_benefit(planner, query, prices, position=92_160)
    replay = costs.replay(7747, 92_160 - 7747).ms - prices.replay.a_ms
    load = costs.load(Tier.DISK, 5_140_000).ms
    assert point.ms == pytest.approx(replay - load, rel=1e-6)
    assert point.bytes == 5_140_000
    whole = range_benefit(planner, query, prices, start=0)
    assert whole.ms > 5 * point.ms
    # A byte of point state is still worth more than a byte of range state.
    assert point.ms_per_gib > whole.ms_per_gib
    assert point_benefit(planner, query, prices, position=1).is_low


def test_a_point_that_a_slow_tier_holds_is_worth_nothing(
    world: SimpleNamespace, costs: CostModel
) -> None:
    planner = Planner(world.v4_pro, world.serial)
    slow = RestoreQuery(
        tokens=1024, spans=(RangeSpan(0, 640),), points=(Point(640, (Piece(Tier.REMOTE, 10**9),)),)
    )
    assert point_benefit(planner, slow, costs.prices(), position=640).is_low


def test_eviction_weights_follow_the_measured_prices(costs: CostModel) -> None:
    weights = eviction_weights(costs.prices(), copies=Tier.HOST)
    per_token = costs.prefill(2_000, 60_000).ms - costs.prefill(1_000, 60_000).ms
    assert weights.lost_ms(1_000, 61_500) == pytest.approx(per_token, rel=1e-6)
    assert weights.lost_ms(1_000, 60_000, copy_bytes=1_000) < 1.0
    assert eviction_weights(costs.prices()).reload_ms_per_byte is None


def test_memory_costs_nothing_while_it_is_free_and_then_what_goes_first() -> None:
    idle, hot = Benefit(10.0, GIB, 0.1), Benefit(500.0, GIB, 1.0)
    assert hbm_price([hot, idle], GIB, free_bytes=2 * GIB) == 0.0
    assert hbm_price([hot, idle], GIB, free_bytes=0) == pytest.approx(1.0)
    assert hbm_price([hot, idle], 2 * GIB, free_bytes=0) == pytest.approx(250.5)
    assert hbm_price([], GIB, free_bytes=0) == 0.0
