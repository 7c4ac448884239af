"""This experiment shows what the receding-horizon oracle knows, part by part: why OwnerServe is
behind it, how far."""

from __future__ import annotations

import msgspec

from ownerserve.report.figures.panels import Panel, Panels, panels
from ownerserve.sim.config.setup import Oracle
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
    known,
)
from ownerserve.sim.suites.fleet import GOAL_LANES, SEATED, agents
from ownerserve.sim.suites.goal import while_full
from ownerserve.sim.suites.judging import all_of

KNOWN: dict[str, Oracle] = {
    "nothing (OwnerServe)": "",
    "when each session goes on": "next-use",
    "where it went on": "places",
    "what lies where": "residents",
    "where it went on + what lies where": "places-residents",
    "all": "horizon",
}
NOTHING, ORDER, *_, PLACES, ALL = KNOWN
BEHIND_ORACLE = 0.1


def _lanes(scale: Scale) -> tuple[int, ...]:
    """Return the loads above the knee: below it there is little to know."""
    return scale.of(GOAL_LANES[2:], GOAL_LANES[:1])


def _jobs(scale: Scale) -> dict[str, Job]:
    return {
        f"{label} at {lanes}": Simulation(
            "claude_code",
            msgspec.structs.replace(agents(SEATED, scale, lanes=lanes), oracle=oracle),
            while_full,
        )
        for lanes in _lanes(scale)
        for label, oracle in KNOWN.items()
    }


def _verdicts(results: Results) -> list[Finding]:
    told, near = [], []
    for lanes in _lanes(results.scale):
        p95 = {label: known(results[f"{label} at {lanes}"], "turn_p95_s") for label in KNOWN}
        least = (1 + BEHIND_ORACLE) * p95[ALL]
        if p95[NOTHING] > least:  # else it lacks nothing, of neither kind
            near.append(p95[PLACES] <= least < p95[ORDER])
        told.append(
            f"{lanes} sessions: turn p95 " + ", ".join(f"{p95[k]:.3g} s ({k})" for k in KNOWN)
        )
    return [
        _behind(results),
        Finding(
            "What OwnerServe lacks to the oracle is news of where state lies, not an order of "
            "eviction",
            "issue W6",
            all_of(near),
            "; ".join(told),
        ),
    ]


def _behind(results: Results) -> Finding:
    fits, told = [], []
    for lanes in _lanes(results.scale):
        own, best = (results[f"{label} at {lanes}"] for label in (NOTHING, ALL))
        rate, most = (known(kept, "tasks_per_gpu_hour") for kept in (own, best))
        p95, least = (known(kept, "turn_p95_s") for kept in (own, best))
        fits += [rate >= (1 - BEHIND_ORACLE) * most, p95 <= (1 + BEHIND_ORACLE) * least]
        told.append(
            f"{lanes} sessions: {rate:.3g} tasks a GPU hour against {most:.3g} "
            f"({rate / most - 1:+.1%}), turn p95 {p95:.3g} s against {least:.3g} s "
            f"({p95 / least - 1:+.0%})"
        )
    return Finding(
        "OwnerServe is within 10 % of the receding-horizon oracle",
        "issue W6",
        all_of(fits),
        "; ".join(told),
    )


COLUMNS = {
    "tasks / GPU h": "tasks_per_gpu_hour",
    "turn p95 (s)": "turn_p95_s",
    "turn mean (s)": "turn_mean_s",
    "cached share": "cached_token_share",
    "migrations": "migrations.count",
    "network KV (bytes)": "network_kv_bytes",
}


def _tables(results: Results) -> list[ResultTable]:
    rows: list[list[Cell]] = [
        [label, *(known(kept, path) for path in COLUMNS.values())]
        for label, kept in results.kept.items()
    ]
    caption = "OwnerServe with seats, told one part after another of what an oracle knows."
    return [ResultTable("goal-oracle", caption, ["told", *COLUMNS], rows)]


def _figures(results: Results) -> list[Drawing]:
    shown = [
        Panel(
            f"A turn, p95, {lanes} sessions", "s",
            {label: known(results[f"{label} at {lanes}"], "turn_p95_s") for label in KNOWN},
        )
        for lanes in _lanes(results.scale)
    ]  # fmt: skip
    data = Panels("OwnerServe, told what an oracle knows", shown)
    return [Drawing("goal-oracle", panels, data, "Parts of the oracle's knowledge.")]


EXPERIMENTS = [
    Experiment(
        name="goal-oracle",
        title="Goal of the results: what an oracle knows",
        source="issue W6",
        about="OwnerServe with seats above the knee, told part of what the receding-horizon oracle "
        "knows: when each session goes on (so evictors choose as Belady would), where it went on "
        "(so its former workers let go of it), and before each decision what truly lies where.",
        jobs=_jobs,
        verdicts=_verdicts,
        tables=_tables,
        figures=_figures,
    ),
]
