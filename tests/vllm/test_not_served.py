"""A model whose state can't be kept is served by vLLM as if there were no connector."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.vllm import connectors, oracle, tiny
from tests.support.vllm.rig import Rig, settle

pytestmark = pytest.mark.vllm


def test_a_model_that_is_not_served_runs_without_us(rig: Rig, store: Path) -> None:
    """Without prefix caching vLLM leaves recurrent state at no boundary: nothing can be kept, the
    engine starts all the same, and counts what passes by."""
    prompt = tiny.prompt(300, seed=205)
    worker = rig.worker(
        "qwen3next",
        connectors.ours(store),
        enable_prefix_caching=False,
        mamba_cache_mode="none",
    )
    for _ in range(2):
        answer = worker.generate(prompt, session="s")
        assert answer.cached == 0
        oracle.assert_same("qwen3next", rig.cold("qwen3next", prompt), answer)
    settle(worker)
    assert worker.hook("connector_status")["bypassed_model"] == 2


def test_pages_that_only_a_worker_refuses_do_not_end_the_start(rig: Rig, store: Path) -> None:
    """What a former life stored is there, and can't be put into such pages: nobody waits for it."""
    prompt = tiny.prompt(300, seed=206)
    before = rig.worker("qwen3", connectors.ours(store))
    before.generate(prompt)
    settle(before)
    before.shutdown()
    strange = ["tests.support.vllm.strange_pages"]
    worker = rig.worker("qwen3", connectors.ours(store), imports=strange)
    turns = [worker.submit(tokens) for tokens in (prompt, tiny.prompt(200, seed=207))]
    for tokens, answer in zip(
        (prompt, tiny.prompt(200, seed=207)), worker.wait(turns), strict=True
    ):
        assert answer.cached == 0
        oracle.assert_same("qwen3", rig.cold("qwen3", tokens), answer)
    settle(worker)
    worker.ask("reset")
    assert worker.generate(prompt).cached == 0
    status = worker.hook("connector_status")
    assert status["bypassed_model"] == 3
    assert (status["turns"], status["holds"], status["loads"]) == (0, 0, 0)
