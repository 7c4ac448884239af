"""Replays that take several steps, and what stops them on the way: an abort, a preemption.

A load that fails before a replay: test_replays_store.py. All at random: test_replays_random.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.vllm import oracle, tiny
from tests.support.vllm.fleet import vllm_version
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
    """vLLM finds no block for who is in mid-replay, and takes back what it has."""
    worker = rig.worker(FAMILY, replaying(store, **NO_POINTS), **CHUNKED)
    prompt = tiny.prompt(PROMPT_TOKENS, seed=1)
    worker.generate(prompt)
    hook(worker, "watch_interruptions")
    asked, beside = branch(prompt, 1100, seed=31), tiny.prompt(400, seed=32)
    asks = [{"id": "beside", "tokens": beside}, {"id": "preempted", "tokens": asked}]
    assert hook(worker, "preempt_amid_a_replay", asks=asks)
    other, answer = worker.wait(["beside", "preempted"])
    assert_cold(rig, beside, other)
    assert_cold(rig, asked, answer)
    settle(worker)
    assert hook(worker, "replay_lengths")["running"] == 0
    assert worker.hook("connector_status").get("switched_off", 0) == 0


def assert_cold(rig: Rig, asked: list[int], answer: Any) -> None:
    """The answer is that of an engine without a cache, far within the oracle's tolerance."""
    judgement = oracle.judge(rig.cold(FAMILY, asked), answer)
    assert judgement.compared
    assert judgement.worst < EXACT, (len(asked), answer.cached, judgement)
