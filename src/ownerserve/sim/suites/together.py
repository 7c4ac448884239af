"""This experiment has both halves at once: where turns run and how their state comes back, on
fleets of hybrid models with tiers, under what each engine may do.

The other experiments hold one half still: placement on device memory alone, restoring on one
worker. Memory is what makes each row meet pressure: LANES sessions of CONTEXT_TOKENS are 1.5 times
what the devices hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import NamedTuple

from ownerserve.kv.messages import PlacementAction
from ownerserve.router.admission import SeatSettings
from ownerserve.sim.build import geometry_of, pace_of
from ownerserve.sim.config.granted import EngineAbilities, granted
from ownerserve.sim.config.setup import PD, SimSetup, Tiers
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

PACES = ("deepseek-v4-flash@h200", "qwen3.5-35b-a3b@h200")
"""Compressed attention with windows; and linear attention, whose kind Qwen3-Next is (no pace of it
is shipped)."""
SETS: tuple[EngineAbilities, ...] = ("ideal", "hf", "vllm")
RIVALS = ("lmetric_gate", "static_pd_delta")
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


class Served(NamedTuple):
    """Served work is one kind of work on one fleet with one engine's abilities."""

    pace: str
    work: str
    abilities: EngineAbilities

    def __str__(self) -> str:
        return f"{self.pace}, {self.work}, {self.abilities}"


def _rows(scale: Scale) -> Iterator[Served]:
    """Yield the rows; quick: of one model and one engine."""
    for pace in scale.of(PACES, PACES[1:]):
        for work in WORKS:
            for abilities in scale.of(SETS, SETS[1:2]):
                yield Served(pace, work, abilities)


def _policies(row: Served) -> tuple[str, ...]:
    """Return ours and the rivals that such engines can carry out."""
    splits = PlacementAction.REMOTE_PREFILL in granted(row.abilities).actions
    return (OURS, *(name for name in RIVALS if splits or name not in PD))


def _setup(row: Served, policy: str, scale: Scale, seed: int) -> SimSetup:
    workers, lanes = scale.of(WORKERS, 2), scale.of(LANES, 4)
    token_bytes = geometry_of(pace_of(row.pace)).bytes_per_token
    kv_bytes = round(lanes * CONTEXT_TOKENS * token_bytes / (PRESSURE * workers))
    return SimSetup(
        policy=policy,
        workers=workers,
        prefill_workers=workers // 2 if policy in PD else 0,
        pace=row.pace,
        kv_bytes=kv_bytes,
        running=lanes,
        abilities=row.abilities,
        seats=SeatSettings() if policy == OURS else None,
        tiers=Tiers(host_bytes=round(HOST_SHARE * kv_bytes), disk_bytes=DISK_BYTES),
        shape=WorkloadShape(
            mode=Capped(lanes),
            sessions=Sample(scale.of(SESSIONS, 6)),
            tool_scale=WORKS[row.work].tool_scale,
            seed=seed,
        ),
    )


def _label(row: Served, policy: str, seed: int) -> str:
    return f"{policy} on {row}, draw {seed}"


def _seeds(scale: Scale) -> tuple[int, ...]:
    return scale.of(SEEDS, SEEDS[:2])


def _jobs(scale: Scale) -> dict[str, Job]:
    return {
        _label(row, policy, seed): Simulation(
            WORKS[row.work].role, _setup(row, policy, scale, seed), while_full
        )
        for row in _rows(scale)
        for policy in _policies(row)
        for seed in _seeds(scale)
    }


def _values(results: Results, row: Served, policy: str, path: str) -> list[float]:
    return [known(results[_label(row, policy, seed)], path) for seed in _seeds(results.scale)]


def _best(results: Results, row: Served, path: str) -> Compared:
    """Compare ours with the best rival there, by mean, so that above 1 is better for us."""
    sign = 1.0 if path == WORK else -1.0
    rival = max(
        _policies(row)[1:], key=lambda name: sign * fmean(_values(results, row, name, path))
    )
    pair = (_values(results, row, OURS, path), _values(results, row, rival, path))
    return compared(*pair) if path == WORK else inverse(compared(*pair))


def _finding(results: Results, claim: str, path: str, abilities: EngineAbilities) -> Finding:
    told = {
        f"{row.pace}, {row.work}": _best(results, row, path)
        for row in _rows(results.scale)
        if row.abilities == abilities
    }
    return Finding(
        claim,
        "issue W12b",
        over({what: as_much(ratio) for what, ratio in told.items()}),
        "; ".join(f"{what}: {ratio}" for what, ratio in told.items()),
        draws=len(_seeds(results.scale)),
    )


def _verdicts(results: Results) -> list[Finding]:
    return [
        _finding(results, f"{claim}, with {abilities} abilities", path, abilities)
        for abilities in results.scale.of(SETS, SETS[1:2])
        for claim, path in (
            (
                "With one brain for both a fleet does as much work as with the best rival",
                WORK,
            ),
            ("Its turns' mean is no higher than the best rival's", "turn_mean_s"),
        )
    ]


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
            policy,
            *(fmean(_values(results, row, policy, path)) for path in COLUMNS.values()),
        ]
        for row in _rows(results.scale)
        for policy in _policies(row)
    ]
    caption = f"Means over draws, {LANES} at once on {WORKERS} workers with host memory and SSDs."
    return [ResultTable("together", caption, ["fleet, work, abilities", "", *COLUMNS], rows)]


EXPERIMENTS = [
    Experiment(
        name="together",
        title="Placement and restoring at once",
        source="issue W12b",
        about="Agents, sessions that come back cold, rollouts and long documents on four workers "
        "of hybrid models with host memory and SSDs: ours as it ships (seats on) beside the gates "
        "and a PD split without seats, with all that is designed, with what the reference engine "
        "states and with what vLLM's connector states.",
        jobs=_jobs,
        verdicts=_verdicts,
        tables=_tables,
    ),
]
