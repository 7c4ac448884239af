"""A branch off the middle of a longer stored prompt restores in a new process: windows and
recurrent state stand where prompts part, not at their ends alone. vLLM's own scheduler, no
replay."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.vllm import connectors, oracle, tiny
from tests.support.vllm.rig import Rig, settle
from tests.support.vllm.wire import Answer

pytestmark = pytest.mark.vllm

FAMILIES = ("gptoss", "gemma3", "qwen3next", "lfm2")
TRUNK_TOKENS, AT, ADDED = 900, 300, 90
LEAST = AT // 128 * 128
"""The last boundary of the coarsest of these families before the branch."""


def branch(seed: int, *, trunk: int = TRUNK_TOKENS, at: int = AT) -> list[int]:
    return [*tiny.prompt(trunk, seed=1)[:at], *tiny.prompt(ADDED, seed=seed)]


def leave(rig: Rig, family: str, store: Path, *prompts: list[int], **extra: object) -> Answer:
    """What a process answers to the last of these, each asked with nothing but the store; then it
    ends."""
    worker = rig.worker(family, connectors.ours(store, **extra))
    for prompt in prompts:
        worker.ask("reset")
        answer = worker.generate(prompt)
        settle(worker)
    worker.shutdown()
    return answer


@pytest.mark.parametrize("family", FAMILIES)
def test_the_second_branch_off_a_stored_prompt_restores(
    rig: Rig, family: str, store: Path, tmp_path: Path
) -> None:
    """The first one finds where it parts, and leaves a point there: the junction. Short
    convolutions are judged by a first branch: vLLM's CPU kernels answer otherwise for every way in
    which a prompt is cut, and it ends a step where the second one restores."""
    trunk = tiny.prompt(TRUNK_TOKENS, seed=1)
    leave(rig, family, store, trunk, branch(2))
    second = rig.worker(family, connectors.ours(store)).generate(branch(3))
    assert second.cached >= LEAST
    if family == "lfm2":
        truth = leave(rig, family, tmp_path / "other", trunk, branch(3))
        assert truth.cached == 0
        assert oracle.judge(truth, second).worst <= oracle.TOLERANCE
    else:
        oracle.assert_same(family, rig.cold(family, branch(3)), second)


@pytest.mark.parametrize("family", ["gptoss", "gemma3"])
def test_any_boundary_of_a_prompts_last_tokens_restores(rig: Rig, family: str, store: Path) -> None:
    """The lead of its point, which ends at 480: at 288 all rows are the lead's, at 448 some are the
    point's. Nobody branched there before."""
    leave(rig, family, store, tiny.prompt(500, seed=1))
    after = rig.worker(family, connectors.ours(store))
    for at, boundary in ((300, 288), (460, 448)):
        prompt = branch(at, trunk=500, at=at)
        restored = after.generate(prompt)
        assert restored.cached == boundary
        oracle.assert_same(family, rig.cold(family, prompt), restored)
        after.ask("reset")
    settle(after)


def test_turn_ends_alone_leave_branches_nothing(rig: Rig, store: Path) -> None:
    """The control: what the setting was before."""
    trunk, old = tiny.prompt(TRUNK_TOKENS, seed=1), "turn-end"
    assert leave(rig, "gptoss", store, trunk, branch(2), checkpoints=old).cached == 0
    worker = rig.worker("gptoss", connectors.ours(store, checkpoints=old))
    assert worker.generate(branch(3)).cached == 0
