"""This experiment has both halves at once: where turns run and how their state comes back, on
fleets of hybrid models with tiers, under what each engine may do. It is a suite of its own, since
it takes as long as all others.

The other experiments hold one half still: placement on device memory alone, restoring on one
worker. Memory is what makes each row meet pressure: LANES sessions of CONTEXT_TOKENS are 1.5 times
what the devices hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from ownerserve.kv.messages import PlacementAction
from ownerserve.router.admission import SeatSettings
from ownerserve.sim.build import geometry_of, pace_of
from ownerserve.sim.config.granted import EngineAbilities, granted
from ownerserve.sim.config.setup import SimSetup, Tiers
from ownerserve.sim.suites.base import (
    Cell,
    Experiment,
    Finding,
    Job,
    Results,
    ResultTable,
    Scale,
    Simulation,
    known,
)
from ownerserve.sim.suites.draws import Compared, as_much, compared, inverse, over
from ownerserve.sim.suites.fleet import OURS, WORKERS
from ownerserve.sim.suites.goal import P95, WORK, while_full
from ownerserve.sim.workload import Capped, Sample, WorkloadShape

PACES = ("deepseek-v4-flash@h200", "qwen3-next-80b@h200")
"""Compressed attention with windows; and linear attention (a pace that is scaled by shape: see its
error_note)."""
SETS: tuple[EngineAbilities, ...] = ("ideal", "hf", "vllm")
GATE = "lmetric_gate"
SPLITS = ("static_pd", "static_pd_delta")
"""Policies of the PD matrix: all of a prompt's state is sent, or what the decoder lacks."""
PREFILL_WORKERS = (1, 2, 3)
"""Its splits: so many of the workers prefill, the others decode."""
MATRIX_OF = "agents"
"""The work that the PD matrix is run on; three others times six splits would be two thirds of all
runs."""
SEEDS = (1, 2, 3)
LANES, SESSIONS = 24, 36
CONTEXT_TOKENS = 100_000
PRESSURE = 1.5
HOST_SHARE, DISK_BYTES = 2.0, 2 * 10**12
"""Host memory in device memories; an SSD of each worker."""
COLD_TOOLS = 20.0
"""Tools that take so many times longer: a session comes back when its state has left the device."""


class Played(NamedTuple):
    """Played work is whose sessions run, and how long their tools take."""

    role: str
    tool_scale: float = 1.0


WORKS = {
    "agents": Played("held_out"),
    "cold resume": Played("held_out", COLD_TOOLS),
    "rollouts": Played("rollouts"),
    "long documents": Played("longdoc"),
}


class Contender(NamedTuple):
    """A contender is a policy, with how many of the workers prefill where it splits."""

    policy: str
    prefill_workers: int = 0

    def __str__(self) -> str:
        return f"{self.policy} {self.prefill_workers} prefill" if self.splits else self.policy

    @property
    def splits(self) -> bool:
        """Whether it prefills apart."""
        return self.prefill_workers > 0


SHIPPED = Contender(OURS)


class Served(NamedTuple):
    """Served work is one kind of work on one fleet with one engine's abilities."""

    pace: str
    work: str
    abilities: EngineAbilities

    def __str__(self) -> str:
        return f"{self.pace}, {self.work}, {self.abilities}"


def _rows(scale: Scale) -> Iterator[Served]:
    """Yield the rows; quick: two kinds of work on one model and one engine."""
    for pace in scale.of(PACES, PACES[1:]):
        for work in scale.of(tuple(WORKS), ("agents", "long documents")):
            for abilities in _sets(scale):
                yield Served(pace, work, abilities)


def _sets(scale: Scale) -> tuple[EngineAbilities, ...]:
    """Return the abilities; quick: those under which all contenders can run."""
    return scale.of(SETS, SETS[:1])


def _rivals(row: Served, scale: Scale) -> tuple[Contender, ...]:
    """Return the rivals that such engines can carry out, for agents the PD matrix among them;
    quick: one split of two workers."""
    splits = PlacementAction.REMOTE_PREFILL in granted(row.abilities).actions
    if row.work != MATRIX_OF or not splits:
        return (Contender(GATE),)
    matrix = (
        Contender(policy, prefill)
        for policy in scale.of(SPLITS, SPLITS[1:])
        for prefill in scale.of(PREFILL_WORKERS, PREFILL_WORKERS[:1])
    )
    return (Contender(GATE), *matrix)


