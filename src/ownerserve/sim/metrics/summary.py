"""The summary is every metric of docs/metrics.md from a run's rows, counters and samples, as one
plain dict.

Owns the names: what stands here is what tables, figures and `simulate --json` show. Must never
depend on the processor's clock.
A metric that the run does not tell is None, never 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ownerserve.sim.metrics.counters import FleetCounters, GapCounters
from ownerserve.sim.metrics.coupling import coupling
from ownerserve.sim.metrics.fleet_load import hotspot_index, load_metrics, memory_metrics
from ownerserve.sim.metrics.moves import migration_metrics
from ownerserve.sim.metrics.rows import ACTIONS, MODES, NO_WORKER, REASONS, SERVED, Rows
from ownerserve.sim.metrics.samples import Samples
from ownerserve.sim.metrics.spreads import Metric, ratio, rounded, spread
from ownerserve.sim.metrics.tasks import Tasks, tasks, tool_idle_utilisation


class Run(msgspec.Struct, frozen=True):
    """A run has what its rows do not tell.

    `hot_ms`: T_hot at the end, for judging migrations. `trace_span_s`: first arrival to last end as
    recorded (0: unknown). `accuracy_turns`: k of the migration accuracy.
    """

    gpus: int
    workers: int
    hot_ms: float
    trace_span_s: float = 0.0
    accuracy_turns: int = 3


def summarise(rows: Rows, counters: FleetCounters, samples: Samples, run: Run) -> dict[str, Metric]:
    """Return all metrics by name and unit; floats have nine significant digits."""
    table = rows.table()
    served = table[np.isin(table["mode"], SERVED)]
    sessions = tasks(table)
    makespan_s = float(table["done_s"].max() - table["arrived_s"].min()) if len(table) else 0.0
    parts: dict[str, Metric] = {
        **_latencies(served),
        **_tasks(sessions, counters, run, makespan_s),
        **_outcomes(table, served),
        **_tokens(served),
        **_bytes(table, counters),
        **load_metrics(samples),
        **memory_metrics(sessions, samples),
        "restore": _restore(served),
        "hotspot_index": hotspot_index(table, run.workers),
        "decode_interference": ratio(counters.decode_stall_ms, counters.decode_alone_ms),
        "owner_hit_rate": _owner_hit_rate(served),
        "tool_idle_utilisation": tool_idle_utilisation(sessions.gaps, samples),
        "makespan_s": makespan_s,
        "wall_clock_factor": ratio(makespan_s, run.trace_span_s),
        "modes": _modes(table),
        "actions": _counts(table["action"], ACTIONS),
        "reasons": _counts(table["reason"], REASONS),
        "migrations": migration_metrics(
            table,
            counters.migrations,
            hot_ms=run.hot_ms,
            next_turns=run.accuracy_turns,
        ),
        "coupling": coupling(served),
        "pressure": _pressure(counters),
    }
    if counters.in_gaps.any:
        parts["in_gaps"] = _in_gaps(counters.in_gaps)
    return {name: rounded(value) for name, value in parts.items()}


def _in_gaps(counters: GapCounters) -> dict[str, Metric]:
    """Return what was granted between turns, by how it ended."""
    ends = {"moves": counters.moves, "replicas": counters.replicas}
    return {
        **{name: dict(sorted(found.items())) for name, found in ends.items()},
        "moved_bytes": counters.moved_bytes,
    }


def digest(metrics: Mapping[str, Metric]) -> str:
    """Return the SHA-256 over all of the metrics: equal runs, equal digests."""
    return hashlib.sha256(msgspec.json.encode(metrics, order="deterministic")).hexdigest()


def _latencies(served: NDArray[Any]) -> dict[str, Metric]:
    decoded = served[served["output_tokens"] >= 2]
    per_token = (decoded["done_s"] - decoded["first_token_s"]) / (decoded["output_tokens"] - 1)
    return {
        "ttft_ms": spread((served["first_token_s"] - served["arrived_s"]) * 1e3),
        "tpot_ms": spread(per_token * 1e3),
        "step_latency_ms": spread((served["done_s"] - served["arrived_s"]) * 1e3),
        "queue_ms": spread((served["started_s"] - served["arrived_s"]) * 1e3),
    }


def _tasks(
    sessions: Tasks, counters: FleetCounters, run: Run, makespan_s: float
) -> dict[str, Metric]:
    ended = np.isin(sessions.session, counters.completed)
    e2e, tool = sessions.e2e_s[ended], sessions.tool_s[ended]
    good = int(sessions.good[ended].sum())
    hours = makespan_s / 3600
    means: dict[str, Metric] = dict.fromkeys(("total_s", "llm_s", "tool_s", "retry_s"))
    if len(e2e):
        means |= {
            "total_s": float(e2e.mean()),
            "llm_s": float((e2e - tool).mean()),
            "tool_s": float(tool.mean()),
            "retry_s": float(sessions.retry_s[ended].mean()),
        }
    return {
        "e2e_s": spread(e2e),
        "task_s": means,
        "completed_tasks": good,
        "completed_tasks_per_hour": ratio(good, hours),
        "completed_tasks_per_gpu_hour": ratio(good, hours * run.gpus),
    }


def _outcomes(table: NDArray[Any], served: NDArray[Any]) -> dict[str, Metric]:
    truncated = int((served["output_tokens"] < served["wanted_tokens"]).sum())
    total = len(table)
    return {
        "requests": total,
        "success_rate": ratio(len(served) - truncated, total),
        "truncation_rate": ratio(truncated, total),
        "error_rate": ratio(total - len(served), total),
        "retries": int((table["attempts"] - 1).sum()),
        "client_retries": int(table["client_retries"].sum()),
    }


def _tokens(served: NDArray[Any]) -> dict[str, Metric]:
    totals = {
        name: int(served[name].sum(dtype=np.int64))
        for name in ("prompt_tokens", "output_tokens", "computed_tokens", "restored_tokens")
    }
    cached = int(served["cached_tokens"].sum(dtype=np.int64))
    return {
        **totals,
        "cached_token_share": ratio(cached, totals["prompt_tokens"]),
        "prefill_tokens_saved": cached,
    }


def _bytes(table: NDArray[Any], counters: FleetCounters) -> dict[str, Metric]:
    placed, duplicate, avoidable, network = (
        int(table[f"{name}_bytes"].sum())
        for name in ("placed", "duplicate", "avoidable", "network")
    )
    return {
        "placed_bytes": placed,
        "duplicate_bytes": duplicate,
        "avoidable_duplicate_bytes": avoidable,
        "avoidable_duplicate_share": ratio(avoidable, placed),
        "duplicate_factor": ratio(placed, placed - duplicate),
        "network_kv_bytes": network + counters.in_gaps.moved_bytes,
        "ssd_written_bytes": counters.ssd_written_bytes,
        "ssd_write_amplification": ratio(counters.ssd_written_bytes, counters.ssd_new_bytes),
    }


def _restore(served: NDArray[Any]) -> dict[str, Metric]:
    """Return the mean ms of each part of a restore and the spread of their sum, over turns that had
    one."""
    parts = [served[f"restore_{part}_ms"] for part in ("queue", "load", "recompute")]
    total = parts[0] + parts[1] + parts[2]
    restored = total > 0
    means = [float(part[restored].mean()) if restored.any() else None for part in parts]
    return {
        "turns": int(restored.sum()),
        "queue_ms": means[0],
        "load_ms": means[1],
        "recompute_ms": means[2],
        "total_ms": spread(total[restored]),
    }


def _owner_hit_rate(served: NDArray[Any]) -> float | None:
    owned = served[served["owner"] != NO_WORKER]
    return ratio(int((owned["owner"] == owned["worker"]).sum()), len(owned))


def _modes(table: NDArray[Any]) -> dict[str, Metric]:
    """Return every mode that occurred: turns, share of all, latencies."""
    found: dict[str, Metric] = {}
    for index, mode in enumerate(MODES):
        turns = table[table["mode"] == index]
        if len(turns):
            latency = (turns["done_s"] - turns["arrived_s"]) * 1e3
            first = (turns["first_token_s"] - turns["arrived_s"]) * 1e3
            found[mode.value] = {
                "turns": len(turns),
                "share": len(turns) / len(table),
                "step_latency_ms": spread(latency),
                "ttft_ms": spread(first) if index in SERVED else None,
            }
    return found


def _counts(codes: NDArray[Any], names: tuple[Any, ...]) -> dict[str, Metric]:
    """Return how often each name occurred; those that never did, and None, are left out."""
    counts = np.bincount(codes, minlength=len(names))
    return {
        name.value: int(count)
        for name, count in zip(names, counts, strict=True)
        if name is not None and count
    }


def _pressure(counters: FleetCounters) -> dict[str, Metric]:
    names = (
        "steps",
        "preemptions",
        "evictions",
        "evicted_blocks",
        "evicted_tokens",
        "wanted_tokens",
        "ssd_read_bytes",
    )
    return {name: getattr(counters, name) for name in names}
