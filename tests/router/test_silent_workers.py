"""Workers that take a connection and never say a word: each wait of a gateway for them ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from ownerserve.kv.ids import Incarnation
from ownerserve.router.fleet import Fleet
from ownerserve.router.gateway.access import open_access
from ownerserve.router.gateway.config import Address, Config, parse_worker
from ownerserve.router.gateway.health import HealthMonitor
from ownerserve.router.gateway.inventory import InventoryReader
from ownerserve.router.gateway.pool import WorkerPool
from ownerserve.router.messages import Down, WorkerDown, WorkerUp
from ownerserve.router.profile import Profile

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
