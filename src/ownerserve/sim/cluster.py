"""This module runs tasks on the machines of a Ray cluster (extra `ray`).

Owns the actors: one a CPU of the cluster, each given all tasks once, then only names. OwnerServe
in this version has to be installed on every machine of the cluster. A machine that is lost takes
the tasks that ran there with it: their ends carry Ray's error, the others go on.
"""

from __future__ import annotations

import importlib
import logging
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ownerserve.kv.addresses import parse_address
from ownerserve.kv.errors import InvalidInput
from ownerserve.sim.pool import PARTS, Task, TaskEnded

AUTO = "auto"
LOCAL = "local"
CLIENT = "ray://"
MEND = "use auto, local or ray://HOST:10001"
REACH_S = 3.0
"""How long a head may take to accept a connection; Ray's own client keeps at it for 30 s."""
SERVER_FAILED = "Starting Ray client server failed"
SERVER_TRIES = 3
"""A head starts a process for each client, and now and then loses it before it is up."""


class RayRunner:
    """The runner is a TaskRunner over a Ray cluster.

    `address`: `auto`, `ray://HOST:10001`, or `local` for a cluster of this machine's cores that
    ends with the run.
    """

    def __init__(self, address: str) -> None:
        if address not in (AUTO, LOCAL):
            _host_and_port(address)
        try:
            import ray

            if address.startswith(CLIENT):
                importlib.import_module("grpc")  # Ray's client needs it, Ray does not
        except ImportError as error:
            problem = f"{address} needs {error.name}, which is not installed"
            raise InvalidInput("--ray", problem, "pip install 'ownerserve[ray]'") from error
        self._ray = ray
        self._address = address

    def __call__(
        self, tasks: Mapping[str, Task], *, progress: Callable[[int], None] | None = None
    ) -> Iterator[TaskEnded]:
        """Run the tasks and yield each one's end, in the order of ending. Raises InvalidInput when
        the cluster can't be reached."""
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
        mend = "start one with `ray start --head`, or pass `local`"
        if self._address == LOCAL:
            quiet["include_dashboard"] = False
        try:
            if self._address.startswith(CLIENT):
                _reach(self._address)
                # Ray names no cause; a head that asks for a token looks like one that is slow.
                mend = "set RAY_AUTH_MODE=token if the cluster asks for a token; see its logs"
                # What its threads tell of a connection that ends is told by our own errors.
                logging.getLogger("ray.util.client").setLevel(logging.CRITICAL)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Ray Client connection timed out")
                self._begin(quiet)
        except (OSError, ValueError, RuntimeError, self._ray.exceptions.RayError) as error:
            problem = " ".join(str(error).split())
            raise InvalidInput("--ray", f"{self._address}: {problem}", mend) from error

    def _begin(self, quiet: Mapping[str, Any]) -> None:
        """Call Ray's own start; a head that lost the process it began for us is asked again."""
        for tries_left in reversed(range(SERVER_TRIES)):
            try:
                self._ray.init(address=self._address, **quiet)
                return
            except (RuntimeError, ConnectionError) as error:
                if SERVER_FAILED not in str(error) or not tries_left:
                    raise

    def _end(self, name: str, done: Any) -> TaskEnded:
        try:
            return TaskEnded(name, self._ray.get(done))
        except self._ray.exceptions.RayTaskError as error:
            return TaskEnded(name, error=error.cause or error)
        except self._ray.exceptions.RayError as error:
            return TaskEnded(name, error=error)


def _reach(address: str) -> None:
    """Raise OSError when nothing listens at a `ray://HOST:PORT`."""
    socket.create_connection(_host_and_port(address), REACH_S).close()


def _host_and_port(address: str) -> tuple[str, int]:
    """Return where a `ray://HOST:PORT` is. Raises InvalidInput when it is none."""
    try:
        return parse_address(address.removeprefix(CLIENT), field="--ray", mend=MEND)
    except InvalidInput as error:
        problem = f"{address[:80]}: is not ray://HOST:PORT"
        raise InvalidInput("--ray", problem, MEND) from error


class _Hand:
    """A hand is one process of the cluster: it keeps the tasks, and with them their traces."""

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        self._tasks = tasks

    def run(self, name: str) -> Any:
        return self._tasks[name](_untold)


def _untold(done: int, total: int) -> None:
    """Drop what a task tells of its progress: a cluster's tasks tell of their ends alone."""
