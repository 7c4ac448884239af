"""A gateway that runs out of something of its own loses no worker for it."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from ownerserve.gateway.http import fetching
from ownerserve.gateway.http.door import OURS, Share, is_ours, share_of
from ownerserve.gateway.http.upstream import WorkerPool
from ownerserve.router.messages import Failure, Refusal
from tests.support.gateway.process import GatewayProcess, gateway_process, worker_process
from tests.support.gateway.world import World
from tests.support.waits import until_async

CHAT = "/v1/chat/completions"
FEW = 64
"""Descriptors: with two workers ten clients may be inside."""


def ask(url: str) -> int:
    request = urllib.request.Request(f"{url}{CHAT}", b"{}", {"connection": "close"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        status: int = answer.status
        return status


def admin(running: GatewayProcess, path: str) -> str:
    with urllib.request.urlopen(f"{running.admin_url}{path}", timeout=60) as answer:
        text: str = answer.read().decode()
        return text


@pytest.mark.slow
def test_clients_that_take_all_descriptors_cost_no_worker_and_no_turn(tmp_path: Path) -> None:
    """60 idle connections, of which ten may be inside: turns are served, nobody is down."""
    with ExitStack() as stack:
        ports = [stack.enter_context(worker_process()).port for _ in range(2)]
        running = stack.enter_context(gateway_process(tmp_path, ports, descriptors=FEW))
        host, port = running.data_url.removeprefix("http://").split(":")
        for _ in range(60):
            idle = stack.enter_context(socket.create_connection((host, int(port))))
            idle.setblocking(False)
        assert [ask(running.data_url) for _ in range(8)] == [200] * 8
        workers = json.loads(admin(running, "/status"))["workers"]
        assert [worker["up"] for worker in workers] == [True, True]
        assert "ownerserve_gateway_worker_downs_total{" not in admin(running, "/metrics")
        assert "Traceback" not in running.said.read_text()


@pytest.mark.parametrize("number", sorted(OURS))
def test_a_failure_of_our_own_says_nothing_of_the_worker(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Neither on a turn, nor on a probe; and it passes."""

    async def scenario(world: World) -> None:
        loop, client = asyncio.get_running_loop(), await world.client()
        (pool,) = world.gateway.turns.pools.values()

        async def fails(*_: object, **__: object) -> None:
            raise OSError(number, "none left")

        with monkeypatch.context() as patched:
            patched.setattr(fetching, "connected", fails)
            patched.setattr(WorkerPool, "open", fails)
            pool.close_idle()
            told = await client.post(CHAT)
            assert (told.status, told["retry-after"]) == (503, "1")
            assert json.loads(told.body)["error"]["code"] == "exhausted"
            (monitor,) = world.gateway.monitors.values()
            for _ in range(4):
                assert await monitor.probe() == []
        assert len(world.gateway.state.fleet.up) == 1
        account = world.gateway.state.account
        assert (account.failures[Failure.OURS], account.refusals[Refusal.EXHAUSTED]) == (1, 1)
        assert not account.downs
        assert (await client.post(CHAT)).status == 200
        assert loop is asyncio.get_running_loop()

    play(scenario, engines=1, connect_timeout_s=0.1, health_interval_s=60.0)


def test_a_shortage_that_passes_is_waited_out(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        opens, calls = WorkerPool.open, []

        async def fails_once(pool: WorkerPool) -> object:
            calls.append(pool)
            if len(calls) == 1:
                raise OSError(errno.EMFILE, "none left")
            return await opens(pool)

        monkeypatch.setattr(WorkerPool, "open", fails_once)
        assert (await client.post(CHAT)).status == 200
        assert len(calls) == 2

    play(scenario, engines=1)


def test_the_door_shuts_and_opens_again(play: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        door = world.gateway.door
        assert door is not None
        door.clients_max = 4
        clients = [await world.client() for _ in range(4)]
        await until_async(lambda: door.is_shut)
        late = await world.client()  # the kernel lets it wait
        clients[0].hang_up()
        await until_async(lambda: not door.is_shut or door.shut_times == 2)
        assert (await late.post(CHAT)).status == 200
        for client in clients[1:]:
            client.hang_up()

    play(scenario, engines=1)


def test_what_is_given_out_leaves_a_reserve() -> None:
    assert share_of(1024, 2) == Share(293, 146)
    assert share_of(64, 2).clients_max * 3 <= 32
    assert share_of(8, 100) == Share(1, 1)
    for limit, workers in ((256, 1), (1024, 40), (1 << 20, 500)):
        share = share_of(limit, workers)
        assert share.clients_max * 2 + share.idle_max * workers < limit


def test_a_name_that_is_not_found_is_not_ours() -> None:
    assert not is_ours(socket.gaierror(socket.EAI_NONAME, "no"))
    assert not is_ours(ConnectionRefusedError(errno.ECONNREFUSED, "no"))
    assert not is_ours(TimeoutError())
