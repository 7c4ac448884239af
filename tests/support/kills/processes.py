"""A fleet of real processes, each behind a wire that can be watched: a directory, two workers with
stores, a gateway. Any of them is killed and begun again at its place."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import httpx

from tests.support.kills.cutting import Cuts, DirectoryWire, NodeWire, WorkerWire
from tests.support.kills.wires import WAIT_S, Wires
from tests.support.net import free_port
from tests.support.waits import until

LEASE_S = 2.0
SESSION_HEADER = "x-session-id"
FINAL_HEADER = "x-ownerserve-session-final"


class Member:
    """One process: `ownerserve GIVEN...`, begun and killed at will."""

    def __init__(self, name: str, folder: Path, given: Sequence[str]) -> None:
        self.name = name
        self._ready = folder / f"{name}.ready"
        self._log = folder / f"{name}.log"
        self._given = [*given, "--ready-file", str(self._ready)]
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        self._ready.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ownerserve.cli.main", *self._given], stdout=log, stderr=log
            )

    def is_ready(self) -> bool:
        assert self._process is not None and self._process.poll() is None, self.said()
        return self._ready.exists() and bool(self._ready.read_text().strip())

    def await_ready(self) -> None:
        until(self.is_ready, what=f"{self.name} to begin")

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(WAIT_S)

    def terminate(self) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(WAIT_S)
        finally:
            self._process.kill()
            self._process.wait()

    @property
    def is_dead(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def said(self) -> str:
        return self._log.read_text(errors="replace")[-4000:] if self._log.exists() else ""


class Worker(Member):
    """A worker with a store. `port` and `rpc` are its own, `url` leads over the wire."""

    def __init__(
        self, name: str, folder: Path, wires: Wires, *, directory: str, cuts: Cuts
    ) -> None:
        self.port, rpc = free_port(), free_port()
        asked = wires.lay(rpc, between=lambda: NodeWire(cuts))
        told = {f":{rpc}".encode(): f":{asked}".encode()}
        self.rpc = f"tcp://127.0.0.1:{asked}"
        served = wires.lay(self.port, told=told, between=lambda: WorkerWire(cuts))
        self.url = f"http://127.0.0.1:{served}"
        given = f"worker --model tiny-qwen3 --kv-memory 8MiB --threads 1 --worker-id {name}"
        given += f" --port {self.port} --rpc-port {rpc} --store {folder / name}"
        given += f" --spill-after 0 --directory {directory}"
        super().__init__(name, folder, given.split())

    def metric(self, start: str) -> float:
        lines = httpx.get(f"http://127.0.0.1:{self.port}/metrics", timeout=WAIT_S).text
        found = re.findall(rf"^{re.escape(start)}\S* (\S+)$", lines, re.MULTILINE)
        return sum(map(float, found))


class Fleet:
    """All of them. `members` by name: directory, w0 .., gateway, gateway1 ..; `backend`: the URL of
    the directory's, where it keeps nothing itself."""

    def __init__(
        self, folder: Path, *, policy: str, workers: int = 2, gateways: int = 1, backend: str = ""
    ) -> None:
        self.wires = Wires()
        self.cuts = Cuts()
        port = free_port()
        self.directory = f"tcp://127.0.0.1:{port}"
        laid = self.wires.lay(port, between=lambda: DirectoryWire(self.cuts))
        self.asked = asked = f"tcp://127.0.0.1:{laid}"
        given = f"directory serve --port {port} --lease {LEASE_S}"
        given += f" --backend {backend}" if backend else f" --home {folder / 'home'}"
        members: list[Member] = [Member("directory", folder, given.split())]
        self.workers = [
            Worker(f"w{n}", folder, self.wires, directory=asked, cuts=self.cuts)
            for n in range(workers)
        ]
        self.ports = [free_port() for _ in range(gateways)]
        self.admins = [free_port() for _ in range(gateways)]
        members += self.workers
        for number, (port, admin) in enumerate(zip(self.ports, self.admins, strict=True)):
            given = f"gateway --port {port} --admin-port {admin} --policy {policy}"
            given += f" --directory {asked} --drain-timeout 1"
            given += "".join(f" --worker {worker.url}" for worker in self.workers)
            members.append(Member(f"gateway{number or ''}", folder, given.split()))
        self.members = {member.name: member for member in members}

    def begin(self) -> None:
        for member in self.members.values():
            member.begin()
        for member in self.members.values():
            member.await_ready()

    def mend(self) -> None:
        """Whoever is dead begins again."""
        dead = [member for member in self.members.values() if member.is_dead]
        for member in dead:
            member.begin()
        for member in dead:
            member.await_ready()

    def turn(
        self, session: str, prompt: list[int], *, final: bool = False, through: int = 0
    ) -> list[int] | None:
        """What is answered; None: nothing was, or an error said so. `through`: which gateway."""
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
        headers = {SESSION_HEADER: session} | (
            {"x-ownerserve-session-final": "true"} if final else {}
        )
        url = f"http://127.0.0.1:{self.ports[through]}/v1/completions"
        with suppress(httpx.HTTPError):
            answer = httpx.post(url, json=body, headers=headers, timeout=WAIT_S)
            if answer.status_code == 200:
                ids: list[int] = answer.json()["choices"][0]["token_ids"]
                return ids
        return None

    def said(self) -> str:
        return "\n".join(f"--- {one.name}\n{one.said()}" for one in self.members.values())

    def close(self) -> None:
        for member in [*self.members.values()][::-1]:
            if not member.is_dead:
                member.terminate()
        self.wires.close()
