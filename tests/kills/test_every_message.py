"""Two gateways, three workers, one directory, each a process: all that the protocol has is said."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import get_args

import httpx
import msgspec
import pytest

from ownerserve.directory import messages as ask
from ownerserve.directory.rpc.client import DirectoryClient
from ownerserve.router.requests.identity import Scope
from tests.support.directory.servers import Server, find_binary
from tests.support.kills.processes import SESSION_HEADER, Fleet
from tests.support.kills.wires import WAIT_S
from tests.support.waits import until

pytestmark = [pytest.mark.engine, pytest.mark.crash, pytest.mark.slow]

SAID = {one.__struct_config__.tag for one in get_args(ask.Request)}


@pytest.fixture(params=["embedded", "valkey"])
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    server = None
    if request.param == "valkey":
        if find_binary() is None:
            pytest.skip("no valkey-server and no redis-server on PATH")
        (tmp_path / "server").mkdir()
        server = Server(tmp_path / "server")
    made = Fleet(
        tmp_path,
        policy="round_robin",
        workers=3,
        gateways=2,
        backend=server.url if server is not None else "",
    )
    try:
        made.begin()
        yield made
    finally:
        made.close()
        if server is not None:
            server.stop()


def found(fleet: Fleet, session: str) -> ask.SessionIs | None:
    name = Scope("-", "tiny-qwen3").name(SESSION_HEADER, session)
    client = DirectoryClient(fleet.directory)
    try:
        (one,) = client.execute([ask.FindSession(name)])
    finally:
        client.close()
    return one if isinstance(one, ask.SessionIs) else None


def asked(fleet: Fleet) -> set[str]:
    """Types of messages that the directory was sent, by its own count."""
    report = directory(fleet, "status", "--json", "-")
    return {name for name, times in msgspec.json.decode(report)["asked"].items() if times}


def directory(fleet: Fleet, verb: str, *given: str) -> bytes:
    command = [sys.executable, "-m", "ownerserve.cli.main", "directory", verb, fleet.directory]
    return subprocess.run([*command, *given], check=True, capture_output=True).stdout


def on_nodes(fleet: Fleet) -> set[str]:
    """Types of messages that the gateways sent to workers' ports, by their own count."""
    types = set()
    for admin in fleet.admins:
        for line in httpx.get(
            f"http://127.0.0.1:{admin}/metrics", timeout=WAIT_S
        ).text.splitlines():
            if line.startswith("ownerserve_gateway_node_requests_total{") and not line.endswith(
                " 0.0"
            ):
                types.add(line.split('"')[1])
    return types


def test_every_message_is_said(fleet: Fleet) -> None:
    prompts = {"a": [*range(5, 60)], "b": [*range(7, 70)]}

    def turn(session: str, *, through: int, final: bool = False) -> bool:
        answer = fleet.turn(session, prompts[session], through=through, final=final)
        if answer is not None:
            prompts[session] += [*answer, *range(70, 90)]
        return answer is not None

    for number in range(16):  # of three workers the next each time, through either gateway
        one = partial(turn, "ab"[number % 2], through=number // 2 % 2)
        until(one, what=fleet.said())
        time.sleep(0.2)  # owners' answers say whose the session is once the directory has answered

    def has_moved() -> bool:
        """Between an owner and a guest that are far apart enough for the directory to answer."""
        turn("b", through=0)
        return "transfer" in asked(fleet)

    until(has_moved, what=fleet.said())

    def is_over() -> bool:
        """The last turn may be at a guest whose gateway does not know the owner: then another."""
        if found(fleet, "a") is not None:
            turn("a", through=0, final=True)
            return False
        return True

    until(is_over, what=fleet.said())
    tip = found(fleet, "b")
    assert tip is not None and tip.prefix_hash is not None
    holder = next(worker for worker in fleet.workers if worker.name == tip.owner.worker)
    other = next(worker for worker in fleet.workers if worker is not holder)
    directory(fleet, "status", "--prefix", tip.prefix_hash.hex(), "--group", "none")
    directory(fleet, "replicate", tip.prefix_hash.hex(), "--to", other.name)
    holder.terminate()
    with suppress(AssertionError):
        until(lambda: asked(fleet) >= SAID)
    assert not SAID - asked(fleet), f"{SAID - asked(fleet)}\n{fleet.said()}"
    assert on_nodes(fleet) >= {"reserve", "commit", "release_session"}
