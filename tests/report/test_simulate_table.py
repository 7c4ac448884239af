"""The simulator's tables, to the character, and its JSON."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ownerserve.report.simulate_table import (
    SEED_002,
    Simulated,
    details_table,
    modes_table,
    summary_table,
    to_json,
)


def spread(p50: float) -> dict[str, float]:
    return {"mean": p50, "p50": p50, "p90": 2 * p50, "p95": 3 * p50, "p99": 4 * p50}


def metrics(ttft_ms: float) -> dict[str, Any]:
    return {
        "ttft_ms": spread(ttft_ms),
        "tpot_ms": spread(12.3456),
        "step_latency_ms": spread(4_000),
        "cached_token_share": 0.794,
        "hotspot_index": 1.25,
        "wall_clock_factor": 1.0625,
        "completed_tasks_per_gpu_hour": 1234.5,
        "error_rate": 0.0,
        "success_rate": 0.99,
        "truncation_rate": 0.01,
        "network_kv_bytes": 3 << 30,
        "duplicate_factor": None,
        "migrations": {"count": 3, "mean_ms": None, "accuracy": None, "thrash_rate": 0.0},
        "modes": {
            "direct_append": {
                "turns": 75,
                "share": 0.75,
                "step_latency_ms": spread(495),
                "ttft_ms": spread(43),
            },
            "refused": {
                "turns": 25,
                "share": 0.25,
                "step_latency_ms": spread(0),
                "ttft_ms": None,
            },
        },
    }


POLICIES = {"sticky": metrics(18_020), "ownerserve": metrics(735)}


def shown(table: Table, width: int = 120) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def test_summary() -> None:
    golden = Path(__file__).parent / "golden" / "simulate_summary.txt"
    assert shown(summary_table(POLICIES, "A trace")) == golden.read_text()


def test_nothing_is_cut_in_80_columns() -> None:
    six = dict.fromkeys(("round_robin", "least_load", "lmetric", "sticky"), POLICIES["sticky"])
    six |= {"ear": POLICIES["sticky"], "ownerserve": POLICIES["ownerserve"]}
    for table in (summary_table(six, "t"), details_table(six, "t"), modes_table(six, "t")):
        assert shown(table, 80) == shown(table, 200)
        assert "…" not in shown(table, 80)


def test_seed_002_comes_first() -> None:
    (line,) = [line for line in shown(summary_table(POLICIES, "t")).splitlines() if "18.0" in line]
    assert line.split()[:10] == [
        *("sticky", "18.0", "s", "36.0", "s", "24.7", "ms", "79.4%", "1.25", "1.06")
    ]
    assert len(SEED_002) == 6


def test_details_leave_out_what_nobody_tells() -> None:
    text = shown(details_table(POLICIES, "t"))
    assert "duplicate factor" not in text
    assert "tool-idle" not in text
    assert "accuracy" not in text
    lines = text.splitlines()
    assert next(line for line in lines if "thrash" in line).count("0.0%") == 2
    assert next(line for line in lines if "network" in line).count("3 GiB") == 2


def test_modes() -> None:
    text = shown(modes_table(POLICIES, "t"))
    assert text.count("direct_append") == 2
    refused = next(line for line in text.splitlines() if "refused" in line)
    assert refused.split()[-2:] == ["-", "-"]


def test_json_has_the_agreed_keys() -> None:
    result = Simulated(
        {"name": "cc"}, 7, POLICIES, requests=500, cpu_s=0.25, digest="ab", engine_abilities={}
    )
    body = to_json(result)
    assert set(body) == {
        "trace", "seed", "policies", "requests", "cpu_s", "requests_per_cpu_s", "digest",
        "warnings", "engine_abilities",
    }  # fmt: skip
    assert body["requests_per_cpu_s"] == 2_000
    assert body["policies"]["sticky"]["ttft_ms"]["p50"] == 18_020
    assert to_json(Simulated({}, 7, {}, 0, 0.0, "", {}))["requests_per_cpu_s"] is None
