"""Many sessions at once that begin with the same long prefix, which nobody has: each worker
computes it once, and every one is answered. Engines that keep prompts as vLLM does, and the
reference engine, all of them processes. With OWNERSERVE_HERD=500 so many.
"""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.gateway.agents import Agent
from tests.support.gateway.commands import running
from tests.support.gateway.engine import BLOCK_BYTES, TOKEN_BYTES, engine_processes
from tests.support.gateway.process import gateway_process

pytestmark = pytest.mark.slow

HERD = int(os.environ.get("OWNERSERVE_HERD", "100"))
WORKERS = 4
PREFIX = b"a repository's preamble, line after line. " * 1600
OWN_BYTES = 300


def test_each_worker_computes_a_cold_prefix_once(tmp_path: Path) -> None:
    async def scenario(port: int) -> list[Agent]:
        herd = [
            Agent(f"one{number}", port, context=PREFIX, growth=OWN_BYTES) for number in range(HERD)
        ]
        await asyncio.wait_for(asyncio.gather(*(agent.turn() for agent in herd)), 300)
        return herd

    with (
        engine_processes(WORKERS, "--token-us", "20", "--seats", "64") as engines,
        gateway_process(tmp_path, [one.port for one in engines]) as at,
    ):
        herd = asyncio.run(scenario(int(at.data_url.rpartition(":")[2])))
        counts = []
        for engine in engines:
            with urllib.request.urlopen(f"http://127.0.0.1:{engine.port}/counts") as answer:
                counts.append(json.loads(answer.read()))
    assert not sum((agent.met for agent in herd), Counter()), "all at the first try"
    prefix, own = len(PREFIX) // TOKEN_BYTES, (OWN_BYTES + 2 * BLOCK_BYTES) // TOKEN_BYTES
    print(f"\n{HERD} at once, a prefix of {prefix} tokens:", counts)
    assert sum(one.get("prompts", 0) for one in counts) == HERD
    for one in counts:
        assert one.get("block_computed_max", 0) <= 1
        assert one.get("computed_tokens", 0) <= prefix + one.get("prompts", 0) * own


@pytest.mark.engine
def test_each_reference_engine_computes_a_cold_prefix_once(tmp_path: Path) -> None:
    """Named, and by content; more than their memory promises room for come at once."""
    pytest.importorskip("torch")
    prefix = "a repository's preamble, line after line. " * 30

    async def herd(url: str, name: str) -> list[httpx.Response]:
        async def one(client: httpx.AsyncClient, number: int) -> httpx.Response:
            said = {"prompt": f"{name}{prefix}question {number}", "max_tokens": 2, "temperature": 0}
            headers = {"x-session-id": f"{name}{number}"} if name else {}
            return await client.post(f"{url}/v1/completions", json=said, headers=headers)

        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=300, limits=limits) as client:
            return await asyncio.gather(*(one(client, number) for number in range(HERD)))

    with ExitStack() as stack:
        named: list[str] = []
        for number in range(2):
            worker = ("worker", "--model", "tiny-qwen3", "--port", "0")
            (url,), _ = stack.enter_context(running(tmp_path / f"worker{number}", *worker))
            named += ("--worker", url)
        command = ("gateway", "--port", "0", "--admin-port", "0", "--receipts", "open", *named)
        (data, _), _ = stack.enter_context(running(tmp_path / "gateway", *command))
        for name in ("named", ""):
            answers = asyncio.run(herd(data, name))
            assert {answer.status_code for answer in answers} == {200}
            computed: Counter[str] = Counter()
            came: Counter[str] = Counter()
            for answer in answers:
                usage, worker_id = answer.json()["usage"], answer.headers["x-ownerserve-worker"]
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                computed[worker_id] += usage["prompt_tokens"] - cached
                came[worker_id] += 1
            print(f"\n{HERD} at once, {len(prefix)} tokens: came {came}, computed {computed}")
            for worker_id, tokens in computed.items():  # its own end, and what a block rounds off
                assert tokens <= len(prefix) + came[worker_id] * 48
