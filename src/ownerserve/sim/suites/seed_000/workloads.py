"""These experiments run seed 000 §3.6.4's other classes of turns: forked rollouts, long documents,
cold resume."""

from __future__ import annotations

from collections.abc import Callable
from operator import ge, le, lt
from typing import Any, TypeAlias

import numpy as np

from ownerserve.report.figures.panels import Panel, Panels, panels
from ownerserve.report.page import Verdict
from ownerserve.sim.config.setup import SimSetup, Tiers
from ownerserve.sim.run import Result
from ownerserve.sim.suites.base import (
    Drawing,
    Experiment,
    Finding,
    Job,
    Results,
    ResultTable,
    Scale,
    Simulation,
    by_label,
    known,
    table_of,
)
from ownerserve.sim.suites.judging import counted, smaller
from ownerserve.sim.workload import Capped, Sample, WorkloadShape

Judged: TypeAlias = tuple[Verdict, str]
GB = 10**9
OURS = "ownerserve"
PLACED = ("round_robin", "least_load", "multi_owner", "lmetric_gate", "static_pd_delta", OURS)
WORKERS = 4
PACE = "qwen3-30b-a3b@h200"

COLUMNS = {
    "TTFT p50 (ms)": "ttft_ms.p50",
    "TTFT p90 (ms)": "ttft_ms.p90",
    "turn p95 (ms)": "step_latency_ms.p95",
    "task mean (s)": "e2e_s.mean",
    "cached share": "cached_token_share",
    "tokens computed": "computed_tokens",
    "duplicate factor": "duplicate_factor",
    "network KV (bytes)": "network_kv_bytes",
    "hotspot index": "hotspot_index",
}


def _setup(policy: str, scale: Scale, *, lanes: int, sessions: int, **changes: Any) -> SimSetup:
    workers = scale.of(WORKERS, 2)
    return SimSetup(
        policy=policy,
        workers=workers,
        prefill_workers=workers // 2 if policy == "static_pd_delta" else 0,
        pace=PACE,
        shape=WorkloadShape(
            mode=Capped(scale.of(lanes, 4)), sessions=Sample(scale.of(sessions, 6))
        ),
        **changes,
    )


# -- forked rollouts and long documents --------------------------------------------------------


def _rollout_jobs(scale: Scale) -> dict[str, Job]:
    return {
        policy: Simulation("rollouts", _setup(policy, scale, lanes=6, sessions=16))
        for policy in PLACED
    }


def _longdoc_jobs(scale: Scale) -> dict[str, Job]:
    return {
        policy: Simulation("longdoc", _setup(policy, scale, lanes=24, sessions=200))
        for policy in PLACED
    }


def _tables(results: Results, name: str, caption: str) -> list[ResultTable]:
    return [table_of(results, PLACED, COLUMNS, name=name, caption=caption)]


def _figures(results: Results, name: str, title: str) -> list[Drawing]:
    shown = [
        Panel("First token, p90", "ms", by_label(results, PLACED, "ttft_ms.p90")),
        Panel("Cached share", "of prompt tokens", by_label(results, PLACED, "cached_token_share"),
              better="higher"),
        Panel("Duplicate factor", "copies", by_label(results, PLACED, "duplicate_factor")),
        Panel("A task, mean", "s", by_label(results, PLACED, "e2e_s.mean")),
    ]  # fmt: skip
    return [Drawing(name, panels, Panels(title, shown, columns=2), title)]


def _rollout_tables(results: Results) -> list[ResultTable]:
    return _tables(results, "000-rollouts", "Eight samples of each task begin with one prompt.")


def _rollout_figures(results: Results) -> list[Drawing]:
    return _figures(results, "000-rollouts", "Forked rollouts")


def _longdoc_tables(results: Results) -> list[ResultTable]:
    return _tables(results, "000-longdoc", "Questions of different people on shared documents.")


def _longdoc_figures(results: Results) -> list[Drawing]:
    return _figures(results, "000-longdoc", "Questions on long documents")


def _against(results: Results, path: str, beats: Callable[[float, float], bool]) -> Judged:
    """Judge OwnerServe against every other policy; not shown where nothing was shared by
    anybody."""
    own = known(results[OURS], path)
    others = {policy: known(results[policy], path) for policy in PLACED if policy != OURS}
    won = sum(beats(own, other) for other in others.values())
    told = ", ".join(f"{policy} {value:.4g}" for policy, value in others.items())
    shared = max(known(results[policy], "cached_token_share") for policy in PLACED)
    verdict = counted(won, len(others) if shared else 0)
    return verdict, f"{path}: {own:.4g} against {told}"


def _rollout_verdicts(results: Results) -> list[Finding]:
    source = "seed 000 §3.6.6, §3.10"
    copies, told = _against(results, "duplicate_factor", lt)
    time, sooner = _against(results, "e2e_s.mean", lt)
    return [
        Finding("Branches share one prefix artifact: fewer copies of it", source, copies, told),
        Finding("Forked rollouts end sooner than under every baseline", source, time, sooner),
    ]


def _longdoc_verdicts(results: Results) -> list[Finding]:
    source = "seed 000 §2.9, §3.7 B3"
    saved, told = _against(results, "cached_token_share", ge)
    first, sooner = _against(results, "ttft_ms.p90", le)
    return [
        Finding("Shared documents are re-used as much as under any baseline", source, saved, told),
        Finding("Their first tokens come no later than under any", source, first, sooner),
    ]


# -- cold resume -------------------------------------------------------------------------------

