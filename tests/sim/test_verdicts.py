"""Every verdict of every suite can say "does not hold", and says "not shown" where nothing could.

Three kinds of made-up rows for each experiment: nothing happened at all, all runs alike, and runs
that contradict each claim. Who adds a claim adds the rows that refute it.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

import pytest

from ownerserve.cli.simulation.evaluate import COLOURS
from ownerserve.report.page import CLASSES, SIGNS, Verdict
from ownerserve.sim.suites import together
from ownerserve.sim.suites.base import Experiment, Finding, Origin, Results, Scale
from ownerserve.sim.suites.registry import experiments
from ownerserve.sim.suites.traces import ROLES

ORIGINS = {role: Origin(role, 100, 1000, is_generated=True) for role in ROLES}
JUDGED = [one for one in experiments() if one.name not in ("002-f5", "002-f3")]
COMPUTED = ("000-state", "002-f2")
"""What is kept of these is no run's metrics."""

ALIKE: dict[str, Any] = {
    # a run's metrics
    "requests": 1000,
    "cached_token_share": 0.9,
    "computed_tokens": 5e6,
    "prefill_tokens_saved": 4e6,
    "success_rate": 1.0,
    "error_rate": 0.0,
    "interference_index": 2.0,
    "hotspot_index": 1.5,
    "duplicate_factor": 1.5,
    "decode_interference": 0.5,
    "avoidable_duplicate_share": 0.1,
    "network_kv_bytes": 1e12,
    "ssd_written_bytes": 1e9,
    "hbm_bytes_per_session": 1e9,
    "makespan_s": 1000.0,
    "ttft_ms": {"p50": 100.0, "p90": 500.0, "p99": 900.0, "mean": 200.0},
    "tpot_ms": {"p90": 20.0, "p99": 30.0},
    "step_latency_ms": {"p50": 900.0, "p90": 5e3, "p95": 8e3, "p99": 2e4},
    "e2e_s": {"mean": 1000.0},
    "migrations": {"count": 10, "thrash_rate": 0.2, "accuracy": 0.3},
    "restore": {"turns": 10, "load_ms": 5.0, "recompute_ms": 5.0},
    "pressure": {
        "evictions": 100,
        "evicted_tokens": 1e6,
        "wanted_tokens": 1e6,
        "preemptions": 3,
    },
    # what experiments add to them
    "tasks_per_gpu_hour": 4.0,
    "completed_tasks_per_gpu_hour": 4.0,
    "turn_p95_s": 30.0,
    "turn_mean_s": 9.0,
    "first_turn_mean_s": 20.0,
    "turn_s": 3.0,
    "gain": 0.5,
    "direct_share": 0.5,
    "fast_share": 0.5,
    "starved_sessions": 0.1,
    "lucky_sessions": 0.1,
    "fast_ttft_p50_ms": 100.0,
    "resumed_ttft_p50_ms": 300.0,
    "written_to_state": 1.0,
    "later_ttft_p95_ms": 500.0,
    "later_ttft_p99_ms": 900.0,
    "restored_turns": 10,
}
LEVEL_IS_ENOUGH = {
    "OwnerServe does as much work as the best rival, both without seats",
    "OwnerServe's turn p95 is no higher than the best rival's, both without seats",
    "With host memory OwnerServe does as much work as every rival",
    "With host memory its turn p95 is no higher than any rival's",
    "OwnerServe is within 10 % of the receding-horizon oracle",
    "OwnerServe is within 10 % of a fleet that never evicts and moves state for nothing",
    "Shared documents are re-used as much as under any baseline",
    "Their first tokens come no later than under any",
    "OwnerServe on the same 8 GPUs is no worse than any of them",
    "The cost-based policy is as fast as the best fixed one, and writes less than that",
    *(
        f"{claim} {rival}, with {abilities} abilities"
        for claim in together.CLAIMS
        for rival, abilities in (
            *(("the best rival", abilities) for abilities in together.SETS),
            *(("the best PD split", abilities) for abilities in ("ideal", "hf")),
        )
    ),
    "Eviction by block frees what is needed: below 500 tokens at a time, not 67k",
}
"""Claims that equal rows may support: they say no worse, as much as, within."""


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` over `base`, part by part."""
    found = dict(base)
    for name, value in changes.items():
        part = found.get(name)
        found[name] = merged(part, value) if isinstance(value, Mapping) and part else value
    return found


def dead(value: Any) -> Any:
    """The same where nothing ever happened."""
    if isinstance(value, dict):
        return {name: dead(inner) for name, inner in value.items()}
    return 0


NOTHING_TO_TELL = (
    "interference_index", "hotspot_index", "migrations", "avoidable_duplicate_share", "gain",
    "fast_ttft_p50_ms",
)  # fmt: skip
IDLE: dict[str, Any] = merged(
    ALIKE,
    {
        **dict.fromkeys(NOTHING_TO_TELL),
        **{name: dead(ALIKE[name]) for name in (
            "pressure", "restore", "restored_turns", "network_kv_bytes", "error_rate",
            "ssd_written_bytes", "written_to_state", "fast_share", "decode_interference",
            "cached_token_share",
        )},
        "success_rate": 1.0,
    },
)  # fmt: skip
IDLE["migrations"] = {"count": 0, "thrash_rate": None, "accuracy": None}
"""No queue, no move, no eviction, no restore: all runs take the same time."""


def findings(
    experiment: Experiment, base: Mapping[str, Any], changes: Mapping[str, Any]
) -> list[Finding]:
    """What an experiment says of runs that are like `base`, but for those whose label matches a
    pattern in `changes`."""
    kept = {}
    for label in experiment.jobs(Scale.FULL):
        told = dict(base)
        for pattern, more in changes.items():
            if fnmatch(label, pattern):
                told = merged(told, more)
        kept[label] = told
    return experiment.verdicts(Results(kept, ORIGINS))


SLOW = {"step_latency_ms": {"p50": 9e3, "p90": 9e4, "p95": 9e4}, "e2e_s": {"mean": 9e3}}
CONTRARY: dict[str, dict[str, Any]] = {
    "000-splits": {"hybrid*": {"completed_tasks_per_gpu_hour": 1.0, **SLOW}},
    "000-placement": {
        "ownerserve": {
            "duplicate_factor": 2.0, "network_kv_bytes": 9e12, "decode_interference": 0.9, **SLOW,
        },
    },
    "000-restore": {
        "* adaptive*": {
            "ttft_ms": {"mean": 900.0}, "later_ttft_p95_ms": 900.0, "written_to_state": 2.0,
        },
        "* GPU-only*": {"hbm_bytes_per_session": 2e9},
    },
    "000-rollouts": {"ownerserve": {"duplicate_factor": 3.0, **SLOW}},
    "000-longdoc": {"ownerserve": {"cached_token_share": 0.1, "ttft_ms": {"p90": 9e3}}},
    "000-cold-resume": {"*": {}},
    "001-eviction": {
        "* pinned-slot": {"error_rate": 0.0},
        "* session slot": {"direct_share": 0.9},
        "* cost": {"pressure": {"evictions": 300, "evicted_tokens": 9e6}},
    },
    "002-f1": {
        "ear, * no tools": {"makespan_s": 3000.0},
        "* tools": {"turn_s": 6.0},
        "alone* tools": {"turn_s": 3.0},
    },
    "002-f4": {"*": {}},
    "002-f6": {"*": {}},
    "002-f7": {"*": {}},
    "002-f8": {"ear*": {"turn_s": 9.0}, "alone*": {"turn_s": 0.1}},
    "002-f9": {"*": {}},
    "002-f10": {"*": {}},
    "goal": {
        "ownerserve on*": {"tasks_per_gpu_hour": 2.0, "turn_p95_s": 90.0},
        "ownerserve + seats*": {
            "tasks_per_gpu_hour": 1.5, "turn_p95_s": 95.0, "first_turn_mean_s": 90.0,
        },
    },
    "abilities": {
        "*, hf, *": {"ttft_ms": {"mean": 900.0}, "cached_token_share": 0.2},
        "*, ideal, *": {"tasks_per_gpu_hour": 2.0},
        "*, vllm-replay, *": {"ttft_ms": {"mean": 900.0}, "cached_token_share": 0.2},
    },
    "together": {"ownerserve on*": {"tasks_per_gpu_hour": 2.0, "turn_mean_s": 90.0}},
    "goal-oracle": {"all at*": {"turn_p95_s": 10.0, "tasks_per_gpu_hour": 9.0}},
    "goal-tiers": {
        "ownerserve, *": {"tasks_per_gpu_hour": 2.0, "turn_p95_s": 90.0},
        "ownerserve + seats*": {"tasks_per_gpu_hour": 1.5},
    },
    "003-versions": {
        "8 colocated, ownerserve": SLOW,
        "v?,*": {"fast_ttft_p50_ms": 200.0, "step_latency_ms": {"p50": 100.0, "p90": 1e3}},
        "v3,*": {"error_rate": 0.2, "fast_share": 0.5},
        "v4,*": {"error_rate": 0.2, "fast_share": 0.4},
        "v5,*": {"error_rate": 0.3, "fast_share": 0.6},
    },
    "003-cliff": {"*": {}},
    "003-knobs": {"*": {"error_rate": 0.2}},
}  # fmt: skip
"""Experiment -> label pattern -> what refutes all of its claims; nothing: equal runs do."""

STATE = {
    "parts": {}, "bytes": [1.0] * 6, "dense_bytes": [1.0] * 6, "sessions": [1] * 6,
    "dense_sessions": [2] * 6, "window_to_range": 30.0, "replay_tokens": 10, "is_dense": False,
    "window_layers": 1, "window_tokens": 1,
}  # fmt: skip
TRACE = {
    "any": 0.3, "intra": 0.1, "split": [0.1, 0.9, 0.0], "top1": 0.01, "ratio": 1.0,
    "tool_p50_s": 9.0, "api_p50_s": 1.0, "inputs": [1] * 100,
}  # fmt: skip


def computed(name: str, told: Mapping[str, Any]) -> list[Finding]:
    """What the experiments say that simulate nothing."""
    from ownerserve.sim.suites.seed_000 import state as s000_state
    from ownerserve.sim.suites.seed_002 import trace as s002_trace

    if name == "000-state":
        dense = {"dense_bytes": [9.0] * 6, "is_dense": True}
        kept = {one: {**told, **(dense if "qwen3-32b" in one else {})} for one in s000_state.MODELS}
        return s000_state.EXPERIMENTS[0].verdicts(Results({"state": kept}, ORIGINS))
    kept = {role: dict(told) for role in s002_trace.ROLES}
    return s002_trace.EXPERIMENTS[0].verdicts(Results(kept, ORIGINS))


SIMULATED = [one for one in JUDGED if one.name not in COMPUTED and one.name in CONTRARY]


@pytest.mark.parametrize("experiment", SIMULATED, ids=lambda one: one.name)
def test_every_claim_can_fail(experiment: Experiment) -> None:
    said = findings(experiment, ALIKE, CONTRARY[experiment.name])
    assert said
    assert {one.claim: one.verdict for one in said} == {one.claim: Verdict.FAILS for one in said}


@pytest.mark.parametrize("experiment", SIMULATED, ids=lambda one: one.name)
def test_runs_that_are_all_alike_support_no_claim_of_a_difference(experiment: Experiment) -> None:
    held = {
        one.claim
        for one in findings(experiment, ALIKE, {})
        if one.verdict in (Verdict.HOLDS, Verdict.IN_RANGE)
    }
    assert not held - LEVEL_IS_ENOUGH


@pytest.mark.parametrize("experiment", SIMULATED, ids=lambda one: one.name)
def test_runs_in_which_nothing_happened_show_nothing(experiment: Experiment) -> None:
    held = {
        one.claim
        for one in findings(experiment, IDLE, {})
        if one.verdict in (Verdict.HOLDS, Verdict.IN_RANGE)
    }
    assert not held - LEVEL_IS_ENOUGH


@pytest.mark.parametrize("name", COMPUTED)
def test_every_claim_about_models_and_traces_can_fail(name: str) -> None:
    said = computed(name, STATE if name == "000-state" else TRACE)
    assert {one.claim: one.verdict for one in said} == {one.claim: Verdict.FAILS for one in said}


def test_every_experiment_with_verdicts_is_tested_here() -> None:
    assert {one.name for one in JUDGED} == set(CONTRARY) | set(COMPUTED)


def test_every_verdict_can_be_shown() -> None:
    assert set(COLOURS) == set(SIGNS) == set(CLASSES) == set(Verdict)
