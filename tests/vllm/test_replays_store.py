"""Replays over full attention's KV that comes from the store: another process, no window kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.vllm import oracle, tiny
from tests.support.vllm.fleet import vllm_version
from tests.support.vllm.replays import EXACT, FAMILIES, PROMPT_TOKENS, branch, hook, replaying
from tests.support.vllm.rig import Rig, settle

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(vllm_version() < (0, 31), reason="vLLM 0.30 has no rewind"),
]

NO_POINTS = {"checkpoints": "zero", "host_cache_bytes": 0, "restore_deadline_s": 60}


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_that_nobody_stored_are_replayed_after_a_restart(
    rig: Rig, family: str, store: Path
) -> None:
    """The last branch finds its records gone in mid-load, and is computed whole."""
    prompt = tiny.prompt(PROMPT_TOKENS, seed=1)
    before = rig.worker(family, replaying(store, **NO_POINTS))
    before.generate(prompt)
    settle(before)
    before.shutdown()
    after = rig.worker(family, replaying(store, **NO_POINTS))
    asked = branch(prompt, 1100, seed=3)
    answer = after.generate(asked)
    judgement = oracle.judge(rig.cold(family, asked), answer)
    assert answer.cached == 1088 - hook(after, "replay_lengths")["reach"]
    assert judgement.compared and judgement.worst < EXACT
    status = after.hook("connector_status")
    assert (status["restore_loaded"], status["replays"]) == (1, 1)
    settle(after)
    assert after.ask("reset")
    after.hook("empty_store")
    asked = branch(prompt, 1300, seed=4)
    answer = after.generate(asked)
    judgement = oracle.judge(rig.cold(family, asked), answer)
    assert answer.cached == 0
    assert judgement.compared and judgement.worst < EXACT
    assert after.hook("connector_status")["restore_miss"] == 1
    settle(after)
