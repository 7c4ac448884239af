"""Workers that take a connection and never say a word: each wait of a gateway for them ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from ownerserve.gateway.config import Config
from ownerserve.gateway.http.access import Address, open_access, parse_worker
from ownerserve.gateway.http.upstream import WorkerPool
from ownerserve.gateway.service import Gateway
from ownerserve.gateway.workers.health import HealthMonitor
from ownerserve.gateway.workers.inventory import InventoryReader
from ownerserve.kv.ids import Incarnation
from ownerserve.router.fleet import Fleet
from ownerserve.router.messages import Down, Failure, WorkerDown, WorkerUp
from ownerserve.router.worker import Profile
from tests.support.gateway.process import WorkerProcess, worker_process
from tests.support.gateway.world import World
from tests.support.waits import until_async

WAIT_S = 60.0
ACCESS = open_access(None, None)


def before_a_silent_worker(scheme: str, scenario: Callable[[Address], Awaitable[None]]) -> None:
    """The kernel accepts, and nobody reads."""

    async def main(address: Address) -> None:
        async with asyncio.timeout(WAIT_S):
            await scenario(address)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = parse_worker(f"{scheme}://127.0.0.1:{listener.getsockname()[1]}")
        asyncio.run(main(address))


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_silent_worker_is_taken_out(scheme: str) -> None:
    async def scenario(address: Address) -> None:
        config = Config(workers=(address,), health_timeout_s=0.1)
        monitor = HealthMonitor(address, config, access=ACCESS, tell=print)
        assert await monitor.probe() == []
        assert await monitor.probe() == [WorkerDown(address.worker, Down.UNHEALTHY)]

    before_a_silent_worker(scheme, scenario)


def test_a_connection_that_is_never_greeted_is_given_up() -> None:
    async def scenario(address: Address) -> None:
        with pytest.raises(OSError):
            await WorkerPool(address, ACCESS, connect_timeout_s=0.1).connect()

    before_a_silent_worker("https", scenario)


def test_a_silent_inventory_is_given_up_and_asked_again() -> None:
    async def scenario(address: Address) -> None:
        fleet = Fleet()
        fleet.raise_up(WorkerUp(address.worker, 0, Incarnation(1), Profile()))
        config = Config(workers=(address,), health_timeout_s=0.1)
        reader = InventoryReader(address, config, access=ACCESS, fleet=fleet, tell=print)
        for times in (1, 2):
            await reader.read()
            assert reader.counts["failed"] == times

    before_a_silent_worker("http", scenario)


PROBED = {"health_interval_s": 0.02, "health_timeout_s": 0.1}


def test_a_turn_at_a_worker_that_hangs_before_its_first_byte_goes_to_another(
    play: Callable[..., None],
) -> None:
    """The worker took the turn, then stopped: being taken out ends the wait there."""

    async def scenario(world: World) -> None:
        client = await world.client()
        first = world.engine_of(await client.post("/v1/chat/completions", x__session__id="a"))
        (other,) = [engine for engine in world.engines if engine is not first]
        first.is_hung = True
        answer = await client.post("/v1/chat/completions", x__session__id="a")
        assert (answer.status, answer["x-ownerserve-reason"]) == (200, "retry_other_worker")
        assert world.engine_of(answer) is other
        assert world.gateway.state.account.failures[Failure.SILENT] == 1

    play(scenario, engines=2, **PROBED)


def test_with_nobody_else_a_turn_at_a_worker_that_hangs_is_refused(
    play: Callable[..., None],
) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        world.engines[0].is_hung = True
        answer = await client.post("/v1/chat/completions")
        assert (answer.status, answer["retry-after"]) == (503, "1")

    play(scenario, engines=1, **PROBED)


def test_an_answer_that_stops_in_its_middle_is_broken_off_when_its_worker_is_taken_out(
    play: Callable[..., None],
) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        (engine,) = world.engines
        client.writer.write(
            b"POST /v1/completions?stream HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n\r\n{}"
        )
        await client.reader.readuntil(b"data: 0")
        engine.is_hung = True
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await client.reader.readuntil(b"data: 1")
        assert world.gateway.state.account.broken == 1

    play(scenario, engines=1, **PROBED)


def test_an_answer_that_goes_on_is_left_alone_though_its_worker_is_taken_out(
    play: Callable[..., None],
) -> None:
    """Probes may go unanswered at a worker that is merely busy."""

    async def scenario(world: World) -> None:
        (engine,), (pool,) = world.engines, world.gateway.turns.pools.values()
        client = await world.client()
        client.writer.write(
            b"POST /v1/completions?slow HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n\r\n{}"
        )
        await client.reader.readuntil(b"\r\n\r\n")
        for _ in range(3):
            pool.found_out()
            engine.go_on.set()
            assert await client.reader.readexactly(1) == b"x"
        pool.found_out()
        pool.found_out()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await client.reader.readexactly(1)

    play(scenario, engines=1)


@pytest.mark.slow
def test_what_is_unanswered_at_a_process_that_stops_is_answered_by_another() -> None:
    """SIGSTOP amid six requests: each is answered, once, and the account is whole."""

    async def main(stops: WorkerProcess, other: WorkerProcess) -> None:
        workers = tuple(Address("127.0.0.1", worker.port) for worker in (stops, other))
        config = Config(workers=workers, health_interval_s=0.05, health_timeout_s=2.0)
        world = World([], Gateway(config))
        try:
            await world.gateway.start()
            clients = [await world.client() for _ in range(12)]
            asked = [
                asyncio.ensure_future(client.post("/v1/completions?slow", x__session__id=f"{n}"))
                for n, client in enumerate(clients)
            ]
            there = next(iter(world.gateway.state.fleet))
            await until_async(lambda: there.requests == 6, what="six of twelve are at it")
            stops.stop()
            async with asyncio.timeout(WAIT_S):
                answers = await asyncio.gather(*asked)
            assert [answer.status for answer in answers] == [200] * 12
            reasons = [answer["x-ownerserve-reason"] for answer in answers]
            account = world.gateway.state.account
            assert reasons.count("retry_other_worker") == account.failures[Failure.SILENT] == 6
            assert (account.received, account.finished, account.rejected) == (12, 12, 0)
            await world.settled()
        finally:
            await world.close()

    with worker_process() as stops, worker_process() as other:
        asyncio.run(main(stops, other))