def _setup(row: Served, one: Contender, scale: Scale, seed: int) -> SimSetup:
    workers, lanes = scale.of(WORKERS, 2), scale.of(LANES, 4)
    token_bytes = geometry_of(pace_of(row.pace)).bytes_per_token
    kv_bytes = round(lanes * CONTEXT_TOKENS * token_bytes / (PRESSURE * workers))
    return SimSetup(
        policy=one.policy,
        workers=workers,
        prefill_workers=one.prefill_workers,
        pace=row.pace,
        kv_bytes=kv_bytes,
        running=lanes,
        abilities=row.abilities,
        seats=SeatSettings() if one == SHIPPED else None,
        tiers=Tiers(host_bytes=round(HOST_SHARE * kv_bytes), disk_bytes=DISK_BYTES),
        shape=WorkloadShape(
            mode=Capped(lanes),
            sessions=Sample(scale.of(SESSIONS, 6)),
            tool_scale=WORKS[row.work].tool_scale,
            seed=seed,
        ),
    )


def _label(row: Served, one: Contender, seed: int) -> str:
    return f"{one} on {row}, draw {seed}"


def _seeds(scale: Scale) -> tuple[int, ...]:
    return scale.of(SEEDS, SEEDS[:2])


def _jobs(scale: Scale) -> dict[str, Job]:
    return {
        _label(row, one, seed): Simulation(
            WORKS[row.work].role, _setup(row, one, scale, seed), while_full
        )
        for row in _rows(scale)
        for one in (SHIPPED, *_rivals(row, scale))
        for seed in _seeds(scale)
    }


def _values(results: Results, row: Served, one: Contender, path: str) -> list[float]:
    return [known(results[_label(row, one, seed)], path) for seed in _seeds(results.scale)]


class Lead(NamedTuple):
    """How far ours is ahead of the best rival, by name: above 1 is better for us."""

    rival: str
    by: Compared


def _ahead(results: Results, row: Served, rivals: Sequence[Contender], path: str) -> Lead:
    """Compare ours with the best of `rivals` there, by mean."""
    sign = 1.0 if path == WORK else -1.0
    best = max(rivals, key=lambda one: sign * fmean(_values(results, row, one, path)))
    ratio = compared(_values(results, row, SHIPPED, path), _values(results, row, best, path))
    return Lead(str(best), ratio if path == WORK else inverse(ratio))


def _finding(results: Results, claim: str, told: Mapping[str, Lead]) -> Finding:
    return Finding(
        claim,
        "issue W12b",
        over({what: as_much(ahead.by) for what, ahead in told.items()}),
        "; ".join(f"{what}: {ahead.by} beside {ahead.rival}" for what, ahead in told.items()),
        draws=len(_seeds(results.scale)),
    )


def _verdicts(results: Results) -> list[Finding]:
    """Judge ours beside all rivals by what engines may do, and beside the PD matrix alone."""
    scale, found = results.scale, []
    for abilities in _sets(scale):
        rows = [row for row in _rows(scale) if row.abilities == abilities]
        for claim, path in CLAIMS.items():
            for which, rivals_of in FIELDS.items():
                told = {
                    f"{row.pace}, {row.work}": _ahead(results, row, rivals, path)
                    for row in rows
                    if (rivals := rivals_of(_rivals(row, scale)))
                }
                if told:
                    words = f"{claim} {which}, with {abilities} abilities"
                    found.append(_finding(results, words, told))
    return found


CLAIMS = {
    "With one brain for both a fleet does as much work as with": WORK,
    "Its turns' mean is no higher than with": "turn_mean_s",
}


Rivals = Sequence[Contender]
FIELDS: dict[str, Callable[[Rivals], Rivals]] = {
    "the best rival": lambda rivals: rivals,
    "the best PD split": lambda rivals: [one for one in rivals if one.splits],
}
"""Whom ours is compared with, of a row's rivals."""


COLUMNS = {
    "tasks / GPU h": WORK,
    "turn mean (s)": "turn_mean_s",
    "turn p95 (s)": P95,
    "first turn (s)": "first_turn_mean_s",
    "cached share": "cached_token_share",
    "network (bytes)": "network_kv_bytes",
}


def _tables(results: Results) -> list[ResultTable]:
    rows: list[list[Cell]] = [
        [
            str(row),
            str(one),
            *(fmean(_values(results, row, one, path)) for path in COLUMNS.values()),
        ]
        for row in _rows(results.scale)
        for one in (SHIPPED, *_rivals(row, results.scale))
    ]
    caption = f"Means over draws, {LANES} at once on {WORKERS} workers with host memory and SSDs."
    return [ResultTable("together", caption, ["fleet, work, abilities", "", *COLUMNS], rows)]


EXPERIMENTS = [
    Experiment(
        name="together",
        title="Placement and restoring at once",
        source="issue W12b",
        suite="together",
        about="Agents, sessions that come back cold, rollouts and long documents on four workers "
        "of hybrid models with host memory and SSDs: ours as it ships (seats on) beside the gates "
        "and, for agents, one to three of the four prefilling for the others; with all that is "
        "designed, with what the reference engine states and with what vLLM's connector states.",
        jobs=_jobs,
        verdicts=_verdicts,
        tables=_tables,
    ),
]
