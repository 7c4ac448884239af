"""Tasks side by side on this machine's cores.

Owns the processes. Tasks are inherited by fork, so nothing is sent to them but their names; what
they answer is sent back. An exception of a task is its answer: the others go on.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from multiprocessing.managers import ValueProxy
from typing import Any, TypeAlias

import msgspec

from ownerserve.sim.sweep import settled_heap

PARTS = 1000
"""A task's progress is told in so many parts, whatever it counts."""
TOLD_EVERY = 20
LOOK_EVERY_S = 0.3

Told: TypeAlias = Callable[[int, int], None]
"""What a task may tell while it runs: how much is done, of how much."""
Task: TypeAlias = Callable[[Told], Any]


class Ended(msgspec.Struct, frozen=True):
    """A task's end: its answer, or what it raised."""

    name: str
    answer: Any = None
    error: BaseException | None = None


_TASKS: Mapping[str, Task] = {}


def run_tasks(
    tasks: Mapping[str, Task],
    *,
    processes: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Ended]:
    """Every task's end, in the order of ending. `processes` 0: one a core. `progress` hears of
    parts done, PARTS a task. Ctrl-C, or closing the iterator, ends the processes.
    """
    global _TASKS
    count = min(processes or os.cpu_count() or 1, len(tasks))
    if not count:
        return
    _TASKS = tasks
    context = multiprocessing.get_context("fork")
    with settled_heap(), context.Manager() as manager:
        parts, lock = manager.Value("q", 0), manager.Lock()
        pool = ProcessPoolExecutor(count, mp_context=context, initializer=_deaf)
        told = 0
        waiting: dict[Future[Any], str] = {}
        try:
            waiting = {pool.submit(_run, name, parts, lock): name for name in tasks}
            while waiting:
                done, _ = wait(waiting, timeout=LOOK_EVERY_S, return_when=FIRST_COMPLETED)
                if progress is not None:
                    now = parts.value
                    progress(now - told)
                    told = now
                for future in sorted(done, key=lambda future: waiting[future]):
                    name, error = waiting.pop(future), future.exception()
                    yield Ended(name, None if error else future.result(), error)
        finally:
            _TASKS = {}
            for process in list(pool._processes.values()) if waiting else []:
                with suppress(ProcessLookupError):
                    process.terminate()
            pool.shutdown(wait=True, cancel_futures=True)


def _deaf() -> None:
    """Ctrl-C reaches the whole group; only the first process acts on it, and ends the others."""
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
