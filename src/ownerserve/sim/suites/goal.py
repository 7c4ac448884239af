"""The goal of the results (issue W6): every policy on equal GPUs, below and above the knee.

A fixed number of sessions is open at once; the next begins when one ends. Below the knee their
state fits into the fleet's device memory, above it does not. Work done is measured while all lanes
are busy, over the first half of all turns: what comes after is the long sessions' tools running
out, which no policy can change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ownerserve.report.figures.panels import Panel, Panels, panels
from ownerserve.report.figures.sweeps import Sweep, Sweeps, sweeps
from ownerserve.report.page import Verdict
from ownerserve.sim.metrics.rows import SERVED
from ownerserve.sim.oracle.horizon import horizon
from ownerserve.sim.run import Result
from ownerserve.sim.setup import Tiers
from ownerserve.sim.suites.base import (
    Cell,
    Drawing,
    Experiment,
    Finding,
    Job,
    Results,
    Scale,
    Simulation,
    Table,
    at,
)
from ownerserve.sim.suites.fleet import (
    COLOCATED_BASELINES,
    GOAL_LANES,
    OURS,
    SEATED,
    SEATS,
    WORKERS,
    agents,
)
from ownerserve.sim.suites.judging import all_of, larger

PD_BASELINES = ("static_pd", "static_pd_delta")
BASELINES = (*COLOCATED_BASELINES, *PD_BASELINES)
POLICIES = (*BASELINES, "ear", OURS, SEATED)
ORACLE = "oracle (receding horizon)"
SHOWN = (
    ORACLE,
    "sticky",
    "lmetric_gate",
    "dynamo",
    "ttft_gate",
    "static_pd_delta",
    "ear",
    SEATED,
    OURS,
)
SHARE = 0.5
EQUAL = 0.01
"""Rates this close are the same: one long session more or less in the window."""
PROPORTION = 0.9
AVOIDABLE_MAX = 0.05
BEHIND_ORACLE = 0.1
NETWORK_MIN = 2.0
GIB = 1 << 30
HOST = Tiers(host_bytes=256 * GIB)
TIERED_SEATS = msgspec.structs.replace(SEATS, share=1.5)
"""What leaves the device is tenths of a second away: half as many sessions more may be inside."""

KEPT = (
    "step_latency_ms",
    "ttft_ms",
    "e2e_s",
    "cached_token_share",
    "success_rate",
    "network_kv_bytes",
    "avoidable_duplicate_share",
    "interference_index",
    "owner_hit_rate",
    "requests",
    "completed_tasks_per_gpu_hour",
    "hotspot_index",
    "modes",
    "actions",
    "reasons",
    "migrations",
    "pressure",
)


def while_full(result: Result) -> dict[str, Any]:
    """Some metrics of the whole run, and these of the time to the SHARE-th of its turns:
    `tasks_per_gpu_hour` (a turn counts as one over the turns of a session), turn latencies."""
    table = result.rows.table()
    served = np.sort(table[np.isin(table["mode"], SERVED)], order="done_s")
    part = served[: max(1, round(SHARE * len(served)))]
    hours = float(part["done_s"][-1] - table["arrived_s"].min()) / 3600
    turns_of_task = len(table) / len(np.unique(table["session"]))
    took_s = part["done_s"] - part["arrived_s"]
    return {
        "window_h": hours,
        "tasks_per_gpu_hour": len(part) / turns_of_task / (hours * result.setup.workers),
        "turn_p95_s": float(np.percentile(took_s, 95)),
        "turn_mean_s": float(took_s.mean()),
        **{name: result.metrics[name] for name in KEPT},
    }


def _label(policy: str, lanes: int) -> str:
    return f"{policy} at {lanes}"


def _lanes(scale: Scale) -> tuple[int, ...]:
    return scale.of(GOAL_LANES, GOAL_LANES[:2])


def _jobs(scale: Scale) -> dict[str, Job]:
    jobs: dict[str, Job] = {}
    for lanes in _lanes(scale):
        setups = {policy: agents(policy, scale, lanes=lanes) for policy in POLICIES}
        setups[ORACLE] = horizon(setups[SEATED])
        for policy, setup in setups.items():
            jobs[_label(policy, lanes)] = Simulation("claude_code", setup, while_full)
    return jobs


def _rate(results: Results, policy: str, lanes: int) -> float:
    return float(results[_label(policy, lanes)]["tasks_per_gpu_hour"])


def _p95(results: Results, policy: str, lanes: int) -> float:
    return float(results[_label(policy, lanes)]["turn_p95_s"])


def knee(results: Results, policies: Sequence[str], lanes: Sequence[int]) -> int:
    """The last load up to which the best policy's work grew nearly in proportion to sessions."""
    best = [max(_rate(results, policy, count) for policy in policies) for count in lanes]
    for at_ in range(1, len(lanes)):
        if best[at_] / best[at_ - 1] < PROPORTION * lanes[at_] / lanes[at_ - 1]:
            return lanes[at_ - 1]
    return lanes[-1]


