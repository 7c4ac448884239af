"""Real workers behind a real gateway, in threads of one process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import httpx
import torch
import uvicorn

from ownerserve.directory.opening import opener_of
from ownerserve.engines.hf.build import HfWorker, WorkerOptions, build_worker
from ownerserve.engines.hf.http.serve import listen, url_of
from ownerserve.engines.hf.http.server import make_app
from ownerserve.engines.hf.metrics.prometheus import RpcCollector
from ownerserve.gateway.config import Config
from ownerserve.gateway.http.access import parse_worker
from ownerserve.gateway.metrics import GatewayCollector
from ownerserve.gateway.receipts import ReceiptForm
from ownerserve.gateway.service import Gateway
from ownerserve.kv.messages import RoutingUnit
from ownerserve.node.rpc.server import RpcServer
from tests.support.metric_lines import summed
from tests.support.waits import until

WAIT_S = 300.0

T = TypeVar("T")


class ServedWorker:
    """A worker behind uvicorn in a thread."""

    def __init__(self, options: WorkerOptions) -> None:
        torch.set_num_threads(1)
        self.worker: HfWorker = build_worker(options)
        self.rpc = RpcServer()
        self.worker.metrics.registry.register(RpcCollector(self.rpc.counts))
        engine, transfers = self.worker.engine, self.worker.transfers
        answer = engine.call if transfers is None else transfers.answering(engine.call)
        self.rpc.start(answer, step_s=engine.step_s)
        bound: socket.socket = listen("127.0.0.1", 0)
        self.url = url_of(bound)
        config = uvicorn.Config(
            make_app(self.worker, rpc=self.rpc.address),
            log_level="error",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([bound],))
        self._thread.start()
        until(lambda: self._server.started)
        if transfers is not None:
            transfers.start(engine.between_steps, rpc=self.rpc.address)
        self.http = httpx.Client(base_url=self.url, timeout=WAIT_S)

    @property
    def name(self) -> str:
        """The gateway's id of it."""
        return self.url.removeprefix("http://")

    @property
    def unit(self) -> RoutingUnit:
        """As the worker and the directory know it."""
        return self.worker.engine.latest.unit

    def metric(self, start: str) -> float:
        return summed(self.http.get("/metrics").text, start)

    def close(self) -> None:
        self.http.close()
        self._server.should_exit = True
        self._thread.join(WAIT_S)
        self.rpc.stop()
        if self.worker.transfers is not None:
            self.worker.transfers.stop()


class ServedGateway:
    """A gateway on its own event loop in a thread."""

    def __init__(self, *workers: ServedWorker, directory: str | None = None, **config: Any) -> None:
        self._directory = directory
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        addresses = tuple(parse_worker(worker.url) for worker in workers)
        self.gateway = self.run(
            self._start(Config(workers=addresses, **{"receipts": ReceiptForm.OPEN, **config}))
        )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.gateway.port}", timeout=WAIT_S)

    async def _start(self, config: Config) -> Gateway:
        directory = None if self._directory is None else opener_of(self._directory)()
        gateway = Gateway(config, directory)
        await gateway.start()
        return gateway

    def run(self, work: Any) -> Any:
        """The result of a coroutine on the gateway's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)

    def read(self, get: Callable[[], T]) -> T:
        """What `get` gives on the gateway's loop."""

        async def got() -> T:
            return get()

        return self.run(got())  # type: ignore[no-any-return]

    def metric(self, name: str, **labels: str) -> float:
        def total() -> float:
            return sum(
                sample.value
                for family in GatewayCollector(self.gateway).collect()
                for sample in family.samples
                if sample.name == name and labels.items() <= sample.labels.items()
            )

        return self.read(total)

    def complete(self, prompt: list[int], session: str, *, new: int = 4) -> httpx.Response:
        """One turn of a session."""
        body = {"prompt": prompt, "max_tokens": new, "temperature": 0, "return_token_ids": True}
        headers = {"x-session-id": session}
        return self.http.post("/v1/completions", json=body, headers=headers)

    def close(self) -> None:
        self.http.close()
        self.run(self.gateway.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_S)
        self.loop.close()
