"""This module runs a simulated fleet to its end, and says what came of it.

Owns the loop around the heap: samples, progress, the result. The same workload and setup give the
same bytes (invariant 8): nothing here depends on the machine it runs on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from ownerserve.sim.build import PRODUCTION, BaselineParts, Built, build
from ownerserve.sim.config.setup import SimSetup
from ownerserve.sim.fleet import gauge
from ownerserve.sim.fleet.fleet import SimFleet
from ownerserve.sim.metrics.counters import FleetCounters
from ownerserve.sim.metrics.rows import Rows
from ownerserve.sim.metrics.samples import Samples
from ownerserve.sim.metrics.spreads import Metric
from ownerserve.sim.metrics.summary import Run, summarise
from ownerserve.sim.timeline.heap import Heap
from ownerserve.sim.workload import WorkloadDriver
from ownerserve.trace.model import Trace

Progress = Callable[[int, int], None]
"""Turns ended, turns in all."""
REPORT_EVERY = 256
MOST_SAMPLES = 1024
"""Samples of load over a run: enough for a heat map; a trace of days is sampled less often."""
MOST_READINGS = 256 * 1024
"""Samples of all workers together: a large fleet is sampled less often, down to FEWEST_SAMPLES."""
FEWEST_SAMPLES = 128


class Result(msgspec.Struct, frozen=True):
    """A result is what a run says: `metrics` in plain data, the rows, samples and counts behind
    them."""

    setup: SimSetup
    metrics: dict[str, Metric]
    rows: Rows
    samples: Samples
    counters: FleetCounters


def simulate(
    trace: Trace,
    setup: SimSetup,
    progress: Progress | None = None,
    *,
    parts: BaselineParts = PRODUCTION,
) -> Result:
    """Run all of `trace` on the fleet of `setup`; `parts` replace some of production's."""
    workload = WorkloadDriver.of(trace, setup.shape)
    built = build(workload, setup, parts)
    samples = Samples(setup.workers, setup.sample_s, most=most_samples(setup.workers))
    _sample(built.heap, built.fleet, samples, built.heap.now)
    built.fleet.begin()
    _run(built, workload.requests, progress)
    _note(built.fleet, samples, built.heap.now)
    return finish(built, setup, samples, trace)


def most_samples(workers: int) -> int:
    """Return how many samples a run of so many workers keeps; an even number."""
    readings = MOST_READINGS // workers // 2 * 2
    return min(MOST_SAMPLES, max(FEWEST_SAMPLES, readings))


def finish(built: Built, setup: SimSetup, samples: Samples, trace: Trace) -> Result:
    """Make the result of a fleet whose workload is over."""
    fleet = built.fleet
    fleet.tally()
    built.nodes.tally(fleet.counters)
    run = Run(
        gpus=setup.workers * built.pace.gpus,
        workers=setup.workers,
        hot_ms=fleet.gateways[0].router.settings.hot_ms,
        trace_span_s=trace_span_s(trace),
    )
    metrics = summarise(fleet.rows, fleet.counters, samples, run)
    return Result(setup, metrics, fleet.rows, samples, fleet.counters)


def trace_span_s(trace: Trace) -> float:
    """Return the seconds from the first start to the last recorded end; 0 where starts were not
    recorded."""
    if trace.arrivals != "recorded":
        return 0.0
    ends = [
        session.start_s + request.start_s + (request.api_s or 0.0)
        for session in trace.sessions
        for request in session.requests[-1:]
    ]
    starts = [session.start_s for session in trace.sessions if session.requests]
    return max(ends) - min(starts) if ends else 0.0


def _run(built: Built, total: int, progress: Progress | None) -> None:
    heap, fleet = built.heap, built.fleet
    while fleet.is_busy:
        heap.run_some(REPORT_EVERY)
        if progress is not None:
            progress(len(fleet.rows), total)


def _sample(heap: Heap, fleet: SimFleet, samples: Samples, now: float) -> None:
    """Note every worker's load, and again after the period, for as long as the run goes on: the
    fleet stops the heap with its last turn."""
    _note(fleet, samples, now)
    heap.at(now + samples.period_s, partial(_sample, heap, fleet, samples))


def _note(fleet: SimFleet, samples: Samples, now: float) -> None:
    samples.add(now, [gauge.sample(worker) for worker in fleet.workers])
