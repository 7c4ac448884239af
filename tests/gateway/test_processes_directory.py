"""The embedded directory of a gateway of several processes, over real workers that own; and the end
of the front process, which has it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.support.gateway.commands import running
from tests.support.net import free_port
from tests.support.waits import WAIT_S, until

SESSIONS, WORKERS = 12, 2


class Fleet(NamedTuple):
    """A gateway of two relays with its directory in itself, before workers that own there."""

    url: str
    admin: str
    supervisor: int

    def turn(self, session: int, words: int) -> str:
        """A turn of a session: the worker where it ran."""
        said = f"session {session} says: " + "rivers and seas, " * 24 + "and so on, " * words
        body = {"prompt": said, "max_tokens": 1, "temperature": 0}
        headers = {"x-session-id": f"s{session}"}
        answer = httpx.post(
            f"{self.url}/v1/completions", json=body, headers=headers, timeout=WAIT_S
        )
        assert answer.status_code == 200, answer.text
        where: str = answer.headers["x-ownerserve-worker"]
        return where

    def turns(self, words: int) -> dict[int, str]:
        """A turn of each session, each on a connection of its own, and where it ran."""
        with ThreadPoolExecutor(4) as pool:
            ran = pool.map(lambda session: self.turn(session, words), range(SESSIONS))
            return dict(enumerate(ran))

    def relays(self) -> list[dict[str, int]]:
        found: list[dict[str, int]] = httpx.get(f"{self.admin}/status").json()["processes"]
        return found

    def front(self) -> int:
        """The process id of the front: the supervisor's child that is no relay."""
        said = Path(f"/proc/{self.supervisor}/task/{self.supervisor}/children").read_text()
        (pid,) = {int(one) for one in said.split()} - {one["pid"] for one in self.relays()}
        return pid

    def owners(self) -> dict[str, str]:
        """The worker that owns each session, as far as the relays heard."""
        rows = httpx.get(f"{self.admin}/owners?last=500").json()["sessions"]
        return {row["session"]: row["owner"] for row in rows if row["owner"]}


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    ports, directory = [free_port() for _ in range(WORKERS)], free_port()
    options = ["--port", "0", "--admin-port", "0", "--receipts", "open", "--processes", "2"]
    options += ["--directory", f"embedded:{directory}"]
    options += [word for port in ports for word in ("--worker", f"http://127.0.0.1:{port}")]
    with ExitStack() as stack:
        (url, admin, served), process = stack.enter_context(
            running(tmp_path / "gateway", "gateway", *options)
        )
        for number, port in enumerate(ports):
            worker = ["worker", "--model", "tiny-qwen3", "--port", str(port)]
            worker += ["--worker-id", f"w{number}", "--directory", served]
            stack.enter_context(running(tmp_path / f"worker{number}", *worker))
        until(lambda: httpx.get(f"{admin}/health").json()["workers_up"] == WORKERS)
        yield Fleet(url, admin, process.pid)


@pytest.mark.engine
@pytest.mark.crash
def test_no_turn_fails_and_no_session_moves_while_the_front_is_killed(fleet: Fleet) -> None:
    """Relays know where sessions are, and turns wait for no directory."""
    assert len(set(fleet.turns(1).values())) == WORKERS
    until(lambda: len(fleet.owners()) == SESSIONS, what="each session has an owner")
    at, front = fleet.turns(2), fleet.front()
    with ThreadPoolExecutor(1) as pool:
        amid = pool.submit(fleet.turns, 3)
        os.kill(front, signal.SIGKILL)
        assert len(amid.result()) == SESSIONS, "no turn failed"

    def is_back() -> bool:
        try:
            return httpx.get(f"{fleet.admin}/health").status_code == 200
        except httpx.TransportError:
            return False

    until(is_back, what="the admin port is back")
    assert fleet.front() != front
    assert [one["life"] for one in fleet.relays()] == [1, 1], "the relays went on"
    after = fleet.turns(4)
    assert len([one for one in at if after[one] != at[one]]) <= SESSIONS // 3
    assert len(fleet.owners()) == SESSIONS
