"""The evaluation's experiments on seeds 000, 001 and 003: small runs, and their baselines."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ownerserve.kv.geometry import Geometry
from ownerserve.kv.registry import build_spec as spec_of
from ownerserve.kv.registry.source import find_config, read_config
from ownerserve.report.page import Verdict
from ownerserve.sim.build import BaselineParts
from ownerserve.sim.config.setup import Links, SimSetup
from ownerserve.sim.metrics.summary import digest
from ownerserve.sim.run import Result, simulate
from ownerserve.sim.suites.base import Experiment, Measurement, Results, Scale
from ownerserve.sim.suites.publish import publish
from ownerserve.sim.suites.run import run_work, traces_of, work_of
from ownerserve.sim.suites.seed_000 import restore, state
from ownerserve.sim.suites.seed_001 import eviction
from ownerserve.sim.suites.seed_003 import cliff
from ownerserve.sim.suites.slots import Backup, SlotNode, SlotOrder, SlotRouter, pd_transfers
from ownerserve.sim.workload import Closed, WorkloadShape
from ownerserve.trace.model import Trace
from ownerserve.trace.synth.generate import generate
from ownerserve.trace.synth.options import Options

MODULES = (
    "seed_000.placement", "seed_000.restore", "seed_000.state", "seed_000.workloads",
    "seed_001.eviction", "seed_003.cliff",
)  # fmt: skip
EXPERIMENTS: list[Experiment] = [
    experiment
    for name in MODULES
    for experiment in importlib.import_module(f"ownerserve.sim.suites.{name}").EXPERIMENTS
]
UNIT_BYTES = 64 * 98_304
"""Qwen3-30B-A3B: 64 tokens."""


@cache
def swe(sessions: int = 4) -> Trace:
    """Short SWE-like sessions, all at once; a context ends near 20k tokens."""
    return generate("swe-long", Options(sessions=sessions, max_input_tokens=20_000, tool_time=0.2))


def fleet(**changes: Any) -> SimSetup:
    """One worker, or more, with room for about 32k tokens each."""
    base: dict[str, Any] = {
        "policy": "sticky",
        "workers": 1,
        "pace": "qwen3-30b-a3b@h100",
        "kv_bytes": 500 * UNIT_BYTES,
        "running": 8,
        "shape": WorkloadShape(mode=Closed()),
    }
    return SimSetup(**{**base, **changes})


@cache
def slotted(slots: int | None, *, in_flight: int = 0, backup: Backup = "keep") -> Result:
    """Seed 003's router on one P and two D workers."""
    setup = fleet(policy="static_pd_delta", workers=3, prefill_workers=1, links=Links(nic_gb_s=1.7))
    parts = BaselineParts(
        policy=lambda settings: SlotRouter(slots),
        order=SlotOrder,
        node=SlotNode,
        transfers=pd_transfers(in_flight, backup),
    )
    return simulate(swe(), setup, parts=parts)


# -- every experiment --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda one: one.name)
def test_an_experiment_says_something_and_draws_it(experiment: Experiment, tmp_path: Path) -> None:
    work = work_of([experiment], Scale.QUICK)
    traces = traces_of(work, None)
    concluded = run_work(work, traces)
    origins = {role: origin for role, (_, origin) in traces.items()}
    report = publish(concluded, tmp_path, origins=origins, command="ownerserve evaluate")
    [said] = report.published
    assert not said.error
    assert said.claims and all(any(c.isdigit() for c in claim.number) for claim in said.claims)
    assert said.tables or said.drawings
    for drawing, _ in said.drawings:
        assert drawing.svg.stat().st_size > 1000


def test_state_is_told_without_a_simulation() -> None:
    [experiment] = state.EXPERIMENTS
    [job] = experiment.jobs(Scale.FULL).values()
    assert isinstance(job, Measurement)
    results = Results({"state": job.compute(None)}, {})
    findings = experiment.verdicts(results)
    more = next(one for one in findings if "v4-flash" in one.claim)
    assert more.verdict is Verdict.HOLDS
    assert "25 against 3 at 1M" in more.number
    [by_context, _] = experiment.tables(results)
    assert ["qwen3-30b-a3b", 128.0, 32.0, 8.0, 4.0, 2.0, 1.0] in [list(r) for r in by_context.rows]


# -- seed 000: the dense layout ----------------------------------------------------------------


def test_the_dense_layout_keeps_an_entry_a_token_in_every_layer() -> None:
    spec = spec_of(read_config(find_config("deepseek-v4-flash")))
    dense = Geometry.of(restore.dense_equivalent(spec))
    assert dense.bytes_per_token == Geometry.of(spec).dense_bytes_per_token == 27_884
    assert dense.point_bytes == dense.fixed_bytes_per_sequence == 0


# -- seed 001: slots ---------------------------------------------------------------------------


def test_a_session_slot_goes_whole_and_a_block_alone() -> None:
    slot = simulate(swe(), fleet(), parts=BaselineParts(order=SlotOrder, node=SlotNode)).metrics
    block = simulate(swe(), fleet()).metrics
    for metrics in (slot, block):
        assert metrics["success_rate"] == 1.0
    whole, parts = slot["pressure"], block["pressure"]
    assert isinstance(whole, dict) and isinstance(parts, dict)
    assert parts["evicted_tokens"] == parts["wanted_tokens"] > 0
    assert whole["evicted_tokens"] > whole["wanted_tokens"]
    per_slot = whole["evicted_tokens"] / whole["evictions"]
    assert per_slot > parts["evicted_tokens"] / parts["evictions"]


def test_pinned_slots_refuse_what_released_slots_serve() -> None:
    pinned = simulate(swe(), fleet(cache_policy="pinned-slot"))
    row = eviction.measured(pinned)
    assert row["error_rate"] > 0.3


# -- seed 003: the router and the transfers ----------------------------------------------------


def test_a_hard_cap_starves_who_comes_late() -> None:
    kept = cliff.measured(slotted(1))
    assert kept["starved_sessions"] == 0.5  # two slots for four sessions
    assert 0 < kept["fast_share"] < 1


def test_without_a_cap_every_session_finds_a_slot() -> None:
    kept = cliff.measured(slotted(4))
    assert kept["starved_sessions"] == 0.0


def test_the_workers_word_gives_slots_by_room() -> None:
    kept = cliff.measured(slotted(None))
    assert 0 < kept["fast_share"] < 1
    assert kept["starved_sessions"] < 1


def test_one_transfer_at_a_time_is_slower() -> None:
    free, one = (slotted(1, in_flight=count).metrics["ttft_ms"] for count in (0, 1))
    assert isinstance(free, dict) and isinstance(one, dict)
    assert one["mean"] > free["mean"]


def test_a_released_backup_is_computed_again() -> None:
    kept, released = (
        slotted(1, backup=backup).metrics["computed_tokens"]
        for backup in ("keep", "release-after-transfer")
    )  # fmt: skip
    assert released > 1.2 * kept  # type: ignore[operator]


def test_baselines_are_reproducible() -> None:
    first = digest(slotted(1, in_flight=1).metrics)
    slotted.cache_clear()
    assert digest(slotted(1, in_flight=1).metrics) == first
