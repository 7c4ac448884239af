"""The pool runs tasks side by side on this machine's cores.

Owns the processes. Tasks are inherited by fork, so nothing is sent to them but their names; what
they answer is sent back. An exception of a task is its answer: the others go on. What a task
answers does not depend on where it runs, so how many run at once changes nothing but the time.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, suppress
from multiprocessing.managers import ValueProxy
from typing import Any, Protocol, TypeAlias

import msgspec

PARTS = 1000
"""A task's progress is told in so many parts, whatever it counts."""
TOLD_EVERY = 20
LOOK_EVERY_S = 0.3

Told: TypeAlias = Callable[[int, int], None]
"""What a task may tell while it runs: how much is done, of how much."""
Task: TypeAlias = Callable[[Told], Any]


class TaskEnded(msgspec.Struct, frozen=True):
    """A task's end has its answer, or what it raised."""

    name: str
    answer: Any = None
    error: BaseException | None = None


class TaskRunner(Protocol):
    """A task runner says where tasks run: `run_tasks` on this machine, `cluster.RayRunner` on
    many."""

    def __call__(
        self, tasks: Mapping[str, Task], *, progress: Callable[[int], None] | None = None
    ) -> Iterator[TaskEnded]:
        """Run the tasks and yield each one's end, in the order of ending.

        `progress` hears of parts done, PARTS a task. Ctrl-C, or closing the iterator, ends what
        runs.
        """


_TASKS: Mapping[str, Task] = {}


def run_tasks(
    tasks: Mapping[str, Task],
    *,
    processes: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Iterator[TaskEnded]:
    """Run tasks on this machine as a TaskRunner: at most `processes` at once, 0: one a core; one
    alone runs in this process."""
    count = min(processes or os.cpu_count() or 1, len(tasks))
    if "fork" not in multiprocessing.get_all_start_methods():
        count = min(count, 1)  # without it each process would need the tasks, and all they hold
    with settled_heap():
        if count > 1:
            yield from _run_apart(tasks, count, progress)
        else:
            yield from _run_here(tasks, progress)


class settled_heap:
    """While this context stands, the collector does not walk what was there before.

    Traces are millions of objects that no run ever frees.
    """

    def __enter__(self) -> None:
        gc.collect()
        gc.freeze()
        self._before = gc.get_threshold()
        gc.set_threshold(100_000, 50, 50)

    def __exit__(self, *_: object) -> None:
        gc.set_threshold(*self._before)
        gc.unfreeze()


def _run_here(
    tasks: Mapping[str, Task], progress: Callable[[int], None] | None
) -> Iterator[TaskEnded]:
    for name, task in tasks.items():
        told = 0

        def tell(done: int, total: int) -> None:
            nonlocal told
            here = PARTS * done // max(total, 1)
            if progress is not None:
                progress(here - told)
            told = here

        try:
            ended = TaskEnded(name, task(tell))
            tell(1, 1)
        except Exception as error:  # noqa: BLE001 - the root of a task: it is its answer
            ended = TaskEnded(name, error=error)
        yield ended


def _run_apart(
    tasks: Mapping[str, Task], count: int, progress: Callable[[int], None] | None
) -> Iterator[TaskEnded]:
    global _TASKS
    _TASKS = tasks
    context = multiprocessing.get_context("fork")
    with _interrupts_held():
        started = context.Manager()
    with started as manager:
        parts, lock = manager.Value("q", 0), manager.Lock()
        pool = ProcessPoolExecutor(count, mp_context=context, initializer=_deaf)
        told = 0
        waiting: dict[Future[Any], str] = {}
        try:
            with _interrupts_held():  # the first one starts all processes
                waiting = {pool.submit(_run, name, parts, lock): name for name in tasks}
            while waiting:
                done, _ = wait(waiting, timeout=LOOK_EVERY_S, return_when=FIRST_COMPLETED)
                if progress is not None:
                    now = parts.value
                    progress(now - told)
                    told = now
                for future in sorted(done, key=lambda future: waiting[future]):
                    name, error = waiting.pop(future), future.exception()
                    yield TaskEnded(name, None if error else future.result(), error)
        finally:
            _TASKS = {}
            # The standard library ends no running worker of a pool.
            for process in list(pool._processes.values()) if waiting else []:  # noqa: SLF001
                with suppress(ProcessLookupError):
                    process.terminate()
            pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back until the block is over: a process that is being started can't answer it
    yet."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _deaf() -> None:
    """Ignore Ctrl-C in a pool's process: it reaches the whole group, and the first process ends the
    others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _run(name: str, parts: ValueProxy[int], lock: Any) -> Any:
    last = 0

    def tell(done: int, total: int) -> None:
        nonlocal last
        here = PARTS * done // max(total, 1)
        if here - last >= PARTS // TOLD_EVERY:
            with lock:
                parts.value += here - last
            last = here

    answer = _TASKS[name](tell)
    with lock:
        parts.value += PARTS - last
    return answer
