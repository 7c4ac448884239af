"""A sweep is many runs over one trace, wherever a TaskRunner runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from time import process_time
from typing import Any

import msgspec

from ownerserve.sim.config.setup import SimSetup
from ownerserve.sim.pool import TaskRunner, Told, run_tasks
from ownerserve.sim.run import Result, simulate
from ownerserve.trace.model import Trace

Reduce = Callable[[Result], Any]
"""What is kept of a run: a result with its rows may be large, and is made small where it ran."""


class Outcome(msgspec.Struct, frozen=True):
    """An outcome is a run's end: what was kept of it, and the CPU seconds of the replay alone."""

    name: str
    kept: Any
    cpu_s: float
    turns: int


class Jobs(msgspec.Struct, frozen=True):
    """The jobs are runs by name, what they run on, and what is kept of each."""

    trace: Trace
    setups: Mapping[str, SimSetup]
    reduce: Reduce


def metrics_of(result: Result) -> dict[str, Any]:
    """Return the plain metrics, which most sweeps keep."""
    return result.metrics


def run_all(
    jobs: Jobs,
    *,
    runner: TaskRunner = run_tasks,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Outcome]:
    """Yield every run as it ends; raise what one raises. `progress`: see TaskRunner.

    Ctrl-C, or closing the iterator, ends what runs.
    """
    tasks = {name: partial(_run, jobs, name) for name in jobs.setups}
    for ended in runner(tasks, progress=progress):
        if ended.error is not None:
            raise ended.error
        yield ended.answer


def _run(jobs: Jobs, name: str, told: Told) -> Outcome:
    began_s = process_time()
    result = simulate(jobs.trace, jobs.setups[name], told)
    cpu_s = process_time() - began_s
    return Outcome(name, jobs.reduce(result), cpu_s, len(result.rows))
