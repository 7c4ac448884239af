"""Tool gaps: spill and prefetch by expected cost, checked against drawn gaps and a dense search."""

from __future__ import annotations

from math import log
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.messages import Tier
from ownerserve.plan.gaps import (
    POPULATION,
    Gap,
    GapCosts,
    GapStats,
    can_prefetch,
    plan_gap,
    prefetch_after_s,
)

TOOL = Gap(log(20.0), 1.0)


def expected_cost_ms(
    gap: Gap, costs: GapCosts, *, spill_after_s: float | None, prefetch_after_s: float | None
) -> float:
    """The expected cost of any two instants (None: not at all), as plan/gaps.py's docstring has
    it."""
    hold, load_s = costs.hold_ms_per_s, costs.load_ms / 1e3
    if spill_after_s is None:
        return hold * gap.mean_until(costs.ttl_s)
    held = hold * gap.mean_until(spill_after_s)
    cost = held + (costs.spill_ms + costs.load_ms) * (1.0 - gap.cdf(spill_after_s))
    if prefetch_after_s is None:
        return cost
    until = gap.mean_until(prefetch_after_s)
    again = hold * (gap.mean_until(prefetch_after_s + costs.ttl_s) - until)
    return cost + again - 1e3 * (gap.mean_until(prefetch_after_s + load_s) - until)


def drawn_cost(gap: Gap, costs: GapCosts, *, spill: float, fetch: float | None) -> float:
    """Mean cost over drawn gaps, event by event."""
    drawn = np.random.default_rng(1).lognormal(gap.mu, gap.sigma, 100_000)
    load_s = costs.load_ms / 1e3
    total = costs.hold_ms_per_s * np.minimum(drawn, spill)
    total += np.where(drawn > spill, costs.spill_ms + costs.load_ms, 0.0)
    if fetch is not None:
        after = np.clip(drawn - fetch, 0.0, None)
        total += costs.hold_ms_per_s * np.minimum(after, costs.ttl_s)
        total -= 1e3 * np.minimum(after, load_s)
    return float(total.mean())


@pytest.mark.parametrize(("spill", "fetch"), [(0.0, None), (5.0, None), (5.0, 12.0), (1.0, 1.0)])
def test_expected_costs_are_those_of_drawn_gaps(spill: float, fetch: float | None) -> None:
    costs = GapCosts(hold_ms_per_s=2.0, spill_ms=15.0, load_ms=400.0, ttl_s=120.0)
    exact = expected_cost_ms(TOOL, costs, spill_after_s=spill, prefetch_after_s=fetch)
    assert exact == pytest.approx(drawn_cost(TOOL, costs, spill=spill, fetch=fetch), rel=0.03)


def test_the_population_is_the_one_of_the_design() -> None:
    assert 1.0 - POPULATION.cdf(60.0) == pytest.approx(0.19, abs=0.01)
    assert 1.0 - POPULATION.cdf(300.0) == pytest.approx(0.07, abs=0.01)


@pytest.mark.parametrize("hold", [0.01, 0.3, 3.0, 30.0])
@pytest.mark.parametrize("load_ms", [20.0, 4000.0])
@pytest.mark.parametrize("gap", [TOOL, Gap(log(2.0), 0.3), POPULATION])
def test_a_plan_is_nearly_as_good_as_a_dense_search(
    world: SimpleNamespace, gap: Gap, load_ms: float, hold: float
) -> None:
    costs = GapCosts(hold_ms_per_s=hold, spill_ms=10.0, load_ms=load_ms)
    plan = plan_gap(gap, costs, world.full)
    taken = expected_cost_ms(
        gap, costs, spill_after_s=plan.spill_after_s, prefetch_after_s=plan.prefetch_after_s
    )
    assert plan.cost_ms == pytest.approx(taken)
    assert plan.cost_ms <= plan.hold_cost_ms
    instants = np.geomspace(0.01, 299.0, 36).tolist()
    best = min(
        expected_cost_ms(gap, costs, spill_after_s=s, prefetch_after_s=f)
        for s in (0.0, *instants)
        for f in (None, *(t for t in instants if t >= s))
    )
    assert plan.cost_ms <= min(best, plan.hold_cost_ms) * 1.03 + 0.05


def test_memory_that_costs_nothing_is_kept_and_memory_that_is_dear_goes_at_once(
    world: SimpleNamespace,
) -> None:
    free = plan_gap(TOOL, GapCosts(hold_ms_per_s=0.0, spill_ms=10.0, load_ms=100.0), world.full)
    assert free.spill_after_s is None
    dear = plan_gap(TOOL, GapCosts(hold_ms_per_s=500.0, spill_ms=10.0, load_ms=100.0), world.full)
    assert dear.spill_after_s == 0.0


