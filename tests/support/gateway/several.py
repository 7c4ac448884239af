"""A gateway of several processes, as its tests see it: who answered, what it holds open."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tests.support.gateway.process import GatewayProcess, gateway_process
from tests.support.waits import until

OPTIONS = ("--log-format", "json", "--access-log", "--drain-timeout", "2", "--receipts", "open")


class Answered(NamedTuple):
    """An answer: its status, headers in lower case, and what it says as JSON."""

    status: int
    headers: dict[str, str]
    said: Any


class Several(NamedTuple):
    """A gateway of `processes` relays that runs."""

    gateway: GatewayProcess
    processes: int

    @property
    def place(self) -> tuple[str, int]:
        """Host and port of its data port."""
        url = httpx.URL(self.gateway.data_url)
        assert url.port is not None
        return url.host, url.port

    def connect(self) -> socket.socket:
        """A new connection to the data port."""
        return socket.create_connection(self.place, timeout=60)

    def post(self, path: str, body: object, **headers: str) -> Answered:
        """Ask on a connection of its own; `_` in a header's name stands for `-`."""
        connection = http.client.HTTPConnection(*self.place, timeout=60)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(
                "POST", path, json.dumps(body), {"content-type": "application/json", **named}
            )
            answer = connection.getresponse()
            told = {name.lower(): value for name, value in answer.getheaders()}
            return Answered(answer.status, told, json.loads(answer.read()))
        finally:
            connection.close()

    def admin(self, path: str) -> Any:
        """What the admin port says, from JSON."""
        answer = httpx.get(self.gateway.admin_url + path, timeout=30)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        said = [f'{label}="{value}"' for label, value in labels.items()]
        lines = httpx.get(self.gateway.admin_url + "/metrics", timeout=30).text.splitlines()
        found = [one for one in lines if one.startswith(name) and all(s in one for s in said)]
        assert found, name
        return sum(float(one.rpartition(" ")[2]) for one in found)

    def processes_now(self) -> list[Any]:
        """What the relays that answer say of themselves."""
        found = self.admin("/status")["processes"]
        assert isinstance(found, list)
        return found

    def pid(self, process: int) -> int:
        """The process id of a relay."""
        return next(int(one["pid"]) for one in self.processes_now() if one["process"] == process)

    def kill(self, process: int) -> None:
        """SIGKILL a relay, and wait until another has its place."""
        before = {one["process"]: one["life"] for one in self.processes_now()}
        os.kill(self.pid(process), signal.SIGKILL)

        def is_back() -> bool:
            now = {one["process"]: one["life"] for one in self.processes_now()}
            return now.get(process) == before[process] + 1

        until(is_back, what="it is started again")

    def entries(self, event: str) -> list[dict[str, Any]]:
        """The log's entries of one kind so far."""
        rows = []
        for line in self.gateway.said.read_text().splitlines():
            if line.startswith("{") and line.endswith("}"):
                row = json.loads(line)
                if row["event"] == event:
                    rows.append(row)
        return rows

    def served(self) -> dict[str, list[str]]:
        """Which processes answered each session's turns, in order."""
        by_session = defaultdict[str, list[str]](list)
        for row in self.entries("turn"):
            if row.get("session"):
                by_session[row["session"]].append(row["process"])
        return by_session


@contextmanager
def several(folder: Path, processes: int, workers: Sequence[int], *more: str) -> Iterator[Several]:
    """A gateway of several processes over workers at these ports, until the end."""
    options = [*OPTIONS, "--processes", str(processes), *more]
    with gateway_process(folder, workers, *options) as gateway:
        yield Several(gateway, processes)


def descriptors(pid: int) -> int:
    """How many descriptors a process has."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def rss_bytes(pid: int) -> int:
    """What a process has in memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
