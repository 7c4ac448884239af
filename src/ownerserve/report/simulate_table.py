"""This module shows what policies did on a trace: tables for people, the body of `simulate --json`
for programs.

Owns the columns and their order: seed 002's first. Takes metrics as plain dicts under the names of
docs/metrics.md. Must never compute a metric: sim.metrics does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from rich.table import Table

from ownerserve.kv.units import format_bytes
from ownerserve.report.trace_table import tokens
from ownerserve.report.unserved import unserved

Metrics: TypeAlias = Mapping[str, Any]
Policies: TypeAlias = Mapping[str, Metrics]
Form: TypeAlias = Callable[[float], str]

UNKNOWN = "-"
NAME_WIDTH = 12
"""Columns of a policy's name in a table of 80 columns."""


class Simulated(msgspec.Struct, frozen=True):
    """A simulated result has the metrics of each policy on one trace.

    `cpu_s`: of the replays alone, outside the digest. `engine_abilities`: what the engines were
    granted, and what of it no real worker does yet.
    """

    trace: dict[str, Any]
    seed: int
    policies: dict[str, dict[str, Any]]
    requests: int
    cpu_s: float
    digest: str
    engine_abilities: dict[str, Any]


class Column(msgspec.Struct, frozen=True):
    """A column is one quantity: where it stands in the metrics ("ttft_ms.p50"), and how it is
    written."""

    heading: str
    path: str
    form: Form


def milliseconds(value: float) -> str:
    """Write ms with three digits, in ms or s: "7.35 s", "412 ms"."""
    return seconds(value / 1e3) if value >= 1e3 else f"{_digits(value)} ms"


def seconds(value: float) -> str:
    """Write seconds with three digits, zeros kept: "18.0 s"."""
    return f"{value:,.0f} s" if value >= 100 or not value else f"{value:#.3g} s"


def share(value: float) -> str:
    """Return a share of 1 as text."""
    return f"{value:.1%}"


def number(value: float) -> str:
    """Return a number as text, as short as its size allows."""
    return _digits(value)


def size(value: float) -> str:
    """Return a size in bytes as text."""
    return format_bytes(round(value))


def _digits(value: float) -> str:
    """Write a number with three significant digits, all digits before the point: 7.35, 62.8,
    1,234."""
    if abs(value) >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.3g}"


SEED_002 = (
    Column("TTFT\np50", "ttft_ms.p50", milliseconds),
    Column("\np90", "ttft_ms.p90", milliseconds),
    Column("TPOT\np90", "tpot_ms.p90", milliseconds),
    Column("cached\nshare", "cached_token_share", share),
    Column("hotspot\nindex", "hotspot_index", number),
    Column("clock\nfactor", "wall_clock_factor", number),
)
SUMMARY = (
    *SEED_002,
    Column("step\np95", "step_latency_ms.p95", milliseconds),
    Column("tasks /\nGPU h", "completed_tasks_per_gpu_hour", number),
    Column("\nerrors", "error_rate", share),
)
DETAILS = (
    Column("requests", "requests", number),
    Column("served whole", "success_rate", share),
    Column("truncated", "truncation_rate", share),
    Column("refused or failed", "error_rate", share),
    Column("completed tasks", "completed_tasks", number),
    Column("completed tasks an hour", "completed_tasks_per_hour", number),
    Column("TTFT, mean", "ttft_ms.mean", milliseconds),
    Column("TTFT, p95", "ttft_ms.p95", milliseconds),
    Column("TTFT, p99", "ttft_ms.p99", milliseconds),
    Column("TPOT, mean", "tpot_ms.mean", milliseconds),
    Column("TPOT, p99", "tpot_ms.p99", milliseconds),
    Column("step, p50", "step_latency_ms.p50", milliseconds),
    Column("step, p99", "step_latency_ms.p99", milliseconds),
    Column("task, mean", "e2e_s.mean", seconds),
    Column("task, p95", "e2e_s.p95", seconds),
    Column("  of it LLM, mean", "task_s.llm_s", seconds),
    Column("  of it tools, mean", "task_s.tool_s", seconds),
    Column("  of it retries, mean", "task_s.retry_s", seconds),
    Column("prefill tokens saved", "prefill_tokens_saved", tokens),
    Column("restored tokens", "restored_tokens", tokens),
    Column("restore: load", "restore.load_ms", milliseconds),
    Column("restore: recompute", "restore.recompute_ms", milliseconds),
    Column("restore: queue", "restore.queue_ms", milliseconds),
    Column("owner hit rate", "owner_hit_rate", share),
    Column("HBM an open session", "hbm_bytes_per_session", size),
    Column("most sessions open", "max_concurrent_sessions", number),
    Column("duplicate factor", "duplicate_factor", number),
    Column("avoidable duplicates", "avoidable_duplicate_bytes", size),
    Column("  of bytes placed", "avoidable_duplicate_share", share),
    Column("KV over the network", "network_kv_bytes", size),
    Column("SSD write amplification", "ssd_write_amplification", number),
    Column("decode interference", "decode_interference", share),
    Column("interference index", "interference_index", number),
    Column("pending hotspot index", "pending_hotspot_index", number),
    Column("tool-idle utilisation", "tool_idle_utilisation", share),
    Column("migrations", "migrations.count", number),
    Column("  transfer, mean", "migrations.mean_ms", milliseconds),
    Column("  accuracy", "migrations.accuracy", share),
    Column("  thrash rate", "migrations.thrash_rate", share),
    Column("evictions", "pressure.evictions", number),
    Column("preemptions", "pressure.preemptions", number),
)


