"""This experiment draws the architecture (seed 002, figure 5)."""

from __future__ import annotations

from ownerserve.report.figures.architecture import Architecture, architecture
from ownerserve.sim.suites.base import Drawing, Experiment, Job, Results, Scale

_SHOWN = Architecture(
    ["worker 0", "worker 1", "worker 2", "worker N"],
    {"s17": "worker 0", "s18": "worker 0", "s19": "worker 2"},
    ("worker 0", "worker 1", "s18"),
)


def _jobs(scale: Scale) -> dict[str, Job]:
    return {}


def _figures(results: Results) -> list[Drawing]:
    caption = "Router, session table, symmetric workers and a migration (seed 002, f5)."
    return [Drawing("002-f5-architecture", architecture, _SHOWN, caption)]


EXPERIMENTS = [
    Experiment(
        name="002-f5",
        title="The architecture",
        source="seed 002 §4.1, f5",
        about="Every worker prefills and decodes; a session is bound to one until it moves.",
        jobs=_jobs,
        figures=_figures,
    )
]
