"""This module runs experiments: every job once, all in one pool.

Owns which jobs are equal and what came of each. A job that raises is told by its experiment and
label; what does not need it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from ownerserve.sim.config.setup import SimSetup
from ownerserve.sim.pool import PARTS, TaskEnded, TaskRunner, Told, run_tasks
from ownerserve.sim.run import simulate
from ownerserve.sim.suites.base import Experiment, Job, Measurement, Origin, Results, Scale
from ownerserve.sim.suites.traces import find
from ownerserve.trace.model import Trace

Traces: TypeAlias = dict[str, tuple[Trace, Origin]]
Reduce: TypeAlias = Callable[[Any], Any]


class Concluded(msgspec.Struct, frozen=True):
    """A concluded experiment has its results, or why there are none."""

    experiment: Experiment
    results: Results
    error: str = ""


class Work(msgspec.Struct, frozen=True):
    """The work is all jobs of `experiments`, equal ones once."""

    experiments: Sequence[Experiment]
    scale: Scale
    jobs: Mapping[str, Mapping[str, Job]]
    """Experiment -> label -> job."""

    @property
    def runs(self) -> dict[tuple[str, SimSetup], dict[Reduce, None]]:
        """The simulations by what makes them equal, and all that is to be kept of each."""
        found: dict[tuple[str, SimSetup], dict[Reduce, None]] = {}
        for job in self._each():
            if not isinstance(job, Measurement):
                found.setdefault((job.trace, job.setup), {})[job.reduce] = None
        return found

    @property
    def measurements(self) -> dict[Measurement, None]:
        """`measurements` are those that the experiments need, each once, in order."""
        return dict.fromkeys(job for job in self._each() if isinstance(job, Measurement))

    @property
    def roles(self) -> list[str]:
        """The roles of the traces that are needed, sorted."""
        return sorted({job.trace for job in self._each() if job.trace})

    def _each(self) -> Iterable[Job]:
        return (job for jobs in self.jobs.values() for job in jobs.values())


def work_of(experiments: Sequence[Experiment], scale: Scale) -> Work:
    """Return what has to be run for the experiments at this scale."""
    return Work(experiments, scale, {one.name: one.jobs(scale) for one in experiments})


def traces_of(work: Work, folder: Path | None) -> Traces:
    """Find the traces that the jobs name. Raises InvalidInput."""
    return {role: find(role, folder, work.scale) for role in work.roles}


def run_work(
    work: Work,
    traces: Traces,
    *,
    runner: TaskRunner = run_tasks,
    progress: Callable[[float], None] | None = None,
) -> list[Concluded]:
    """Run everything; `progress` hears of runs done, in fractions."""
    runs, measurements = list(work.runs.items()), list(work.measurements)
    tasks: dict[str, Callable[[Told], Any]] = {}
    # The heaviest first: a long run begun last would keep one core waiting for the other.
    order = sorted(range(len(runs)), key=lambda at: -_weight(runs[at][0][1]))
    for at in order:
        (role, setup), reduces = runs[at]
        tasks[f"run {at:04}"] = partial(_simulate, traces[role][0], setup, list(reduces))
    for at, measurement in enumerate(measurements):
        trace = traces[measurement.trace][0] if measurement.trace else None
        tasks[f"measurement {at:04}"] = partial(_measure, measurement, trace)
    ends: dict[str, TaskEnded] = {}
    told = None if progress is None else lambda parts: progress(parts / PARTS)
    for ended in runner(tasks, progress=told):
        ends[ended.name] = ended
    by_run = {key: ends[f"run {at:04}"] for at, (key, _) in enumerate(runs)}
    by_measurement = {job: ends[f"measurement {at:04}"] for at, job in enumerate(measurements)}

    def end_of(job: Job) -> TaskEnded:
        if isinstance(job, Measurement):
            return by_measurement[job]
        return by_run[job.trace, job.setup]

    origins = {role: origin for role, (_, origin) in traces.items()}
    return [_concluded(one, work, end_of, origins) for one in work.experiments]


def _concluded(
    experiment: Experiment,
    work: Work,
    end_of: Callable[[Job], TaskEnded],
    origins: Mapping[str, Origin],
) -> Concluded:
    kept: dict[str, Any] = {}
    for label, job in work.jobs[experiment.name].items():
        ended = end_of(job)
        if ended.error is not None:
            empty = Results({}, origins, work.scale)
            return Concluded(experiment, empty, f"{label}: {describe(ended.error)}")
        kept[label] = ended.answer if isinstance(job, Measurement) else ended.answer[job.reduce]
    return Concluded(experiment, Results(kept, origins, work.scale))


def describe(error: BaseException) -> str:
    """Return in one line what was raised."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _weight(setup: SimSetup) -> int:
    """Return roughly how long a run takes next to another: by what it draws of its trace."""
    return setup.shape.sessions.count if setup.shape.sessions is not None else 1 << 30


def _simulate(
    trace: Trace, setup: SimSetup, reduces: list[Reduce], told: Told
) -> dict[Reduce, Any]:
    result = simulate(trace, setup, told)
    return {reduce: reduce(result) for reduce in reduces}


def _measure(measurement: Measurement, trace: Trace | None, told: Told) -> Any:
    return measurement.compute(trace)
