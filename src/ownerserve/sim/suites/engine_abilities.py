"""This experiment shows what the results are worth with the engines of today.

It has the headline rows under each set of abilities (sim.config.granted), over several draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Any

import msgspec

from ownerserve.kv.registry import build_spec
from ownerserve.kv.registry.source import find_config, read_config
from ownerserve.kv.specs import ModelSpec
from ownerserve.report.figures.panels import Panel, Panels, panels
from ownerserve.sim.build import BaselineParts
from ownerserve.sim.config.granted import EngineAbilities, granted
from ownerserve.sim.config.setup import SimSetup, Tiers
from ownerserve.sim.run import simulate
from ownerserve.sim.suites.base import (
    Cell,
    Drawing,
    Experiment,
    Finding,
    Job,
    Measurement,
    Results,
    ResultTable,
    Scale,
    Simulation,
    known,
)
from ownerserve.sim.suites.draws import Compared, compared, inverse, more, over
from ownerserve.sim.suites.fleet import OURS
from ownerserve.sim.suites.goal import HOST, LOADS, P95, WORK, setup_of, while_full
from ownerserve.sim.suites.seed_000.restore import hybrid_worker
from ownerserve.sim.sweep import metrics_of
from ownerserve.trace.model import Trace

SETS: tuple[EngineAbilities, ...] = ("ideal", "hf", "vllm")
SEEDS = (1, 2, 3)
DEVICE, TIERED = "device only", "256 GiB of host memory"
ROWS = {
    f"{OURS}, {DEVICE}": (OURS, None, ("ideal", "hf")),
    f"ear, {DEVICE}": ("ear", None, ("ideal", "hf")),
    f"{OURS}, {TIERED}": (OURS, HOST, SETS),
}
"""Policy, tiers, sets: a model without window state on its device alone is the same to hf and to
vllm, since nothing is ever brought."""
HYBRID = "V4-Flash, one worker"
WINDOWED = "gpt-oss-120b's state, one worker"
"""Full and sliding attention, which vLLM under our scheduler class replays; V4 it does not. No pace
of gpt-oss is shipped: the worker has Qwen3-30B-A3B's."""
WINDOWED_SETS: tuple[EngineAbilities, ...] = ("hf", "vllm", "vllm-replay")
WINDOWED_PACE = "qwen3-30b-a3b@h200"
WINDOWED_KV, WINDOWED_TIERS = 40 * 10**9, {"host_bytes": 20 * 10**9, "disk_bytes": 4 * 10**12}
POINTS = {"turn ends": "turn-end", "no points": "zero"}
"""What the store keeps of the windows."""


def _label(what: str, name: str, seed: int) -> str:
    return f"{what}, {name}, draw {seed}"


def _gpt_oss(_: ModelSpec) -> ModelSpec:
    return build_spec(read_config(find_config("gpt-oss-120b")))


def _windowed(setup: SimSetup, trace: Trace | None) -> dict[str, Any]:
    assert trace is not None
    return metrics_of(simulate(trace, setup, parts=BaselineParts(spec=_gpt_oss)))


def _windowed_setup(scale: Scale, seed: int, points: str, name: EngineAbilities) -> SimSetup:
    return msgspec.structs.replace(
        hybrid_worker(scale, seed),
        pace=WINDOWED_PACE,
        kv_bytes=WINDOWED_KV,
        tiers=Tiers(**WINDOWED_TIERS, checkpoints=points),
        abilities=name,
    )


def _seeds(scale: Scale) -> tuple[int, ...]:
    return scale.of(SEEDS, SEEDS[:2])


def _jobs(scale: Scale) -> dict[str, Job]:
    jobs: dict[str, Job] = {}
    for seed in _seeds(scale):
        for row, (policy, tiers, sets) in ROWS.items():
            for name in sets:
                able: dict[str, Any] = {"abilities": name, "tiers": tiers}
                setup = setup_of(policy, scale, lanes=LOADS[-1], seed=seed, **able)
                jobs[_label(row, name, seed)] = Simulation("held_out", setup, while_full)
        for name in SETS:
            setup = msgspec.structs.replace(hybrid_worker(scale, seed), abilities=name)
            jobs[_label(HYBRID, name, seed)] = Simulation("held_out", setup)
        for kept, points in POINTS.items():
            for name in WINDOWED_SETS:
                setup = _windowed_setup(scale, seed, points, name)
                row = f"{WINDOWED}, {kept}"
                jobs[_label(row, name, seed)] = Measurement(partial(_windowed, setup), "held_out")
    return jobs


def _values(results: Results, what: str, name: str, path: str) -> list[float]:
    seeds = _seeds(results.scale)
    return [known(results[_label(what, name, seed)], path) for seed in seeds]


def _better(results: Results, what: str, pair: Sequence[str], path: str) -> Compared:
    """Compare the first set with the second, so that above 1 is better."""
    ratio = compared(*(_values(results, what, name, path) for name in pair))
    return inverse(ratio) if path in (P95, "ttft_ms.mean") else ratio