def _verdicts(results: Results) -> list[Finding]:
    lanes = _lanes(results.scale)
    turning = knee(results, BASELINES, lanes)
    below, above = [n for n in lanes if n <= turning], [n for n in lanes if n > turning]
    return [
        _below(results, below),
        _above(results, above),
        _duplicates(results, lanes),
        _network(results, lanes),
        _behind_oracle(results, lanes),
    ]


def _behind_oracle(results: Results, lanes: Sequence[int]) -> Finding:
    fits, told = [], []
    for count in lanes:
        rate, best = (_rate(results, policy, count) for policy in (SEATED, ORACLE))
        p95, least = (_p95(results, policy, count) for policy in (SEATED, ORACLE))
        fits += [rate >= (1 - BEHIND_ORACLE) * best, p95 <= (1 + BEHIND_ORACLE) * least]
        told.append(
            f"{count} sessions: {rate:.3g} tasks a GPU hour against {best:.3g} "
            f"({rate / best - 1:+.1%}), turn p95 {p95:.3g} s against {least:.3g} s "
            f"({p95 / least - 1:+.0%})"
        )
    return Finding(
        "OwnerServe is within 10 % of the receding-horizon oracle", "issue W6",
        all_of(fits),
        "; ".join(told),
    )  # fmt: skip


def _best_of(results: Results, lanes: int) -> tuple[str, float, str, float]:
    """The baseline that does most, and the one with the least p95: not always the same."""
    most = max(BASELINES, key=lambda policy: _rate(results, policy, lanes))
    least = min(BASELINES, key=lambda policy: _p95(results, policy, lanes))
    return most, _rate(results, most, lanes), least, _p95(results, least, lanes)


def _against(results: Results, lanes: int) -> str:
    most, rate, least, p95 = _best_of(results, lanes)
    return (
        f"{lanes} sessions: {_rate(results, SEATED, lanes):.3g} tasks a GPU hour against "
        f"{rate:.3g} ({most}), turn p95 {_p95(results, SEATED, lanes):.3g} s against {p95:.3g} s "
        f"({least})"
    )


def _below(results: Results, lanes: Sequence[int]) -> Finding:
    fits = []
    for count in lanes:
        _, rate, _, p95 = _best_of(results, count)
        is_as_much = _rate(results, SEATED, count) >= (1 - EQUAL) * rate
        fits.append((is_as_much, _p95(results, SEATED, count) <= (1 + EQUAL) * p95))
    flat = [fit for pair in fits for fit in pair]
    return Finding(
        "Below the knee OwnerServe is no worse than the best baseline", "issue W6",
        all_of(flat),
        "; ".join(_against(results, count) for count in lanes),
    )  # fmt: skip


def _above(results: Results, lanes: Sequence[int]) -> Finding:
    wins = []
    for count in lanes:
        _, rate, _, p95 = _best_of(results, count)
        wins += [_rate(results, SEATED, count) > rate, _p95(results, SEATED, count) < p95]
    return Finding(
        "Above the knee OwnerServe completes more tasks a GPU hour, at a lower turn p95, than "
        "every baseline", "issue W6",
        all_of(wins),
        "; ".join(_against(results, count) for count in lanes) or "0 loads were above the knee",
    )  # fmt: skip


def _duplicates(results: Results, lanes: Sequence[int]) -> Finding:
    told = {n: results[_label(SEATED, n)]["avoidable_duplicate_share"] for n in lanes}
    shares = {n: share for n, share in told.items() if share is not None}
    good = [share <= AVOIDABLE_MAX for share in shares.values()]
    return Finding(
        "At most 5 % of the bytes placed are avoidable duplicates", "seed 000 §3.9, issue W6",
        all_of(good),
        ", ".join(f"{share:.2%} at {count} sessions" for count, share in shares.items()),
    )  # fmt: skip


def _network(results: Results, lanes: Sequence[int]) -> Finding:
    ratios = {}
    for count in lanes:
        ours = results[_label(SEATED, count)]["network_kv_bytes"]
        theirs = results[_label("static_pd_delta", count)]["network_kv_bytes"]
        if theirs or ours:  # else nobody sent anything, and neither could send less
            ratios[count] = theirs / ours if ours else float("inf")
    good = [ratio >= NETWORK_MIN for ratio in ratios.values()]
    return Finding(
        "At least two times fewer KV bytes cross the network than with delta-transfer PD",
        "seed 000 §3.9, issue W6",
        all_of(good),
        ", ".join(f"{ratio:.3g}x at {count} sessions" for count, ratio in ratios.items()),
    )  # fmt: skip


