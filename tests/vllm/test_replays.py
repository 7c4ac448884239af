"""Replays: a prompt that shares full attention's KV but no window with what is cached goes on near
its branch, at the price of the tail; the answer is the cold one.

Each test runs a real vLLM with our scheduler. Below: what stands without it, and the controls.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.vllm import connectors, oracle, tiny
from tests.support.vllm.fleet import VllmWorker, vllm_version
from tests.support.vllm.replays import (
    EXACT,
    FAMILIES,
    PROMPT_TOKENS,
    branch,
    hook,
    replaying,
)
from tests.support.vllm.rig import Rig, settle
from tests.support.vllm.wire import Answer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(vllm_version() < (0, 31), reason="vLLM 0.30 has no rewind"),
]

BRANCHES = (1300, 1100, 700)
B = 32


def whole(tokens: int) -> int:
    return tokens // B * B


@pytest.mark.parametrize("family", FAMILIES)
def test_a_branch_goes_on_where_only_full_attention_is_cached(
    rig: Rig, family: str, store: Path
) -> None:
    """vLLM's own hit of these branches is 0: their windows are gone. What a replay writes is hashed
    and stored only where it is right, the prompt's own end among it."""
    worker = rig.worker(family, replaying(store))
    prompt = tiny.prompt(PROMPT_TOKENS, seed=1)
    worker.generate(prompt)
    lengths = hook(worker, "replay_lengths")
    assert lengths["is_on"]
    hook(worker, "watch_replays")
    branches = [branch(prompt, at, seed=at) for at in BRANCHES]
    for number, (at, asked) in enumerate(zip(BRANCHES, branches, strict=True), start=1):
        answer = worker.generate(asked)
        assert answer.cached == whole(whole(at) - lengths["reach"])
        assert worst(rig, family, asked, answer) < EXACT
        assert worker.hook("connector_status")["replays"] == number
    for asked in branches:
        again = worker.generate(asked)
        assert again.cached == whole(len(asked) - 1)
        oracle.assert_same(family, rig.cold(family, asked), again)
    seen = hook(worker, "seen_of_replays")
    assert seen["hashed"] and seen["copied"]
    assert not seen["hashed_wrong"] and not seen["copied_wrong"]
    assert worker.hook("connector_status")["replays"] == len(BRANCHES)
    settle(worker)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_our_scheduler_the_branch_is_computed_whole(
    rig: Rig, family: str, store: Path
) -> None:
    worker = rig.worker(family, connectors.ours(store, checkpoints="zero"))
    prompt = tiny.prompt(PROMPT_TOKENS, seed=1)
    worker.generate(prompt)
    assert worker.generate(branch(prompt, 1100, seed=1100)).cached == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_several_branches_in_one_step_write_nothing_of_each_other(
    rig: Rig, family: str, store: Path
) -> None:
    """One of them computes, in that very step, blocks that another replays over."""
    options = replaying(store, checkpoints="turn-end")  # a lead would serve what replays here
    worker = rig.worker(family, options, max_num_batched_tokens=4096)
    answers = together(worker)
    for asked, answer in answers:
        assert worst(rig, family, asked, answer) < EXACT
    assert worker.hook("connector_status")["replays"] >= 2
    settle(worker)


@pytest.mark.parametrize("control", ["write_what_is_replayed", "replay_half", "pad_by_full_blocks"])
def test_a_control_is_told_from_the_cold_answer(rig: Rig, control: str, store: Path) -> None:
    """Rows that are not kept from being written, half of the tokens, rows found by full blocks:
    each gives other answers."""
    options = replaying(store, checkpoints="turn-end")
    worker = rig.worker("gptoss", options, max_num_batched_tokens=4096)
    worker.generate(tiny.prompt(64, seed=5))
    hook(worker, control)
    answers = together(worker)
    assert worker.hook("connector_status")["replays"] >= 2
    assert max(worst(rig, "gptoss", asked, answer) for asked, answer in answers) > 50 * EXACT


def worst(rig: Rig, family: str, asked: list[int], answer: Answer) -> float:
    """The largest difference of a log probability to a cold engine's answer."""
    judgement = oracle.judge(rig.cold(family, asked), answer)
    assert judgement.compared
    return judgement.worst


def together(worker: VllmWorker) -> list[tuple[list[int], Answer]]:
    """A prompt, then in one step: branches of it, and one prompt that goes on beyond what is cached
    with a branch of that."""
    hook(worker, "hear_all_out")
    prompt = tiny.prompt(PROMPT_TOKENS, seed=1)
    worker.generate(prompt)
    asked = [branch(prompt, at, seed=at) for at in BRANCHES]
    fresh = branch(prompt, 1500, seed=9, added=200)
    asked += [fresh, branch(fresh, 1650, seed=10)]
    ids = worker.submit_all(asked)
    by_id = {answer.id: answer for answer in worker.wait(ids)}
    assert hook(worker, "most_at_once") == len(asked)
    return [(tokens, by_id[id]) for tokens, id in zip(asked, ids, strict=True)]
