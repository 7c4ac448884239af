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
