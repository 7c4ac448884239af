"""The goal of the results (issue W6), on sessions on which no constant was set, in several draws.

A fixed number of sessions is open at once; the next begins when one ends. At the lower load their
state about fits into the fleet's device memory, at the higher one it does not. Work done is
measured while all lanes are busy, over the first half of all turns: what comes after is the long
sessions' tools running out, which no policy can change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from ownerserve.report.figures.panels import Panel, Panels, panels
from ownerserve.report.page import Verdict
from ownerserve.sim.config.setup import SimSetup, Tiers
from ownerserve.sim.metrics.rows import SERVED
from ownerserve.sim.run import Result
from ownerserve.sim.suites.base import (
    Cell,
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
from ownerserve.sim.suites.draws import Compared, as_much, at_no_cost, compared, inverse, more, over
from ownerserve.sim.suites.fleet import OURS, SEATED, SEATS, WORKERS, agents
from ownerserve.sim.suites.judging import all_of

DRAWS = {"held_out": (1, 2, 3), "held_out_generated": (1, 2, 3)}
"""Role -> seeds. On seed 0's draw of the recorded trace constants were chosen: its sessions are
not in this role (traces.py)."""
LOADS = (24, 48)
SESSIONS = 64
TOLD = "lmetric_gate, told"
TOLD_SEATED = "lmetric_gate, told + seats"
RIVALS = ("sticky", "ttft_gate", "lmetric_gate", TOLD, "static_pd_delta")
POLICIES = (*RIVALS, "ear", OURS)
WITH_SEATS = (TOLD_SEATED, SEATED)
"""Run at the higher load alone: at the lower one nobody waits for a seat."""
AVOIDABLE_MAX = 0.05
NETWORK_MIN = 2.0
GIB = 1 << 30
HOST = Tiers(host_bytes=256 * GIB)
SHARE = 0.5

KEPT = (
    "step_latency_ms",
    "ttft_ms",
    "e2e_s",
    "cached_token_share",
    "success_rate",
    "network_kv_bytes",
    "avoidable_duplicate_share",
    "requests",
    "computed_tokens",
    "modes",
    "actions",
    "reasons",
    "migrations",
    "pressure",
)


def while_full(result: Result) -> dict[str, Any]:
    """Return some metrics of the whole run, and these of the time to the SHARE-th of its turns.

    `tasks_per_gpu_hour` (a turn counts as one over the turns of a session), turn latencies.
    `first_turn_*`: of all sessions' first turns, a seat's wait included. `session_mean_s`: from a
    session's first arrival to its last end, of all. `held_longest_s`: how long a turn of a session
    that has begun waited to be let in.
    """
    table = result.rows.table()
    served = np.sort(table[np.isin(table["mode"], SERVED)], order="done_s")
    part = served[: max(1, round(SHARE * len(served)))]
    hours = float(part["done_s"][-1] - table["arrived_s"].min()) / 3600
    turns_of_task = len(table) / len(np.unique(table["session"]))
    took_s = part["done_s"] - part["arrived_s"]
    is_first = served["position"] == 0
    first_s = (served["done_s"] - served["arrived_s"])[is_first]
    held_s = (served["routed_s"] - served["arrived_s"])[~is_first]
    return {
        "window_h": hours,
        "tasks_per_gpu_hour": len(part) / turns_of_task / (hours * result.setup.workers),
        "turn_p95_s": float(np.percentile(took_s, 95)),
        "turn_p99_s": float(np.percentile(took_s, 99)),
        "turn_mean_s": float(took_s.mean()),
        "first_turn_mean_s": float(first_s.mean()),
        "first_turn_longest_s": float(first_s.max()),
        "held_longest_s": float(held_s.max(initial=0.0)),
        "session_mean_s": at(result.metrics, "e2e_s.mean"),
        **{name: result.metrics[name] for name in KEPT},
    }


def setup_of(policy: str, scale: Scale, *, lanes: int, seed: int, **changes: Any) -> SimSetup:
    """Return the setup of a policy's run at so many lanes, with the sessions of a seed.

    `policy` may say ", told": before each decision the router hears what of the session is resident
    on which device; and then " + seats".
    """
    name = policy.replace(", told", "")
    oracle = "residents" if name != policy else ""
    told = {"lanes": lanes, "sessions": SESSIONS, "seed": seed, "oracle": oracle, **changes}
    return agents(name, scale, **told)


def _label(policy: str, role: str, lanes: int, seed: int) -> str:
    return f"{policy} on {role}, {lanes} at once, draw {seed}"


def _jobs(scale: Scale) -> dict[str, Job]:
    return {
        _label(policy, role, lanes, seed): Simulation(
            role, setup_of(policy, scale, lanes=lanes, seed=seed), while_full
        )
        for role in DRAWS
        for lanes in LOADS
        for seed in _seeds(role, scale)
        for policy in _policies(lanes)
    }


def _policies(lanes: int) -> tuple[str, ...]:
    return (*POLICIES, *WITH_SEATS) if lanes == LOADS[-1] else POLICIES


def _seeds(role: str, scale: Scale) -> tuple[int, ...]:
    return scale.of(DRAWS[role], DRAWS[role][:2])


# -- verdicts ----------------------------------------------------------------------------------

Kind = Callable[[Compared], Verdict]
CELLS = [(role, lanes) for role in DRAWS for lanes in LOADS]
HIGH = [(role, lanes) for role, lanes in CELLS if lanes == LOADS[-1]]


def _values(results: Results, policy: str, cell: tuple[str, int], path: str) -> list[float]:
    role, lanes = cell
    seeds = _seeds(role, results.scale)
    return [known(results[_label(policy, role, lanes, seed)], path) for seed in seeds]


def _versus(results: Results, pair: tuple[str, str], cell: tuple[str, int], path: str) -> Compared:
    ours, theirs = (_values(results, policy, cell, path) for policy in pair)
    return compared(ours, theirs)


def _finding(
    results: Results,
    claim: str,
    kind: Kind,
    pair: tuple[str, str | None],
    path: str,
    *,
    cells: Sequence[tuple[str, int]] = CELLS,
) -> Finding:
    """Judge one claim over `cells`.

    A rival None is the best of RIVALS there, by mean. Latencies are compared the other way round:
    theirs over ours, so that above 1 is always better for us.
    """
    ours, rival = pair
    said, told, lower = {}, [], path.endswith("_s")
    for cell in cells:
        theirs = rival or _best(results, cell, path)
        ratio = _versus(results, (ours, theirs), cell, path)
        name = f"{cell[0]}, {cell[1]} at once"
        said[name] = kind(inverse(ratio) if lower else ratio)
        beside = "" if rival else f" against {theirs}"
        told.append(f"{name}: {ratio}{beside}")
    number = f"{path} of {ours} / {rival or 'the best rival'}: " + "; ".join(told)
    draws = min(len(_seeds(role, results.scale)) for role, _ in cells)
    return Finding(claim, "issue W6", over(said), number, draws=draws)


def _best(results: Results, cell: tuple[str, int], path: str) -> str:
    sign = 1 if path.endswith("_s") else -1
    return min(RIVALS, key=lambda policy: sign * fmean(_values(results, policy, cell, path)))


WORK, P95, FIRST = "tasks_per_gpu_hour", "turn_p95_s", "first_turn_mean_s"


def _verdicts(results: Results) -> list[Finding]:
    def say(claim: str, kind: Kind, pair: tuple[str, str | None], path: str, **more_: Any) -> None:
        found.append(_finding(results, claim, kind, pair, path, **more_))

    found: list[Finding] = []
    say(
        "OwnerServe does as much work as the best rival, both without seats",
        as_much,
        (OURS, None),
        WORK,
    )
    say(
        "OwnerServe's turn p95 is no higher than the best rival's, both without seats",
        as_much,
        (OURS, None),
        P95,
    )
    say(
        "OwnerServe does more work than a plain gate that is told what is resident",
        more,
        (OURS, TOLD),
        WORK,
    )
    say("OwnerServe does more work than EAR", more, (OURS, "ear"), WORK)
    say("OwnerServe's turn p95 is lower than EAR's", more, (OURS, "ear"), P95)
    say("Above the knee seats let OwnerServe do more work", more, (SEATED, OURS), WORK, cells=HIGH)
    say(
        "With seats for both, OwnerServe does more work than the gate that is told",
        more,
        (SEATED, TOLD_SEATED),
        WORK,
        cells=HIGH,
    )
    say(
        "With seats for both, OwnerServe's turn p95 is lower than that gate's",
        more,
        (SEATED, TOLD_SEATED),
        P95,
        cells=HIGH,
    )
    say("Seats cost a session's first turn nothing", at_no_cost, (SEATED, OURS), FIRST, cells=HIGH)
    return [*found, _duplicates(results), _network(results)]  # fmt: skip


def _duplicates(results: Results) -> Finding:
    shares = {}
    for cell in CELLS:
        values = [
            at(results[_label(OURS, cell[0], cell[1], seed)], "avoidable_duplicate_share")
            for seed in _seeds(cell[0], results.scale)
        ]
        told = [value for value in values if value is not None]
        if told:
            shares[f"{cell[0]}, {cell[1]} at once"] = max(told)
    return Finding(
        "At most 5 % of the bytes placed are avoidable duplicates", "seed 000 §3.9, issue W6",
        all_of([share <= AVOIDABLE_MAX for share in shares.values()]),
        ", ".join(f"at most {share:.2%} ({name})" for name, share in shares.items()) or "0 bytes",
        draws=min(len(_seeds(role, results.scale)) for role in DRAWS),
    )  # fmt: skip


def _network(results: Results) -> Finding:
    ratios = {}
    for cell in CELLS:
        ours, theirs = (
            fmean(_values(results, policy, cell, "network_kv_bytes"))
            for policy in (OURS, "static_pd_delta")
        )
        if ours or theirs:  # else nobody sent anything, and neither could send less
            ratios[f"{cell[0]}, {cell[1]} at once"] = theirs / ours if ours else float("inf")
    return Finding(
        "At least two times fewer KV bytes cross the network than with delta-transfer PD",
        "seed 000 §3.9, issue W6",
        all_of([ratio >= NETWORK_MIN for ratio in ratios.values()]),
        ", ".join(f"{ratio:.3g}x ({name})" for name, ratio in ratios.items()) or "0 bytes",
        draws=min(len(_seeds(role, results.scale)) for role in DRAWS),
    )  # fmt: skip


# -- tables and figures ------------------------------------------------------------------------

COLUMNS = {
    "tasks / GPU h": WORK,
    "turn mean (s)": "turn_mean_s",
    "turn p95 (s)": P95,
    "turn p99 (s)": "turn_p99_s",
    "first turn, mean (s)": FIRST,
    "session, mean (s)": "session_mean_s",
    "cached share": "cached_token_share",
    "tokens computed": "computed_tokens",
    "success": "success_rate",
    "migrations": "migrations.count",
    "network KV (bytes)": "network_kv_bytes",
}


def _row(kept: Sequence[Mapping[str, Any]]) -> list[Cell]:
    """Return means over draws, and the least and most of the work."""
    cells: list[Cell] = [fmean(known(one, path) for one in kept) for path in COLUMNS.values()]
    work = [known(one, WORK) for one in kept]
    return [*cells, min(work), max(work)]


def _tables(results: Results) -> list[ResultTable]:
    rows: list[list[Cell]] = []
    for role, lanes in CELLS:
        for policy in _policies(lanes):
            seeds = _seeds(role, results.scale)
            kept = [results[_label(policy, role, lanes, seed)] for seed in seeds]
            rows.append([f"{policy} on {role}, {lanes} at once", *_row(kept)])
    columns = ["", *COLUMNS, "least tasks / GPU h", "most tasks / GPU h"]
    caption = "Means over draws; rates and turns while all lanes are open."
    return [ResultTable("goal-policies", caption, columns, rows)]


def _figures(results: Results) -> list[Drawing]:
    shown = []
    for role, lanes in CELLS:
        for path, unit, better in ((WORK, "tasks a GPU hour", "higher"), (P95, "s", "lower")):
            means: dict[str, float | None] = {
                policy: fmean(_values(results, policy, (role, lanes), path))
                for policy in _policies(lanes)
            }
            what = "work" if path == WORK else "turn p95"
            shown.append(Panel(f"{role}, {lanes} at once: {what}", unit, means, better))
    data = Panels(f"Agents on {WORKERS} GPUs, means over draws", shown, columns=2)
    return [Drawing("goal-policies", panels, data, "Sessions on which no constant was set.")]


# -- with host memory --------------------------------------------------------------------------

TIERED = ("sticky", "lmetric_gate", "ear", OURS, SEATED)


def _tiered_label(policy: str, seed: int) -> str:
    return f"{policy}, draw {seed}"


def _tiered_jobs(scale: Scale) -> dict[str, Job]:
    jobs: dict[str, Job] = {}
    for seed in _tiered_seeds(scale):
        for policy in TIERED:
            setup = setup_of(policy, scale, lanes=LOADS[-1], seed=seed, tiers=HOST)
            if setup.seats is not None:
                setup = msgspec.structs.replace(setup, seats=SEATS)
            jobs[_tiered_label(policy, seed)] = Simulation("held_out", setup, while_full)
    return jobs


def _tiered_seeds(scale: Scale) -> tuple[int, ...]:
    return scale.of(DRAWS["held_out"][:3], DRAWS["held_out"][:2])


def _tiered_verdicts(results: Results) -> list[Finding]:
    seeds, found = _tiered_seeds(results.scale), []
    for ours, path, kind, claim in (
        (OURS, WORK, as_much, "With host memory OwnerServe does as much work as every rival"),
        (OURS, P95, as_much, "With host memory its turn p95 is no higher than any rival's"),
        (SEATED, WORK, at_no_cost, "With host memory seats cost OwnerServe no work"),
    ):
        said, told, lower = {}, [], path == P95
        for rival in TIERED[:-2] if ours == OURS else (OURS,):
            pair = ([known(results[_tiered_label(policy, seed)], path) for seed in seeds]
                    for policy in (ours, rival))  # fmt: skip
            ratio = compared(*pair)
            said[rival] = kind(inverse(ratio) if lower else ratio)
            told.append(f"{rival} {ratio}")
        number = f"{LOADS[-1]} at once, {path} of {ours} over: " + ", ".join(told)
        found.append(Finding(claim, "issue W6", over(said), number, draws=len(seeds)))
    return found


def _tiered_tables(results: Results) -> list[ResultTable]:
    seeds = _tiered_seeds(results.scale)
    rows: list[list[Cell]] = [
        [policy, *_row([results[_tiered_label(policy, seed)] for seed in seeds])]
        for policy in TIERED
    ]
    columns = ["", *COLUMNS, "least tasks / GPU h", "most tasks / GPU h"]
    caption = "256 GiB of host memory for each GPU, for every policy; means over draws."
    return [ResultTable("goal-tiers", caption, columns, rows)]


EXPERIMENTS = [
    Experiment(
        name="goal",
        title="Goal of the results: equal GPUs, sessions drawn anew",
        source="issue W6",
        about="Agent sessions on four GPUs with device memory alone, at a load that about fits and "
        "at twice that. Recorded Claude-Code sessions without those on which constants were set, "
        "and a generated coding-agent trace whose tools take half as long; several draws of "
        "each, intervals over draws. 'Told': before each decision the router hears what of the "
        "session is resident on which device, truly and without delay: more than production's "
        "reports tell. Moves between workers are modelled; between real ones they take a tier.",
        jobs=_jobs,
        verdicts=_verdicts,
        tables=_tables,
        figures=_figures,
    ),
    Experiment(
        name="goal-tiers",
        title="Goal of the results: with host memory",
        source="issue W6",
        about="The same at the higher load on the recorded sessions, with 256 GiB of host memory "
        "behind each GPU. What is brought for a turn is brought when there is room for it to "
        "begin, and transfers may send from host memory. Seats: 1.5 times the device memory.",
        jobs=_tiered_jobs,
        verdicts=_tiered_verdicts,
        tables=_tiered_tables,
    ),
]
