"""Folding k decode steps into one event changes nothing but the time it takes to simulate."""

from __future__ import annotations

from typing import Any

import pytest

from ownerserve.router.policies import ROUTING_POLICIES
from ownerserve.sim.config.setup import SimSetup, Tiers
from ownerserve.sim.run import Result, simulate
from ownerserve.sim.workload import Capped, WorkloadShape
from ownerserve.trace.model import Trace
from tests.support.sim.fleet_driver import MIB, agents, setup

WITHIN = 0.005
MEASURES = {
    "TTFT mean": lambda r: r.metrics["ttft_ms"]["mean"],
    "TTFT p99": lambda r: r.metrics["ttft_ms"]["p99"],
    "TPOT mean": lambda r: r.metrics["tpot_ms"]["mean"],
    "E2E mean": lambda r: r.metrics["e2e_s"]["mean"],
    "cached share": lambda r: r.metrics["cached_token_share"],
    "evicted tokens": lambda r: r.counters.evicted_tokens,
    "steps": lambda r: r.counters.steps,
}
TRACE = agents(10, 6, seed=3, most_output=60)


def both(trace: Trace, wanted: SimSetup) -> tuple[Result, Result]:
    import msgspec

    return simulate(trace, wanted), simulate(trace, msgspec.structs.replace(wanted, longest_fold=1))


def compare(trace: Trace, wanted: SimSetup) -> Result:
    folded, stepped = both(trace, wanted)
    for name, measure in MEASURES.items():
        assert measure(folded) == pytest.approx(measure(stepped), rel=WITHIN), name
    assert len(folded.rows) == len(stepped.rows) == trace.request_count
    return folded


@pytest.mark.parametrize("policy", ROUTING_POLICIES)
def test_under_every_policy(policy: str) -> None:
    folded = compare(TRACE, setup(policy, kv_bytes=1500 * MIB))
    assert folded.counters.evicted_tokens > 0


def test_when_the_pool_is_so_small_that_turns_are_thrown_out() -> None:
    crowded = setup(
        "least_load", workers=1, kv_bytes=900 * MIB, shape=WorkloadShape(mode=Capped(8))
    )
    folded = compare(agents(8, 4, most_output=400), crowded)
    assert folded.counters.preemptions > 0


CASES: dict[str, dict[str, Any]] = {
    "point state": {"pace": "deepseek-v4-flash@h200", "kv_bytes": 1024 * MIB},
    "recurrent state": {"pace": "qwen3.5-35b-a3b@h200", "kv_bytes": 1024 * MIB},
    "tiers": {
        "kv_bytes": 1200 * MIB,
        "tiers": Tiers(host_bytes=1 << 30, disk_bytes=64 << 30, remote_bytes=256 << 30),
    },
}


@pytest.mark.parametrize("case", CASES)
def test_with(case: str) -> None:
    compare(TRACE, setup("ownerserve", workers=2, **CASES[case]))
