"""A fleet of real processes, each behind a wire that can be watched: a directory, two workers with
stores, a gateway. Any of them is killed and begun again at its place."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import httpx

from tests.support.kills.cutting import Cuts, DirectoryWire, NodeWire, WorkerWire
from tests.support.kills.forked import FAILED, Forked
from tests.support.kills.wires import WAIT_S, Lane, Wires
from tests.support.metric_lines import summed
from tests.support.net import free_port
from tests.support.waits import until

LEASE_S = 2.0
BEGIN_S = 300.0
"""A member begins in a second; on a machine with thirty others at work it took more than 60."""
SESSION_HEADER = "x-session-id"
FINAL_HEADER = "x-ownerserve-session-final"


def metric(port: int, start: str) -> float:
    """The sum of a metric of a process, which may be named with its first labels."""
    return summed(httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S).text, start)


class Member:
    """One process: `ownerserve GIVEN...`, begun and killed at will."""

    def __init__(self, name: str, folder: Path, given: Sequence[str]) -> None:
        self.name = name
        self._ready = folder / f"{name}.ready"
        self._log = folder / f"{name}.log"
        self._given = [*given, "--ready-file", str(self._ready)] if given else []
        self._process: Forked | None = None

    def begin(self) -> None:
        self._ready.unlink(missing_ok=True)
        self._process = Forked(self._given, self._log)

    def is_ready(self) -> bool:
        assert self._process is not None and self._process.poll() is None, self.said()
        return self._ready.exists() and bool(self._ready.read_text().strip())

    def await_ready(self) -> None:
        until(self.is_ready, within_s=BEGIN_S, what=f"{self.name} to begin")

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        assert self._process.wait(WAIT_S) is not None

    def terminate(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        if self._process.wait(WAIT_S) is None:
            self.kill()

    def freeze(self) -> None:
        """SIGSTOP: it is there, and does nothing."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)  # to one that is dead: nothing

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_dead(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def said(self, *, end: int = 4000) -> str:
        """The last `end` characters of its log."""
        return self._log.read_text(errors="replace")[-end:] if self._log.exists() else ""

    def violations(self) -> list[str]:
        """Checks of its state machines that did not hold, in any of its lives."""
        return [line for line in self.said(end=0).splitlines() if FAILED in line]


class Worker(Member):
    """A worker with a store. `port` and `rpc` are its own, `url` leads over the wire."""

    def __init__(
        self, name: str, folder: Path, wires: Wires, *, directory: str, cuts: Cuts
    ) -> None:
        self.port, rpc = free_port(), free_port()
        asked = wires.lay(rpc, Lane("gateway", name), between=lambda: NodeWire(cuts))
        told = {f":{rpc}".encode(): f":{asked}".encode()}
        self.rpc = f"tcp://127.0.0.1:{asked}"
        turns = Lane("gateway", f"{name}'s HTTP")
        served = wires.lay(self.port, turns, told=told, between=lambda: WorkerWire(cuts))
        self.url = f"http://127.0.0.1:{served}"
        given = f"worker --model tiny-qwen3 --kv-memory 8MiB --threads 1 --worker-id {name}"
        given += f" --port {self.port} --rpc-port {rpc} --store {folder / name}"
        given += f" --spill-after 0 --directory {directory}"
        super().__init__(name, folder, given.split())

    def metric(self, start: str) -> float:
        return metric(self.port, start)

    def load(self) -> dict[str, int]:
        """What it says of its load."""
        url = f"http://127.0.0.1:{self.port}/ownerserve/status"
        return dict(httpx.get(url, timeout=WAIT_S).json()["load"])


class Command(Member):
    """A command that asks the directory and ends: `ownerserve directory GIVEN...`."""

    def __init__(self, folder: Path) -> None:
        super().__init__("command", folder, ())

    def begin_with(self, *given: str) -> None:
        self._given = ["directory", *given]
        self.begin()

    def kill(self) -> None:
        if not self.is_dead:
            super().kill()

    def ended(self) -> int:
        """Its exit code, once it has ended; fails when it hangs."""
        assert self._process is not None
        code = self._process.wait(WAIT_S)
        assert code is not None, "the command hangs"
        return code


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
        self._port = port
        self.asked = self._lane_of("command")
        """Where commands ask the directory: over a wire of their own, as each member does."""
        given = f"directory serve --port {port} --lease {LEASE_S}"
        given += f" --backend {backend}" if backend else f" --home {folder / 'home'}"
        members: list[Member] = [Member("directory", folder, given.split())]
        self.workers = [
            Worker(f"w{n}", folder, self.wires, directory=self._lane_of(f"w{n}"), cuts=self.cuts)
            for n in range(workers)
        ]
        self.ports = [free_port() for _ in range(gateways)]
        self.admins = [free_port() for _ in range(gateways)]
        members += self.workers
        for number, (port, admin) in enumerate(zip(self.ports, self.admins, strict=True)):
            name = f"gateway{number or ''}"
            given = f"gateway --port {port} --admin-port {admin} --policy {policy}"
            given += f" --directory {self._lane_of(name)} --drain-timeout 1 --opening 0"
            given += " --receipts open"
            given += "".join(f" --worker {worker.url}" for worker in self.workers)
            members.append(Member(name, folder, given.split()))
        self.members = {member.name: member for member in members}
        self.command = Command(folder)

    def _lane_of(self, asker: str) -> str:
        """The directory's address for one who asks it."""
        lane = Lane(asker, "directory")
        laid = self.wires.lay(self._port, lane, between=lambda: DirectoryWire(self.cuts))
        return f"tcp://127.0.0.1:{laid}"

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
        self,
        session: str,
        prompt: list[int],
        *,
        final: bool = False,
        through: int = 0,
        max_tokens: int = 4,
        within_s: float = WAIT_S,
    ) -> list[int] | None:
        """What is answered; None: nothing was within `within_s` (then the client hangs up), or an
        error said so. `through`: which gateway."""
        body = {"prompt": prompt, "temperature": 0, "return_token_ids": True}
        body["max_tokens"] = max_tokens
        headers = {SESSION_HEADER: session} | (
            {"x-ownerserve-session-final": "true"} if final else {}
        )
        url = f"http://127.0.0.1:{self.ports[through]}/v1/completions"
        with suppress(httpx.HTTPError):
            answer = httpx.post(url, json=body, headers=headers, timeout=within_s)
            if answer.status_code == 200:
                ids: list[int] = answer.json()["choices"][0]["token_ids"]
                return ids
        return None

    def drain(self, worker: str, *, through: int = 0) -> None:
        """Tell a gateway that is there to send the worker no new turn."""
        self._tell(worker, "drain", through)

    def undrain(self, worker: str, *, through: int = 0) -> None:
        """Tell a gateway that is there to send it turns again."""
        self._tell(worker, "undrain", through)

    def _tell(self, worker: str, what: str, through: int) -> None:
        (url,) = [one.url for one in self.workers if one.name == worker]
        name = url.removeprefix("http://")
        with suppress(httpx.HTTPError):
            admin = f"http://127.0.0.1:{self.admins[through]}"
            httpx.post(f"{admin}/workers/{name}/{what}", timeout=WAIT_S)

    def at_rest(self) -> bool:
        """Whether no request is anywhere: what came in is done or was refused (invariant 3)."""
        for admin in self.admins:
            ended = metric(admin, "ownerserve_gateway_ends_total") + metric(
                admin, "ownerserve_gateway_refusals_total"
            )
            came = metric(admin, "ownerserve_gateway_requests_total")
            if metric(admin, "ownerserve_gateway_live") or came != ended:
                return False
        loads = [worker.load() for worker in self.workers]
        return not any(load["running_sequences"] + load["waiting_sequences"] for load in loads)

    def violations(self) -> list[str]:
        """Checks of anybody's state machines that did not hold."""
        return [line for member in self.members.values() for line in member.violations()]

    def said(self) -> str:
        return "\n".join(f"--- {one.name}\n{one.said()}" for one in self.members.values())

    def close(self) -> None:
        for member in [*self.members.values()][::-1]:
            if not member.is_dead:
                member.terminate()
        self.wires.close()
