"""An agent that speaks to a gateway of hf workers, and looks at each answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import httpx
import msgspec

from ownerserve.directory.opening import opener_of
from ownerserve.gateway.config import Config
from ownerserve.gateway.http.access import parse_worker
from ownerserve.gateway.receipts import ReceiptForm
from ownerserve.gateway.service import Gateway
from ownerserve.router.settings import DEFAULTS
from tests.support.hf.engine_rig import TOLERANCE, reference, text
from tests.support.hf.worker_process import WorkerProcess

MODEL = "tiny-qwen3"
WAIT_S = 300.0


class Agent:
    """A session, its context, and where its last turn ran."""

    def __init__(self, client: httpx.AsyncClient, number: int) -> None:
        self._client = client
        self._name = f"agent{number}"
        self.context = text(700, seed=number)
        self.at = ""

    async def turn(self) -> tuple[int, int]:
        """Run a turn whose answer is a cold engine's; return what was cached, and what of the
        context was there before."""
        known = len(self.context) - 40 if self.at else 0
        body = {
            "model": MODEL, "prompt": self.context, "max_tokens": 8, "temperature": 0,
            "logprobs": 1, "return_token_ids": True,
        }  # fmt: skip
        head = {"x-session-id": self._name}
        answer = await self._client.post("/v1/completions", json=body, headers=head)
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        said, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        for row, token, logprob in zip(
            reference(MODEL, self.context, said), said, logprobs, strict=True
        ):
            assert abs(float(row[token]) - logprob) <= TOLERANCE
        self.context += [*said, *text(40, seed=len(self.context))]
        self.at = answer.headers["x-ownerserve-worker"]
        return int(answer.headers["x-ownerserve-cached-tokens"]), known


def over_a_gateway(
    workers: Sequence[WorkerProcess],
    play: Callable[[Gateway, httpx.AsyncClient], Coroutine[None, None, None]],
    *,
    directory: str | None = None,
) -> None:
    """Play over a gateway of these workers, which may have a directory."""

    async def over() -> None:
        config = Config(
            workers=tuple(parse_worker(worker.url) for worker in workers),
            policy="ownerserve",
            health_interval_s=0.1,
            settings=msgspec.structs.replace(DEFAULTS, output_tokens=8),
            receipts=ReceiptForm.OPEN,
            seats=None,
        )
        gateway = Gateway(config, None if directory is None else opener_of(directory)())
        await gateway.start()
        try:
            url = f"http://127.0.0.1:{gateway.port}"
            async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
                await play(gateway, client)
        finally:
            await gateway.stop()

    asyncio.run(over())
