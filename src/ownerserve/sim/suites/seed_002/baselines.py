"""This experiment shows three kinds of baseline and three ways to fail (seed 002 §3, figure 4)."""

from __future__ import annotations

from collections.abc import Mapping

from ownerserve.report.figures.panels import Panel, Panels, panels
from ownerserve.report.page import Verdict
from ownerserve.sim.suites.base import (
    Drawing,
    Experiment,
    Finding,
    Job,
    Results,
    ResultTable,
    Scale,
    at,
    by_label,
    known,
    table_of,
)
from ownerserve.sim.suites.fleet import LANES, simulate
from ownerserve.sim.suites.judging import first_of, larger

POLICIES = ("round_robin", "lmetric", "static_pd", "static_pd_delta", "sticky", "ear")
TRANSFER_S = 30.0
CALM_LANES = 8
COLUMNS = {
    "TTFT p50 (ms)": "ttft_ms.p50",
    "TTFT p99 (ms)": "ttft_ms.p99",
    "cached share": "cached_token_share",
    "interference index": "interference_index",
    "hotspot index": "hotspot_index",
    "success": "success_rate",
    "retries": "retries",
    "preemptions": "pressure.preemptions",
}


def _jobs(scale: Scale) -> dict[str, Job]:
    busy = {policy: simulate(policy, scale) for policy in POLICIES}
    calm = {
        f"{policy}, calm": simulate(policy, scale, lanes=CALM_LANES)
        for policy in ("static_pd", "sticky", "ear")
    }
    return {**busy, **calm}


def _verdicts(results: Results) -> list[Finding]:
    share = {name: known(results[name], "cached_token_share") for name in POLICIES}
    success = {name: known(results[name], "success_rate") for name in POLICIES}
    first = {name: known(results[name], "ttft_ms.p50") for name in (*POLICIES, "static_pd, calm")}
    index = {name: at(results[name], "interference_index") for name in POLICIES}
    lost = 100 * (share["sticky"] - share["round_robin"])
    lmetric = 100 * (share["sticky"] - share["lmetric"])
    slower = first["static_pd"] / first["sticky"]
    fewer = success["sticky"] - success["static_pd"]
    return [
        Finding(
            "Load balancing loses locality: 23 points of cached share", "seed 002 §3.1",
            larger(lost, holds=15, partly=3),
            f"round robin loses {lost:.1f} points to sticky",
        ),
        Finding(
            "LMetric is blind to sessions: cached share 56.9 %", "seed 002 §3.1",
            larger(lmetric, holds=15, partly=3),
            f"{share['lmetric']:.1%}, {lmetric:.1f} points below sticky: its price counts what is "
            "cached, so it mostly finds the holder",
        ),
        Finding(
            "Static PD meets the decode side's memory wall: TTFT p50 62 to 72 times",
            "seed 002 §3.2",
            larger(slower, holds=30, partly=2),
            f"{slower:.3g} times sticky's ({first['static_pd'] / 1e3:.3g} s), at {CALM_LANES} "
            f"lanes {first['static_pd, calm'] / 1e3:.3g} s",
        ),
        Finding(
            "Static PD: success falls from 99.5 % to 52 to 68 %", "seed 002 §3.2",
            larger(fewer, holds=0.2, partly=0.01),
            f"{success['static_pd']:.1%} against {success['sticky']:.1%} with a transfer given up "
            f"after {TRANSFER_S:.0f} s without room",
        ),
        _hot_pins(results, index),
    ]  # fmt: skip


def _hot_pins(results: Results, index: Mapping[str, float | None]) -> Finding:
    """Judge hot pins by queues, and in a range by what workers compute. Without a queue nothing is
    shown."""
    sticky, lmetric = index["sticky"], index["lmetric"]
    hot = {name: at(results[name], "hotspot_index") for name in ("sticky", "lmetric", "ear")}
    claim = "Sticky makes hot pins: interference index twice LMetric's"
    if not sticky or not lmetric or not hot["sticky"] or not hot["lmetric"]:
        return Finding(claim, "seed 002 §3.3", Verdict.NOT_SHOWN, "no turn waited: 0 queues")
    pinned, busier = sticky / lmetric, hot["sticky"] / hot["lmetric"]
    return Finding(
        claim, "seed 002 §3.3", first_of(pinned >= 1.8, busier >= 1.8),
        f"{sticky:.3g} against {lmetric:.3g} ({pinned:.2f}x); the busiest worker computes "
        f"{hot['sticky']:.3g} times the mean, with LMetric {hot['lmetric']:.3g}, with EAR "
        f"{hot['ear'] or 0:.3g}",
    )  # fmt: skip


def _tables(results: Results) -> list[ResultTable]:
    labels = [*POLICIES, *(label for label in results.kept if label.endswith(", calm"))]
    caption = f"{LANES} sessions at once; calm: {CALM_LANES}."
    return [table_of(results, labels, COLUMNS, name="002-f4-failures", caption=caption)]


def _figures(results: Results) -> list[Drawing]:
    shown = [
        Panel("Locality: cached share", "", by_label(results, POLICIES, "cached_token_share"),
              "higher"),
        Panel("Memory wall: success", "of turns", by_label(results, POLICIES, "success_rate"),
              "higher"),
        Panel("Memory wall: TTFT p50", "ms", by_label(results, POLICIES, "ttft_ms.p50")),
        Panel("Hot pins: interference index", "",
              by_label(results, POLICIES, "interference_index")),
    ]  # fmt: skip
    data = Panels("Three kinds of baseline, three ways to fail", shown, columns=2)
    return [Drawing("002-f4-failures", panels, data, "The baselines' failures (seed 002, f4).")]


EXPERIMENTS = [
    Experiment(
        name="002-f4",
        title="How the baselines fail",
        source="seed 002 §3, f4",
        about="Round robin and LMetric, static PD (half of the GPUs prefill) and sticky beside "
        "EAR, on equal turns.",
        jobs=_jobs,
        verdicts=_verdicts,
        tables=_tables,
        figures=_figures,
    )
]
