"""The door as it ships beside fixed shares of seats, and beside itself with each constant moved.

    python benchmarks/door.py shares --traces FOLDER --aiperf FILE... [--draws 5] [--first-draw 1]
    python benchmarks/door.py flat   --traces FOLDER --aiperf FILE... [--draws 3]

shares   work over the best of fixed shares (0.8 to 2) and no seats, and the first turn's wait over
         that share's: the share that is best in the mean of all draws, as nobody knows it before
flat     each constant of the rule times 0.9 and times 1.1: work over the work as it ships

Families, loads and draws: benchmarks/goal/families.py. Each run's line goes to --out at its end and
is not made again by the same code. Means over the draws, with paired bootstrap 95 % intervals.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from goal import cells as runs
from goal.contenders import OURS, SEATS, setup_of
from goal.families import LOADS, Case, Sources, cases
from goal.paired import paired
from ownerserve.router import admission
from ownerserve.router.entry import running, stay
from ownerserve.sim.config.setup import SimSetup
from ownerserve.sim.run import simulate
from ownerserve.sim.suites.goal import while_full
from ownerserve.trace.model import Trace

WORK, FIRST, P95 = "tasks_per_gpu_hour", "first_turn_mean_s", "turn_p95_s"
SHARED = (
    OURS,
    *(f"ownerserve{SEATS}{share}" for share in (0.8, 1.0, 1.25, 1.5, 2.0)),
    "ownerserve",
)
SETTINGS = ("idle_s", "return_s", "patience_s", "share")
MODULES: Mapping[str, ModuleType] = {
    "LOSS": stay,
    "SMALL": stay,
    "FORGET": stay,
    "REFILLS_ASSUMED": stay,
    "STAY_EVERY_S": admission,
    "MEMORY_S": running,
}
FACTORS = (0.9, 1.1)
MOVED = (OURS, *(f"{name} x{factor}" for name in (*SETTINGS, *MODULES) for factor in FACTORS))


def setup_as(variant: str, case: Case) -> SimSetup:
    """Return the fleet of a variant: a contender's, or ours with one setting moved."""
    name, _, factor = variant.rpartition(" x")
    if name not in (*SETTINGS, *MODULES):
        return setup_of(variant, case, 0)
    setup = setup_of(OURS, case, 0)
    if name in MODULES:
        return setup
    moved = getattr(setup.seats, name) * float(factor)
    seats = msgspec.structs.replace(setup.seats, **{name: moved})
    return msgspec.structs.replace(setup, seats=seats)


def measured(trace: Trace, setup: SimSetup, variant: str) -> dict[str, Any]:
    """Return what one run did; a module's constant is moved while it runs."""
    name, _, factor = variant.rpartition(" x")
    if name not in MODULES:
        return while_full(simulate(trace, setup))
    kept = getattr(MODULES[name], name)
    setattr(MODULES[name], name, kept * float(factor))
    try:
        return while_full(simulate(trace, setup))
    finally:
        setattr(MODULES[name], name, kept)


def wanted(options: argparse.Namespace) -> Iterator[tuple[Case, Trace, str]]:
    """Yield the runs, whole draws first."""
    sources = Sources(options.traces, options.aiperf)
    families = [one for one in sources.families if one in options.only] or sources.families
    loads = [one for one in LOADS if one in options.only] or list(LOADS)
    for draw in range(options.first_draw, options.first_draw + options.draws):
        for family in families:
            trace = sources.trace(family, draw)
            for case in cases(family, trace, draw, loads=loads):
                for variant in SHARED if options.what == "shares" else MOVED:
                    yield case, trace, variant


def all_cells(options: argparse.Namespace) -> list[runs.Cell]:
    """Run what the file does not hold, and return every cell that is wanted."""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    had, code, found = runs.had(options.out), runs.code_digest(), []
    for case, trace, variant in wanted(options):
        key = f"{code} {case.family} {case.load} {case.draw} {variant}"
        if key not in had:
            done = measured(trace, setup_as(variant, case), variant)
            had[key] = runs.Cell(
                key, case.family, case.load, case.lanes, variant, case.draw, 0, done
            )
            with options.out.open("ab") as lines:
                lines.write(msgspec.json.encode(had[key]) + b"\n")
        found.append(had[key])
    return found


def tables(cells: Sequence[runs.Cell], variants: Sequence[str]) -> Iterator[Table]:
    """Yield a table a family and load."""
    for family, load in dict.fromkeys((one.family, one.load) for one in cells):
        of: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in variants}
        for one in cells:
            if (one.family, one.load) == (family, load):
                of[one.contender][one.draw] = one.metrics
        table = Table("", "work", "p95 s", "first turn s", "work of ours over its", "first turn")
        table.title = f"{family}, {load}: {len(of[OURS])} draws"
        for name in variants:
            means = [fmean(run[key] for run in of[name].values()) for key in (WORK, P95, FIRST)]
            ratios = [_ratio(of[OURS], of[name], key) for key in (WORK, FIRST)]
            table.add_row(name, *(f"{mean:.4g}" for mean in means), *ratios)
        yield table


def _ratio(
    ours: Mapping[int, Mapping[str, Any]], theirs: Mapping[int, Mapping[str, Any]], key: str
) -> str:
    pairs = [([run[key]], [theirs[draw][key]]) for draw, run in ours.items() if draw in theirs]
    found = paired([one for one, _ in pairs], [other for _, other in pairs])
    return f"{found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}]"


def main() -> None:
    """Run, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("shares", "flat"))
    parser.add_argument("--traces", type=Path, required=True, help="folder of the shared traces")
    parser.add_argument("--aiperf", type=Path, nargs="*", default=[], metavar="FILE")
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--first-draw", type=int, default=1, help="draws before it were looked at")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="families, loads")
    parser.add_argument("--out", type=Path, default=Path("build/door.jsonl"))
    options = parser.parse_args()
    for table in tables(all_cells(options), SHARED if options.what == "shares" else MOVED):
        Console(width=160).print(table)


if __name__ == "__main__":
    main()
