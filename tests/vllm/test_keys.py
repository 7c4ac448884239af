"""A worker over a store whose key it lacks serves without it, says why, and harms no record."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.vllm import connectors, oracle, tiny
from tests.support.vllm.rig import Rig, settle

pytestmark = pytest.mark.vllm

B = 32


@pytest.mark.parametrize("key", ["another", "none"])
def test_without_its_key_nothing_is_restored_and_with_it_all(
    rig: Rig, store: Path, key: str
) -> None:
    prompt = tiny.prompt(400, seed=611)
    worker = rig.worker("qwen3", connectors.ours(store))
    worker.generate(prompt, salt="alice")
    settle(worker)
    worker.shutdown()
    [path] = store.rglob("KEY")
    right = path.read_bytes()
    path.unlink()
    if key == "another":
        path.write_bytes(os.urandom(32))
    worker = rig.worker("qwen3", connectors.ours(store))
    answer = worker.generate(prompt, salt="alice")
    assert answer.cached == 0
    oracle.assert_same("qwen3", rig.cold("qwen3", prompt), answer)
    assert worker.hook("connector_status")["bypassed_model"] >= 1
    worker.shutdown()
    said = "did not seal the tenants' records" if key == "another" else "KEY is missing"
    logs = "".join(log.read_text() for log in rig.folder.glob("worker-*.log"))
    [line] = [line for line in logs.splitlines() if f"restored: key: {path}" in line]
    assert said in line
    path.write_bytes(right)
    after = rig.worker("qwen3", connectors.ours(store))
    again = after.generate(prompt, salt="alice")
    assert again.cached == 399 // B * B
    oracle.assert_same("qwen3", rig.cold("qwen3", prompt), again)
