"""A worker has another one compute a turn's prompt, and reads it as it is computed, over real
processes: the right bytes, or it computes itself. What a gateway does of it: test_prefill_fleet.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ownerserve.kv.ids import SessionId  # noqa: E402
from ownerserve.kv.wire.headers import LenderAddress  # noqa: E402
from tests.support.hf.engine_rig import TOLERANCE, reference, text  # noqa: E402
from tests.support.hf.worker_process import WorkerProcess  # noqa: E402
from tests.support.waits import until  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.crash]

FAMILIES = ("tiny-qwen3", "tiny-v4", "tiny-gemma3", "tiny-gptoss", "tiny-qwen3next")
AGENT = SessionId("a" * 32)
KEPT = ("--host-cache", "64MiB", "--dear")


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Any]:
    started: list[WorkerProcess] = []

    def start(name: str, *flags: str) -> WorkerProcess:
        started.append(WorkerProcess(tmp_path, name, None, *KEPT, *flags))
        return started[-1]

    yield start
    for worker in started:
        if worker.process.poll() is None:
            worker.stop()


def address(worker: WorkerProcess) -> LenderAddress:
    return LenderAddress(worker.unit, worker.rpc)


def assert_cold(model: str, prompt: list[int], answer: dict[str, Any]) -> None:
    """The answer is a cold engine's, as far as it can tell."""
    tokens = answer["tokens"]
    rows = reference(model, prompt, tokens)
    for row, token, logprob in zip(rows, tokens, answer["logprobs"], strict=True):
        assert abs(float(row[token]) - logprob) <= TOLERANCE


def prefills(worker: WorkerProcess, end: str) -> float:
    return worker.metric(f'ownerserve_prefills_for_peers_total{{end="{end}"}}')


@pytest.mark.parametrize("model", FAMILIES)
def test_a_prompt_is_computed_elsewhere_and_answered_here(model: str, workers: Any) -> None:
    p, d = workers("p", "--model", model), workers("d", "--model", model)
    prompt = text(900, seed=3)
    answer = d.serve(prompt, AGENT, decode_from=address(p))
    assert answer["mode"] == "remote_prefill", d.http.get("/metrics").text
    assert answer["cached"] >= 832  # but for the last block, which is never sent
    assert_cold(model, prompt, answer)
    assert prefills(p, "accepted") == prefills(p, "read") == 1
    # The next turn's prompt too: what was generated here is not computed again there.
    longer = [*prompt, *answer["tokens"], *text(500, seed=9)]
    again = d.serve(longer, AGENT, decode_from=address(p))
    assert again["mode"] == "remote_prefill"
    assert_cold(model, longer, again)
