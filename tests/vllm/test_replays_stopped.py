"""Replays that take several steps, and what stops them on the way: an abort, a preemption.

A load that fails before a replay: test_replays_store.py. All at random: test_replays_random.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.vllm import oracle, tiny
from tests.support.vllm.fleet import VllmWorker, vllm_version
from tests.support.vllm.replays import (
    EXACT,
    PROMPT_TOKENS,
    branch,
    hook,
    replaying,
    replaying_async,
)
from tests.support.vllm.rig import Rig, settle

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(vllm_version() < (0, 31), reason="vLLM 0.30 has no rewind"),
]

FAMILY = "gptoss"
B = 32
CHUNKED = {"max_num_batched_tokens": 512, "long_prefill_token_threshold": 40}
"""A step computes 40 tokens of each prompt at most where there are two: a replay of 127 takes
four."""
NO_POINTS = {"checkpoints": "zero", "host_cache_bytes": 0, "restore_deadline_s": 60}
MOST_WAVES = 12


@pytest.mark.parametrize("start", [replaying, replaying_async])
def test_a_replay_in_several_steps_is_exact_after_one_that_was_aborted_amid(
    rig: Rig, start: Callable[..., dict[str, Any]], store: Path
) -> None:
    worker = rig.worker(FAMILY, start(store, **NO_POINTS), **CHUNKED)
    prompt = tiny.prompt(PROMPT_TOKENS, seed=1)
    worker.generate(prompt)
    hook(worker, "watch_interruptions")
    asked, beside = branch(prompt, 1100, seed=31), tiny.prompt(400, seed=32)
    asks = [{"id": "aborted", "tokens": asked}, {"id": "beside", "tokens": beside}]
    assert hook(worker, "abort_amid_a_replay", asks=asks)
    settle(worker)
    lengths = hook(worker, "replay_lengths")
    assert lengths["running"] == 0
    assert worker.ask("reset")
    worker.generate(prompt)
    before = worker.hook("connector_status")["replays"]
    answer, other = worker.wait(worker.submit_all([asked, beside]))
    assert answer.cached == (1088 - lengths["reach"]) // B * B
    assert_cold(rig, asked, answer)
    assert_cold(rig, beside, other)
    assert worker.hook("connector_status")["replays"] == before + 1
    seen = hook(worker, "interruptions")
    assert seen["chunked"] >= 3
    assert seen["aborted_in_replay"] == 1
    settle(worker)


def test_a_replay_that_is_preempted_amid_begins_anew(rig: Rig, store: Path) -> None:
    """Prompts that grow take the blocks of branches behind them, until one was in mid-replay."""
    worker = rig.worker(
        FAMILY,
        replaying(store, **NO_POINTS),
        **CHUNKED,
        num_gpu_blocks_override=90,
        scheduler_reserve_full_isl=False,
        max_num_seqs=8,
    )
    hook(worker, "watch_interruptions")
    for wave in range(MOST_WAVES):
        asked = a_wave(worker, wave)
        ids = worker.submit_all(asked, max_tokens=4)
        for tokens, answer in zip(asked, worker.wait(ids), strict=True):
            assert_cold(rig, tokens, answer, max_tokens=4)
        settle(worker)
        if hook(worker, "interruptions")["preempted_in_replay"]:
            break
    assert hook(worker, "interruptions")["preempted_in_replay"]
    assert hook(worker, "replay_lengths")["running"] == 0
    assert worker.hook("connector_status").get("switched_off", 0) == 0


def a_wave(worker: VllmWorker, wave: int) -> list[list[int]]:
    """Prompts of their own, then branches of one that is cached."""
    assert worker.ask("reset")
    trunk = tiny.prompt(900, seed=100 + wave)
    worker.generate(trunk, max_tokens=1)
    fresh = [tiny.prompt(300 + 30 * wave, seed=200 + 10 * wave + n) for n in range(4)]
    return fresh + [branch(trunk, 860 - 60 * n, seed=300 + 10 * wave + n) for n in range(4)]


def assert_cold(rig: Rig, asked: list[int], answer: Any, *, max_tokens: int = 16) -> None:
    """The answer is that of an engine without a cache, far within the oracle's tolerance."""
    judgement = oracle.judge(rig.cold(FAMILY, asked, max_tokens=max_tokens), answer)
    assert judgement.compared
    assert judgement.worst < EXACT, (len(asked), answer.cached, judgement)
