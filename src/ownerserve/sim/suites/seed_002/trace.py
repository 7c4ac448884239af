"""This experiment shows what the traces themselves say, and whether turns are coupled (seed 002,
figures 2 and 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ownerserve.report.figures.reuse import ReuseShares, ReuseTopology, reuse_topology
from ownerserve.report.figures.timeline import Coupling, Timeline, TimelineSpan, coupling_timeline
from ownerserve.report.page import Verdict
from ownerserve.sim.config.setup import SimSetup
from ownerserve.sim.run import Result
from ownerserve.sim.suites.base import (
    Drawing,
    Experiment,
    Finding,
    Job,
    Measurement,
    Results,
    ResultTable,
    Scale,
    Simulation,
)
from ownerserve.sim.suites.fleet import agents
from ownerserve.sim.suites.judging import all_of, first_of
from ownerserve.sim.workload import First, WorkloadShape
from ownerserve.trace.model import Trace
from ownerserve.trace.stats import measure

ROLES = ("claude_code", "mooncake_conversation", "mooncake_synthetic", "miniswe")
SEED = ReuseShares(0.932, 0.057, 0.011)
SEED_TOP1, SEED_RATIO, SEED_ANY, SEED_INTRA = 0.465, 75.0, 0.803, 0.796


def statistics(trace: Trace | None) -> dict[str, Any]:
    """Return the quantities of §2.1-2.2 of one trace."""
    assert trace is not None
    told = measure(trace)
    ideal, split, tool = told.ideal_cached_token_share, told.reuse_split, told.think_s_after
    return {
        "requests": told.requests,
        "ratio": told.input_output_ratio,
        "top1": told.input_share.top1,
        "any": None if ideal is None else ideal.any_session,
        "intra": None if ideal is None else ideal.intra_session,
        "split": None
        if split is None or trace.ids == "session"
        else [split.intra_session, split.cross_session, split.shared_head],
        "tool_p50_s": tool["tool_use"].spread.p50 if "tool_use" in tool else None,
        "api_p50_s": None if told.api_s is None else told.api_s.p50,
        "api_share": told.api_share_of_tool_loop,
        "inputs": [sum(r.input_tokens for r in session.requests) for session in trace.sessions],
    }


def _statistics(scale: Scale) -> dict[str, Job]:
    return {role: Measurement(statistics, role) for role in ROLES}


def _large(results: Results) -> list[str]:
    """Return the traces of which 1 % of the sessions is at least one; all where none is so
    large."""
    return [role for role in ROLES if len(results[role]["inputs"]) >= 100] or list(ROLES)


def _told(results: Results, key: str) -> str:
    """Return one quantity of all traces in words, for a verdict."""
    told = ((role, results[role][key]) for role in ROLES)
    return ", ".join(f"{value:.3g} ({role})" for role, value in told if value is not None)


def _trace_verdicts(results: Results) -> list[Finding]:
    own = results["claude_code"]
    gaps = [
        results[role]["any"] - results[role]["intra"]
        for role in ROLES
        if results[role]["any"] is not None
    ]
    intra = [results[role]["split"][0] for role in ROLES if results[role]["split"] is not None]
    shares = [results[role]["any"] for role in ROLES if results[role]["any"] is not None]
    top = [results[role]["top1"] for role in _large(results)]
    ratios = [results[role]["ratio"] for role in ROLES]
    tool_s, api_s = own["tool_p50_s"], own["api_p50_s"]
    return [
        Finding(
            "Re-use is intra-session (93.2 %)", "seed 002 §2.2",
            all_of([share >= SEED.intra_session - 0.05 for share in intra]),
            f"{_range(intra)} of re-used tokens where ids are global",
            "mooncake_conversation", draws=0,
        ),
        Finding(
            "The any-session bound is less than 1 point above the intra-session bound",
            "seed 002 §2.2",
            all_of([gap < 0.01 for gap in gaps]), f"{_range(gaps)} of the prompt tokens", draws=0,
        ),
        Finding(
            "The ideal cached share is about 80 %", "seed 002 §2.2",
            all_of([abs(share - SEED_ANY) < 0.05 for share in shares]),
            f"depends on the trace: {_told(results, 'any')}", draws=0,
        ),
        Finding(
            "The top 1 % of sessions hold 46.5 % of input tokens", "seed 002 §2.1",
            all_of([share > 0.4 for share in top]),
            f"{_range(top)}; hence skew is swept (002-f9)", draws=0,
        ),
        Finding(
            "Input is 75 times output", "seed 002 §2.1",
            all_of([SEED_RATIO / 1.5 <= ratio <= SEED_RATIO * 1.5 for ratio in ratios]),
            f"{_told(results, 'ratio')}", draws=0,
        ),
        Finding(
            "An agent's next turn follows at once (T_human = 0)", "seed 002 §2.3",
            Verdict.NOT_SHOWN if tool_s is None or not api_s
            else first_of(tool_s < 0.1 * api_s, tool_s < 0.5 * api_s),
            f"tool time p50 {tool_s or 0:.3g} s beside an answer's p50 "
            f"{api_s or 0:.3g} s; hence tool time is swept (002-f8, 002-f9)", draws=0,
        ),
    ]  # fmt: skip


def _range(shares: Sequence[float]) -> str:
    return f"{min(shares):.1%} to {max(shares):.1%}" if shares else "0 traces tell"


def _trace_table(results: Results) -> list[ResultTable]:
    keys = ("requests", "ratio", "top1", "any", "intra", "tool_p50_s", "api_p50_s", "api_share")
    columns = (
        "trace", "requests", "input / output", "input of top 1 % of sessions",
        "ideal cached share, any session", "ideal cached share, own session", "tool p50 (s)",
        "answer p50 (s)", "answering / (answering + tools)",
    )  # fmt: skip
    rows = [[role, *(results[role][key] for key in keys)] for role in ROLES]
    rows.append(["seed 002", None, SEED_RATIO, SEED_TOP1, SEED_ANY, SEED_INTRA, 0.0, None, None])
    return [
        ResultTable("002-f2-traces", "What the traces are like, beside the seed's", columns, rows)
    ]


def _trace_figures(results: Results) -> list[Drawing]:
    splits = {"seed 002": SEED}
    for role in ROLES:
        if results[role]["split"] is not None:
            splits[role] = ReuseShares(*results[role]["split"])
    inputs = {role: results[role]["inputs"] for role in _large(results)}
    caption = "Where re-use comes from, and how unevenly sessions use input (seed 002, f2)."
    return [Drawing("002-f2-reuse", reuse_topology, ReuseTopology(splits, inputs), caption)]


LANES_SHOWN = 3
TURNS_SHOWN = 6


def first_turns(result: Result) -> dict[str, list[list[float]]]:
    """Return (arrival, end) of the first turns of the sessions for which those take a middling
    time."""
    table = result.rows.table()
    found: dict[str, list[list[float]]] = {}
    for session in np.unique(table["session"]):
        own = table[table["session"] == session]
        own = own[np.argsort(own["arrived_s"], kind="stable")][:TURNS_SHOWN]
        if len(own) >= TURNS_SHOWN - 2:
            begin = float(own["arrived_s"][0])
            times = zip(own["arrived_s"], own["done_s"], strict=True)
            found[f"session {session}"] = [[float(a) - begin, float(d) - begin] for a, d in times]
    by_span = sorted(found, key=lambda name: found[name][-1][1])
    middle = max((len(by_span) - LANES_SHOWN) // 2, 0)
    return {name: found[name] for name in by_span[middle : middle + LANES_SHOWN]}


def _timelines(scale: Scale) -> dict[str, Job]:
    chat = SimSetup(
        policy="sticky", workers=4, shape=WorkloadShape(sessions=First(scale.of(400, 12)))
    )
    return {
        "chat": Simulation("mooncake_conversation", chat, first_turns),
        "agents": Simulation(
            "claude_code", agents("sticky", scale, lanes=4, sessions=8), first_turns
        ),
        "coupled": Simulation(
            "claude_code", agents("sticky", scale, lanes=4, sessions=8, tool_scale=0.0), first_turns
        ),
    }


def _timeline_figures(results: Results) -> list[Drawing]:
    titles = {
        "chat": ("Chat: a person reads between turns", "human"),
        "agents": ("Agents as recorded: tools run between turns", "tool"),
        "coupled": ("Agents whose tools take no time (the seed's assumption)", "tool"),
    }
    shown = []
    for name, (title, pause) in titles.items():
        lanes = {lane: spans_of(turns, pause) for lane, turns in results[name].items()}
        shown.append(Timeline(title, lanes))
    return [
        Drawing(
            "002-f3-coupling", coupling_timeline, Coupling(shown),
            "Who waits for whom (seed 002, f3): the first turns of sessions as simulated.",
        )
    ]  # fmt: skip


def spans_of(turns: list[list[float]], pause: str) -> list[TimelineSpan]:
    spans: list[TimelineSpan] = []
    until_s = 0.0
    for arrived_s, done_s in turns:
        if arrived_s > until_s:
            spans.append(TimelineSpan(pause, until_s, arrived_s))
        if done_s > max(until_s, arrived_s):
            spans.append(TimelineSpan("turn", max(until_s, arrived_s), done_s))
        until_s = max(until_s, done_s)
    return spans


EXPERIMENTS = [
    Experiment(
        name="002-f2",
        title="Re-use and skew of the traces",
        source="seed 002 §2.1-2.2, f2",
        about="No simulation: statistics of the traces with an infinite cache. The Claude-Code "
        "trace's block ids are local to a session, so its split between sources is not told.",
        jobs=_statistics,
        verdicts=_trace_verdicts,
        tables=_trace_table,
        figures=_trace_figures,
    ),
    Experiment(
        name="002-f3",
        title="Dispatch coupling, drawn",
        source="seed 002 §2.3, f3",
        about="The first turns of a few sessions on a calm fleet.",
        jobs=_timelines,
        figures=_timeline_figures,
    ),
]
