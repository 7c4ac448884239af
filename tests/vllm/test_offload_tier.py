"""The adoption path: vLLM's own OffloadingConnector over our store, in place of its `fs` tier."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ownerserve.store.disk.tier import DiskTier
from ownerserve.store.service.runtime import WallClock
from tests.support.children import ROOT
from tests.support.vllm import connectors, oracle, tiny
from tests.support.vllm.fleet import vllm_version
from tests.support.vllm.rig import Rig, settle

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        vllm_version() < (0, 31),
        reason="0.30's OffloadingConnector with a secondary tier does not come to rest here",
    ),
]
TESTED = pytest.mark.skipif(
    vllm_version() < (0, 32), reason="vLLM calls this interface experimental; we follow 0.32's"
)


def as_documented() -> dict[str, Any]:
    """The --kv-transfer-config of docs/vllm.md."""
    text = (ROOT / "docs" / "vllm.md").read_text()
    found = [one for one in re.findall(r"```json\n(.*?)```", text, re.S) if "OwnerServeTier" in one]
    assert len(found) == 1
    config: dict[str, Any] = msgspec.json.decode(found[0])
    return config


def over_our_store(store: Path, weights: str = "") -> dict[str, Any]:
    """The documented configuration, in small, on a spec that takes CPUs (vLLM's refuses them)."""
    config = as_documented()
    extra = config["kv_connector_extra_config"]
    small = connectors.offloading(store, chunk_tokens=128)["kv_transfer_config"]
    assert extra["spec_name"] == "TieringOffloadingSpec", "the class that CpuTieringSpec is made of"
    (tier,) = extra["secondary_tiers"]
    extra |= small["kv_connector_extra_config"]
    extra["secondary_tiers"] = [{**tier, "store": str(store), "weights": weights}]
    return {"kv_transfer_config": config}


def records(store: Path) -> int:
    """How many chunks a closed store holds."""
    tier = DiskTier(store, WallClock())
    try:
        return sum(usage.records for usage in tier.usage().values())
    finally:
        tier.close()


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_what_one_process_offloaded_another_restores(rig: Rig, family: str, store: Path) -> None:
    prompt = tiny.prompt(700, seed=51)
    before = rig.worker(family, over_our_store(store))
    assert before.generate(prompt).cached == 0
    settle(before, blocks_free=False)
    before.shutdown()
    assert records(store) > 0
    after = rig.worker(family, over_our_store(store))
    restored = after.generate(prompt)
    assert restored.cached >= 512
    oracle.assert_same(family, rig.cold(family, prompt), restored)


def test_what_was_damaged_on_disk_is_computed(rig: Rig, store: Path) -> None:
    prompt = tiny.prompt(700, seed=52)
    before = rig.worker("qwen3", over_our_store(store))
    before.generate(prompt)
    settle(before, blocks_free=False)
    before.shutdown()
    for segment in (store / "segments").iterdir():
        spoilt = bytearray(segment.read_bytes())
        for at in range(6000, len(spoilt), 4096):
            spoilt[at] ^= 0xFF
        segment.write_bytes(spoilt)
    after = rig.worker("qwen3", over_our_store(store))
    answer = after.generate(prompt)
    assert answer.cached < 512
    oracle.assert_same("qwen3", rig.cold("qwen3", prompt), answer)
    assert after.generate(prompt).tokens == answer.tokens, "the engine lives on"


def test_other_weights_find_nothing(rig: Rig, store: Path) -> None:
    prompt = tiny.prompt(700, seed=53)
    before = rig.worker("qwen3", over_our_store(store, weights="revision 1"))
    before.generate(prompt)
    settle(before, blocks_free=False)
    before.shutdown()
    after = rig.worker("qwen3", over_our_store(store, weights="revision 2"))
    assert after.generate(prompt).cached == 0


@TESTED
def test_a_prompt_that_nobody_continues_does_not_push_out_a_session(rig: Rig) -> None:
    """Our order for vLLM's host memory beside its own, which is the control."""
    worker = rig.worker("qwen3", connectors.none())
    ours = worker.hook("play_policy", ours="SessionPolicy")
    assert ours == {"session": [0, 1, 2, 3], "refused": True}
    assert worker.hook("play_policy", ours="lru")["session"] != [0, 1, 2, 3]


@TESTED
def test_an_engine_serves_with_our_order(rig: Rig, store: Path) -> None:
    """Host memory for 24 chunks of 128 tokens: it evicts, and what it evicted is in the store."""
    arguments = over_our_store(store)
    extra = arguments["kv_transfer_config"]["kv_connector_extra_config"]
    extra["eviction_policy"] = "SessionPolicy"
    extra["cache_policy_module_path"] = "ownerserve.engines.vllm.offload_policy"
    worker = rig.worker("qwen3", arguments)
    chunk_bytes = 128 * worker.hook("fill_kv_bytes")
    worker.shutdown()
    extra["cpu_bytes_to_use"] = 24 * chunk_bytes
    worker = rig.worker("qwen3", arguments)
    prompts = [tiny.prompt(900, seed=541 + n) for n in range(6)]
    for prompt in prompts:
        worker.generate(prompt)
        settle(worker, blocks_free=False)
    worker.ask("reset")
    back = worker.generate(prompts[0])
    assert back.cached >= 768
    oracle.assert_same("qwen3", rig.cold("qwen3", prompts[0]), back)
