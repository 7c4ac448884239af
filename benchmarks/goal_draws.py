"""The goal on many draws: ours beside every rival, the reference and the bound, with intervals.

    python benchmarks/goal_draws.py --traces FOLDER [--aiperf FILE ...] [--draws 10] [--rivals all]
    python benchmarks/goal_draws.py --quick                  that it works: seconds, no evidence

Families, contenders and perturbations: benchmarks/goal/. Runs are kept in --out and not made again
by the same code, so that a run of hours can be ended and begun again. `--only` takes families and
loads ("claude-code above"). Exit code 1 where a policy does more work than the reference.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table as Shown

from goal import cells as runs
from goal import tables
from goal.contenders import BOUND, OURS, PERTURBATIONS, POOLS, REFERENCE, rivals
from goal.families import LOADS, Sources, cases
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.units import GIB
from ownerserve.sim.suites.base import Scale


def parsed() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--traces", type=Path, help="folder of the shared traces")
    parser.add_argument("--aiperf", type=Path, nargs="*", default=[], metavar="FILE")
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--first-draw", type=int, default=1, help="draws before it were looked at")
    parser.add_argument(
        "--perturbations", type=int, default=3, choices=range(1, 1 + len(PERTURBATIONS))
    )
    parser.add_argument("--rivals", choices=("main", "all", "none"), default="main")
    parser.add_argument("--contenders", nargs="*", metavar="NAME", help="just these")
    parser.add_argument("--reference", action="store_true", help="with the reference and the bound")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD")
    parser.add_argument("--host-gib", type=int, default=0, help="host memory behind each worker")
    parser.add_argument("--out", type=Path, default=Path("build/goal-draws"))
    parser.add_argument("--jobs", type=int, default=0, help="runs at once; 0: one a core")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="the goal's lines, and all tables"
    )
    parser.add_argument("--quick", action="store_true")
    return parser.parse_args()


def contenders(options: argparse.Namespace) -> tuple[str, ...]:
    """Return who is compared, ours first, each once."""
    if options.contenders:
        return tuple(dict.fromkeys(options.contenders))
    chosen = [OURS, *(() if options.rivals == "none" else rivals(options.rivals))]
    pools = POOLS if options.host_gib and options.rivals != "none" else ()
    return (*chosen, *pools, *((*REFERENCE, BOUND) if options.reference else ()))


def batches(options: argparse.Namespace) -> Iterator[dict[str, runs.Wanted]]:
    """Yield the cells of one family's draw after another: after each there is a whole table."""
    scale = Scale.QUICK if options.quick else Scale.FULL
    sources = Sources(options.traces, options.aiperf, scale)
    code, names = runs.code_digest(), contenders(options)
    unknown = set(options.only) - {*LOADS, *sources.families}
    if unknown:
        mend = f"use {', '.join((*sources.families, *LOADS))}"
        raise InvalidInput("--only", f"{', '.join(sorted(unknown))}: unknown, or no --aiperf", mend)
    families = [one for one in sources.families if one in options.only] or sources.families
    loads = [one for one in LOADS if one in options.only] or list(LOADS)
    first = options.first_draw
    for draw in range(first, first + scale.of(options.draws, min(options.draws, 2))):
        for family in families:
            trace = sources.trace(family, draw)
            digests = (code, runs.trace_digest(trace))
            found = (
                runs.wanted(case, name, number, trace=trace, digests=digests)
                for case in cases(family, trace, draw, loads=loads, scale=scale)
                for case in (case._replace(host_bytes=options.host_gib * GIB),)
                for name in names
                for number in range(scale.of(options.perturbations, 1))
            )
            yield {one.key: one for one in found}


def all_cells(options: argparse.Namespace) -> list[runs.Cell]:
    """Run what is not there yet, with a bar, and return every cell that is wanted."""
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "cells.jsonl"
    kept, found = runs.had(path), list[runs.Cell]()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("runs", total=0)
        for batch in batches(options):
            case = next(iter(batch.values())).case
            total = (progress.tasks[0].total or 0) + len(batch)
            progress.update(bar, total=total, description=f"{case.family}, draw {case.draw}")
            new = {key: one for key, one in batch.items() if key not in kept}
            progress.advance(bar, len(batch) - len(new))
            for cell in runs.run(new, path, processes=options.jobs) if new else ():
                kept[cell.key] = cell
                progress.advance(bar)
            found += [kept[key] for key in batch]
    return found


def show(shown: list[tables.Table], console: Console) -> None:
    """Print a table a case, and the goal's lines."""
    for one in shown:
        table = Shown("", *tables.COLUMNS, "ours / its work")
        table.title = f"{one.family}, {one.load} the knee: {one.lanes} at once"
        for row in tables.rows(one):
            table.add_row(*(cell if isinstance(cell, str) else f"{cell:.4g}" for cell in row))
        console.print(table)
    table = Shown("family", "load", "goal", "verdict", "measured", title="The goal")
    for line in (line for one in shown for line in tables.lines(one)):
        table.add_row(line.family, line.load, line.goal, line.verdict.value, line.number)
    console.print(table)


def written(path: Path, shown: list[tables.Table], beaten: list[str]) -> None:
    """Write what was printed, with all digits."""
    columns = ["", *tables.COLUMNS, "ours / its work"]
    said = {
        "goal": [line._asdict() for one in shown for line in tables.lines(one)],
        "columns": columns,
        "tables": [[one.family, one.load, tables.rows(one)] for one in shown],
        "beats the reference": beaten,
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(said)))


def main() -> int:
    """Run, print, write; return the exit code."""
    options = parsed()
    if min(options.draws, options.first_draw) < 1 or min(options.jobs, options.host_gib) < 0:
        raise InvalidInput(
            "--draws, --first-draw, --jobs, --host-gib",
            "out of range",
            "use 1 or more, 1 or more, 0 or more, 0 or more",
        )
    shown = tables.tables(all_cells(options))
    console = Console(width=220)
    show(shown, console)
    beaten = [
        f"{one.family}, {one.load}: {by}" for one in shown for by in tables.beats_reference(one)
    ]
    for line in beaten:
        console.print(f"does more work than the reference: {line}")
    if options.json is not None:
        written(options.json, shown, beaten)
    return 1 if beaten else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InvalidInput as error:
        sys.exit(str(error))
