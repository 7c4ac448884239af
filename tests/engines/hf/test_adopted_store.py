"""A worker is killed and does not come back: another takes its store over and goes on with its
sessions. Processes as an operator runs them, behind a real gateway.
"""

from __future__ import annotations

import asyncio
import signal
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
from ownerserve.kv.messages import Tier  # noqa: E402
from ownerserve.router.settings import DEFAULTS  # noqa: E402
from tests.support.hf.engine_rig import TOLERANCE, reference, text  # noqa: E402
from tests.support.hf.worker_process import WorkerProcess  # noqa: E402
from tests.support.waits import until, until_async  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.crash]

MODEL = "tiny-qwen3"
PROMPT = text(900, seed=3)
WAIT_S = 300.0


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[list[WorkerProcess]]:
    started: list[WorkerProcess] = []
    yield started
    for worker in started:
        worker.stop()


def killed(worker: WorkerProcess) -> None:
    worker.http.close()
    worker.process.send_signal(signal.SIGKILL)
    worker.process.wait(WAIT_S)


def held(worker: WorkerProcess) -> dict[str, int]:
    """Tokens of each session that the worker says to have on its disk."""
    page = worker.http.get("/ownerserve/inventory", params={"after": 0}).raise_for_status().json()
    words = [word for word in page["words"] if word["tier"] == "disk" and word["is"] == "has"]
    return {word["session"]: word["tokens"] for word in words}


@asynccontextmanager
async def gateway_over(*workers: WorkerProcess) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    """A gateway that begins anew: it knows what its workers tell."""
    config = Config(
        workers=tuple(parse_worker(worker.url) for worker in workers),
        health_interval_s=0.1,
        settings=msgspec.structs.replace(DEFAULTS, output_tokens=8),
        receipts=ReceiptForm.OPEN,
    )
    gateway = Gateway(config)
    await gateway.start()
    try:
        url = f"http://127.0.0.1:{gateway.port}"
        async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
            yield gateway, client
    finally:
        await gateway.stop()


def on_disk(gateway: Gateway) -> set[str]:
    """The workers whose disks are believed to hold a session."""
    copies = [copy for _, one in gateway.state.sessions.items() for copy in one.copies()]
    return {copy.worker.id for copy in copies if copy.worker and copy.tier is Tier.DISK}


async def turn(
    client: httpx.AsyncClient, prompt: list[int]
) -> tuple[dict[str, Any], httpx.Headers]:
    body = {
        "model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 1,
        "return_token_ids": True,
    }  # fmt: skip
    answer = await client.post("/v1/completions", json=body, headers={"x-session-id": "agent"})
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice, answer.headers


def test_a_session_goes_on_from_an_adopted_store(
    tmp_path: Path, workers: list[WorkerProcess]
) -> None:
    dead, own = tmp_path / "dead", tmp_path / "own"
    flags = ("--store", str(dead), "--spill-after", "0.02")
    workers.append(WorkerProcess(tmp_path, "first", None, *flags))
    first = workers[0]

    async def before() -> list[int]:
        async with gateway_over(first) as (_, client):
            choice, headers = await turn(client, PROMPT)
            assert headers["x-ownerserve-mode"] == "cold_prefill"
            await asyncio.to_thread(until, lambda: held(first), within_s=WAIT_S)
            return [*PROMPT, *choice["token_ids"], *text(40, seed=9)]

    prompt = asyncio.run(before())
    told = held(first)
    killed(first)

    adopting = ("--store", str(own), "--adopt", str(dead), "--adopt", str(tmp_path / "none"))
    workers.append(WorkerProcess(tmp_path, "second", None, *adopting))
    workers.append(WorkerProcess(tmp_path, "third", None, "--store", str(tmp_path / "third-kv")))
    second = workers[1]

    def tells_all() -> bool:
        """What the dead one had told at the least: it may have copied more before it died."""
        known = held(second)
        return all(known.get(session, 0) >= tokens for session, tokens in told.items())

    until(tells_all, within_s=WAIT_S, what="the dead worker's sessions are told")
    assert (dead / "ADOPTED").exists()

    async def after() -> None:
        async with gateway_over(*workers[1:]) as (gateway, client):
            await until_async(lambda: on_disk(gateway) == {second.name}, within_s=WAIT_S)
            choice, headers = await turn(client, prompt)
            assert headers["x-ownerserve-worker"] == second.name
            assert headers["x-ownerserve-reason"] == "recovered"
            assert headers["x-ownerserve-mode"] == "fetch"
            assert int(headers["x-ownerserve-cached-tokens"]) >= len(PROMPT) // 16 * 16
            tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            for row, token, logprob in zip(
                reference(MODEL, prompt, tokens), tokens, logprobs, strict=True
            ):
                assert abs(float(row[token]) - logprob) <= TOLERANCE

    asyncio.run(after())
    second.stop()
    workers.append(WorkerProcess(tmp_path, "fourth", None, *adopting))
    until(lambda: held(workers[-1]), within_s=WAIT_S, what="what was adopted once stays")
