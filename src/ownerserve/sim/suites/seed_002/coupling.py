"""This experiment lets sessions arrive by themselves and shows what a slow turn does then (seed
002, figures 1 and 8).

The seed's law is for sessions that arrive at a rate Lambda whatever happens: L is what follows. So
these runs have Poisson arrivals and no cap. W0 is a turn's mean time on a fleet where nobody waits
for anybody; where W grows in a line with L, W / W0 = 1 / (1 - Lambda N W').
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ownerserve.report.figures.amplification import (
    Amplification,
    Coupled,
    CoupledPoint,
    amplification,
    coupled,
)
from ownerserve.report.page import Verdict
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
)
from ownerserve.sim.suites.fleet import agents
from ownerserve.sim.suites.judging import all_of, first_of, larger
from ownerserve.sim.workload import Closed, Poisson

POLICIES = ("round_robin", "lmetric", "sticky", "ear", "ownerserve")
RATES_PER_H = (60, 120, 180)
"""Sessions an hour on four GPUs, from calm to past what they can do."""
SESSIONS = 64
AMPLE = 32
"""GPUs of the fleet where nobody waits: W0 and the time that the sessions take by themselves."""
WITHIN = 1.5
LEVEL = 0.05
"""Times this close to each other are level: one long session more or less."""
KINDS = ((0.0, "coupled", "no tool time"), (1.0, "tools", "tools as recorded"))
"""Factor on tool times, in file names, in words."""


def course(result: Result) -> dict[str, Any]:
    """Return the terms of the law, and how long all of it took."""
    return {
        "makespan_s": result.metrics["makespan_s"],
        "e2e_s": result.metrics["e2e_s"],
        "success_rate": result.metrics["success_rate"],
        "cached_token_share": result.metrics["cached_token_share"],
        **result.metrics["coupling"],  # type: ignore[dict-item]
    }


def _run(policy: str, scale: Scale, rate_per_h: float, *, tools: float, workers: int = 4) -> Job:
    setup = agents(
        policy,
        scale,
        sessions=SESSIONS,
        workers=workers,
        mode=Closed(),
        arrivals=Poisson(rate_per_h / 3600),
        tool_scale=tools,
    )
    return Simulation("claude_code", setup, course)


def run_label(policy: str, rate: float, tools: float) -> str:
    return f"{policy}, {rate:g} an hour, {'tools' if tools else 'no tools'}"


def _rates(scale: Scale) -> tuple[float, ...]:
    return scale.of(RATES_PER_H, RATES_PER_H[-2:])


def _jobs(scale: Scale) -> dict[str, Job]:
    jobs: dict[str, Job] = {}
    for tools in (0.0, 1.0):
        for rate in _rates(scale):
            jobs[run_label("alone", rate, tools)] = _run(
                "sticky", scale, rate, tools=tools, workers=AMPLE
            )
            for policy in POLICIES:
                jobs[run_label(policy, rate, tools)] = _run(policy, scale, rate, tools=tools)
    return jobs


def _points(results: Results, tools: float) -> dict[str, CoupledPoint]:
    """Return the runs whose gain is below 1, so that the law has something to say."""
    found = {}
    for rate in _rates(results.scale):
        alone_s = results[run_label("alone", rate, tools)]["turn_s"]
        for policy in POLICIES:
            label = run_label(policy, rate, tools)
            own = results[label]
            if alone_s and own["gain"] is not None and 0 <= own["gain"] < 1:
                measured = own["turn_s"] / alone_s
                found[label] = CoupledPoint(policy, own["turn_s"], own["gain"], measured)
    return found


def _factors(results: Results, tools: float) -> dict[str, float]:
    """Return the wall clock over that of the same sessions by themselves, at the highest rate."""
    rate = _rates(results.scale)[-1]
    alone = results[run_label("alone", rate, tools)]["makespan_s"]
    return {
        policy: results[run_label(policy, rate, tools)]["makespan_s"] / alone for policy in POLICIES
    }


def _slowdown(results: Results, policy: str, tools: float) -> float:
    rate = _rates(results.scale)[-1]
    alone = results[run_label("alone", rate, tools)]["turn_s"]
    return float(results[run_label(policy, rate, tools)]["turn_s"] / alone)


def _law_verdicts(results: Results) -> list[Finding]:
    points = [*_points(results, 0.0).values(), *_points(results, 1.0).values()]
    errors = [point.measured * (1 - point.gain) for point in points]
    good = [1 / WITHIN <= error <= WITHIN for error in errors]
    share = float(np.mean(good)) if good else 0.0
    spread = "no point below a gain of 1"
    if errors:
        low, mid, high = (float(x) for x in np.percentile(errors, (10, 50, 90)))
        spread = f"measured / law p10 {low:.2f}, p50 {mid:.2f}, p90 {high:.2f}, {len(errors)} runs"
    return [
        Finding(
            "Turn time grows as 1 / (1 - Lambda N W'(L*))", "seed 002 §2.3, §5.4",
            larger(share, holds=0.9, partly=0.5) if errors else Verdict.NOT_SHOWN,
            f"{share:.0%} of points within {WITHIN:g} times; {spread}",
        ),
        _corner(points),
    ]  # fmt: skip


def _corner(points: list[CoupledPoint]) -> Finding:
    by_policy: dict[str, list[CoupledPoint]] = {}
    for point in points:
        by_policy.setdefault(point.policy, []).append(point)
    means = {
        policy: float(np.mean([point.turn_s for point in own])) for policy, own in by_policy.items()
    }
    ranked = sorted(means, key=lambda policy: means[policy])
    place = ranked.index("ear") if "ear" in ranked else len(ranked)
    is_spread = bool(means) and means[ranked[0]] < (1 - LEVEL) * means[ranked[-1]]
    verdict = first_of(place == 0, place <= 1)
    return Finding(
        "EAR lies in the corner of least turn time and amplification", "seed 002 §5.4",
        verdict if is_spread and "ear" in ranked else Verdict.NOT_SHOWN,
        "mean turn: " + (", ".join(f"{policy} {means[policy]:.3g} s" for policy in ranked)
                         or "0 policies with a gain below 1"),
    )  # fmt: skip


def _law_tables(results: Results) -> list[ResultTable]:
    keys = (
        "turn_s", "turns_in_system", "gain", "amplification", "makespan_s", "cached_token_share",
    )  # fmt: skip
    columns = ("", "W (s)", "L*", "gain", "1 / (1 - gain)", "wall clock (s)", "cached share")
    rows = [[label, *(kept[key] for key in keys)] for label, kept in results.kept.items()]
    caption = "Poisson arrivals. Alone: the same sessions on a fleet where nobody waits."
    return [ResultTable("002-f8-coupling", caption, columns, rows)]


def _law_figures(results: Results) -> list[Drawing]:
    found = []
    for tools, name, told in (
        (0.0, "coupled", "no tool time"),
        (1.0, "tools", "tools as recorded"),
    ):
        data = Coupled(f"The law, {told}", list(_points(results, tools).values()))
        caption = f"Measured points and the law (seed 002, f8), {told}."
        found.append(Drawing(f"002-f8-{name}", coupled, data, caption))
    return found


def _clock_verdicts(results: Results) -> list[Finding]:
    rate = _rates(results.scale)[-1]
    coupled_, tools = _factors(results, 0.0), _factors(results, 1.0)
    slow = {policy: _slowdown(results, policy, 0.0) for policy in POLICIES}
    with_tools = {policy: _slowdown(results, policy, 1.0) for policy in POLICIES}
    worst = max(POLICIES[:-2], key=lambda policy: coupled_[policy])
    least = min(coupled_[policy] for policy in POLICIES[:-1])
    spread = max(coupled_[policy] for policy in POLICIES[:-1]) / least
    best = first_of(coupled_["ear"] == least, coupled_["ear"] <= 1.1 * least)
    damped = all_of([with_tools["sticky"] < (1 - LEVEL) * slow["sticky"]])
    return [
        Finding(
            "Load-aware routing amplifies wall clock 8 times", "seed 002 §1 C1, §2.3",
            first_of(coupled_["lmetric"] >= 6, coupled_["lmetric"] >= 1.5),
            f"at {rate:g} sessions an hour without tool time: wall clock lmetric "
            f"{coupled_['lmetric']:.2f}x, worst {worst} {coupled_[worst]:.2f}x; a turn "
            f"{slow['lmetric']:.1f}x",
        ),
        Finding(
            "EAR's wall clock factor (to be determined) is the least of the seed's policies",
            "seed 002 §1 C1",
            best if spread > 1 + LEVEL else Verdict.NOT_SHOWN,
            f"{coupled_['ear']:.2f}x without tool time, {tools['ear']:.2f}x with; OwnerServe "
            f"{coupled_['ownerserve']:.2f}x and {tools['ownerserve']:.2f}x",
        ),
        Finding(
            "A think time in the loop damps the amplification", "seed 002 §2.3",
            damped if max(slow["sticky"], with_tools["sticky"]) > 1 + LEVEL else Verdict.NOT_SHOWN,
            f"sticky's mean turn, over the same turn alone: {slow['sticky']:.2f}x without tool "
            f"time, {with_tools['sticky']:.2f}x as recorded",
        ),
    ]  # fmt: skip


def _clock_figures(results: Results) -> list[Drawing]:
    found = []
    for tools, name, told in (
        (0.0, "coupled", "no tool time"),
        (1.0, "tools", "tools as recorded"),
    ):
        title = f"Wall clock over that of the same sessions alone, {told}"
        data = Amplification(title, {**_factors(results, tools)})
        found.append(Drawing(f"002-f1-{name}", amplification, data, f"{title} (seed 002, f1)."))
    return found


ABOUT = (
    "Claude-Code sessions that arrive as a Poisson process on four GPUs, with the recorded tool "
    "times and with none."
)
EXPERIMENTS = [
    Experiment(
        name="002-f1",
        title="Wall-clock amplification",
        source="seed 002 §1, f1",
        about=ABOUT,
        jobs=_jobs,
        verdicts=_clock_verdicts,
        figures=_clock_figures,
    ),
    Experiment(
        name="002-f8",
        title="The law of dispatch coupling",
        source="seed 002 §2.3, §5.4, f8",
        about=f"{ABOUT} Gain: Lambda N W'(L*), W' the slope of turn time over turns in the system.",
        jobs=_jobs,
        verdicts=_law_verdicts,
        tables=_law_tables,
        figures=_law_figures,
    ),
]
