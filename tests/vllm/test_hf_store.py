"""What the hf engine stored, vLLM restores: same files, same numerics, the same artifacts.

And where the numerics are others, the names are: it is a miss, never a conversion.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ownerserve.engines.hf.build import WorkerOptions, build_worker
from ownerserve.engines.hf.scheduling.requests import (
    Admitted,
    Delta,
    EngineRequest,
    Sampling,
    Stopping,
)
from ownerserve.node.vocabulary.settings import NodeSettings
from ownerserve.store.disk.snapshot import StoreSnapshot
from tests.support.vllm import connectors, oracle, tiny
from tests.support.vllm.rig import Rig, next_turn, settle

pytestmark = pytest.mark.vllm

B, RECORD_BLOCKS = 32, 8
STORED_S = 30.0


def hf_serves(
    model: Path, store: Path, prompt: Sequence[int], *, new: int = 16
) -> tuple[list[int], list[float], int]:
    """The hf engine over a store, from start to end: tokens, their log probabilities, how many
    prompt tokens were cached. Returns when what it computed is stored."""
    torch.set_num_threads(1)
    node = NodeSettings(spill_after_s=0.02, record_blocks=RECORD_BLOCKS)
    worker = build_worker(
        WorkerOptions(model=str(model), store=store, block_tokens=B, kv_bytes=32 << 20, node=node)
    )
    asked = EngineRequest(
        request_id="r",
        prompt=list(prompt),
        stopping=Stopping(max_tokens=new),
        sampling=Sampling(temperature=0.0, logprobs=0),
        session_id="s",
    )

    async def serve() -> list[Any]:
        worker.engine.start()
        try:
            said = [event async for event in worker.engine.submit(asked)]
            await _stored(store, (len(prompt) - 1) // B * B)
            return said
        finally:
            await worker.engine.stop()

    said = asyncio.run(serve())
    sampled = [each for event in said if isinstance(event, Delta) for each in event.sampled]
    [admitted] = [event for event in said if isinstance(event, Admitted)]
    logprobs = [each.chosen.logprob for each in sampled if each.chosen is not None]
    return [each.token for each in sampled], logprobs, admitted.cached_tokens


async def _stored(store: Path, tokens: int) -> None:
    """Wait until a record reaches to `tokens` and none has come for a moment."""
    until, count, since = time.monotonic() + STORED_S, -1, time.monotonic()
    while time.monotonic() < until:
        snapshot = StoreSnapshot(store)
        ends = [entry.meta.end_token for entry in snapshot.entries()]
        snapshot.close()
        if len(ends) != count:
            count, since = len(ends), time.monotonic()
        if max(ends, default=0) >= tokens and time.monotonic() - since > 0.3:
            return
        await asyncio.sleep(0.02)
    pytest.fail(f"the hf engine stored up to {max(ends, default=0)} of {tokens} tokens")


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_vllm_goes_on_from_what_the_hf_engine_stored(rig: Rig, family: str, store: Path) -> None:
    """The prompt, and the turn after it: both are the hf engine's KV, and a cold vLLM's answer."""
    prompt = tiny.prompt(500, seed=81)
    tokens, logprobs, _ = hf_serves(rig.checkpoint(family), store, prompt)
    worker = rig.worker(family, connectors.ours(store, record_blocks=RECORD_BLOCKS))
    restored = worker.generate(prompt)
    assert restored.cached == 499 // B * B
    cold = rig.cold(family, prompt)
    oracle.assert_same(family, cold, restored)
    assert restored.tokens == tokens
    own = [top[token] for top, token in zip(restored.top, restored.tokens, strict=True)]
    assert max(abs(a - b) for a, b in zip(own, logprobs, strict=True)) < oracle.TOLERANCE
    following = next_turn(prompt, restored, seed=8)
    worker.ask("reset")
    settle(worker)
    again = worker.generate(following)
    assert again.cached >= (500 + 15) // B * B
    oracle.assert_same(family, rig.cold(family, following), again)


def test_the_oracle_sees_it_when_that_kv_is_spoilt(rig: Rig, store: Path) -> None:
    """The control of the test above."""
    prompt = tiny.prompt(500, seed=82)
    hf_serves(rig.checkpoint("qwen3"), store, prompt)
    worker = rig.worker("qwen3", connectors.ours(store, record_blocks=RECORD_BLOCKS))
    worker.hook("corrupt_restored")
    spoilt = worker.generate(prompt)
    assert spoilt.cached > 0
    assert not oracle.same("qwen3", rig.cold("qwen3", prompt), spoilt)


def test_the_hf_engine_goes_on_from_what_vllm_stored(rig: Rig, store: Path) -> None:
    prompt = tiny.prompt(500, seed=83)
    worker = rig.worker("qwen3", connectors.ours(store, record_blocks=RECORD_BLOCKS))
    answer = worker.generate(prompt)
    settle(worker)
    worker.shutdown()
    tokens, logprobs, cached = hf_serves(rig.checkpoint("qwen3"), store, prompt)
    assert cached == 499 // B * B
    assert tokens == answer.tokens
    own = [top[token] for top, token in zip(answer.top, answer.tokens, strict=True)]
    assert max(abs(a - b) for a, b in zip(own, logprobs, strict=True)) < oracle.TOLERANCE


@pytest.mark.parametrize(
    ("why", "engine", "extra"),
    [
        ("another dtype", {"dtype": "bfloat16"}, {}),
        ("another block", {}, {"block_tokens": 64}),
        ("other weights", {}, {"weights": "another revision"}),
    ],
)
def test_other_numerics_find_nothing(
    rig: Rig, why: str, engine: dict[str, Any], extra: dict[str, Any], store: Path
) -> None:
    prompt = tiny.prompt(500, seed=84)
    hf_serves(rig.checkpoint("qwen3"), store, prompt)
    settings = {"record_blocks": RECORD_BLOCKS, **extra}
    worker = rig.worker("qwen3", connectors.ours(store, **settings), **engine)
    assert worker.generate(prompt).cached == 0, why
