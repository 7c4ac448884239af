"""Tensor parallelism over two ranks, on the CPU: every rank keeps its heads, in its own shard."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.vllm import connectors, oracle, tiny
from tests.support.vllm.rig import Rig, settle

pytestmark = pytest.mark.vllm

B = 32


def test_two_ranks_restore_their_shards_or_nothing(rig: Rig, store: Path) -> None:
    """A restart restores on both ranks; when one rank's shard is lost the whole load is a miss."""
    prompt = tiny.prompt(400, seed=121)
    connector = connectors.ours(store, host_cache_bytes=0)
    before = rig.worker("qwen3", connector, tensor_parallel_size=2)
    before.generate(prompt, session="s")
    settle(before)
    before.shutdown()
    shards = sorted(path.name for path in store.glob("shard-*"))
    assert shards == ["shard-0-of-2", "shard-1-of-2"]
    after = rig.worker("qwen3", connector, tensor_parallel_size=2)
    restored = after.generate(prompt)
    assert restored.cached == 399 // B * B
    oracle.assert_same("qwen3", rig.cold("qwen3", prompt), restored)
    settle(after)
    after.ask("reset")
    for segment in (store / "shard-1-of-2" / "segments").iterdir():
        segment.write_bytes(b"")
    computed = after.generate(prompt)
    assert computed.cached == 0
    oracle.assert_same("qwen3", rig.cold("qwen3", prompt), computed)
    settle(after)
    assert after.hook("connector_status")["restore_miss"] == 1


def test_another_number_of_ranks_finds_nothing(rig: Rig, store: Path) -> None:
    prompt = tiny.prompt(400, seed=123)
    for ranks, cached in ((1, 0), (2, 0), (1, 399 // B * B)):
        connector = connectors.ours(store)
        worker = rig.worker("qwen3", connector, tensor_parallel_size=ranks)
        computed = worker.generate(prompt)
        assert computed.cached == cached, ranks
        oracle.assert_same("qwen3", rig.cold("qwen3", prompt), computed)
        settle(worker)
        worker.shutdown()
