"""What is said to have happened to a prompt, by a real worker and a real gateway in front of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.engines.hf.build import WorkerOptions
from tests.support.hf.fleet_rig import ServedGateway, ServedWorker

pytestmark = pytest.mark.engine

SYSTEM = [7 + i % 50 for i in range(96)]
"""What every agent's prompt begins with."""


def text(tokens: int, seed: int) -> list[int]:
    return [(seed * 37 + i * i) % 240 + 5 for i in range(tokens)]


@pytest.fixture(scope="module")
def worker() -> Iterator[ServedWorker]:
    worker = ServedWorker(WorkerOptions(model="tiny-qwen3", kv_bytes=2048 << 10, max_running=4))
    yield worker
    worker.close()


@pytest.fixture
def gateway(worker: ServedWorker) -> Iterator[ServedGateway]:
    gateway = ServedGateway(worker, seats=None)  # sessions displace one another here
    yield gateway
    gateway.close()


def test_a_partial_loss_is_a_reseed_with_its_tokens_counted(
    worker: ServedWorker, gateway: ServedGateway
) -> None:
    """1,208 of 1,304 tokens were gone, the system prompt stayed, and all said `append`."""
    prompt = [*SYSTEM, *text(1204, 1)]
    first = gateway.complete(prompt, "a")
    assert first.headers["x-ownerserve-mode"] == "cold_prefill"
    answer = first.json()["choices"][0]["token_ids"]
    for seed in range(2, 12):  # others, with the same system prompt, until hardly anything is left
        gateway.complete([*SYSTEM, *text(1000, seed)], f"other {seed}")
    before = gateway.metric("ownerserve_gateway_lost_tokens_total")
    second = gateway.complete([*prompt, *answer, *text(40, 99)], "a")
    cached = second.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached < 400
    assert second.headers["x-ownerserve-mode"] == "reseed"
    lost = 1296 - cached
    assert int(second.headers["x-ownerserve-lost-tokens"]) == lost
    assert worker.metric('ownerserve_execution_mode_total{mode="reseed"}') == 1
    assert worker.metric("ownerserve_lost_tokens_total") == lost
    assert worker.metric("ownerserve_reseeds_total") == 1
    assert gateway.metric("ownerserve_gateway_reseeds_total") == 1
    assert gateway.metric("ownerserve_gateway_lost_tokens_total") - before == lost
    assert (
        gateway.metric("ownerserve_gateway_pressure_total", kind="fallback", reason="reseed") == 1
    )


def test_an_append_a_branch_and_an_edited_history_lose_nothing(
    worker: ServedWorker, gateway: ServedGateway
) -> None:
    prompt = [*SYSTEM, *text(300, 31)]
    first = gateway.complete(prompt, "b", new=40)
    answer = first.json()["choices"][0]["token_ids"]
    appended = gateway.complete([*prompt, *answer, *text(20, 32)], "b")
    assert appended.headers["x-ownerserve-mode"] == "direct_append"
    without_thinking = gateway.complete([*prompt, *text(60, 33)], "b")
    assert without_thinking.headers["x-ownerserve-mode"] == "direct_append"
    compacted = gateway.complete([*SYSTEM, *text(80, 34)], "b")
    assert compacted.headers["x-ownerserve-mode"] == "seed"
    assert "x-ownerserve-lost-tokens" not in compacted.headers
    branch = gateway.complete([*prompt, *text(30, 35)], "another")
    assert branch.headers["x-ownerserve-mode"] == "seed"
    assert gateway.metric("ownerserve_gateway_lost_tokens_total") == 0
