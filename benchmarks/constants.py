"""What a fleet does by where its constants come from, and by how T_hot stands to what is derived.

    python benchmarks/constants.py --traces FOLDER [--draws 4] [--only WORD ...] [--out FILE]

Simulated: four H200 with Qwen3-30B-A3B, device memory alone, `ownerserve` with the seats that ship.
Sessions: half of the 96 recorded ones on which constants may be fitted, and generated coding
agents; each draw has others. Loads are multiples of the knee (benchmarks/goal/families.py).

    fixed       what were the defaults: derived from the recorded trace's statistics
    learnt      what ships
    learnt xF   as learnt, with F times the derived T_hot

Each run's line goes to --out at its end, and is not run again. The table has the ratios to
`learnt`, run by run of the same draw: their mean and a paired bootstrap 95 % interval.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

import msgspec
from rich.console import Console
from rich.table import Table

from goal.families import cases
from goal.paired import paired
from ownerserve.router.admission import SeatSettings
from ownerserve.router.learning import Learning
from ownerserve.router.settings import Settings, WorkloadFacts
from ownerserve.router.worker import Worker
from ownerserve.router.workload import EndedTurn
from ownerserve.sim.build import BaselineParts
from ownerserve.sim.config.setup import SimSetup
from ownerserve.sim.run import simulate
from ownerserve.sim.suites.base import known
from ownerserve.sim.suites.fleet import PACE, WORKERS
from ownerserve.sim.suites.goal import while_full
from ownerserve.sim.suites.traces import CLAUDE_CODE, FITTED
from ownerserve.sim.workload import Capped, Sample, WorkloadShape
from ownerserve.sim.workload.cast import cast
from ownerserve.trace.model import Trace
from ownerserve.trace.read import read_trace
from ownerserve.trace.synth.generate import generate
from ownerserve.trace.synth.options import Options

RECORDED = WorkloadFacts(
    context_tokens_p50=110_000,
    context_tokens_p90=261_000,
    addition_tokens_p50=758,
    reuse_share=0.96,
)
"""What `ownerserve trace stats` measures of the shared recording."""
SESSIONS_MOST = 72
LOADS = ("below", "knee", "above")
FAMILIES = ("claude-code", "generated")
SHOWN = {
    "work": "tasks_per_gpu_hour",
    "turn mean": "turn_mean_s",
    "turn p95": "turn_p95_s",
    "first turn": "first_turn_mean_s",
    "moves": "moves",
    "network": "network_kv_bytes",
}


class _Never(Learning):
    """Nothing is learnt: what a router begins with holds."""

    def took(self, turn: EndedTurn, now_s: float) -> bool:
        return False


def _times(factor: float) -> type[Learning]:
    """Return learning whose T_hot is `factor` times what is derived."""

    class Scaled(Learning):
        def derive(self, workers: Sequence[Worker], now_s: float) -> Settings | None:
            found = super().derive(workers, now_s)
            if found is None:
                return None
            self.learnt = msgspec.structs.replace(found, hot_ms=factor * found.hot_ms)
            return self.learnt

    return Scaled


VARIANTS = {
    "learnt": BaselineParts(),
    "fixed": BaselineParts(prior=RECORDED, learning=_Never),
    "learnt x0.1": BaselineParts(learning=_times(0.1)),
    "learnt x3": BaselineParts(learning=_times(3.0)),
}

Name: TypeAlias = tuple[str, str, int, str]
"""Family, load, draw and variant of a run."""


class Cell(msgspec.Struct, frozen=True):
    """A cell is one run, and what came of it."""

    family: str
    load: str
    draw: int
    variant: str
    metrics: dict[str, float]

    @property
    def name(self) -> Name:
        """What it is a run of."""
        return self.family, self.load, self.draw, self.variant


_recorded = cache(read_trace)


def sessions_of(family: str, folder: Path, draw: int) -> Trace:
    """Return the sessions that a draw of the family is drawn from; none of them is held out."""
    if family == "generated":
        return generate("coding-agent", Options(sessions=SESSIONS_MOST, seed=500 + draw))
    whole = _recorded(folder / CLAUDE_CODE)
    drawn = sorted({one.source for one in cast(whole, WorkloadShape(sessions=Sample(FITTED)))})
    return msgspec.structs.replace(whole, sessions=tuple(whole.sessions[one] for one in drawn))


def wanted(options: argparse.Namespace) -> Iterator[tuple[Name, SimSetup, Trace]]:
    """Yield all runs, whole draws first, with their sessions."""
    words = set(options.only)
    for draw in range(1, 1 + options.draws):
        for family in FAMILIES:
            if words & set(FAMILIES) and family not in words:
                continue
            trace = sessions_of(family, options.traces, draw)
            for case in cases(family, trace, draw, loads=LOADS):
                if words & set(LOADS) and case.load not in words:
                    continue
                setup = SimSetup(
                    workers=WORKERS,
                    pace=PACE,
                    kv_bytes=case.kv_bytes,
                    seats=SeatSettings(),
                    shape=WorkloadShape(
                        mode=Capped(case.lanes),
                        sessions=Sample(min(case.sessions, SESSIONS_MOST)),
                        seed=draw,
                    ),
                )
                for variant in VARIANTS:
                    yield (family, case.load, draw, variant), setup, trace


def measured(trace: Trace, setup: SimSetup, parts: BaselineParts) -> dict[str, float]:
    """Return what one run did."""
    result = simulate(trace, setup, parts=parts)
    kept = while_full(result)
    moves = known(result.metrics, "migrations.count")
    return {name: kept[name] for name in SHOWN.values() if name != "moves"} | {"moves": moves}


def all_cells(options: argparse.Namespace) -> list[Cell]:
    """Run what the file does not hold, and return every cell that is wanted."""
    path = options.out
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_bytes().splitlines() if path.exists() else []
    had = {one.name: one for one in (msgspec.json.decode(line, type=Cell) for line in lines)}
    found = []
    for name, setup, trace in wanted(options):
        if name not in had:
            had[name] = Cell(*name, measured(trace, setup, VARIANTS[name[-1]]))
            with path.open("ab") as file:
                file.write(msgspec.json.encode(had[name]) + b"\n")
        found.append(had[name])
    return found


def tables(cells: Sequence[Cell]) -> Iterator[Table]:
    """Yield a table a family and load: each variant's ratio to what is learnt."""
    for family, load in sorted({(one.family, one.load) for one in cells}):
        table = Table("", *SHOWN, title=f"{family}, {load} the knee, beside what is learnt")
        by_name = {one.name: one.metrics for one in cells}
        draws = sorted({one.draw for one in cells if (one.family, one.load) == (family, load)})
        for variant in VARIANTS:
            row = []
            for key in SHOWN.values():
                ours = [by_name[family, load, draw, variant][key] for draw in draws]
                base = [by_name[family, load, draw, "learnt"][key] for draw in draws]
                row.append(f"{fmean(ours):.4g}" if variant == "learnt" else _ratio(ours, base))
            table.add_row(variant, *row)
        yield table


def _ratio(ours: Sequence[float], base: Sequence[float]) -> str:
    found = paired([[one] for one in ours], [[one] for one in base])
    return f"{found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}] of {found.draws}"


def main() -> None:
    """Run, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--traces", type=Path, required=True, help="folder of the shared traces")
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD")
    parser.add_argument("--out", type=Path, default=Path("build/constants.jsonl"))
    for table in tables(all_cells(parser.parse_args())):
        Console(width=160).print(table)


if __name__ == "__main__":
    main()
