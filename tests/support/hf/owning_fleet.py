"""Workers that own, two gateways and a directory service between them, in one process."""

from __future__ import annotations

import time
from typing import Any

from ownerserve.directory import messages as ask
from ownerserve.directory.embedded import EmbeddedDirectory
from ownerserve.directory.rpc.client import DirectoryClient
from ownerserve.directory.rpc.server import DirectoryServer
from ownerserve.directory.terms import TermFile
from ownerserve.engines.hf.build import WorkerOptions
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.headers import TURN_HEADER, TurnLine, encode_turn_line
from ownerserve.kv.wire.rpc import RpcAnswer, RpcRequest
from ownerserve.node.ownership.ownership import boot_time_s
from ownerserve.node.rpc.server import RpcClient
from tests.support.hf.fleet_rig import ServedGateway, ServedWorker

PROMPT = [7 + n % 200 for n in range(96)]
NAME = SessionId("d" * 32)


class BootClock:
    def now(self) -> float:
        return boot_time_s()


class Counted(EmbeddedDirectory):
    """A directory that counts what it is asked, by type."""

    def __init__(self) -> None:
        super().__init__(BootClock(), TermFile(), lease_s=5.0, opens_in_s=0.0)
        self.asked: dict[str, int] = {}
        self.slow_s = 0.0

    def execute(self, requests):  # type: ignore[no-untyped-def]
        time.sleep(self.slow_s)
        for one in requests:
            name = type(one).__name__
            self.asked[name] = self.asked.get(name, 0) + 1
        return super().execute(requests)


class Fleet:
    """One directory, `workers` workers, which are made from `options`, and `gateways`."""

    def __init__(self, workers: int, *, gateways: int = 2, **options: Any) -> None:
        self.directory = Counted()
        self.server = DirectoryServer(self.directory)
        self.server.start()
        address = self.server.address
        self.workers = [
            ServedWorker(
                WorkerOptions(
                    model="tiny-qwen3",
                    kv_bytes=8 << 20,
                    directory=address,
                    worker_id=f"w{n}",
                    **options,
                )
            )
            for n in range(workers)
        ]
        self.gateways = [
            ServedGateway(*self.workers, directory=address, policy="ownerserve")
            for _ in range(gateways)
        ]

    def record(self, session: str) -> ask.SessionIs | ask.Miss:
        client = DirectoryClient(self.server.address)
        try:
            (found,) = client.execute([ask.FindSession(SessionId(session))])
        finally:
            client.close()
        assert isinstance(found, ask.SessionIs | ask.Miss)
        return found

    def owner(self, session: str) -> RoutingUnit | None:
        found = self.record(session)
        return found.owner if isinstance(found, ask.SessionIs) else None

    def version(self, session: str) -> int:
        found = self.record(session)
        return found.version if isinstance(found, ask.SessionIs) else -1

    def close(self) -> None:
        for one in (*self.gateways, *self.workers):
            one.close()
        self.server.stop()


def serve_at(
    worker: ServedWorker,
    prompt: list[int],
    *,
    name: SessionId | None = NAME,
    **line: Any,
) -> dict[str, Any]:
    """A turn that a gateway sends to this worker, whoever owns its session."""
    told = encode_turn_line(TurnLine(name=name, target=worker.unit, **line)).decode()
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "logprobs": 1}
    body |= {"return_token_ids": True}
    answer = worker.http.post("/v1/completions", json=body, headers={TURN_HEADER: told})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return {
        "tokens": choice["token_ids"],
        "logprobs": choice["logprobs"]["token_logprobs"],
        "cached": int(answer.headers["x-ownerserve-cached-tokens"]),
        "mode": answer.headers["x-ownerserve-mode"],
    }


def asked(worker: ServedWorker, request: RpcRequest) -> RpcAnswer:
    client = RpcClient(worker.rpc.address)
    try:
        return client.ask(request)
    finally:
        client.close()


def name_of(gateway: ServedGateway, index: int = 0) -> str:
    """The gateway's name of the session that it met as `index`th."""
    return gateway.read(lambda: [str(name) for name, _ in gateway.gateway.state.sessions.items()])[
        index
    ]
