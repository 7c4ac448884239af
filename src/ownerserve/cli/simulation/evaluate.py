"""`ownerserve evaluate` tests every claim of the seeds on traces, in one report."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ownerserve.cli.output import OutputFolder, console_for, json_option, write_json
from ownerserve.cli.simulation.runners import runner_of, runner_options
from ownerserve.kv.errors import InvalidInput
from ownerserve.report.page import SIGNS, Verdict
from ownerserve.sim.pool import TaskRunner
from ownerserve.sim.suites.base import Scale
from ownerserve.sim.suites.publish import EvaluationReport, publish
from ownerserve.sim.suites.registry import SUITES, chosen
from ownerserve.sim.suites.run import Traces, Work, run_work, traces_of, work_of

COLOURS = {
    Verdict.HOLDS: "green",
    Verdict.IN_RANGE: "yellow",
    Verdict.FAILS: "red",
    Verdict.NOT_SHOWN: "dim",
}


@click.command()
@click.option("--suite", default="seeds", show_default=True, help=f"{', '.join(SUITES)}.")
@click.option(
    "--traces",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="Folder of the shared traces. What is not there is generated, and said so.",
)
@click.option(
    "--out",
    type=OutputFolder(),
    default=Path("evaluation"),
    show_default=True,
    metavar="DIR",
    help="Where report.html, tables and figures are written.",
)
@click.option("--only", metavar="NAME,...", help="These experiments alone.")
@click.option("--list", "lists", is_flag=True, help="List the experiments and leave.")
@click.option("--quick", is_flag=True, help="Tiny generated traces: that it works, no evidence.")
@runner_options
@json_option
def command(
    suite: str, *, traces: Path | None, out: Path, json_target: str | None, **given: Any
) -> None:
    """Test the claims of a suite and write one report.

    \b
    ownerserve evaluate --traces shared/traces --out evaluation     all of the seeds' claims
    ownerserve evaluate --suite together --traces shared/traces     placement and restoring at once
    ownerserve evaluate --only 002-f6 --traces shared/traces        one experiment
    ownerserve evaluate --quick                                     seconds, generated traces

    Exit code 1 when an experiment failed; the others stand. The same traces and version write the
    same bytes.
    """
    console = console_for(json_target)
    only = tuple(filter(None, (name.strip() for name in (given["only"] or "").split(","))))
    if given["only"] is not None and not only:
        raise InvalidInput("--only", "names no experiment", "see --list")
    experiments = chosen(suite, only)
    if given["lists"]:
        for experiment in experiments:
            console.print(
                f"{experiment.name:<16} {experiment.source:<28} {experiment.title}",
                highlight=False,
                soft_wrap=True,
            )
        return
    scale = Scale.QUICK if given["quick"] else Scale.FULL
    signal.signal(signal.SIGTERM, _interrupted)  # as Ctrl-C: no process is left behind
    work = work_of(experiments, scale)
    with console.status("reading traces"):
        loaded = traces_of(work, traces)
    told = "ownerserve evaluate --quick" if given["quick"] else "ownerserve evaluate --traces DIR"
    runner = runner_of(given["jobs"], given["ray"])
    report = _run(work, loaded, out, told=told, runner=runner, console=console)
    console.print(_verdicts(report))
    for failed in report.failures:
        console.print(f"[red]failed[/red] {failed.name}: {escape(failed.error)}", highlight=False)
    console.print(
        f"{out / 'report.html'}   digest {report.digest[:16]}", highlight=False, soft_wrap=True
    )
    write_json(json_target, "evaluate", _body(report, suite, scale))
    if report.failures:
        sys.exit(1)


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def _run(
    work: Work, loaded: Traces, out: Path, *, told: str, runner: TaskRunner, console: Console
) -> EvaluationReport:
    origins = {role: origin for role, (_, origin) in loaded.items()}
    total = len(work.runs) + len(work.measurements)
    with _progress(console, total) as advance:
        concluded = run_work(work, loaded, runner=runner, progress=advance)
    with console.status("drawing"):
        return publish(concluded, out, origins=origins, command=told)


def _verdicts(report: EvaluationReport) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading, wraps in (("verdict", False), ("claim", True), ("measured", True)):
        table.add_column(heading, no_wrap=not wraps, overflow="fold")
    for claim in report.claims:
        colour = COLOURS[claim.verdict]
        table.add_row(
            f"[{colour}]{SIGNS[claim.verdict]} {claim.verdict.value}[/{colour}]",
            f"{escape(claim.claim)} [dim]({escape(claim.source)})[/dim]",
            escape(claim.number),
        )
    return table


def _body(report: EvaluationReport, suite: str, scale: Scale) -> dict[str, Any]:
    return {
        "suite": suite,
        "scale": scale.value,
        "digest": report.digest,
        "facts": report.facts,
        "verdicts": msgspec.to_builtins(report.claims),
        "experiments": {
            one.name: {
                "title": one.title,
                "source": one.source,
                "error": one.error or None,
                "tables": msgspec.to_builtins(one.tables),
                "figures": [written.svg.stem for written, _ in one.drawings],
            }
            for one in report.published
        },
    }


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Any]:
    """Yield a bar over all runs; it shows nothing when no terminal looks on."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("runs", total=total)
        yield lambda amount: progress.advance(task, amount)
