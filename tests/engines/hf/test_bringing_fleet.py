"""A gateway moves a session off a busy worker, and the state comes with the turn: over two real
workers, each wire of it cut in turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.gateway.config import Config  # noqa: E402
from ownerserve.gateway.http.access import parse_worker  # noqa: E402
from ownerserve.gateway.receipts import ReceiptForm  # noqa: E402
from ownerserve.gateway.service import Gateway  # noqa: E402
from ownerserve.kv.wire.headers import read_brought  # noqa: E402
from ownerserve.router.settings import DEFAULTS  # noqa: E402
from tests.support.hf.engine_rig import TOLERANCE, reference, text  # noqa: E402
from tests.support.hf.worker_process import WorkerProcess  # noqa: E402
from tests.support.waits import until_async  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.crash]

MODEL = "tiny-qwen3"
WAIT_S = 300.0
KEPT = ("--host-cache", "64MiB", "--kv-memory", "64MiB", "--dear")


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[list[WorkerProcess]]:
    started = [WorkerProcess(tmp_path, name, None, *KEPT) for name in ("one", "other")]
    yield started
    for worker in started:
        worker.stop()


@asynccontextmanager
async def gateway_over(workers: list[WorkerProcess]) -> AsyncIterator[tuple[Gateway, Any]]:
    """A gateway whose sessions leave a worker before which anybody waits."""
    config = Config(
        workers=tuple(parse_worker(worker.url) for worker in workers),
        policy="ear",
        health_interval_s=0.1,
        settings=msgspec.structs.replace(DEFAULTS, output_tokens=8, hot_ms=1.0, cool_s=0.0),
        receipts=ReceiptForm.OPEN,
        seats=None,
    )
    gateway = Gateway(config)
    await gateway.start()
    try:
        url = f"http://127.0.0.1:{gateway.port}"
        async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
            yield gateway, client
    finally:
        await gateway.stop()


async def turn(
    client: httpx.AsyncClient, prompt: list[int], session: str, *, tokens: int = 8
) -> tuple[dict[str, Any], httpx.Headers]:
    body = {
        "model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 1,
        "return_token_ids": True,
    }  # fmt: skip
    answer = await client.post("/v1/completions", json=body, headers={"x-session-id": session})
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice, answer.headers


async def keep_busy(gateway: Gateway, client: httpx.AsyncClient, home: str) -> Any:
    """A long turn of another session that stands at `home`, under way there."""
    for number in range(16):
        hog, prompt = f"hog{number}", text(64, seed=20 + number)
        said, headers = await turn(client, prompt, hog)
        if headers["x-ownerserve-worker"] == home:
            break
    else:
        raise AssertionError(f"no session of 16 was begun at {home}")
    longer = [*prompt, *said["token_ids"], *text(7000, seed=40)]
    busy = asyncio.create_task(turn(client, longer, hog, tokens=2))
    (unit,) = [unit for unit in gateway.state.fleet if unit.id == home]
    await until_async(lambda: unit.queue_ms > 50.0 or busy.done(), within_s=WAIT_S)
    return busy


def test_a_session_leaves_a_busy_worker_with_its_state(workers: list[WorkerProcess]) -> None:
    async def play() -> None:
        async with gateway_over(workers) as (gateway, client):
            prompt = text(900, seed=3)
            first, headers = await turn(client, prompt, "agent")
            home = headers["x-ownerserve-worker"]
            (away,) = [worker for worker in workers if worker.name != home]
            prompt = [*prompt, *first["token_ids"], *text(40, seed=9)]
            busy = await keep_busy(gateway, client, home)
            choice, headers = await turn(client, prompt, "agent")
            assert headers["x-ownerserve-worker"] == away.name, headers
            assert headers["x-ownerserve-action"] in ("state_migration", "artifact_fetch")
            assert headers["x-ownerserve-mode"] in ("migrate", "fetch")
            assert int(headers["x-ownerserve-cached-tokens"]) >= 880
            assert read_brought(headers["x-ownerserve-brought-tokens"])["peer"] >= 880
            brought = 'ownerserve_brought_total{end="brought"}'
            assert await asyncio.to_thread(away.metric, brought) == 1
            tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            for row, token, logprob in zip(
                reference(MODEL, prompt, tokens), tokens, logprobs, strict=True
            ):
                assert abs(float(row[token]) - logprob) <= TOLERANCE
            await busy
            # The former home lets it go, and the next turn stays where the state is.
            prompt = [*prompt, *tokens, *text(20, seed=10)]
            units = list(gateway.state.fleet)
            await until_async(lambda: not any(u.requests for u in units), within_s=WAIT_S)
            _, headers = await turn(client, prompt, "agent")
            assert headers["x-ownerserve-worker"] == away.name
            assert await asyncio.to_thread(away.metric, brought) == 1

    asyncio.run(play())
