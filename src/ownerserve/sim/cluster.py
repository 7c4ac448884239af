"""Tasks on the machines of a Ray cluster (extra `ray`).

Owns the actors: one a CPU of the cluster, each given all tasks once, then only names. OwnerServe
in this version has to be installed on every machine of the cluster. A machine that is lost takes
the tasks that ran there with it: their ends carry Ray's error, the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ownerserve.kv.errors import InvalidInput
from ownerserve.sim.pool import PARTS, Ended, Task

LOCAL = "local"


class RayRunner:
    """A Runner. `address`: `auto`, `ray://HOST:10001`, or `local` for a cluster of this machine's
    cores that ends with it."""

    def __init__(self, address: str) -> None:
        try:
            import ray
        except ImportError as error:
            raise InvalidInput(
                "--ray", "Ray is not installed", "pip install 'ownerserve[ray]'"
            ) from error
        self._ray = ray
        self._address = address

    def __call__(
        self, tasks: Mapping[str, Task], *, progress: Callable[[int], None] | None = None
    ) -> Iterator[Ended]:
        """Raises InvalidInput when the cluster can't be reached."""
        if not tasks:
            return
        ray = self._ray
        self._connect()
        try:
            count = min(int(ray.cluster_resources().get("CPU", 1)), len(tasks))
            held = ray.put(tasks)
            hand = ray.remote(num_cpus=1)(_Hand)
            idle = [hand.remote(held) for _ in range(count)]
            left = list(tasks)[::-1]
            under_way: dict[Any, tuple[str, Any]] = {}
            while left or under_way:
                while left and idle:
                    name, actor = left.pop(), idle.pop()
                    under_way[actor.run.remote(name)] = name, actor
                (done, *_), _ = ray.wait(list(under_way))
                name, actor = under_way.pop(done)
                yield self._end(name, done)
                idle.append(actor)
                if progress is not None:
                    progress(PARTS)
        finally:
            ray.shutdown()

    def _connect(self) -> None:
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
        if self._address == LOCAL:
            quiet["include_dashboard"] = False
        try:
            self._ray.init(address=self._address, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            problem = " ".join(str(error).split())
            mend = "start one with `ray start --head`, or pass `local`"
            raise InvalidInput("--ray", f"{self._address}: {problem}", mend) from error

    def _end(self, name: str, done: Any) -> Ended:
        try:
            return Ended(name, self._ray.get(done))
        except self._ray.exceptions.RayTaskError as error:
            return Ended(name, error=error.cause or error)
        except self._ray.exceptions.RayError as error:
            return Ended(name, error=error)


class _Hand:
    """One process of the cluster: it keeps the tasks, and with them their traces."""

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        self._tasks = tasks

    def run(self, name: str) -> Any:
        return self._tasks[name](_untold)


def _untold(done: int, total: int) -> None:
    """A cluster's tasks tell of their ends alone."""
