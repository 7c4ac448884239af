"""A gateway: the state, the listener, the pools, the health probes, and their end.

Owns the event loop's tasks and the set of clients. `start` opens the port when every worker has
been asked once; `drain` lets what is live run to its end.
"""

from __future__ import annotations

import asyncio
import os
from itertools import count

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import WorkerId
from ownerserve.router.gateway.client import ClientConnection
from ownerserve.router.gateway.config import Config
from ownerserve.router.gateway.health import HealthMonitor
from ownerserve.router.gateway.observe import Observer
from ownerserve.router.gateway.pool import WorkerPool
from ownerserve.router.messages import Drain, WorkerDown, WorkerUp
from ownerserve.router.policies import POLICIES
from ownerserve.router.state import RouterState

SWEEP_INTERVAL_S = 5.0
BACKLOG = 4096


class Gateway:
    """One gateway process's data port and everything behind it."""

    def __init__(self, config: Config) -> None:
        if config.policy not in POLICIES:
            raise InvalidInput(
                "policy", f"{config.policy!r} is unknown", f"use one of {', '.join(POLICIES)}"
            )
        if not config.workers:
            raise InvalidInput("worker", "none given", "give --worker URL at least once")
        self.config = config
        self.state = RouterState(POLICIES[config.policy]())
        self.clients: set[ClientConnection] = set()
        self.pools: dict[WorkerId, WorkerPool] = {
            address.worker: WorkerPool(address, connect_timeout_s=config.connect_timeout_s)
            for address in config.workers
        }
        self.draining = False
        loop = asyncio.get_running_loop()
        self.now = loop.time
        self.observer = Observer(self.now, decisions_kept=config.decisions_kept)
        self._tasks: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None
        self._ids = count(1)
        self._id_prefix = f"os-{os.urandom(6).hex()}-"

    def next_request_id(self) -> bytes:
        """An id for a request that came without one: unique among gateways, cheap."""
        return f"{self._id_prefix}{next(self._ids)}".encode()

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start(self) -> None:
        """Ask every worker once, then listen."""
        monitors = [
            HealthMonitor(address, self.config, tell=self._heard) for address in self.config.workers
        ]
        for news in await asyncio.gather(*(monitor.probe() for monitor in monitors)):
            if news is not None:
                self._heard(news)  # in the order of the settings, whoever answered first
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: ClientConnection(self), self.config.host, self.config.port, backlog=BACKLOG
        )
        self._tasks = [loop.create_task(monitor.run()) for monitor in monitors]
        self._tasks.append(loop.create_task(self._sweep()))

    async def drain(self) -> None:
        """Take no more; wait for what is live, at most `drain_timeout_s`; then close all."""
        self.draining = True
        self.state.handle(Drain(), self.now())
        assert self._server is not None
        self._server.close()
        deadline_s = self.now() + self.config.drain_timeout_s
        while self.state.live and self.now() < deadline_s:
            await asyncio.sleep(0.02)
        await self.stop()

    async def stop(self) -> None:
        """Close everything now."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in list(self.clients):
            client.close()
        for pool in self.pools.values():
            pool.close_idle()
        await asyncio.sleep(0)  # let the transports report their end

    def _heard(self, event: WorkerUp | WorkerDown) -> None:
        self.state.handle(event, self.now())
        if isinstance(event, WorkerDown):
            self.pools[event.worker].close_idle()

    async def _sweep(self) -> None:
        """Close clients that keep us waiting: one timer for all of them."""
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            now = self.now()
            for client in list(self.clients):
                client.expire(now)