COLD = {
    "Qwen3-30B": ("qwen3-30b-a3b@h200", 24 * GB),
    "V4-Flash": ("deepseek-v4-flash@h200", 2 * GB),
}
"""Model -> pace, device memory: room for a few documents, not for all that are asked about."""
TIERS = {
    "no tier": Tiers(),
    "host": Tiers(host_bytes=200 * GB, checkpoints="adaptive"),
    "disk": Tiers(disk_bytes=800 * GB, checkpoints="adaptive"),
    "disk, zero SWA": Tiers(disk_bytes=800 * GB, checkpoints="zero"),
}
GAPS = 10.0
"""Factor on the gaps between questions: p50 8 minutes."""
RESUMES = ("no tier", "disk")


def _resumed(result: Result) -> dict[str, Any]:
    """Return the metrics, and the first tokens of turns that come back to a conversation."""
    table = result.rows.table()
    later = table[table["position"] > 0]
    ttft_ms = (later["first_token_s"] - later["arrived_s"]) * 1e3
    return {
        **result.metrics,
        "resumed_ttft_p50_ms": float(np.median(ttft_ms)) if len(later) else None,
        "resumed_ttft_p90_ms": float(np.percentile(ttft_ms, 90)) if len(later) else None,
        "resumed_computed": float(later["computed_tokens"].mean()) if len(later) else None,
    }


def _cold_setup(scale: Scale, model: str, tiers: Tiers) -> SimSetup:
    pace, kv_bytes = COLD[model]
    return SimSetup(
        policy="sticky",
        workers=1,
        pace=pace,
        kv_bytes=kv_bytes,
        running=16,
        tiers=tiers,
        shape=WorkloadShape(
            mode=Capped(scale.of(40, 6)), sessions=Sample(scale.of(120, 8)), tool_scale=GAPS
        ),
    )


def _cold_jobs(scale: Scale) -> dict[str, Job]:
    return {
        f"{model}, {label}": Simulation("longdoc", _cold_setup(scale, model, tiers), _resumed)
        for model in COLD
        for label, tiers in TIERS.items()
    }


def _cold_tables(results: Results) -> list[ResultTable]:
    columns = {
        "resumed TTFT p50 (ms)": "resumed_ttft_p50_ms",
        "resumed TTFT p90 (ms)": "resumed_ttft_p90_ms",
        "tokens computed a resumed turn": "resumed_computed",
        "cached share": "cached_token_share",
        "restored turns": "restore.turns",
        "queue (ms)": "restore.queue_ms",
        "load (ms)": "restore.load_ms",
        "recompute (ms)": "restore.recompute_ms",
        "SSD written (bytes)": "ssd_written_bytes",
    }
    caption = "Turns that come back minutes later, when the device holds others."
    return [table_of(results, list(results.kept), columns, name="000-cold-resume", caption=caption)]


def _cold_figures(results: Results) -> list[Drawing]:
    labels = list(results.kept)
    shown = [
        Panel("Resumed turn's first token, p50", "ms",
              by_label(results, labels, "resumed_ttft_p50_ms")),
        Panel("p90", "ms", by_label(results, labels, "resumed_ttft_p90_ms")),
        Panel("Computed", "tokens a resumed turn", by_label(results, labels, "resumed_computed")),
    ]  # fmt: skip
    data = Panels("Cold resume: minutes later, from below the device", shown, columns=2)
    return [Drawing("000-cold-resume", panels, data, "Cold resume by tier and model.")]


def _cold_verdicts(results: Results) -> list[Finding]:
    found = []
    for model in COLD:
        none, disk = (known(results[f"{model}, {tier}"], "resumed_ttft_p50_ms") for tier in RESUMES)
        parts = results[f"{model}, disk"]["restore"]
        zero = known(results[f"{model}, disk, zero SWA"], "resumed_ttft_p50_ms")
        verdict = smaller(disk / none, holds=0.5, partly=0.95)
        found.append(
            Finding(
                f"A cold session resumes sooner from stored artifacts than by prefill ({model})",
                "seed 000 §3.6.4",
                verdict if parts["turns"] else Verdict.NOT_SHOWN,
                f"TTFT p50 of later turns {disk:.4g} ms from disk (3 GB/s) against {none:.4g} ms; "
                f"means: load {_ms(parts, 'load_ms')}, recompute {_ms(parts, 'recompute_ms')}; "
                f"without window checkpoints {zero:.4g} ms",
            )
        )
    return found


def _ms(parts: dict[str, Any], name: str) -> str:
    return "none" if parts[name] is None else f"{parts[name]:.4g} ms"


EXPERIMENTS = [
    Experiment(
        name="000-rollouts",
        title="Forked rollouts",
        source="seed 000 §3.6.4, §3.7 B3",
        about="Generated tasks of eight samples each: the samples begin together with one prompt "
        "and go apart. Four H200, six tasks at once.",
        jobs=_rollout_jobs,
        verdicts=_rollout_verdicts,
        tables=_rollout_tables,
        figures=_rollout_figures,
    ),
    Experiment(
        name="000-longdoc",
        title="Questions on long documents",
        source="seed 000 §3.7 B3",
        about="Generated conversations on ten documents of 6k to 128k tokens, by different people. "
        "Four H200, 24 conversations at once.",
        jobs=_longdoc_jobs,
        verdicts=_longdoc_verdicts,
        tables=_longdoc_tables,
        figures=_longdoc_figures,
    ),
    Experiment(
        name="000-cold-resume",
        title="Cold resume",
        source="seed 000 §3.6.4",
        about="The same conversations with gaps ten times as long, on one worker whose device "
        "holds a few documents. What is below it varies: nothing, host memory, a disk.",
        jobs=_cold_jobs,
        verdicts=_cold_verdicts,
        tables=_cold_tables,
        figures=_cold_figures,
    ),
]
