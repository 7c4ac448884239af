"""The harness itself, with no OwnerServe in it: what runs here, and that the oracle can tell."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.vllm import connectors, oracle, tiny
from tests.support.vllm.fleet import WorkerFailed
from tests.support.vllm.rig import Rig, settle

pytestmark = pytest.mark.vllm

GROUPS = {
    "qwen3": ["FullAttentionSpec"],
    "gemma3": ["SlidingWindowSpec", "SlidingWindowSpec", "FullAttentionSpec"],
    "gptoss": ["SlidingWindowSpec", "FullAttentionSpec"],
    "qwen3next": ["MambaSpec", "MambaSpec", "MambaSpec", "FullAttentionSpec"],
    "deepseek3": ["MLAAttentionSpec"],
}


@pytest.mark.parametrize("family", GROUPS)
def test_a_family_runs_and_vllm_groups_its_kv_as_we_think(rig: Rig, family: str) -> None:
    worker = rig.worker(family, connectors.none())
    assert worker.ask("groups") == GROUPS[family]
    prompt = tiny.prompt(200, seed=1)
    oracle.assert_same(family, rig.cold(family, prompt), worker.generate(prompt))


@pytest.mark.parametrize("family", ["gemma3", "qwen3next"])
def test_vllms_own_offloading_restores_after_a_restart(
    rig: Rig, family: str, tmp_path: Path
) -> None:
    prompt = tiny.prompt(500, seed=2)
    first = rig.worker(family, connectors.offloading(tmp_path))
    first.generate(prompt)
    settle(first)
    first.shutdown()
    restored = rig.worker(family, connectors.offloading(tmp_path)).generate(prompt)
    assert restored.cached >= 384
    oracle.assert_same(family, rig.cold(family, prompt), restored)


@pytest.mark.parametrize(
    ("family", "group"), [(f, g) for f in GROUPS for g in range(len(GROUPS[f]))]
)
def test_the_oracle_sees_a_spoilt_group(rig: Rig, family: str, group: int, tmp_path: Path) -> None:
    """The corruption control: overwrite what one KV group restored, and the answers must differ.

    Several prompts, since one that flips its first token shows no more than one position.
    """
    prompts = [tiny.prompt(500, seed=seed) for seed in (3, 4, 5, 6)]
    worker = rig.worker(family, connectors.offloading(tmp_path))
    for prompt in prompts:
        worker.generate(prompt)
    settle(worker)
    worker.ask("reset")
    worker.hook("corrupt_restored", group=group)
    spoilt = [worker.generate(prompt) for prompt in prompts]
    assert all(answer.cached > 0 for answer in spoilt)
    cold = [rig.cold(family, prompt) for prompt in prompts]
    judged = [oracle.judge(one, other) for one, other in zip(cold, spoilt, strict=True)]
    seen = [oracle.same(family, *pair) for pair in zip(cold, spoilt, strict=True)]
    assert not all(seen), judged


def test_a_killed_worker_is_gone_and_its_caller_knows(rig: Rig) -> None:
    worker = rig.worker("qwen3", connectors.none())
    pid = worker.pid
    worker.submit(tiny.prompt(1500, seed=4), max_tokens=400)
    worker.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(WorkerFailed):
        worker.ask("pool")