COLUMNS = {
    "tasks / GPU h": "tasks_per_gpu_hour",
    "turn p95 (s)": "turn_p95_s",
    "turn mean (s)": "turn_mean_s",
    "task mean (s)": "e2e_s.mean",
    "TTFT p50 (ms)": "ttft_ms.p50",
    "TTFT p99 (ms)": "ttft_ms.p99",
    "cached share": "cached_token_share",
    "success": "success_rate",
    "preemptions": "pressure.preemptions",
    "migrations": "migrations.count",
    "network KV (bytes)": "network_kv_bytes",
    "avoidable duplicates": "avoidable_duplicate_share",
}


def _tables(results: Results) -> list[Table]:
    caption = "Every policy at each number of sessions at once; rates and turns while all are open."
    return [Table("goal-policies", caption, ["", *COLUMNS], _rows(results, COLUMNS))]


def _figures(results: Results) -> list[Drawing]:
    lanes = _lanes(results.scale)
    x = [float(count) for count in lanes]
    lines = {
        path: {
            policy: [at(results[_label(policy, count)], path) for count in lanes]
            for policy in SHOWN
        }
        for path in ("tasks_per_gpu_hour", "turn_p95_s", "cached_token_share")
    }
    labels = ("tasks a GPU hour", "turn p95, s", "cached share")
    titles = ("Work done (↑ better)", "A turn, p95 (↓ better)", "Cached share (↑ better)")
    data = Sweeps(
        f"Claude-Code sessions on {WORKERS} GPUs, every policy",
        [
            Sweep(title, "sessions at once", label, x, lines[path])
            for title, label, path in zip(titles, labels, lines, strict=True)
        ],
    )
    last = lanes[-1]
    own = {policy: _rate(results, policy, last) for policy in POLICIES}
    p95 = {policy: _p95(results, policy, last) for policy in POLICIES}
    bars = Panels(
        f"{last} sessions at once",
        [
            Panel("Work done", "tasks a GPU hour", {**own}, "higher"),
            Panel("A turn, p95", "s", {**p95}),
        ],
        columns=2,
    )
    return [
        Drawing("goal-knee", sweeps, data, "Below and above the knee."),
        Drawing("goal-above", panels, bars, "All policies above the knee."),
    ]


TIERED = ("sticky", "lmetric_gate", "dynamo", "ttft_gate", "ear", OURS, SEATED)


def _tiered_jobs(scale: Scale) -> dict[str, Job]:
    lanes = _lanes(scale)[-1]
    setups = {policy: agents(policy, scale, lanes=lanes, tiers=HOST) for policy in TIERED}
    setups[SEATED] = msgspec.structs.replace(setups[SEATED], seats=TIERED_SEATS)
    return {p: Simulation("claude_code", setup, while_full) for p, setup in setups.items()}


def _tiered_verdicts(results: Results) -> list[Finding]:
    rates = {policy: float(results[policy]["tasks_per_gpu_hour"]) for policy in TIERED}
    p95 = {policy: float(results[policy]["turn_p95_s"]) for policy in TIERED}
    ours = max((OURS, SEATED), key=lambda policy: rates[policy])
    others = [policy for policy in TIERED if policy in BASELINES]
    best, least = max(rates[p] for p in others), min(p95[p] for p in others)
    wins = [rates[ours] >= (1 - EQUAL) * best, p95[ours] <= (1 + EQUAL) * least]
    return [
        Finding(
            "The same with host memory behind every policy's GPUs", "issue W6",
            all_of(wins),
            f"{_lanes(results.scale)[-1]} sessions: "
            + ", ".join(f"{p} {rates[p]:.3g} tasks a GPU hour, p95 {p95[p]:.3g} s" for p in TIERED),
        )
    ]  # fmt: skip


def _rows(results: Results, columns: Mapping[str, str]) -> list[list[Cell]]:
    return [
        [label, *(at(kept, path) for path in columns.values())]
        for label, kept in results.kept.items()
    ]


def _tiered_tables(results: Results) -> list[Table]:
    caption = "256 GiB of host memory for each GPU, for every policy"
    return [Table("goal-tiers", caption, ["", *COLUMNS], _rows(results, COLUMNS))]


SHARES = (0.8, 0.9, 1.0)
ALSO_SEATED = ("sticky", "lmetric_gate", "dynamo", "ttft_gate", "ear")


