"""Prompts many times longer than what may be copied at once are stored whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.vllm import connectors, oracle, tiny
from tests.support.vllm.fleet import VllmWorker
from tests.support.vllm.rig import Rig, settle

pytestmark = pytest.mark.vllm

BLOCK_TOKENS = 32
COPY_BYTES = 2 * connectors.MIB
TOKENS = 700
"""At 64 KiB a token, 44 MiB: more than 20 x COPY_BYTES."""
IDLE_WAIT_S = 0.001
"""What a step that computes nothing waits for news."""


def small(store: Path, **settings: object) -> dict[str, object]:
    """A connector whose records are one block, and whose budget holds one of them."""
    given = {"record_blocks": 1, "copy_bytes": COPY_BYTES, **settings}
    return connectors.ours(store, host_cache_bytes=0, **given)


def whole(tokens: int) -> int:
    """Tokens of a prompt that a restore can bring: up to its last boundary, its last token not."""
    return (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def assert_nothing_is_held(worker: VllmWorker) -> None:
    settle(worker)
    pool, status = worker.ask("pool"), worker.hook("connector_status")
    assert (pool["referenced"], pool["free"]) == (0, pool["blocks"])
    assert (status["holds"], status["late_turns"]) == (0, 0)


def test_a_prompt_of_twenty_budgets_in_one_step_is_stored_whole(rig: Rig, store: Path) -> None:
    prompt = tiny.prompt(TOKENS, seed=61)
    before = rig.worker("qwen3-wide", small(store))
    assert before.hook("fill_kv_bytes") * TOKENS > 20 * COPY_BYTES
    before.generate(prompt, session="s", max_tokens=4)
    assert before.hook("connector_status")["late_turns"] == 1
    assert_nothing_is_held(before)
    assert before.hook("connector_status").get("unsaved_tokens", 0) == 0
    before.shutdown()
    after = rig.worker("qwen3-wide", small(store))
    restored = after.generate(prompt, session="s", max_tokens=4)
    assert restored.cached >= 0.99 * whole(TOKENS)
    oracle.assert_same("qwen3-wide", rig.cold("qwen3-wide", prompt, max_tokens=4), restored)
    assert_nothing_is_held(after)


def test_an_idle_engine_that_saves_waits_and_does_not_spin(rig: Rig, store: Path) -> None:
    """Counted, not timed: a step for each wait and each record, however slow the drive is."""
    seconds, records = 0.2, TOKENS // BLOCK_TOKENS
    worker = rig.worker("qwen3-wide", small(store, save_buffer_bytes=4 * COPY_BYTES))
    worker.hook("slow_commits", seconds=seconds)
    worker.generate(tiny.prompt(TOKENS, seed=62), max_tokens=4)
    before = worker.ask("usage")["steps"]
    began = worker.hook("clock_s")
    assert_nothing_is_held(worker)
    waited_s = worker.hook("clock_s") - began
    steps = worker.ask("usage")["steps"] - before
    assert waited_s > seconds
    assert steps <= 2 * records + waited_s / IDLE_WAIT_S


def test_blocks_that_others_took_first_are_counted_and_nobody_waited(rig: Rig, store: Path) -> None:
    """A slow drive and a pool for one prompt: the second takes it at once, the first is lost."""
    worker = rig.worker(
        "qwen3-wide",
        small(store, save_buffer_bytes=COPY_BYTES),
        num_gpu_blocks_override=26,
        max_model_len=800,
    )
    worker.hook("slow_commits", seconds=0.5)
    first, second = tiny.prompt(TOKENS, seed=63), tiny.prompt(TOKENS, seed=64)
    worker.generate(first, session="a", max_tokens=4)
    answer = worker.generate(second, session="b", max_tokens=4)
    oracle.assert_same("qwen3-wide", rig.cold("qwen3-wide", second, max_tokens=4), answer)
    assert_nothing_is_held(worker)
    status = worker.hook("connector_status")
    assert status["unsaved_tokens"] > 0 and status["unsaved_bytes"] > 0
    log = worker.log.read_text()
    assert log.count("were not stored") == 1
    assert "Raise copy_bytes (now 2097152" in log
    # What was saved of either is what was computed.
    worker.ask("reset")
    for prompt in (first, second):
        again = worker.generate(prompt, max_tokens=4)
        oracle.assert_same("qwen3-wide", rig.cold("qwen3-wide", prompt, max_tokens=4), again)


def test_late_saves_of_hybrid_sessions_under_aborts_and_preemptions_leak_nothing(
    rig: Rig, store: Path
) -> None:
    """Point state is copied in its step, whatever range state waits."""
    worker = rig.worker(
        "gemma3",
        small(store, copy_bytes=1, save_buffer_bytes=1),
        num_gpu_blocks_override=72,
        max_model_len=512,
    )
    prompts = [tiny.prompt(240, seed=650 + n) for n in range(6)]
    ids = [worker.submit(p, max_tokens=60, session=f"s{n}") for n, p in enumerate(prompts)]
    worker.ask("run_steps", 5)
    worker.ask("abort", ids[:2])
    answers = worker.wait(ids[2:])
    assert [len(answer.tokens) for answer in answers] == [60] * 4
    assert_nothing_is_held(worker)
    worker.hook("reset_connector")
    again = worker.generate(prompts[5], max_tokens=4)
    oracle.assert_same("gemma3", rig.cold("gemma3", prompts[5], max_tokens=4), again)


def test_a_reset_gives_late_saves_up(rig: Rig, store: Path) -> None:
    """vLLM's cache says no more what the blocks hold: what is left can't be saved."""
    worker = rig.worker("qwen3-wide", small(store, save_buffer_bytes=COPY_BYTES))
    worker.hook("slow_commits", seconds=0.2)
    prompt = tiny.prompt(TOKENS, seed=66)
    worker.generate(prompt, session="s", max_tokens=4)
    while not worker.hook("reset_connector"):
        worker.ask("run_steps", 1)
    assert_nothing_is_held(worker)
    assert worker.hook("connector_status")["unsaved_tokens"] > 0
    again = worker.generate(prompt, session="s", max_tokens=4)
    oracle.assert_same("qwen3-wide", rig.cold("qwen3-wide", prompt, max_tokens=4), again)
