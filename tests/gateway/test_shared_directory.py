"""Two gateways before two real workers, at one directory or at none: as an operator runs it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from ownerserve.cli.demo.processes import FREE_PORTS
from tests.support.gateway.commands import counted, running
from tests.support.waits import WAIT_S, until

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support.directory.servers import Server, find_binary

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BOUND_S = 30.0
"""Until a session is bound: off the request path, and an empty directory first waits one lease
(5 s), because it cannot know whether it is new or has forgotten."""


@contextmanager
def directory(kind: str, home: Path) -> Iterator[tuple[str, subprocess.Popen[bytes] | Server]]:
    """A directory that two gateways can share, and what to kill."""
    if kind == "tcp":
        with running(home, "directory", "serve", "--port", "0", "--new-fleet") as (lines, process):
            yield lines[0], process
        return
    home.mkdir()
    server = Server(home)
    try:
        yield server.url, server
    finally:
        server.stop()


def turn(http: httpx.Client, messages: list[dict[str, str]]) -> httpx.Response:
    body = {"messages": messages, "max_tokens": 8, "temperature": 0}
    answer = http.post("/v1/chat/completions", json=body, headers={"x-session-id": "s"})
    answer.raise_for_status()
    said = answer.json()["choices"][0]["message"]["content"]
    messages += [
        {"role": "assistant", "content": said},
        {"role": "user", "content": "and what then? " * 10},
    ]
    return answer


def at_rest(admin: str) -> bool:
    """Whether the gateway knows of nothing that runs; of others' turns it knows workers' words."""
    workers = httpx.get(f"{admin}/status").json()["workers"]
    return all(not one["batch"] and not one["queue_ms"] for one in workers)


def fleet(
    stack: ExitStack, home: Path, *options: str
) -> tuple[list[str], list[tuple[httpx.Client, str]]]:
    """Two workers, and two gateways over them: a client and the admin URL of each."""
    workers = [
        stack.enter_context(
            running(home / f"worker{n}", "worker", "--port", "0", "--worker-id", f"w{n}", *options)
        )[0][0]
        for n in range(2)
    ]
    named = [word for worker in workers for word in ("--worker", worker)]
    gateways = []
    for number in range(2):
        data, admin = stack.enter_context(
            running(
                home / f"gateway{number}",
                "gateway",
                *FREE_PORTS,
                "--receipts",
                "open",
                *options,
                *named,
            )
        )[0]
        client = stack.enter_context(httpx.Client(base_url=data, timeout=WAIT_S))
        gateways.append((client, admin))
    return workers, gateways


@pytest.mark.parametrize("kind", ["tcp", "valkey"])
def test_a_session_finds_its_owner_through_either_gateway(kind: str, tmp_path: Path) -> None:
    if kind == "valkey" and find_binary() is None:
        pytest.skip("no valkey-server and no redis-server on PATH (apt-get install redis-server)")
    with ExitStack() as stack:
        url, shared = stack.enter_context(directory(kind, tmp_path / "directory"))
        workers, [(one, beside), (two, admin)] = fleet(stack, tmp_path, "--directory", url)
        messages = [{"role": "user", "content": "tell me of owners and epochs. " * 40}]
        first = turn(one, messages)
        owner = f"http://{first.headers['x-ownerserve-worker']}"
        until(
            lambda: counted(owner, 'ownerserve_directory_answers_total{answer="advanced"}'),
            within_s=BOUND_S,
            what="the owner says that it owns",
        )
        until(partial(at_rest, admin), within_s=BOUND_S, what="the turn is seen to end")
        second = turn(two, messages)
        assert second.headers["x-ownerserve-worker"] == first.headers["x-ownerserve-worker"]
        assert second.headers["x-ownerserve-reason"] == "owner"
        assert int(second.headers["x-ownerserve-cached-tokens"]) > 100
        asked = "ownerserve_gateway_directory_answers_total"
        assert counted(admin, asked) == counted(admin, asked + '{answer="session_is"}') == 1
        assert sum(counted(worker, "ownerserve_sessions_owned") for worker in workers) == 1
        # A directory that is lost costs no turn: both go by what they know.
        shared.kill()
        for gateway, told in ((one, beside), (two, admin)):
            until(partial(at_rest, told), within_s=BOUND_S, what="the turn is seen to end")
            later = turn(gateway, messages)
            assert later.headers["x-ownerserve-worker"] == first.headers["x-ownerserve-worker"]


def test_two_gateways_over_workers_that_own_nothing(tmp_path: Path) -> None:
    """No directory: each keeps its own tables, and asks nobody."""
    with ExitStack() as stack:
        workers, [(one, _), (two, admin)] = fleet(stack, tmp_path)
        messages = [{"role": "user", "content": "tell me of homes and inventories. " * 40}]
        for gateway in (one, two, one, two):
            turn(gateway, messages)
        for url in (*workers, admin):
            assert "ownerserve_directory" not in httpx.get(f"{url}/metrics", timeout=30).text
        assert httpx.get(f"{admin}/status").json()["directory"] is None


def test_what_one_gateway_did_the_other_hears_of_from_the_workers(tmp_path: Path) -> None:
    with ExitStack() as stack:
        _, [(one, beside), (two, admin)] = fleet(stack, tmp_path)
        messages = [{"role": "user", "content": "tell me of homes and inventories. " * 40}]
        place = turn(one, messages).headers["x-ownerserve-worker"]
        until(
            lambda: counted(admin, "ownerserve_gateway_worker_extents"),
            within_s=BOUND_S,
            what="an inventory is read",
        )
        for gateway, told in ((two, admin), (one, beside), (two, admin)):
            until(partial(at_rest, told), within_s=BOUND_S, what="the turn is seen to end")
            later = turn(gateway, messages)
            assert later.headers["x-ownerserve-worker"] == place
            assert int(later.headers["x-ownerserve-cached-tokens"]) > 100
        assert later.headers["x-ownerserve-reason"] == "owner"