def cell(metrics: Metrics, column: Column) -> str:
    """Write one quantity; "-" for what the run does not tell."""
    value = _at(metrics, column.path)
    return UNKNOWN if value is None else column.form(value)


def _at(metrics: Metrics, path: str) -> float | None:
    value: Any = metrics
    for name in path.split("."):
        if value is None:
            return None
        value = value.get(name)
    return value if isinstance(value, int | float) else None


def summary_table(policies: Policies, title: str, columns: Sequence[Column] = SUMMARY) -> Table:
    """Make the table with policies as rows."""
    table = _table(title)
    table.add_column("\npolicy", no_wrap=True)
    for column in columns:
        table.add_column(column.heading, justify="right", no_wrap=True)
    for name, metrics in policies.items():
        table.add_row(_folded(name), *(cell(metrics, column) for column in columns))
    return table


def _folded(name: str) -> str:
    """Fold a policy's name into lines of at most 12 characters, where it has underscores to fold
    at."""
    lines = [""]
    for part in name.replace("_", "_ ").split():
        if lines[-1] and len(lines[-1] + part) > NAME_WIDTH:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def details_table(policies: Policies, title: str, rows: Sequence[Column] = DETAILS) -> Table:
    """Make the table with policies as columns; a quantity that no policy tells is left out."""
    table = _table(title)
    table.add_column("", no_wrap=True)
    for name in policies:
        table.add_column(name.replace("_", "_\n"), justify="right", no_wrap=True)
    for row in rows:
        cells = [cell(metrics, row) for metrics in policies.values()]
        if set(cells) != {UNKNOWN}:
            table.add_row(row.heading, *cells)
    return table


def modes_table(policies: Policies, title: str) -> Table:
    """Make the table of how turns were served: share and latencies of each execution mode (seed
    003's tables)."""
    table = _table(title)
    for heading in ("\npolicy", "\nmode"):
        table.add_column(heading, no_wrap=True)
    for heading in ("\nturns", "\nshare", "step\np50", "\np90", "TTFT\np50", "\np90"):
        table.add_column(heading, justify="right", no_wrap=True)
    columns = (
        Column("", "turns", number),
        Column("", "share", share),
        Column("", "step_latency_ms.p50", milliseconds),
        Column("", "step_latency_ms.p90", milliseconds),
        Column("", "ttft_ms.p50", milliseconds),
        Column("", "ttft_ms.p90", milliseconds),
    )
    for name, metrics in policies.items():
        for index, (mode, told) in enumerate(metrics["modes"].items()):
            label = "" if index else name
            table.add_row(label, mode, *(cell(told, column) for column in columns))
    return table


def _table(title: str) -> Table:
    """Make an empty table so narrow that six policies fit 80 columns."""
    return Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)


def to_json(result: Simulated) -> dict[str, Any]:
    """Return the body of schema ownerserve.simulate/1."""
    rate = result.requests / result.cpu_s if result.cpu_s > 0 else None
    body = {**msgspec.to_builtins(result), "requests_per_cpu_s": rate}
    return {**body, "warnings": unserved(result.policies)}
