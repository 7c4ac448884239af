"""This module has the child processes of the demo: started, waited for, and never left behind.

Each child runs in a process group of its own and asks the kernel to kill it when the demo dies,
so that even `kill -9` of the demo leaves nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol

from ownerserve.cli.demo.fleets import DemoRun
from ownerserve.kv.errors import PeerLost

PR_SET_PDEATHSIG = 1
BEGIN_S = 300.0
"""A process that imports torch is ready in seconds; beside many others at work, in minutes."""
STOP_S = 10.0
GATEWAY_ARGUMENTS = (
    *("--prefill-ms", "0.3", "--hot-ms", "300", "--cool-s", "2"),
    *("--opening", "0"),  # it is alone
)
"""A tiny model on a CPU core computes a token in about that time, and the demo's gaps are short:
the defaults are for a GPU and for sessions that last for hours."""
FREE_PORTS = ("--port", "0", "--admin-port", "0")
"""A gateway takes these: whatever else runs on this machine may have the usual ones."""
_libc = ctypes.CDLL(None)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies; runs in a child before it becomes
    another program."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class ChildProcess(Protocol):
    """A child process is an `ownerserve` command that runs, as `subprocess.Popen` knows one."""

    @property
    def pid(self) -> int:
        """`pid` is the process's, and its group's."""
        ...

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code once it has ended. Raises subprocess.TimeoutExpired."""
        ...

    def send_signal(self, sig: int) -> None:
        """Send it a signal."""
        ...


Begin = Callable[[Sequence[str], Path], ChildProcess]
"""How a child begins: from its command's arguments, and the file that its output goes to."""


def spawned(arguments: Sequence[str], log_path: Path) -> ChildProcess:
    """Begin a child by starting Python anew."""
    with log_path.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "ownerserve.cli.main", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


class Child:
    """A child is one `ownerserve` process and the URL it serves on. Owns the process."""

    def __init__(
        self, name: str, arguments: Sequence[str], folder: Path, *, begin: Begin = spawned
    ) -> None:
        self.name = name
        self.log_path = folder / f"{name}.log"
        self._ready_path = folder / f"{name}.ready"
        self.process = begin([*arguments, "--ready-file", str(self._ready_path)], self.log_path)

    def wait_ready(self, timeout_s: float) -> list[str]:
        """Return the lines of the child's ready file: the URL it serves on, then others it names.

        Raises PeerLost with the end of its log when it dies or is not ready in time.
        """
        deadline = time.monotonic() + timeout_s
        while not self._ready_path.exists():
            if (code := self.process.poll()) is not None:
                raise PeerLost(f"{self.name} exited with {code}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise PeerLost(f"{self.name} not ready after {timeout_s:.0f} s:\n{self.tail()}")
            time.sleep(0.02)
        return self._ready_path.read_text().split()

    def tail(self, lines: int = 15) -> str:
        """Return the end of what the child printed."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """Ask, wait, then kill; returns when the child is gone."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


class DemoFleet:
    """The fleet is a directory, workers and the gateway before them. A context manager: leaving
    stops all."""

    def __init__(self, folder: Path, *, begin: Begin = spawned) -> None:
        self._folder = folder
        self._begin = begin
        self._children: list[Child] = []
        self.workers: dict[str, Child] = {}
        """By the names that answers have for them."""
        self.directory_url = self.gateway_url = self.admin_url = ""

    def start(self, worker_arguments: Sequence[str], run: DemoRun) -> None:
        """Start the directory, workers that own, then the gateway over them. Raises PeerLost."""
        directory = self._spawn("directory", ["directory", "serve", "--port", "0", "--new-fleet"])
        [self.directory_url] = directory.wait_ready(BEGIN_S)
        asking = ("--directory", self.directory_url)
        pending = [
            self._spawn(
                f"worker-{i}",
                [*worker_arguments, *asking, "--worker-id", f"worker-{i}", "--role", role],
            )
            for i, role in enumerate(run.roles)
        ]
        urls = [child.wait_ready(BEGIN_S)[0] for child in pending]
        names = (url.removeprefix("http://") for url in urls)
        self.workers = dict(zip(names, pending, strict=True))
        over = [part for url in self.worker_urls for part in ("--worker", url)]
        options = ("--policy", run.policy, *GATEWAY_ARGUMENTS, *run.gateway_arguments, *asking)
        gateway = self._spawn("gateway", ["gateway", *FREE_PORTS, *options, *over])
        self.gateway_url, self.admin_url = gateway.wait_ready(BEGIN_S)

    @property
    def worker_urls(self) -> list[str]:
        """`worker_urls` are where its workers serve."""
        return [f"http://{name}" for name in self.workers]

    @property
    def pids(self) -> list[int]:
        """`pids` are those of its processes."""
        return [child.process.pid for child in self._children]

    def _spawn(self, name: str, arguments: Sequence[str]) -> Child:
        child = Child(name, arguments, self._folder, begin=self._begin)
        self._children.append(child)
        return child

    def __enter__(self) -> DemoFleet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in reversed(self._children):
            child.stop()


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Let SIGTERM behave like Ctrl-C while inside, so that clean-up runs for both."""

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
