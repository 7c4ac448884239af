"""Sessions whose KV left the engine come back from the store, and the answer is the cold one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ownerserve.store.disk.tier import DiskTier
from ownerserve.store.service.runtime import WallClock
from tests.support.vllm import connectors, oracle, tiny
from tests.support.vllm.fleet import VllmWorker
from tests.support.vllm.rig import Rig, next_turn, settle
from tests.support.vllm.wire import Answer

pytestmark = pytest.mark.vllm

FAMILIES = ("qwen3", "gemma3", "mistral", "gptoss", "qwen3next", "deepseek3")
BOUNDARY_TOKENS = 128
"""At most this far apart do restorable points of the default settings lie here."""


def whole(tokens: int) -> int:
    """Tokens of a prompt that a restore must bring: up to its last boundary, its last token not."""
    return (tokens - 1) // BOUNDARY_TOKENS * BOUNDARY_TOKENS


def first_turn(worker: VllmWorker, tokens: list[int], **options: object) -> Answer:
    answer = worker.generate(tokens, **options)
    settle(worker)
    return answer


@pytest.mark.parametrize("family", FAMILIES)
def test_a_replayed_prompt_hits_after_a_restart(rig: Rig, family: str, store: Path) -> None:
    """The window at the prompt's boundary must be saved when the prefill ends: at the request's
    end it is gone."""
    prompts = [tiny.prompt(n, seed=n) for n in (200, 700, 333)]
    before = rig.worker(family, connectors.ours(store))
    for number, prompt in enumerate(prompts):
        first_turn(before, prompt, session=f"s{number}")
    before.shutdown()
    after = rig.worker(family, connectors.ours(store))
    for prompt in prompts:
        restored = after.generate(prompt)
        assert restored.cached >= whole(len(prompt))
        oracle.assert_same(family, rig.cold(family, prompt), restored)
    settle(after)


@pytest.mark.parametrize("family", FAMILIES[:-1])
def test_a_session_goes_on_after_a_restart(rig: Rig, family: str, store: Path) -> None:
    """The MLA family is left out: vLLM's CPU kernels write other KV when they decode than when
    they prefill (0.4 in a log probability), so no cold engine is its oracle here."""
    prompt = tiny.prompt(500, seed=21)
    before = rig.worker(family, connectors.ours(store))
    answer = first_turn(before, prompt, session="s", max_tokens=40)
    before.shutdown()
    after = rig.worker(family, connectors.ours(store))
    following = next_turn(prompt, answer, seed=1)
    restored = after.generate(following, session="s")
    assert restored.cached >= whole(len(prompt) + len(answer.tokens))
    oracle.assert_same(family, rig.cold(family, following), restored)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_restored_is_what_is_computed_with(rig: Rig, family: str, store: Path) -> None:
    """The control of the tests above: spoil what our connector restored, the oracle must see it."""
    prompt = tiny.prompt(500, seed=22)
    worker = rig.worker(family, connectors.ours(store))
    first_turn(worker, prompt)
    worker.shutdown()
    after = rig.worker(family, connectors.ours(store))
    after.hook("corrupt_restored")
    spoilt = after.generate(prompt)
    assert spoilt.cached >= whole(len(prompt))
    assert not oracle.same(family, rig.cold(family, prompt), spoilt)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3next"])
def test_a_session_comes_back_after_others_have_evicted_it(
    rig: Rig, family: str, store: Path
) -> None:
    prompt = tiny.prompt(600, seed=23)
    no_soft_references = {"soft_reference": {"ttl_s": 0.0}}
    worker = rig.worker(
        family,
        connectors.ours(store, **no_soft_references),
        num_gpu_blocks_override=120,
        max_model_len=1024,
    )
    answer = first_turn(worker, prompt, session="mine")
    for number in range(8):
        first_turn(worker, tiny.prompt(900, seed=100 + number), session=f"other{number}")
    restored = worker.generate(next_turn(prompt, answer, seed=2), session="mine")
    assert restored.cached >= whole(len(prompt))
    oracle.assert_same(family, rig.cold(family, next_turn(prompt, answer, seed=2)), restored)
    settle(worker)


def test_a_quiet_engine_knows_in_its_first_step_what_it_restores(rig: Rig, store: Path) -> None:
    """No step goes by that computes nothing because another thread has not answered yet."""
    prompt = tiny.prompt(700, seed=62)
    worker = rig.worker("qwen3", connectors.ours(store))
    worker.hook("count_unanswered")
    worker.generate(prompt, max_tokens=2)
    settle(worker)
    before = worker.hook("unanswered")  # the first step is to say what the workers can do
    worker.ask("reset")
    assert worker.generate(prompt, max_tokens=2).cached == 672
    assert worker.hook("unanswered") == before


def test_a_branch_shares_what_it_has_in_common(rig: Rig, store: Path) -> None:
    """Forks of one stored context restore the shared part and compute their own."""
    trunk = tiny.prompt(900, seed=24)
    worker = rig.worker("qwen3", connectors.ours(store))
    first_turn(worker, trunk)
    worker.shutdown()
    after = rig.worker("qwen3", connectors.ours(store))
    branch = [*trunk[:700], *tiny.prompt(150, seed=25)]
    restored = after.generate(branch)
    assert restored.cached >= whole(700)
    oracle.assert_same("qwen3", rig.cold("qwen3", branch), restored)


def test_concurrent_restores_do_not_mix(rig: Rig, store: Path) -> None:
    prompts = [tiny.prompt(300 + 70 * n, seed=30 + n) for n in range(6)]
    worker = rig.worker("gemma3", connectors.ours(store))
    for prompt in prompts:
        first_turn(worker, prompt)
    worker.shutdown()
    after = rig.worker("gemma3", connectors.ours(store), num_gpu_blocks_override=600)
    answers = after.wait([after.submit(prompt) for prompt in prompts])
    for prompt, restored in zip(prompts, answers, strict=True):
        assert restored.cached >= whole(len(prompt))
        oracle.assert_same("gemma3", rig.cold("gemma3", prompt), restored)
    settle(after)


def test_a_salted_prompt_is_nobody_elses(rig: Rig, store: Path) -> None:
    prompt = tiny.prompt(400, seed=26)
    worker = rig.worker("qwen3", connectors.ours(store))
    first_turn(worker, prompt, salt="alice")
    worker.shutdown()
    after = rig.worker("qwen3", connectors.ours(store))
    assert after.generate(prompt, salt="bob").cached == 0
    after.ask("reset")
    assert after.generate(prompt).cached == 0


def test_other_weights_hit_nothing(rig: Rig, store: Path, tmp_path: Path) -> None:
    """Same shapes, same prompt, other weights under another folder: a miss, never wrong KV."""
    prompt = tiny.prompt(400, seed=27)
    worker = rig.worker("qwen3", connectors.ours(store))
    first_turn(worker, prompt)
    worker.shutdown()
    others = tiny.write_checkpoint("qwen3", tmp_path / "qwen3", seed=1)
    stranger = rig.worker("qwen3", connectors.ours(store), model=str(others))
    assert stranger.generate(prompt).cached == 0


def test_a_store_holds_no_more_than_the_operator_said(rig: Rig, store: Path) -> None:
    """Four prompts of 2 MB each, and room for one: the last comes back."""
    room = 4 * connectors.MIB
    settings = connectors.ours(store, host_cache_bytes=0, store_bytes=room)
    worker = rig.worker("qwen3", settings)
    prompts = [tiny.prompt(1000, seed=80 + n) for n in range(4)]
    for prompt in prompts:
        first_turn(worker, prompt, max_tokens=1)
    assert worker.ask("reset")
    assert worker.generate(prompts[-1], max_tokens=1).cached >= whole(1000)
    settle(worker)
    worker.shutdown()
    tier = DiskTier(store, WallClock())
    kept = sum(used.stored_bytes for used in tier.usage().values())
    tier.close()
    assert room / 4 < kept <= room
