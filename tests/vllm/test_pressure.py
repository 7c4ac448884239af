"""A pool too small for what is asked of it: soft references, preemption, aborts."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests.support.vllm import connectors, oracle, tiny
from tests.support.vllm.rig import Rig, next_turn, settle

pytestmark = pytest.mark.vllm

ABORTS = 1000 if os.environ.get("OWNERSERVE_LONG") else 100


def test_an_idle_session_outlives_noise_that_would_evict_it(rig: Rig, store: Path) -> None:
    """99 usable blocks, 230 blocks of noise: with vLLM's LRU nothing of the session is left."""
    prompt = tiny.prompt(640, seed=41)

    def cached_after_noise(connector: dict[str, object]) -> tuple[int, float]:
        worker = rig.worker("qwen3", connector, num_gpu_blocks_override=100, max_model_len=1024)
        answer = worker.generate(prompt, session="mine")
        for number in range(8):
            worker.generate(tiny.prompt(900, seed=400 + number), max_tokens=4)
        settle(worker)
        back = worker.generate(next_turn(prompt, answer, seed=3), session="mine")
        oracle.assert_same("qwen3", rig.cold("qwen3", next_turn(prompt, answer, seed=3)), back)
        return back.cached, back.ttft_s

    assert cached_after_noise(connectors.none())[0] == 0
    kept, _ = cached_after_noise(connectors.ours(store))
    assert kept >= 512


def test_idle_sessions_never_starve_a_request_that_needs_the_whole_pool(
    rig: Rig, store: Path
) -> None:
    worker = rig.worker(
        "gemma3",
        connectors.ours(store, soft_reference={"ttl_s": 3600.0, "pool_fraction": 1.0}),
        num_gpu_blocks_override=200,
        max_model_len=2048,
    )
    for number in range(6):
        worker.generate(tiny.prompt(500, seed=420 + number), session=f"idle{number}")
    large = tiny.prompt(1900, seed=43)
    answer = worker.generate(large, session="large")
    oracle.assert_same("gemma3", rig.cold("gemma3", large), answer)
    settle(worker)


def test_a_soft_reference_ends_with_its_time(rig: Rig, store: Path) -> None:
    """Idle for longer than the TTL: the pool is vLLM's again, and the store brings it back."""
    worker = rig.worker(
        "qwen3",
        connectors.ours(store, soft_reference={"ttl_s": 0.2, "pool_fraction": 0.5}),
        num_gpu_blocks_override=100,
        max_model_len=1024,
    )
    prompt = tiny.prompt(640, seed=44)
    answer = worker.generate(prompt, session="mine")
    settle(worker)
    time.sleep(0.4)
    for number in range(6):
        worker.generate(tiny.prompt(900, seed=440 + number), max_tokens=4)
    following = next_turn(prompt, answer, seed=4)
    back = worker.generate(following, session="mine")
    assert back.cached >= 512
    oracle.assert_same("qwen3", rig.cold("qwen3", following), back)


@pytest.mark.parametrize(("family", "blocks"), [("qwen3", 50), ("gemma3", 72), ("qwen3next", 36)])
def test_preempted_requests_end_with_the_right_answer(
    rig: Rig, family: str, blocks: int, store: Path
) -> None:
    """Six long answers in a pool for about three: some are preempted and come back."""
    worker = rig.worker(
        family, connectors.ours(store), num_gpu_blocks_override=blocks, max_model_len=512
    )
    worker.hook("watch_preemptions")
    prompts = [tiny.prompt(240, seed=450 + n) for n in range(6)]
    ids = [worker.submit(p, max_tokens=200, session=f"s{n}") for n, p in enumerate(prompts)]
    answers = worker.wait(ids)
    preempted = worker.hook("preemptions")
    assert preempted
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.tokens) == 200
        resumed_at = [at for name in preempted if answer.id in name for at in preempted[name]]
        oracle.assert_same_in_parts(
            family,
            lambda tokens, count: rig.cold(family, tokens, max_tokens=count),
            prompt,
            answer=answer,
            resumed_at=resumed_at,
        )
    settle(worker)


@pytest.mark.parametrize("family", ["gemma3", "qwen3next"])
def test_aborts_at_any_moment_leak_no_block(rig: Rig, family: str, store: Path) -> None:
    """Aborts while waiting, while loading, in prefill, in decode; then everything is free."""
    dice = random.Random(7)
    worker = rig.worker(family, connectors.ours(store), num_gpu_blocks_override=300)
    stored = [tiny.prompt(400 + 100 * n, seed=460 + n) for n in range(4)]
    for prompt in stored:
        worker.generate(prompt, max_tokens=4)
    settle(worker)
    for number in range(ABORTS):
        if number % 10 == 0:
            worker.ask("reset")  # the next ones load again
        base = dice.choice(stored)
        ids = [
            worker.submit([*base, *tiny.prompt(30, seed=number)], max_tokens=8, session="s")
            for _ in range(dice.randrange(1, 3))
        ]
        worker.ask("run_steps", dice.randrange(0, 6))
        worker.ask("abort", ids)
    settle(worker)
    pool = worker.ask("pool")
    assert (pool["referenced"], pool["requests"]) == (0, 0)
    assert pool["free"] == pool["blocks"]
    after = worker.generate(stored[0])
    oracle.assert_same(family, rig.cold(family, stored[0]), after)


def test_an_abort_during_a_load_stores_nothing_that_was_not_computed(rig: Rig, store: Path) -> None:
    """vLLM reports 640 computed tokens for a request that was aborted before its load ended."""
    prompt = tiny.prompt(700, seed=47)
    worker = rig.worker("gemma3", connectors.ours(store))
    worker.generate(prompt)
    settle(worker)
    worker.ask("reset")
    for steps in range(4):
        tail = tiny.prompt(200, seed=470 + steps)
        id = worker.submit([*prompt, *tail], max_tokens=4)
        worker.ask("run_steps", steps)
        worker.ask("abort", [id])
        settle(worker)
        worker.ask("reset")
        answer = worker.generate([*prompt, *tail])
        oracle.assert_same("gemma3", rig.cold("gemma3", [*prompt, *tail]), answer)
        worker.ask("reset")


def test_what_came_of_a_prompt_is_counted(rig: Rig, tmp_path: Path) -> None:
    """An append, then a loss: noise took the session's blocks, the store's bytes rotted, and the
    system prompt that all begin with is still cached."""
    store = tmp_path / "store"
    worker = rig.worker(
        "qwen3",
        connectors.ours(store, host_cache_bytes=0, soft_reference={"ttl_s": 0.0}),
        num_gpu_blocks_override=100,
        max_model_len=1024,
    )
    system = tiny.prompt(64, seed=47)
    prompt = [*system, *tiny.prompt(576, seed=48)]
    answer = worker.generate(prompt, session="mine")
    following = next_turn(prompt, answer, seed=5)
    assert worker.generate(following, session="mine").cached >= 640
    settle(worker)
    counts = worker.hook("connector_status")
    assert (counts["mode_cold_prefill"], counts["mode_direct_append"]) == (1, 1)
    for number in range(6):
        worker.generate([*system, *tiny.prompt(830, seed=480 + number)], session=f"noise {number}")
    settle(worker)
    for segment in store.rglob("*.seg"):
        segment.write_bytes(bytes(segment.stat().st_size))
    back = worker.generate([*following, *tiny.prompt(20, seed=49)], session="mine")
    settle(worker)
    counts = worker.hook("connector_status")
    assert counts["mode_seed"] == 6
    assert counts["mode_reseed"] == 1
    assert counts["lost_tokens"] == len(following) // 32 * 32 - back.cached
