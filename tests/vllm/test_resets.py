"""A reset of vLLM's caches forgets no stored state while the weights are the same, and all of it
when they may be others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.vllm import connectors, oracle, tiny
from tests.support.vllm.fleet import VllmWorker
from tests.support.vllm.rig import Rig, settle

pytestmark = pytest.mark.vllm

B = 32
KEEPING = ("reset_connector", "sleep_and_wake", "ask_workers_in_passing")
CHANGING = ("double_weights", "reload_weights", "sleep_deeply", "ask_workers_anything")


def asked_again(worker: VllmWorker, prompt: list[int]) -> int:
    """How much of the prompt comes from the store: vLLM's own cache is emptied first."""
    worker.ask("reset")
    cached = worker.generate(prompt).cached
    settle(worker)
    return cached


def test_state_is_found_after_a_reset_with_the_same_weights(rig: Rig, store: Path) -> None:
    prompt, later = tiny.prompt(700, seed=141), tiny.prompt(400, seed=142)
    worker = rig.worker("qwen3", connectors.ours(store))
    worker.generate(prompt, session="s")
    settle(worker)
    for reset in KEEPING:
        worker.hook(reset)
        again = worker.generate(prompt, session="s")
        assert again.cached == 699 // B * B, reset
        oracle.assert_same("qwen3", rig.cold("qwen3", prompt), again)
        settle(worker)
    worker.generate(later, session="t")
    settle(worker)
    worker.shutdown()
    next_life = rig.worker("qwen3", connectors.ours(store))
    assert next_life.generate(later).cached == 399 // B * B, "what is stored after it is not lost"


def test_nothing_is_found_once_the_weights_may_be_others(rig: Rig, store: Path) -> None:
    """Also where nobody asks for our cache to be reset: the calls themselves are heard."""
    prompt = tiny.prompt(700, seed=143)
    worker = rig.worker("qwen3", connectors.ours(store))
    worker.generate(prompt)
    settle(worker)
    for change in CHANGING:
        assert asked_again(worker, prompt) == 699 // B * B, "found in this life, by this name"
        worker.hook(change)
        assert asked_again(worker, prompt) == 0, change
    worker.shutdown()
    next_life = rig.worker("qwen3", connectors.ours(store))
    restored = next_life.generate(prompt)
    assert restored.cached == 699 // B * B, "what the checkpoint's weights computed"
    oracle.assert_same("qwen3", rig.cold("qwen3", prompt), restored)


def test_what_was_computed_over_former_weights_cache_is_not_found_once_that_is_reset(
    rig: Rig, store: Path
) -> None:
    """vLLM goes on by its own cache until somebody resets it, which no connector is told of: what
    is computed and stored until then is of both weights."""
    prompt = tiny.prompt(700, seed=144)
    worker = rig.worker("qwen3", connectors.ours(store))
    worker.generate(prompt[:400])
    settle(worker)
    worker.hook("reload_weights")
    assert worker.generate(prompt).cached == 400 // B * B, "vLLM's own, from before"
    settle(worker)
    assert asked_again(worker, prompt) == 0
    assert asked_again(worker, prompt) == 699 // B * B, "of the new weights alone"
