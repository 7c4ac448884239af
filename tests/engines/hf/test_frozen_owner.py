"""An owner that is frozen beyond its lease: another serves and owns, its own word is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fleet_rig import WAIT_S, ServedGateway, until

from ownerserve.directory import messages as ask
from ownerserve.directory.embedded import EmbeddedDirectory
from ownerserve.directory.rpc.client import DirectoryClient
from ownerserve.directory.rpc.server import DirectoryServer
from ownerserve.directory.terms import TermFile
from ownerserve.kv.ids import SessionId
from ownerserve.node.ownership import boot_time_s

pytestmark = [pytest.mark.engine, pytest.mark.crash]

PROMPT = [7 + n % 200 for n in range(96)]
LEASE_S = 3.0


class BootClock:
    def now(self) -> float:
        return boot_time_s()


class WorkerProcess:
    """`ownerserve worker` in a process of its own."""

    def __init__(self, folder: Path, name: str, directory: str) -> None:
        ready = folder / f"{name}.ready"
        self.process = subprocess.Popen([
            sys.executable, "-m", "ownerserve.cli.main", "worker", "--model", "tiny-qwen3",
            "--kv-memory", "8MiB", "--port", "0", "--worker-id", name, "--directory", directory,
            "--threads", "1", "--ready-file", str(ready),
        ])  # fmt: skip
        until(ready.exists)
        self.url = ready.read_text().strip()
        self.name = self.url.removeprefix("http://")

    def metric(self, start: str) -> float:
        lines = httpx.get(f"{self.url}/metrics", timeout=WAIT_S).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(start))

    def freeze(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        self.thaw()
        self.process.terminate()
        self.process.wait(WAIT_S)


@pytest.fixture
def server() -> Iterator[DirectoryServer]:
    one = DirectoryServer(
        EmbeddedDirectory(BootClock(), TermFile(), lease_s=LEASE_S, opens_in_s=0.0)
    )
    one.start()
    yield one
    one.stop()


@pytest.fixture
def workers(server: DirectoryServer, tmp_path: Path) -> Iterator[list[WorkerProcess]]:
    made: list[WorkerProcess] = []
    try:
        made += [WorkerProcess(tmp_path, f"w{n}", server.address) for n in range(2)]
        yield made
    finally:
        for one in made:
            one.stop()


def record(server: DirectoryServer, session: str) -> ask.SessionIs | ask.Miss:
    client = DirectoryClient(server.address)
    try:
        (found,) = client.execute([ask.FindSession(SessionId(session))])
    finally:
        client.close()
    assert isinstance(found, ask.SessionIs | ask.Miss)
    return found


def test_who_slept_beyond_its_lease_owns_nothing_and_breaks_nothing(
    server: DirectoryServer, workers: list[WorkerProcess]
) -> None:
    gateway = ServedGateway(*workers, directory=server.address)  # type: ignore[arg-type]
    try:
        first = gateway.complete(PROMPT, "s")
        name = gateway.read(lambda: str(next(iter(gateway.gateway.state.sessions.items()))[0]))

        def owner_at(version: int) -> str | None:
            found = record(server, name)
            is_there = isinstance(found, ask.SessionIs) and found.version == version
            return found.owner.worker if is_there and isinstance(found, ask.SessionIs) else None

        until(lambda: owner_at(1))
        frozen = next(w for w in workers if w.name == first.headers["x-ownerserve-worker"])
        other = next(w for w in workers if w is not frozen)
        before = record(server, name)
        frozen.freeze()
        until(lambda: not gateway.read(lambda: gateway.gateway.state.fleet[frozen.name].up))
        again = gateway.complete(
            [*PROMPT, 9], "s"
        )  # served at once, by a guest until the lease ends
        assert again.status_code == 200 and again.headers["x-ownerserve-worker"] == other.name

        def moves_on() -> bool:
            """A guest's turns are no record; the next one after the lease has ended binds."""
            assert gateway.complete([*PROMPT, 9], "s").status_code == 200
            found = record(server, name)
            return isinstance(found, ask.SessionIs) and found.owner != before.owner

        until(moves_on)
        after = record(server, name)
        assert isinstance(before, ask.SessionIs) and isinstance(after, ask.SessionIs)
        assert after.epoch > before.epoch
        frozen.thaw()
        until(lambda: frozen.metric("ownerserve_sessions_owned") == 0)  # by its own clock
        until(lambda: frozen.metric("ownerserve_directory_leased") == 1)  # registered anew
        assert other.metric("ownerserve_sessions_owned") == 1
        body = {"prompt": [*PROMPT, 9], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
        cold = httpx.post(f"{frozen.url}/v1/completions", json=body, timeout=WAIT_S).json()
        warm = gateway.complete([*PROMPT, 9], "s").json()
        assert cold["choices"][0]["token_ids"] == warm["choices"][0]["token_ids"]
        still = record(server, name)
        assert isinstance(still, ask.SessionIs) and still.owner == after.owner
    finally:
        gateway.close()
