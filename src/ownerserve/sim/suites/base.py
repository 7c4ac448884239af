"""This module says what an experiment of the evaluation is: plain data and pure functions.

Owns the vocabulary, decides and runs nothing. An experiment names its jobs; `evaluate` runs the
jobs of all experiments in one pool, equal simulations once, and hands each experiment what came of
its own. From that it derives tables, figures and findings. Nothing here may depend on a clock, a
machine or the order in which jobs ended: the same traces and code give the same files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeAlias, TypeVar

import msgspec

from ownerserve.report.figures.style import Draw
from ownerserve.report.page import Verdict
from ownerserve.sim.config.setup import SimSetup
from ownerserve.sim.run import Result
from ownerserve.sim.sweep import metrics_of
from ownerserve.trace.model import Trace

T = TypeVar("T")

Metrics: TypeAlias = Mapping[str, Any]
Cell: TypeAlias = str | float | None


class Scale(Enum):
    """The scale says how much is run: for the report, or to see that everything works."""

    FULL = "full"
    QUICK = "quick"

    def of(self, full: T, quick: T) -> T:
        """Return the one of the two values that applies at this scale."""
        return full if self is Scale.FULL else quick


class Simulation(msgspec.Struct, frozen=True):
    """A simulation is the job of one fleet on one trace.

    `reduce` is a module's own function (no closure): it runs where the fleet ran, and its answer is
    plain data.
    """

    trace: str
    """A role of traces.ROLES."""
    setup: SimSetup
    reduce: Callable[[Result], Any] = metrics_of


class Measurement(msgspec.Struct, frozen=True):
    """A measurement is any other job: computed of a trace, or of none ("" as role)."""

    compute: Callable[[Trace | None], Any]
    trace: str = ""


Job: TypeAlias = Simulation | Measurement


class Origin(msgspec.Struct, frozen=True):
    """The origin describes the trace that stands for a role: whether it is the shared one or
    generated."""

    name: str
    sessions: int
    requests: int
    is_generated: bool

    def __str__(self) -> str:
        made = ", generated" if self.is_generated else ""
        return f"{self.name}{made}"


class Results(msgspec.Struct, frozen=True):
    """The results are what came of an experiment's jobs, by label, and the traces they ran on, by
    role."""

    kept: Mapping[str, Any]
    origins: Mapping[str, Origin]
    scale: Scale = Scale.FULL

    def __getitem__(self, label: str) -> Any:
        return self.kept[label]


class Finding(msgspec.Struct, frozen=True):
    """A finding is a verdict on one claim.

    `source`: "seed 002 §3.3". `number`: what was measured, with unit and range. The frame adds
    trace and command. `trace`: of which role, if not the first job's. `draws`: on how many draws of
    sessions it rests; 0: none are drawn.
    """

    claim: str
    source: str
    verdict: Verdict
    number: str
    trace: str = ""
    draws: int = 1


class Drawing(msgspec.Struct, frozen=True):
    """A drawing is a call into report.figures. `name` is the file's, unique over all
    experiments."""

    name: str
    draw: Draw
    data: msgspec.Struct
    caption: str


class ResultTable(msgspec.Struct, frozen=True):
    """A result table is written as CSV and JSON with all digits, on the page with three. Columns
    name their unit."""

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def _no_findings(results: Results) -> list[Finding]:
    return []


def _no_figures(results: Results) -> list[Drawing]:
    return []


def _no_tables(results: Results) -> list[ResultTable]:
    return []


class Experiment(msgspec.Struct, frozen=True, kw_only=True):
    """An experiment names its jobs and concludes from their results.

    `name`: short, for --only, unique. `source`: the section it answers. `about`: a paragraph for
    the report, in plain words: what is varied, on what, what is kept equal. `suite`: with which
    others it is run.
    """

    name: str
    title: str
    source: str
    about: str
    jobs: Callable[[Scale], dict[str, Job]]
    verdicts: Callable[[Results], list[Finding]] = _no_findings
    figures: Callable[[Results], list[Drawing]] = _no_figures
    tables: Callable[[Results], list[ResultTable]] = _no_tables
    suite: str = "seeds"


def at(metrics: Metrics, path: str) -> float | None:
    """Return the number at a path like "ttft_ms.p50" of a run's metrics; None where it tells
    none."""
    value: Any = metrics
    for name in path.split("."):
        if value is None:
            return None
        value = value.get(name)
    return value if isinstance(value, int | float) else None


def known(metrics: Metrics, path: str) -> float:
    """Return the number at a path of a run's metrics, which the run must tell. Raises
    LookupError."""
    value = at(metrics, path)
    if value is None:
        raise LookupError(f"the run tells no {path}")
    return value


def by_label(results: Results, labels: Sequence[str], path: str) -> dict[str, float | None]:
    """Return one metric of several runs by label, as a panel of bars takes it."""
    return {label: at(results[label], path) for label in labels}


def table_of(
    results: Results, labels: Sequence[str], columns: Mapping[str, str], *, name: str, caption: str
) -> ResultTable:
    """Make a table with runs as rows; `columns`: heading with unit -> path in the metrics."""
    rows: list[list[Cell]] = [
        [label, *(at(results[label], path) for path in columns.values())] for label in labels
    ]
    return ResultTable(name, caption, ["", *columns], rows)
