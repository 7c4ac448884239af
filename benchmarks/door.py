"""The door as it ships beside fixed shares of seats, and beside itself with each constant moved.

    python benchmarks/door.py shares --traces FOLDER --aiperf FILE... [--draws 5] [--first-draw 1]
    python benchmarks/door.py flat   --traces FOLDER --aiperf FILE... [--draws 3]

shares   work over the best of fixed shares (0.45 to 2) and no seats, and the first turn's wait over
         that share's: the share that is best in the mean of all draws, as nobody knows it before
flat     each constant of the rule times 0.9 and times 1.1: work over the work as it ships

Families, loads and draws: benchmarks/goal/families.py. Each run's line goes to --out at its end and
is not made again by the same code on the same sessions. Means over the draws, with paired bootstrap
95 % intervals; of fewer than three draws there is none. `hold` of research/hold.md is not in it: it
is no code of this package, and its prototype lost to seats (docs/evidence/seats.md).
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from goal import cells as runs
from goal.contenders import OURS, SEATS, setup_of
from goal.families import LOADS, Case, Sources, cases
from goal.paired import FEWEST_DRAWS, paired
from ownerserve.router import admission
from ownerserve.router.entry import growth, seats, stay
from ownerserve.sim.config.setup import SimSetup
from ownerserve.sim.run import simulate
from ownerserve.sim.suites.draws import Compared
from ownerserve.sim.suites.goal import while_full
from ownerserve.trace.model import Trace

WORK, FIRST = "tasks_per_gpu_hour", "first_turn_mean_s"
MEAN, P95 = "turn_mean_s", "turn_p95_s"
SHARED = (
    OURS,
    *(f"ownerserve{SEATS}{share}" for share in (0.45, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0)),
    "ownerserve",
)
SETTINGS = ("idle_s", "return_s", "patience_s", "share", "overbooked")
MODULES: Mapping[str, ModuleType] = {
    "LOSS": stay,
    "SMALL": stay,
    "FORGET": stay,
    "BIAS_MAX": stay,
    "REFILLS_ASSUMED": stay,
    "STAY_EVERY_S": admission,
    "LONGEST_GAP_S": growth,
    "GROWTH_ASSUMED_TOKENS": seats,
    "GROWTH_ASSUMED_SHARE": seats,
    "REFILL_MOST": seats,
    "BUSY_LEAST": seats,
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
    assert setup.seats is not None
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


def key_of(case: Case, variant: str, *, setup: SimSetup, digests: tuple[str, str]) -> str:
    """Return the name of a run; `digests` are those of the code and of the sessions."""
    said = msgspec.json.encode([setup, digests, case, variant])
    return hashlib.sha256(said).hexdigest()[:24]


def all_cells(options: argparse.Namespace) -> Iterator[runs.Cell]:
    """Yield every cell that is wanted; what the file does not hold is run, and written to it."""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    had, code = runs.had(options.out), runs.code_digest()
    for case, trace, variant in wanted(options):
        setup = setup_as(variant, case)
        key = key_of(case, variant, setup=setup, digests=(code, runs.trace_digest(trace)))
        if key not in had:
            done = measured(trace, setup, variant)
            had[key] = runs.Cell(
                key, case.family, case.load, case.lanes, variant, case.draw, 0, done
            )
            with options.out.open("ab") as lines:
                lines.write(b"\n" + msgspec.json.encode(had[key]))
        yield had[key]


class Family(NamedTuple):
    """A family at a load has what was measured of each variant in each draw."""

    name: str
    load: str
    lanes: Sequence[int]
    runs: Mapping[str, Mapping[int, Mapping[str, Any]]]

    def mean(self, variant: str, metric: str) -> float:
        """Return a metric's mean over the draws."""
        return fmean(run[metric] for run in self.runs[variant].values())

    def ours_over(self, variant: str, metric: str) -> Compared:
        """Return ours over a variant's, paired by draw."""
        ours, theirs = self.runs[OURS], self.runs[variant]
        both = [draw for draw in ours if draw in theirs]
        return paired(
            [[ours[draw][metric]] for draw in both], [[theirs[draw][metric]] for draw in both]
        )


def by_family(cells: Iterable[runs.Cell]) -> list[Family]:
    """Return the cells by family and load, and in each by variant and draw."""
    of: dict[tuple[str, str], dict[str, dict[int, dict[str, Any]]]] = {}
    lanes: dict[tuple[str, str], set[int]] = {}
    for one in cells:
        at = one.family, one.load
        of.setdefault(at, {}).setdefault(one.contender, {})[one.draw] = one.metrics
        lanes.setdefault(at, set()).add(one.lanes)
    return [Family(*at, sorted(lanes[at]), found) for at, found in of.items()]


def table_of(family: Family) -> Table:
    """Return the table of a family at a load: a row a variant."""
    table = Table("", "work", "mean s", "p95 s", "first s", "ours / its work", "ours / its first")
    most, least = max(family.lanes), min(family.lanes)
    at_once = f"{least}" if most == least else f"{least} to {most}"
    table.title = (
        f"{family.name}, {family.load} ({at_once} at once): {len(family.runs[OURS])} draws"
    )
    for name in family.runs:
        means = [family.mean(name, metric) for metric in (WORK, MEAN, P95, FIRST)]
        ratios = [said(family.ours_over(name, metric)) for metric in (WORK, FIRST)]
        table.add_row(name, *(f"{mean:.4g}" for mean in means), *ratios)
    return table


def best_shares(families: Iterable[Family]) -> Table:
    """Return what the issue asks of the door: ours beside the share that is best in the mean."""
    table = Table("", "best by hand", "ours / its work", "ours / its first turn")
    for one in families:
        others = {name: one.mean(name, WORK) for name in one.runs if name != OURS}
        best = max(others, key=others.__getitem__)
        ratios = [said(one.ours_over(best, metric)) for metric in (WORK, FIRST)]
        table.add_row(f"{one.name}, {one.load}", best, *ratios)
    return table


def said(found: Compared) -> str:
    """Return a ratio with its interval, where there is one."""
    if found.draws < FEWEST_DRAWS:
        return f"{found.ratio:.3f}"
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
    console, families = Console(width=160), by_family(all_cells(options))
    for one in families:
        console.print(table_of(one))
    if options.what == "shares":
        console.print(best_shares(families))


if __name__ == "__main__":
    main()
