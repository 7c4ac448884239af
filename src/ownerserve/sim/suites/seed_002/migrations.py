"""This experiment shows the load of every worker over time, and the moves across it (seed 002,
figure 10)."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from ownerserve.report.figures.grids import HeatMap, heat_map
from ownerserve.report.page import Verdict
from ownerserve.sim.metrics import fleet_load
from ownerserve.sim.metrics.moves import THRASH_WINDOW_S
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
    at,
)
from ownerserve.sim.suites.fleet import agents
from ownerserve.sim.suites.judging import first_of, larger

POLICIES = ("sticky", "ear", "ownerserve")


ARROWS = 24


def with_heat(result: Result) -> dict[str, Any]:
    """Return the metrics of migrations, and the heat map while many sessions are open.

    The map goes until half of the turns are done, with ARROWS moves evenly among those of that
    time.
    """
    heat: dict[str, Any] = {**fleet_load.heat_map(result.samples, result.counters)}
    until_s = float(np.median(result.rows.table()["done_s"]))
    times = [time_s for time_s in heat["times_s"] if time_s <= until_s]
    moves = [move for move in heat["moves"] if move["at_s"] <= until_s]
    shown = moves[:: -(-len(moves) // ARROWS) or 1]
    rows = [row[: len(times)] for row in heat["pending_prefill_tokens"]]
    return {
        "migrations": result.metrics["migrations"],
        "requests": result.metrics["requests"],
        "heat": {"times_s": times, "pending_prefill_tokens": rows, "moves": shown},
    }


def _jobs(scale: Scale) -> dict[str, Job]:
    return {
        policy: Simulation("claude_code", agents(policy, scale), with_heat) for policy in POLICIES
    }


def _verdicts(results: Results) -> list[Finding]:
    thrash, accuracy = (_told(results, path) for path in ("thrash_rate", "accuracy"))
    return [
        Finding(
            f"No session moves twice within {THRASH_WINDOW_S:g} s", "seed 002 §5.6",
            first_of(not any(thrash.values()), max(thrash.values()) < 0.02) if thrash
            else Verdict.NOT_SHOWN,
            _shares(thrash),
        ),
        Finding(
            "The target of a move stays calm for the session's next turns", "seed 002 §5.6",
            larger(min(accuracy.values()), holds=0.9, partly=0.5) if accuracy
            else Verdict.NOT_SHOWN,
            _shares(accuracy),
        ),
    ]  # fmt: skip


def _told(results: Results, name: str) -> dict[str, float]:
    """Return a metric of the policies under which something moved."""
    values = {policy: at(results[policy], f"migrations.{name}") for policy in POLICIES[1:]}
    return {policy: value for policy, value in values.items() if value is not None}


def _shares(told: dict[str, float]) -> str:
    return ", ".join(f"{policy} {value:.1%}" for policy, value in told.items()) or "0 moves"


def _tables(results: Results) -> list[ResultTable]:
    columns = {
        "moves": "migrations.count",
        "given up": "migrations.given_up",
        "of turns": "migrations.rate",
        "transfer, mean (ms)": "migrations.mean_ms",
        "accuracy": "migrations.accuracy",
        "thrash rate": "migrations.thrash_rate",
        "bytes": "migrations.bytes",
    }
    rows = [
        [policy, *(at(results[policy], path) for path in columns.values())] for policy in POLICIES
    ]
    return [ResultTable("002-f10-migrations", "Migrations", ["", *columns], rows)]


def _figures(results: Results) -> list[Drawing]:
    found = []
    for policy in POLICIES:
        data = msgspec.convert(
            {**results[policy]["heat"], "title": f"{policy}: pending prefill tokens"}, HeatMap
        )
        caption = f"Load by worker and time, some moves as arrows, {policy} (seed 002, f10)."
        found.append(Drawing(f"002-f10-heat-{policy}", heat_map, data, caption))
    return found


EXPERIMENTS = [
    Experiment(
        name="002-f10",
        title="Migrations",
        source="seed 002 §5.6, f10",
        about="How often sessions move, how long that takes, and whether it was right.",
        jobs=_jobs,
        verdicts=_verdicts,
        tables=_tables,
        figures=_figures,
    )
]
