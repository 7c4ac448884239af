"""Speculation with a model: the target's state is kept and restored as without it, and bears the
same names; what is the drafter's is not kept, and never stands where the target's belongs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.vllm import connectors, drafters, oracle, tiny
from tests.support.vllm.fleet import vllm_version
from tests.support.vllm.rig import Rig, next_turn, settle

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        vllm_version() < (0, 31), reason="vLLM 0.30's rejection sampler needs Triton, on a CPU too"
    ),
]

B = 32
PROMPT, ANSWER, ADDED = 450, 60, 40

Speculation = Callable[[Rig, Path], dict[str, Any]]


def _mtp(rig: Rig, folder: Path) -> dict[str, Any]:
    return drafters.mtp(folder, rig.checkpoint("ernie"), family="ernie") | {"model": str(folder)}


KINDS: dict[str, tuple[str, Speculation]] = {
    "unlike-pages": (
        "qwen3",
        lambda _, at: drafters.model(at, seed=1, num_hidden_layers=2, num_key_value_heads=4),
    ),
    "eagle3": ("qwen3", lambda _, at: drafters.eagle(at, method="eagle3")),
    "mtp": ("ernie", _mtp),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafting_engines_session_comes_back(
    rig: Rig, kind: str, store: Path, tmp_path: Path
) -> None:
    """Also the last block, which vLLM drops of its own hits where EAGLE or MTP draft."""
    family, make = KINDS[kind]
    drafting = make(rig, tmp_path / "drafter")
    prompt = tiny.prompt(PROMPT, seed=192)
    worker = rig.worker(family, connectors.ours(store), **drafting)
    worker.hook("count_drafts")
    answer = worker.generate(prompt, max_tokens=ANSWER, session="s")
    drafted = worker.hook("drafts")
    assert drafted["drafted"] > 0
    oracle.assert_same(family, rig.cold(family, prompt, max_tokens=ANSWER), answer)
    settle(worker)
    worker.shutdown()

    after = rig.worker(family, connectors.ours(store), **drafting)
    after.hook("count_drafts")
    following = next_turn(prompt, answer, seed=193, added=ADDED)
    restored = after.generate(following, max_tokens=ANSWER, session="s")
    assert restored.cached >= (PROMPT + ANSWER - 1) // B * B
    assert after.hook("drafts")["drafted"] > 0
    oracle.assert_same(family, rig.cold(family, following, max_tokens=ANSWER), restored)


def test_a_drafter_that_is_kept_is_as_right_as_before(
    rig: Rig, store: Path, tmp_path: Path
) -> None:
    """Its drafts are all right, since it is the target itself: as long as it knows the prompt."""
    drafting = drafters.model(tmp_path / "drafter")
    prompt = tiny.prompt(PROMPT, seed=198)
    worker = rig.worker("qwen3", connectors.ours(store, drafter="kept"), **drafting)
    answer = worker.generate(prompt, max_tokens=ANSWER, session="s")
    settle(worker)
    worker.shutdown()
    after = rig.worker("qwen3", connectors.ours(store, drafter="kept"), **drafting)
    after.hook("count_drafts")
    following = next_turn(prompt, answer, seed=199, added=ADDED)
    restored = after.generate(following, max_tokens=ANSWER, session="s")
    assert restored.cached >= (PROMPT + ANSWER - 1 - drafters.DRAFTED) // B * B
    oracle.assert_same("qwen3", rig.cold("qwen3", following, max_tokens=ANSWER), restored)
    drafted = after.hook("drafts")
    assert drafted["accepted"] >= 0.95 * drafted["drafted"] > 0


def test_what_a_drafting_engine_stored_is_there_without_its_drafter(
    rig: Rig, store: Path, tmp_path: Path
) -> None:
    """And the other way round: names are the target's."""
    lives = (drafters.model(tmp_path / "drafter"), {}, drafters.eagle(tmp_path / "eagle"))
    tokens, known = tiny.prompt(PROMPT, seed=195), 0
    for number, speculation in enumerate(lives):
        worker = rig.worker("qwen3", connectors.ours(store), **speculation)
        answer = worker.generate(tokens, max_tokens=ANSWER, session="s")
        assert answer.cached >= known // B * B
        oracle.assert_same("qwen3", rig.cold("qwen3", tokens, max_tokens=ANSWER), answer)
        settle(worker)
        worker.shutdown()
        # Tokens of the last step are not counted on: with drafts that were right it has several.
        known = len(tokens) + ANSWER - 1 - drafters.DRAFTED
        tokens = next_turn(tokens, answer, seed=196 + number, added=ADDED)
