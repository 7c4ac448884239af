"""Many runs, side by side on this machine's cores.

Owns the processes. A trace is read once and shared by fork; each run is the same function of its
workload and setup wherever it runs, so how many run at once changes nothing but the time it takes.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from multiprocessing.managers import ValueProxy
from time import process_time
from typing import Any

import msgspec

from ownerserve.sim.run import Result, simulate
from ownerserve.sim.setup import Setup
from ownerserve.trace.model import Trace

Reduce = Callable[[Result], Any]
"""What is kept of a run: a result with its rows may be large, and is made small where it ran."""


class Outcome(msgspec.Struct, frozen=True):
    """A run's end: what was kept of it, and the CPU seconds of the replay alone."""

    name: str
    kept: Any
    cpu_s: float
    turns: int


class Jobs(msgspec.Struct, frozen=True):
    """Runs by name, what they run on, and what is kept of each."""

    trace: Trace
    setups: Mapping[str, Setup]
    reduce: Reduce


def metrics_of(result: Result) -> dict[str, Any]:
    """The plain metrics: what most sweeps keep."""
    return result.metrics


def run_all(
    jobs: Jobs, *, processes: int = 0, progress: Callable[[int], None] | None = None
) -> Iterator[Outcome]:
    """Every run, as it ends. `processes` 0: one a core. `progress` hears of turns that ended.

    Ctrl-C, or closing the iterator, ends the processes.
    """
    count = min(processes or os.cpu_count() or 1, len(jobs.setups))
    if "fork" not in multiprocessing.get_all_start_methods():
        count = 1  # without it each process would read the trace anew: one after the other
    with settled_heap():
        if count <= 1:
            for name, setup in jobs.setups.items():
                yield _run(jobs, name, setup, _Local(progress))
        else:
            yield from _run_apart(jobs, count, progress)


class settled_heap:
    """While it stands, the collector does not walk what was there before: traces are millions of
    objects that no run ever frees."""

    def __enter__(self) -> None:
        gc.collect()
        gc.freeze()
        self._before = gc.get_threshold()
        gc.set_threshold(100_000, 50, 50)

    def __exit__(self, *_: object) -> None:
        gc.set_threshold(*self._before)
        gc.unfreeze()


class _Local:
    """Progress of a run in this process."""

    def __init__(self, progress: Callable[[int], None] | None) -> None:
        self._progress = progress
        self._told = 0

    def __call__(self, ended: int, total: int) -> None:
        if self._progress is not None:
            self._progress(ended - self._told)
        self._told = ended


class _Shared:
    """Progress of a run in a process of its own."""

    def __init__(self, ended: ValueProxy[int], lock: Any) -> None:
        self._ended = ended
        self._lock = lock
        self._told = 0

    def __call__(self, ended: int, total: int) -> None:
        if ended - self._told >= total // 50 or ended == total:
            with self._lock:
                self._ended.value += ended - self._told
            self._told = ended


def _run(jobs: Jobs, name: str, setup: Setup, told: Callable[[int, int], None]) -> Outcome:
    began_s = process_time()
    result = simulate(jobs.trace, setup, told)
    cpu_s = process_time() - began_s
    return Outcome(name, jobs.reduce(result), cpu_s, len(result.rows))


_JOBS: Jobs | None = None
"""Inherited by fork: a trace of a hundred megabytes is not sent to each process."""


def _run_apart(jobs: Jobs, count: int, progress: Callable[[int], None] | None) -> Iterator[Outcome]:
    global _JOBS
    _JOBS = jobs
    context = multiprocessing.get_context("fork")
    with context.Manager() as manager:
        ended, lock = manager.Value("q", 0), manager.Lock()
        pool = ProcessPoolExecutor(count, mp_context=context, initializer=_deaf)
        told = 0
        try:
            waiting: set[Future[Outcome]] = {
                pool.submit(_apart, name, ended, lock) for name in jobs.setups
            }
            while waiting:
                done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                if progress is not None:
                    now = ended.value
                    progress(now - told)
                    told = now
                for future in done:
                    yield future.result()
        finally:
            _JOBS = None
            for process in list(pool._processes.values()) if waiting else []:
                with suppress(ProcessLookupError):
                    process.terminate()
            pool.shutdown(wait=True, cancel_futures=True)


def _deaf() -> None:
    """Ctrl-C reaches the whole group; only the first process acts on it, and ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _apart(name: str, ended: ValueProxy[int], lock: Any) -> Outcome:
    assert _JOBS is not None
    return _run(_JOBS, name, _JOBS.setups[name], _Shared(ended, lock))
