"""Pipeline parallelism over two stages, on the CPU: every stage keeps its layers, in its own
directory. tests/support/vllm/eager_stages.py makes the buffer between stages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.vllm import connectors, oracle, tiny
from tests.support.vllm.fleet import VllmWorker, vllm_version
from tests.support.vllm.replays import EXACT, PROMPT_TOKENS, branch, hook, replaying
from tests.support.vllm.rig import Rig, settle

pytestmark = pytest.mark.vllm

B = 32
TOKENS = 700
WHOLE = (TOKENS - 1) // B * B
FAMILY = "gemma3"
"""Windows and full attention, of which each stage has both; three KV groups."""
long = pytest.mark.skipif(not os.environ.get("OWNERSERVE_LONG"), reason="long: OWNERSERVE_LONG=1")


def staged(rig: Rig, connector: dict[str, Any], **more: Any) -> VllmWorker:
    return rig.worker(
        FAMILY,
        connector,
        worker_extension_cls="tests.support.vllm.eager_stages.EagerStages",
        pipeline_parallel_size=2,
        **more,
    )


def test_two_stages_restore_their_layers_or_nothing(rig: Rig, store: Path) -> None:
    """Two lives of one rank stand around two lives of two stages, over one store: each finds what
    its own kind has left, exactly, and nothing of the other's. When one stage has lost its layers
    the whole load is a miss."""
    prompt = tiny.prompt(TOKENS, seed=131)
    connector = connectors.ours(store, host_cache_bytes=0)

    def checked(worker: VllmWorker, cached: int) -> None:
        answer = worker.generate(prompt, session="s")
        assert answer.cached == cached
        oracle.assert_same(FAMILY, rig.cold(FAMILY, prompt), answer)
        settle(worker)

    alone = rig.worker(FAMILY, connector)
    checked(alone, 0)
    alone.shutdown()

    # In three steps, of which two are under way at once.
    before = staged(rig, connector, max_num_batched_tokens=256)
    checked(before, 0)
    told = before.hook("connector_status")
    assert told["save_kept"] > 0
    assert told.get("save_not_kept", 0) == 0
    # Four sliding layers and two full ones: each stage has half of them.
    assert told["stored_by:stage-0-of-2"] == told["stored_by:stage-1-of-2"] > 0
    before.shutdown()
    assert {path.name for path in store.glob("stage-*")} == {"stage-0-of-2", "stage-1-of-2"}
    assert "what 1 pipeline stages of 1 tensor-parallel ranks have stored" in before.log.read_text()

    after = staged(rig, connector)
    checked(after, WHOLE)
    after.ask("reset")
    for segment in (store / "stage-1-of-2" / "segments").iterdir():
        segment.write_bytes(b"")
    checked(after, 0)
    assert after.hook("connector_status")["restore_miss"] == 1
    after.shutdown()

    again = rig.worker(FAMILY, connector)
    checked(again, WHOLE)
    assert "what 2 pipeline stages of 1 tensor-parallel ranks have stored" in again.log.read_text()


@long
def test_stages_of_two_ranks_each_restore(rig: Rig, store: Path) -> None:
    prompt = tiny.prompt(TOKENS, seed=132)
    connector = connectors.ours(store, host_cache_bytes=0)
    for cached in (0, WHOLE):
        worker = staged(rig, connector, tensor_parallel_size=2)
        answer = worker.generate(prompt)
        assert answer.cached == cached
        oracle.assert_same(FAMILY, rig.cold(FAMILY, prompt), answer)
        settle(worker)
        worker.shutdown()
    found = {str(path.relative_to(store)) for path in store.glob("stage-*/shard-*")}
    assert found == {f"stage-{at}-of-2/shard-{rank}-of-2" for at in (0, 1) for rank in (0, 1)}


@long
@pytest.mark.skipif(vllm_version() < (0, 31), reason="vLLM 0.30 has no rewind")
def test_a_branch_is_replayed_on_both_stages(rig: Rig, store: Path) -> None:
    """As many tokens as on one stage: the windows of both are counted. Each stage keeps its rows of
    full attention from being written."""
    prompt = tiny.prompt(PROMPT_TOKENS, seed=135)
    worker = staged(rig, replaying(store))
    worker.generate(prompt)
    settle(worker)
    lengths = hook(worker, "replay_lengths")
    assert lengths["is_on"]
    asked = branch(prompt, 1100, seed=1100)
    answer = worker.generate(asked)
    assert answer.cached == (1100 // B * B - lengths["reach"]) // B * B
    judged = oracle.judge(rig.cold(FAMILY, asked), answer)
    assert judged.compared
    assert judged.worst < EXACT
    again = worker.generate(prompt)
    oracle.assert_same(FAMILY, rig.cold(FAMILY, prompt), again)
    assert again.cached == (PROMPT_TOKENS - 1) // B * B


@long
def test_a_stage_without_some_state_is_bypassed(rig: Rig, store: Path) -> None:
    """The last stage has one layer, of full attention: the scheduler, which knows the first stage,
    hears of it with the first step, whose turn is bypassed like those that come."""
    prompts = [tiny.prompt(400, seed=seed) for seed in (133, 134)]
    worker = staged(rig, connectors.ours(store), env={"VLLM_PP_LAYER_PARTITION": "5,1"})
    for prompt in prompts:
        answer = worker.generate(prompt)
        oracle.assert_same(FAMILY, rig.cold(FAMILY, prompt), answer)
        settle(worker)
    told = worker.hook("connector_status")
    assert told["bypassed_model"] == 2
    assert told.get("save_kept", 0) == 0
    assert "a pipeline stage has no layer with swa" in worker.log.read_text()
