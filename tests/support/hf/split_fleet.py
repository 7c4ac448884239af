"""A gateway over real workers in their roles, and turns that are held against a cold engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx
import msgspec

from ownerserve.gateway.config import Config
from ownerserve.gateway.http.access import parse_worker
from ownerserve.gateway.receipts import ReceiptForm
from ownerserve.gateway.service import Gateway
from ownerserve.router.settings import DEFAULTS
from tests.support.hf.engine_rig import TOLERANCE, reference
from tests.support.hf.fleet_rig import WAIT_S
from tests.support.hf.worker_process import WorkerProcess

MODEL = "tiny-qwen3"


@asynccontextmanager
async def gateway_over(
    workers: list[WorkerProcess], policy: str, **settings: Any
) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    config = Config(
        workers=tuple(parse_worker(worker.url) for worker in workers),
        policy=policy,
        health_interval_s=0.1,
        settings=msgspec.structs.replace(DEFAULTS, output_tokens=8, long_tokens=500),
        receipts=ReceiptForm.OPEN,
        seats=None,
        **settings,
    )
    gateway = Gateway(config)
    await gateway.start()
    try:
        url = f"http://127.0.0.1:{gateway.port}"
        async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
            yield gateway, client
    finally:
        await gateway.stop()


class Answered(NamedTuple):
    """What was answered to a turn: tokens, what each was worth, and the head."""

    model: str
    prompt: list[int]
    said: list[int]
    logprobs: list[float]
    headers: httpx.Headers

    def check(self) -> None:
        """It is a cold engine's answer."""
        rows = reference(self.model, self.prompt, self.said)
        for row, token, logprob in zip(rows, self.said, self.logprobs, strict=True):
            assert abs(float(row[token]) - logprob) <= TOLERANCE


async def turn(
    client: httpx.AsyncClient,
    prompt: list[int],
    session: str,
    *,
    tokens: int = 8,
    model: str = MODEL,
) -> tuple[list[int], httpx.Headers]:
    """A turn whose answer is a cold engine's: its tokens, and the answer's head."""
    answered = await asked(client, prompt, session, tokens=tokens, model=model)
    answered.check()
    return answered.said, answered.headers


async def asked(
    client: httpx.AsyncClient,
    prompt: list[int],
    session: str,
    *,
    tokens: int = 8,
    model: str = MODEL,
) -> Answered:
    """A turn, and what was answered, which may be wrong."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 1,
        "return_token_ids": True,
    }  # fmt: skip
    answer = await client.post("/v1/completions", json=body, headers={"x-session-id": session})
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    logprobs = choice["logprobs"]["token_logprobs"]
    return Answered(model, prompt, choice["token_ids"], logprobs, answer.headers)


def came_of(headers: httpx.Headers) -> tuple[str, str]:
    return headers["x-ownerserve-action"], headers["x-ownerserve-mode"]


def legs(gateway: Gateway, kind: str = "prefill") -> dict[str, int]:
    counts = gateway.legs.counts
    return {outcome: count for (leg, outcome), count in counts.items() if leg == kind}