def test_a_regular_tool_is_spilled_and_fetched_back_just_before_it_returns(
    world: SimpleNamespace,
) -> None:
    stats = GapStats()
    for gap_s in [30.0, 31.0, 29.5, 30.2] * 10:
        stats.observe(gap_s)
    regular = Gap(stats.mean_log, 0.05)
    costs = GapCosts(hold_ms_per_s=20.0, spill_ms=5.0, load_ms=300.0)
    plan = plan_gap(regular, costs, world.full)
    assert plan.spill_after_s == 0.0
    assert plan.prefetch_after_s is not None
    assert 25.0 < plan.prefetch_after_s < 30.5
    assert plan.cost_ms < 0.7 * plan.hold_cost_ms
    assert [action for _, action in plan.actions] == ["drop", "prefetch"]


def test_no_prefetch_where_the_engine_cannot_take_it(world: SimpleNamespace) -> None:
    none = msgspec.structs.replace(world.full, can_insert=False)
    costs = GapCosts(hold_ms_per_s=20.0, spill_ms=5.0, load_ms=300.0)
    assert plan_gap(Gap(log(30.0), 0.05), costs, none).prefetch_after_s is None
    # Foreign state lands in host memory: it can be brought that far.
    assert can_prefetch(msgspec.structs.replace(none, landing_tier=Tier.HOST))


def test_a_sessions_own_gaps_take_over_from_the_population() -> None:
    rng = np.random.default_rng(4)
    stats = GapStats()
    assert stats.gap() == POPULATION
    shares = []
    for gap_s in rng.lognormal(log(2.0), 0.4, 200):
        stats.observe(float(gap_s))
        shares.append(stats.gap().quantile(0.5))
    assert abs(log(shares[-1] / 2.0)) < 0.5
    assert stats.gap().sigma < POPULATION.sigma
    restored = msgspec.json.decode(msgspec.json.encode(stats), type=GapStats)
    assert restored == stats


def test_a_gap_can_be_zero_but_not_negative() -> None:
    stats = GapStats()
    stats.observe(0.0)
    with pytest.raises(InvalidInput, match="gap_s"):
        stats.observe(-1.0)


def dense_plan_ms(gap: Gap, costs: GapCosts) -> tuple[float, bool, bool]:
    """The cheapest plan on 64 quantiles and one load before each, by the closed forms one by one:
    its cost, and whether it spills and fetches."""
    quantiles = [gap.quantile((i + 0.5) / 64) for i in range(64)]
    instants = sorted({0.0, *quantiles, *(t - costs.load_ms / 1e3 for t in quantiles)})
    best = (costs.hold_ms_per_s * gap.mean_until(costs.ttl_s), False, False)
    spilled = expected_cost_ms(gap, costs, spill_after_s=0.0, prefetch_after_s=None)
    fetch_ms = 0.0
    for t in reversed([t for t in instants if 0.0 <= t < costs.ttl_s]):
        fetched = expected_cost_ms(gap, costs, spill_after_s=0.0, prefetch_after_s=t) - spilled
        fetch_ms = min(fetch_ms, fetched if t > 0.0 else 0.0)
        cost = expected_cost_ms(gap, costs, spill_after_s=t, prefetch_after_s=None) + fetch_ms
        best = min(best, (cost, True, fetch_ms < 0.0))
    return best


def test_the_coarse_grid_decides_as_a_dense_one(world: SimpleNamespace) -> None:
    rng, others = np.random.default_rng(3), 0
    for _ in range(300):
        gap = Gap(float(rng.uniform(-2, 6)), float(rng.uniform(0.05, 3)))
        hold, spill, load = (float(10 ** rng.uniform(*r)) for r in ((-2, 2), (-1, 3), (-1, 4)))
        costs = GapCosts(hold_ms_per_s=hold, spill_ms=spill, load_ms=load)
        plan = plan_gap(gap, costs, world.full)
        cost, spills, fetches = dense_plan_ms(gap, costs)
        assert plan.cost_ms <= cost * 1.02 + 0.01, (gap, costs, plan)
        kind = (plan.spill_after_s is not None, plan.prefetch_after_s is not None)
        others += kind != (spills, fetches)
    assert others <= 3, "another kind of plan only where it is as good"


def test_what_is_gone_is_fetched_when_that_saves_most() -> None:
    costs = GapCosts(hold_ms_per_s=2.0, spill_ms=0.0, load_ms=400.0)
    shares = (0.1, 0.25, 0.5, 0.75)

    def cost_ms(at_s: float | None) -> float:
        return expected_cost_ms(TOOL, costs, spill_after_s=0.0, prefetch_after_s=at_s)

    best = min((TOOL.quantile(share) - 0.4 for share in shares), key=cost_ms)
    found = prefetch_after_s(TOOL, costs, shares)
    assert (found == pytest.approx(best)) if cost_ms(best) < cost_ms(None) else found is None
    dear = msgspec.structs.replace(costs, hold_ms_per_s=500.0)
    assert prefetch_after_s(TOOL, dear, shares) is None
    regular = prefetch_after_s(Gap(log(30.0), 0.05), costs, shares)
    assert regular is not None and 26.0 < regular < 30.0
