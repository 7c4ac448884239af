"""What the results are worth with the engines of today: the headline rows under each set of
abilities (sim.granted), over several draws."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import msgspec

from ownerserve.report.figures.panels import Panel, Panels, panels
from ownerserve.sim.granted import EngineAbilities, granted
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
    known,
)
from ownerserve.sim.suites.draws import Compared, compared, inverse, more, over
from ownerserve.sim.suites.fleet import OURS
from ownerserve.sim.suites.goal import HOST, LOADS, P95, WORK, setup_of, while_full
from ownerserve.sim.suites.s000_restore import hybrid_worker

SETS: tuple[EngineAbilities, ...] = ("ideal", "hf", "vllm")
SEEDS = (1, 2, 3)
FLEETS = {"device only": None, "256 GiB of host memory": HOST}
POLICIES = ("ear", OURS)
HYBRID = "V4-Flash, one worker"


def _label(what: str, name: str, seed: int) -> str:
    return f"{what}, {name}, draw {seed}"


def _seeds(scale: Scale) -> tuple[int, ...]:
    return scale.of(SEEDS, SEEDS[:2])


def _rows() -> list[tuple[str, str]]:
    """Fleet, policy."""
    return [(fleet, policy) for fleet in FLEETS for policy in POLICIES]


def _jobs(scale: Scale) -> dict[str, Job]:
    jobs: dict[str, Job] = {}
    for seed in _seeds(scale):
        for name in SETS:
            able: dict[str, Any] = {"seed": seed, "abilities": name}
            for fleet, policy in _rows():
                changes = {**able, "tiers": FLEETS[fleet]}
                setup = setup_of(policy, scale, lanes=LOADS[-1], **changes)
                label = _label(f"{policy}, {fleet}", name, seed)
                jobs[label] = Simulation("held_out", setup, while_full)
            setup = msgspec.structs.replace(hybrid_worker(scale, seed), abilities=name)
            jobs[_label(HYBRID, name, seed)] = Simulation("held_out", setup)
    return jobs


def _values(results: Results, what: str, name: str, path: str) -> list[float]:
    seeds = _seeds(results.scale)
    return [known(results[_label(what, name, seed)], path) for seed in seeds]


def _better(results: Results, what: str, pair: Sequence[str], path: str) -> Compared:
    """The first set over the second, so that above 1 is better."""
    ratio = compared(*(_values(results, what, name, path) for name in pair))
    return inverse(ratio) if path in (P95, "ttft_ms.mean") else ratio


def _finding(
    results: Results, claim: str, pair: tuple[str, str], cells: Sequence[tuple[str, str]]
) -> Finding:
    told = {what: _better(results, what, pair, path) for what, path in cells}
    verdict = over({what: more(ratio) for what, ratio in told.items()})
    number = "; ".join(f"{what}: {ratio}" for what, ratio in told.items())
    return Finding(
        claim, "issue W7", verdict, f"{pair[0]} against {pair[1]}, {number}",
        draws=len(_seeds(results.scale)),
    )  # fmt: skip


def _verdicts(results: Results) -> list[Finding]:
    moved = [(f"{OURS}, {fleet}", WORK) for fleet in FLEETS]
    return [
        _finding(results, "Moves between workers let OwnerServe do more work", ("ideal", "hf"),
                 moved),
        _finding(results, "Moves between workers let EAR do more work", ("ideal", "hf"),
                 [(f"ear, {fleet}", WORK) for fleet in FLEETS]),
        _finding(results, "A hybrid model's first tokens come sooner with the reference engine's "
                 "abilities than with vLLM's", ("hf", "vllm"), [(HYBRID, "ttft_ms.mean")]),
        _finding(results, "A hybrid model re-uses more with the reference engine's abilities than "
                 "with vLLM's", ("hf", "vllm"), [(HYBRID, "cached_token_share")]),
    ]  # fmt: skip


FLEET_COLUMNS = {"tasks / GPU h": WORK, "turn p95 (s)": P95, "cached share": "cached_token_share"}
WORKER_COLUMNS = {
    "TTFT mean (ms)": "ttft_ms.mean",
    "cached share": "cached_token_share",
    "tokens computed": "computed_tokens",
}


def _tables(results: Results) -> list[Table]:
    rows: list[list[Cell]] = [
        [f"{policy}, {fleet}, {name}", *(
            fmean(_values(results, f"{policy}, {fleet}", name, path))
            for path in FLEET_COLUMNS.values()
        )]
        for fleet, policy in _rows() for name in SETS
    ]  # fmt: skip
    ones: list[list[Cell]] = [
        [name, *(fmean(_values(results, HYBRID, name, path)) for path in WORKER_COLUMNS.values())]
        for name in SETS
    ]
    told: list[list[Cell]] = [[name, granted(name).words()] for name in SETS]
    return [
        Table("abilities-fleet", "Means over draws, 48 at once.", ["", *FLEET_COLUMNS], rows),
        Table("abilities-hybrid", f"{HYBRID}, means over draws.", ["", *WORKER_COLUMNS], ones),
        Table("abilities", "What each set grants.", ["set", "grants"], told),
    ]


def _figures(results: Results) -> list[Drawing]:
    shown = [
        Panel(title, unit, {name: fmean(_values(results, what, name, path)) for name in SETS}, way)
        for title, what, path, unit, way in (
            ("OwnerServe, device only: work", f"{OURS}, device only", WORK, "tasks a GPU hour",
             "higher"),
            ("EAR, device only: work", "ear, device only", WORK, "tasks a GPU hour", "higher"),
            (f"{HYBRID}: TTFT mean", HYBRID, "ttft_ms.mean", "ms", "lower"),
        )
    ]  # fmt: skip
    data = Panels("What engines may do", shown)
    return [Drawing("abilities", panels, data, "The same rows under each set of abilities.")]


EXPERIMENTS = [
    Experiment(
        name="abilities",
        title="What an engine's abilities are worth",
        source="issue W7",
        about="Rows of the others, which grant `ideal` abilities, with what the reference engine "
        "and vLLM's connector state instead: no session moves between workers, and with vLLM's "
        "nothing is replayed and a hit is one length. Recorded sessions, held out.",
        jobs=_jobs,
        verdicts=_verdicts,
        tables=_tables,
        figures=_figures,
    ),
]
