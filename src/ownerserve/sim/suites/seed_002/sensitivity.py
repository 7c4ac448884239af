"""This experiment asks which settings and workloads change the order of the policies (seed 002
§5.5, figure 9)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ownerserve.report.figures.sweeps import Sweep, Sweeps, sweeps
from ownerserve.report.page import Verdict
from ownerserve.sim.build import geometry_of, pace_of, settings_of, speed_of
from ownerserve.sim.config.setup import Links, SimSetup
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
    known,
)
from ownerserve.sim.suites.fleet import GOAL_LANES, LANES, PACE, SESSIONS, agents
from ownerserve.sim.suites.judging import counted, first_of
from ownerserve.sim.workload import TopShare

FEW_SESSIONS = 48
POLICIES = ("sticky", "lmetric_gate", "static_pd_delta", "ear", "ownerserve")
MOVERS = ("ear", "ownerserve")
GB = 10**9
P95 = "step_latency_ms.p95"
LEVEL = 0.02
"""Latencies this close are level."""


class Varied(msgspec.Struct, frozen=True):
    """A varied setting has its values, the fields of `agents` that each means, and who is run."""

    title: str
    x_label: str
    values: Mapping[float, Mapping[str, Any]]
    policies: tuple[str, ...] = POLICIES
    scale: str = "linear"
    chosen: float | None = None
    best: str = ""


def _varied(scale: Scale) -> dict[str, Varied]:
    shares = scale.of((0.3, 0.465, 0.6), (0.7,))  # that few sessions can be cut to
    pace = pace_of(PACE)
    first = settings_of(SimSetup(pace=PACE), speed_of(pace, geometry_of(pace), Links()))
    hot_ms, cool_s = first.hot_ms, first.cool_s
    return {
        "rate": Varied(
            "Load", "sessions at once",
            {lanes: {"lanes": lanes, "sessions": SESSIONS} for lanes in GOAL_LANES}, chosen=LANES,
        ),
        "skew": Varied(
            "Skew", "input of the top 1 % of sessions (0: as recorded)",
            {0.0: {}, **{share: {"skew": TopShare(share)} for share in shares}},
            chosen=0.0,
        ),
        "pool": Varied(
            "KV pool", "GB a GPU",
            {gb: {"kv_bytes": round(gb * GB)} for gb in (36.0, 72.0, 108.0)}, chosen=72.0,
        ),
        "tools": Varied(
            "Tool time", "factor on recorded tool times",
            {scale: {"tool_scale": scale} for scale in (0.0, 0.3, 1.0)}, chosen=1.0,
        ),
        "t_hot": Varied(
            "T_hot", "factor on what a router begins with",
            {f: {"hot_ms": f * hot_ms} for f in (0.03, 0.3, 1.0, 3.0, 30.0)}, MOVERS, "log",
            1.0,
        ),
        "t_cool": Varied(
            "T_cool", "factor on what a router begins with",
            {f: {"cool_s": f * cool_s} for f in (0.03, 1.0, 30.0)}, MOVERS, "log", 1.0,
        ),
    }  # fmt: skip


def _label(name: str, value: float, policy: str) -> str:
    return f"{name} {value:g}, {policy}"


def _jobs(scale: Scale) -> dict[str, Job]:
    jobs: dict[str, Job] = {}
    for name, varied in _varied(scale).items():
        for value, changes in scale.of(list(varied.values.items()), [*varied.values.items()][:2]):
            for policy in varied.policies:
                setup = agents(policy, scale, **{"sessions": FEW_SESSIONS, **changes})
                jobs[_label(name, value, policy)] = Simulation("claude_code", setup)
    return jobs


def _values(results: Results, name: str, varied: Varied) -> list[float]:
    return [v for v in varied.values if _label(name, v, varied.policies[0]) in results.kept]


def _course(results: Results, name: str, policy: str, path: str) -> list[float | None]:
    values = _values(results, name, _varied(results.scale)[name])
    return [at(results[_label(name, value, policy)], path) for value in values]


def _figures(results: Results) -> list[Drawing]:
    shown = []
    for name, varied in _varied(results.scale).items():
        lines: dict[str, list[float | None]] = {}
        for policy in varied.policies:
            course = _course(results, name, policy, P95)
            lines[policy] = [None if y is None else y / 1e3 for y in course]
        shown.append(
            Sweep(
                varied.title, varied.x_label, "turn p95, s", _values(results, name, varied), lines,
                varied.scale, varied.chosen,
            )
        )  # fmt: skip
    data = Sweeps("What moves the policies", shown)
    return [Drawing("002-f9-sensitivity", sweeps, data, "Sensitivity (seed 002, f9).")]


def _tables(results: Results) -> list[ResultTable]:
    paths = {
        "turn p95 (ms)": "step_latency_ms.p95",
        "TTFT p90 (ms)": "ttft_ms.p90",
        "cached share": "cached_token_share",
        "interference index": "interference_index",
        "success": "success_rate",
        "migrations": "migrations.count",
        "thrash rate": "migrations.thrash_rate",
    }
    rows = [[label, *(at(kept, path) for path in paths.values())] for label, kept in
            results.kept.items()]  # fmt: skip
    return [ResultTable("002-f9-sensitivity", "Every run of the sweeps", ["", *paths], rows)]


def _gap(results: Results, name: str, value: float) -> float:
    """Return Sticky's turn p95 over EAR's."""
    upper, lower = (
        known(results[_label(name, value, policy)], P95) for policy in ("sticky", "ear")
    )
    return upper / lower if lower else 1.0


def _verdicts(results: Results) -> list[Finding]:
    every = _varied(results.scale)
    loads = _values(results, "rate", every["rate"])
    skews = _values(results, "skew", every["skew"])
    won = [_gap(results, "rate", load) for load in loads]
    gaps = [_gap(results, "skew", skew) for skew in skews]
    success = [
        known(results[_label("pool", value, "static_pd_delta")], "success_rate")
        for value in _values(results, "pool", every["pool"])
    ]
    moves = [y or 0.0 for y in _course(results, "t_cool", "ear", "migrations.count")]
    fewer = first_of(moves[-1] < 0.9 * moves[0] and moves == sorted(moves, reverse=True),
                     moves[-1] < moves[0])  # fmt: skip
    opens = first_of(gaps == sorted(gaps) and gaps[-1] > (1 + LEVEL) * gaps[0],
                     max(gaps) > (1 + LEVEL) * gaps[0])  # fmt: skip
    ahead = first_of(min(won) >= 1 - LEVEL and max(won) > 1 + LEVEL, max(won) > 1 + LEVEL)
    return [
        Finding(
            "EAR stays ahead of sticky at low and high load", "seed 002 §5.5",
            ahead,
            "sticky's turn p95 over EAR's: " + _pairs(loads, won),
        ),
        Finding(
            "The gap between sticky and EAR opens with skew", "seed 002 §5.5",
            opens if len(gaps) > 1 else Verdict.NOT_SHOWN,
            "sticky's turn p95 over EAR's at each share of the top 1 %: " + _pairs(skews, gaps),
        ),
        Finding(
            "Static PD runs into a wall as the pool shrinks", "seed 002 §5.5",
            Verdict.HOLDS if success[0] < success[-1] - 0.01 else Verdict.FAILS,
            "success of delta-transfer PD by GB: "
            + _pairs(_values(results, "pool", every["pool"]), success),
        ),
        _hot(results, _values(results, "t_hot", every["t_hot"])),
        Finding(
            "T_cool bounds the moves", "seed 002 §4.3.4, §5.5",
            fewer if any(moves) else Verdict.NOT_SHOWN,
            "moves by factor on T_cool: "
            + _pairs(_values(results, "t_cool", every["t_cool"]), moves),
        ),
    ]  # fmt: skip


def _hot(results: Results, factors: Sequence[float]) -> Finding:
    """Judge that each end of T_hot's range is worse than the best between them."""
    p95 = [y or 0.0 for y in _course(results, "t_hot", "ear", P95)]
    least = min(p95)
    best = factors[p95.index(least)]
    ends = [end > (1 + LEVEL) * least for end in (p95[0], p95[-1])]
    at_one = p95[factors.index(1.0)] if 1.0 in factors else p95[-1]
    return Finding(
        "T_hot: too low thrashes, too high misses", "seed 002 §5.5",
        counted(sum(ends), len(ends) if len(p95) > 2 else 0),
        f"least turn p95 at {best:g} times the derived T_hot; the derived one is "
        f"{100 * (at_one / least - 1):.0f} % above that",
    )  # fmt: skip


def _pairs(values: list[float], told: list[float]) -> str:
    return ", ".join(f"{value:g}: {y:.3g}" for value, y in zip(values, told, strict=True))


EXPERIMENTS = [
    Experiment(
        name="002-f9",
        title="Sensitivity",
        source="seed 002 §5.5, f9",
        about=f"{FEW_SESSIONS} sessions of the Claude-Code trace on four GPUs; one setting varied "
        "at a time. Skew cuts sessions until the top 1 % hold the share; 46.5 % is the seed's.",
        jobs=_jobs,
        verdicts=_verdicts,
        tables=_tables,
        figures=_figures,
    )
]
