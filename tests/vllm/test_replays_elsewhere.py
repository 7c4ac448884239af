"""Replays over two tensor-parallel ranks; and where they are off: another connector beside ours,
vLLM 0.30. Off means that the log says why and that the engine serves and restores as ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.vllm import connectors, oracle, tiny
from tests.support.vllm.fleet import VllmWorker, vllm_version
from tests.support.vllm.replays import (
    EXACT,
    PROMPT_TOKENS,
    SCHEDULERS,
    branch,
    hook,
    replaying,
    replaying_async,
)
from tests.support.vllm.rig import Rig, next_turn, settle

pytestmark = pytest.mark.vllm

B = 32
has_rewind = pytest.mark.skipif(vllm_version() < (0, 31), reason="vLLM 0.30 has no rewind")
has_none = pytest.mark.skipif(vllm_version() >= (0, 31), reason="from 0.31 on there is a rewind")
UNDER_OURS = {"scheduler_cls": f"{SCHEDULERS}.ReplayScheduler"}


@has_rewind
def test_two_ranks_replay_the_same_rows(rig: Rig, store: Path) -> None:
    """Both ranks write no row of a replay: each keeps its heads of the blocks that others read."""
    worker = rig.worker("gptoss", replaying_async(store), tensor_parallel_size=2)
    prompt = tiny.prompt(PROMPT_TOKENS, seed=1)
    worker.generate(prompt)
    lengths = hook(worker, "replay_lengths")
    assert lengths["is_on"]
    asked = [branch(prompt, at, seed=at) for at in (1300, 700)]
    answers = [worker.generate(tokens) for tokens in asked]
    again = worker.generate(next_turn(prompt, answers[0], seed=1))
    assert [answer.cached for answer in answers] == [
        (at // B * B - lengths["reach"]) // B * B for at in (1300, 700)
    ]
    for tokens, answer in zip(asked, answers, strict=True):
        assert_cold(rig, "gptoss", tokens, answer)
    assert_cold(rig, "gptoss", next_turn(prompt, answers[0], seed=1), again)
    assert worker.hook("connector_status")["replays"] == len(asked)
    settle(worker)


@has_rewind
@pytest.mark.parametrize("order", ["ours, offloading", "offloading, ours"])
def test_nothing_is_replayed_beside_another_connector(
    rig: Rig, store: Path, tmp_path: Path, order: str
) -> None:
    """vLLM's offloading names what it saves by the request's hashes and takes it by block ids,
    hashed by the pool or not: it would keep windows that are not right."""
    ours = connectors.ours(store, checkpoints="turn-end")  # a chunk end would serve the branch
    made = {"ours": ours, "offloading": connectors.offloading(tmp_path / "fs")}
    both = connectors.multi(*(made[name] for name in order.split(", ")))
    worker = rig.worker("gptoss", {**both, **UNDER_OURS})
    assert_off(rig, "gptoss", worker, why="another connector stands beside OwnerServeConnector")


@has_none
def test_a_vllm_without_a_rewind_serves_under_our_scheduler(rig: Rig, store: Path) -> None:
    worker = rig.worker("gemma3", replaying(store, checkpoints="turn-end"))
    assert_off(rig, "gemma3", worker, why="this vLLM has other hooks, or none")


def assert_off(rig: Rig, family: str, worker: VllmWorker, *, why: str) -> None:
    """A branch is computed whole; a session goes on from what the store kept of it."""
    prompt = tiny.prompt(700, seed=1)
    answer = worker.generate(prompt, session="s")
    assert f"nothing is replayed: {why}" in worker.log.read_text()
    asked = branch(prompt, 500, seed=2)
    branched = worker.generate(asked)
    assert branched.cached == 0
    assert_cold(rig, family, asked, branched)
    settle(worker)
    assert worker.ask("reset")
    following = next_turn(prompt, answer, seed=3)
    restored = worker.generate(following, session="s")
    assert restored.cached >= 672
    assert_cold(rig, family, following, restored)
    settle(worker)


def assert_cold(rig: Rig, family: str, asked: list[int], answer: Any) -> None:
    """The answer is that of an engine without a cache, far within the oracle's tolerance."""
    judgement = oracle.judge(rig.cold(family, asked), answer)
    assert judgement.compared
    assert judgement.worst < EXACT, (len(asked), answer.cached, judgement)