def _finding(
    results: Results, claim: str, pair: tuple[str, str], cells: Sequence[tuple[str, str]]
) -> Finding:
    told = {what: _better(results, what, pair, path) for what, path in cells}
    verdict = over({what: more(ratio) for what, ratio in told.items()})
    number = "; ".join(f"{what}: {ratio}" for what, ratio in told.items())
    return Finding(
        claim, "issue W7", verdict, f"{pair[0]} against {pair[1]}, {number}",
        draws=len(_seeds(results.scale)),
    )  # fmt: skip


def _verdicts(results: Results) -> list[Finding]:
    return [
        _finding(results, "Moves between workers let OwnerServe do more work", ("ideal", "hf"),
                 [(f"{OURS}, {DEVICE}", WORK)]),
        _finding(results, "With host memory, moves between workers let OwnerServe do more work",
                 ("hf", "vllm"), [(f"{OURS}, {TIERED}", WORK)]),
        _finding(results, "Moves between workers let EAR do more work", ("ideal", "hf"),
                 [(f"ear, {DEVICE}", WORK)]),
        _finding(results, "A hybrid model's first tokens come sooner with the reference engine's "
                 "abilities than with vLLM's", ("hf", "vllm"), [(HYBRID, "ttft_ms.mean")]),
        _finding(results, "A hybrid model re-uses more with the reference engine's abilities than "
                 "with vLLM's", ("hf", "vllm"), [(HYBRID, "cached_token_share")]),
        *(
            _finding(results, f"{told} when vLLM replays windows", ("vllm-replay", "vllm"),
                     [(f"{WINDOWED}, {kept}", path) for kept in POINTS])
            for told, path in (("First tokens come sooner", "ttft_ms.mean"),
                               ("More is re-used", "cached_token_share"))
        ),
    ]  # fmt: skip


FLEET_COLUMNS = {"tasks / GPU h": WORK, "turn p95 (s)": P95, "cached share": "cached_token_share"}
WORKER_COLUMNS = {
    "TTFT mean (ms)": "ttft_ms.mean",
    "cached share": "cached_token_share",
    "tokens computed": "computed_tokens",
}


def _tables(results: Results) -> list[ResultTable]:
    rows: list[list[Cell]] = [
        [f"{row}, {name}", *(
            fmean(_values(results, row, name, path)) for path in FLEET_COLUMNS.values()
        )]
        for row, (_, _, sets) in ROWS.items() for name in sets
    ]  # fmt: skip
    ones: list[list[Cell]] = _of_one_worker(results, HYBRID, SETS)
    windowed = [
        [f"{kept}, {row[0]}", *row[1:]]
        for kept in POINTS
        for row in _of_one_worker(results, f"{WINDOWED}, {kept}", WINDOWED_SETS)
    ]
    sets = (*SETS, "vllm-replay")
    told: list[list[Cell]] = [[name, granted(name).words()] for name in sets]
    return [
        ResultTable("abilities-fleet", "Means over draws, 48 at once.", ["", *FLEET_COLUMNS], rows),
        ResultTable(
            "abilities-hybrid", f"{HYBRID}, means over draws.", ["", *WORKER_COLUMNS], ones
        ),
        ResultTable(
            "abilities-windows",
            f"{WINDOWED} at {WINDOWED_PACE}'s pace, means over draws.",
            ["", *WORKER_COLUMNS],
            windowed,
        ),
        ResultTable("abilities", "What each set grants.", ["set", "grants"], told),
    ]


def _of_one_worker(
    results: Results, what: str, sets: Sequence[EngineAbilities]
) -> list[list[Cell]]:
    return [
        [name, *(fmean(_values(results, what, name, path)) for path in WORKER_COLUMNS.values())]
        for name in sets
    ]


def _figures(results: Results) -> list[Drawing]:
    bars = [
        Panel(f"{row}: work", "tasks a GPU hour",
              {name: fmean(_values(results, row, name, WORK)) for name in sets}, "higher")
        for row, (_, _, sets) in ROWS.items()
    ]  # fmt: skip
    first: dict[str, float | None] = {
        name: fmean(_values(results, HYBRID, name, "ttft_ms.mean")) for name in SETS
    }
    shown = [*bars, Panel(f"{HYBRID}: TTFT mean", "ms", first)]
    data = Panels("What engines may do", shown, columns=2)
    return [Drawing("abilities", panels, data, "The same rows under each set of abilities.")]


EXPERIMENTS = [
    Experiment(
        name="abilities",
        title="What an engine's abilities are worth",
        source="issue W7",
        about="Rows of the others, which grant `ideal` abilities, with what the reference engine "
        "and vLLM's connector state instead: sessions move and prompts are computed apart between "
        "reference workers that have a tier, and nowhere else, and with vLLM's nothing is replayed "
        "and a hit is one length. Beside them, for a model of full and sliding attention, what "
        "vLLM does under our scheduler class. Recorded sessions, held out.",
        jobs=_jobs,
        verdicts=_verdicts,
        tables=_tables,
        figures=_figures,
    ),
]