def _seat_jobs(scale: Scale) -> dict[str, Job]:
    lanes = _lanes(scale)[-1]
    jobs: dict[str, Job] = {}
    for policy in ALSO_SEATED:
        for name in (policy, f"{policy} + seats"):
            setup = agents(name, scale, lanes=lanes)
            jobs[name] = Simulation("claude_code", setup, while_full)
    jobs[OURS] = Simulation("claude_code", agents(OURS, scale, lanes=lanes), while_full)
    for share in SHARES:
        setup = agents(OURS, scale, lanes=lanes, seats=msgspec.structs.replace(SEATS, share=share))
        jobs[f"{OURS}, share {share:g}"] = Simulation("claude_code", setup, while_full)
    return jobs


def _seat_verdicts(results: Results) -> list[Finding]:
    gains = {
        policy: results[f"{policy} + seats"]["tasks_per_gpu_hour"]
        / results[policy]["tasks_per_gpu_hour"]
        for policy in ALSO_SEATED
    }
    kept, alone = results[f"{OURS}, share {SEATS.share:g}"], results[OURS]
    ours, least = kept["tasks_per_gpu_hour"], kept["turn_p95_s"]
    others = {p: results[f"{p} + seats"] for p in ALSO_SEATED}
    most = max(others, key=lambda policy: others[policy]["tasks_per_gpu_hour"])
    calmest = min(others, key=lambda policy: others[policy]["turn_p95_s"])
    rate, p95 = others[most]["tasks_per_gpu_hour"], others[calmest]["turn_p95_s"]
    routing = [ours >= (1 - EQUAL) * rate, least <= (1 + EQUAL) * p95]
    is_held = kept["ttft_ms"] != alone["ttft_ms"]  # seats that never hold anybody show nothing
    return [
        Finding(
            "Above the knee what helps is to hold new sessions back (seats)", "seed 003, issue W6",
            larger(ours / alone["tasks_per_gpu_hour"], holds=1.1, partly=1 + EQUAL)
            if is_held else Verdict.NOT_SHOWN,
            f"{ours:.3g} against {alone['tasks_per_gpu_hour']:.3g} tasks a GPU hour, turn p95 "
            f"{least:.3g} against {alone['turn_p95_s']:.3g} s",
        ),
        Finding(
            "Seats are orthogonal to routing: they help the baselines too", "issue W6",
            all_of([gain > 1 + EQUAL for gain in gains.values()] if is_held else []),
            ", ".join(f"{policy} {gain:.2f}x" for policy, gain in gains.items()),
        ),
        Finding(
            "With seats for everybody OwnerServe still leads", "issue W6",
            all_of(routing),
            f"{ours:.3g} against {rate:.3g} tasks a GPU hour ({most}), turn p95 {least:.3g} "
            f"against {p95:.3g} s ({calmest})",
        ),
    ]  # fmt: skip


def _seat_tables(results: Results) -> list[Table]:
    caption = "Seats: a new session waits until its context fits. share: of the fleet's memory."
    return [Table("goal-seats", caption, ["", *COLUMNS], _rows(results, COLUMNS))]


def _seat_figures(results: Results) -> list[Drawing]:
    rows = results.kept
    data = Panels(
        "Who is let in at once, above the knee",
        [
            Panel(
                "Work done", "tasks a GPU hour",
                {label: at(kept, "tasks_per_gpu_hour") for label, kept in rows.items()}, "higher",
            ),
            Panel("A turn, p95", "s", {k: at(kept, "turn_p95_s") for k, kept in rows.items()}),
            Panel(
                "A task, mean, its wait included", "s",
                {label: at(kept, "e2e_s.mean") for label, kept in rows.items()},
            ),
        ],
    )  # fmt: skip
    return [Drawing("goal-seats", panels, data, "Seats, with every policy.")]


EXPERIMENTS = [
    Experiment(
        name="goal",
        title="Goal of the results: equal GPUs, below and above the knee",
        source="issue W6",
        about="Claude-Code sessions on four GPUs with device memory alone, from far fewer sessions "
        "at once than their state fits to far more. Every baseline, EAR and OwnerServe.",
        jobs=_jobs,
        verdicts=_verdicts,
        tables=_tables,
        figures=_figures,
    ),
    Experiment(
        name="goal-tiers",
        title="Goal of the results: with host memory",
        source="issue W6",
        about="The same above the knee, with 256 GiB of host memory behind each GPU. What is "
        "brought for a turn is brought when there is room for it to begin, and transfers may send "
        "from host memory. Seats: 1.5 times the device memory.",
        jobs=_tiered_jobs,
        verdicts=_tiered_verdicts,
        tables=_tiered_tables,
    ),
    Experiment(
        name="goal-seats",
        title="Goal of the results: who is let in",
        source="seed 003, issue W6",
        about="Far above the knee, with and without seats: a new session's first turn waits until "
        "the contexts of the sessions inside leave room for its own. No other turn ever waits.",
        jobs=_seat_jobs,
        verdicts=_seat_verdicts,
        tables=_seat_tables,
        figures=_seat_figures,
    ),
]
