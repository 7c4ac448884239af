"""This module makes files of results: tables, figures, one page, the verdicts.

Owns the folder's layout. Each experiment concludes in a task of its own, so that one that fails is
a line in the report and the others stand.

    OUT/report.html                   everything, self-contained
    OUT/verdicts.json, verdicts.md    claim, source, verdict, number, trace, command
    OUT/tables/NAME.csv, .json        all digits
    OUT/figures/NAME.png, .svg, .json the picture and the data behind it
    OUT/results/EXPERIMENT.json       what was kept of every job
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ownerserve import __version__
from ownerserve.report import page
from ownerserve.report.figures.style import Written, short, write
from ownerserve.report.page import Block, Claim, Command, Grid, ReportPage, Section, Text, plot_from
from ownerserve.sim.config.granted import granted
from ownerserve.sim.pool import Told, run_tasks
from ownerserve.sim.suites.base import Cell, Drawing, Finding, Origin, ResultTable
from ownerserve.sim.suites.run import Concluded, describe


class PublishedExperiment(msgspec.Struct, frozen=True):
    """A published experiment is what one says. `error`: why it says nothing."""

    name: str
    title: str
    source: str
    about: str
    claims: list[Claim] = []
    tables: list[ResultTable] = []
    drawings: list[tuple[Written, str]] = []
    error: str = ""


class EvaluationReport(msgspec.Struct, frozen=True):
    """The report is the whole evaluation. `digest`: SHA-256 over every result: equal runs, equal
    digests."""

    published: list[PublishedExperiment]
    digest: str
    facts: dict[str, str]

    @property
    def claims(self) -> list[Claim]:
        """`claims` are those of all experiments, in order."""
        return [claim for one in self.published for claim in one.claims]

    @property
    def failures(self) -> list[PublishedExperiment]:
        """`failures` are the experiments that ended in an error."""
        return [one for one in self.published if one.error]


def publish(
    concluded: Sequence[Concluded],
    out: Path,
    *,
    origins: Mapping[str, Origin],
    command: str,
) -> EvaluationReport:
    """Write everything below `out`, which is made, drawing on all cores. `command`: how this was
    started, but --only."""
    out.mkdir(parents=True, exist_ok=True)
    tasks = {
        one.experiment.name: partial(_conclude, one, out, command)
        for one in concluded
        if not one.error
    }
    ended = {end.name: end for end in run_tasks(tasks)}
    published = []
    for one in concluded:
        end = ended.get(one.experiment.name)
        if end is None or end.error is not None:
            told = one.experiment
            error = one.error if end is None or end.error is None else describe(end.error)
            published.append(
                PublishedExperiment(told.name, told.title, told.source, told.about, error=error)
            )
        else:
            published.append(end.answer)
    digest = _write_results(concluded, out / "results")
    report = EvaluationReport(published, digest, _facts(origins, digest))
    _write_verdicts(report, out)
    page.write(_page(report, command), out / "report.html")
    return report


def _conclude(concluded: Concluded, out: Path, command: str, told: Told) -> PublishedExperiment:
    experiment, results = concluded.experiment, concluded.results
    findings = experiment.verdicts(results)
    tables, drawings = experiment.tables(results), experiment.figures(results)
    for table in tables:
        _write_table(table, out / "tables")
    return PublishedExperiment(
        experiment.name,
        experiment.title,
        experiment.source,
        experiment.about,
        [_claim(finding, concluded, command) for finding in findings],
        tables,
        [_drawn(drawing, out / "figures") for drawing in drawings],
    )


def _claim(finding: Finding, concluded: Concluded, command: str) -> Claim:
    experiment, origins = concluded.experiment, concluded.results.origins
    role = finding.trace or next(
        (job.trace for job in experiment.jobs(concluded.results.scale).values() if job.trace), ""
    )
    return Claim(
        finding.claim,
        finding.source,
        finding.verdict,
        finding.number,
        _rests_on(str(origins[role]) if role in origins else role or "none needed", finding.draws),
        f"{command} --only {experiment.name}",
        experiment.title,
    )


def _rests_on(trace: str, draws: int) -> str:
    """Return, in words, the trace and the draws of its sessions that a verdict rests on."""
    if not draws:
        return trace
    return f"{trace}; one draw" if draws == 1 else f"{trace}; {draws} draws"


def _drawn(drawing: Drawing, folder: Path) -> tuple[Written, str]:
    return write(drawing.name, drawing.draw, drawing.data, folder), drawing.caption


def _write_table(table: ResultTable, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows(["" if cell is None else cell for cell in row] for row in table.rows)
    (folder / f"{table.name}.csv").write_text(text.getvalue(), encoding="utf-8", newline="\n")
    _write_json(table, folder / f"{table.name}.json")


def _write_results(concluded: Sequence[Concluded], folder: Path) -> str:
    """Write each experiment's results, and return the digest over all."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    for one in concluded:
        path = folder / f"{one.experiment.name}.json"
        _write_json(dict(one.results.kept), path)
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _write_json(value: Any, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


def _write_verdicts(report: EvaluationReport, out: Path) -> None:
    _write_json(report.claims, out / "verdicts.json")
    lines = ["| claim | source | verdict | measured | trace |", "|---|---|---|---|---|"]
    for claim in report.claims:
        cells = (claim.claim, claim.source, f"**{claim.verdict.value}**", claim.number, claim.trace)
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    (out / "verdicts.md").write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")


def _facts(origins: Mapping[str, Origin], digest: str) -> dict[str, str]:
    told = {
        role: f"{origin} ({origin.sessions:,} sessions, {origin.requests:,} requests)"
        for role, origin in origins.items()
    }
    engines = granted("ideal").words()
    return {
        "ownerserve": __version__,
        "unless said otherwise": engines,
        **told,
        "digest of all results": f"`{digest[:16]}`",
    }


def _page(report: EvaluationReport, command: str) -> ReportPage:
    return ReportPage(
        "OwnerServe: the evaluation",
        "Every claim of the seeds that a trace can test, with what was measured. The router, "
        "cache, planner, node and directory that decide are the ones that serve; engines, links "
        "and disks are modelled. A verdict is about the trace it names.",
        [_section(one, command) for one in report.published],
        report.claims,
        report.facts,
    )


def _section(one: PublishedExperiment, command: str) -> Section:
    blocks: list[Block] = [Text(f"{one.source}. {one.about}")]
    if one.error:
        blocks.append(Text(f"**Failed:** {one.error}"))
    blocks += [plot_from(written, caption) for written, caption in one.drawings]
    blocks += [_grid(table) for table in one.tables]
    blocks.append(Command(f"{command} --only {one.name}"))
    return Section(one.title, blocks)


def _grid(table: ResultTable) -> Grid:
    return Grid(
        table.caption, list(table.columns), [[_text(cell) for cell in row] for row in table.rows]
    )


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    return cell if isinstance(cell, str) else short(cell)
