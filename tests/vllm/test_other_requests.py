"""Requests whose KV is not the prompt's alone: served as vLLM would, and never stored or restored
under the plain prompt's name. n-gram speculation keeps its KV: the sequence's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ownerserve.engines.hf.model.tiny import random_model
from ownerserve.store.disk.snapshot import StoreSnapshot
from tests.support.vllm import connectors, oracle, tiny
from tests.support.vllm.fleet import vllm_version
from tests.support.vllm.rig import Rig, settle

pytestmark = pytest.mark.vllm

B = 32
RANK = 4
NGRAM = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 2,
    }
}


def write_adapter(folder: Path) -> Path:
    """A LoRA adapter of the tiny Qwen3's queries and values, large enough to change answers."""
    weights = random_model(tiny.FAMILIES["qwen3"](), seed=0).state_dict()
    dice = torch.Generator().manual_seed(5)
    adapter = {}
    for name, weight in weights.items():
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            out, into = weight.shape
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            adapter[f"{stem}.lora_A.weight"] = torch.randn(RANK, into, generator=dice)
            adapter[f"{stem}.lora_B.weight"] = torch.randn(out, RANK, generator=dice) / 8
    folder.mkdir()
    save_file(adapter, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "lora_alpha": 4,'
        f' "r": {RANK}, "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": ""}}'
    )
    return folder


def test_a_real_request_of_each_kind_is_bypassed_by_name(rig: Rig) -> None:
    """Built with vLLM's own classes, of the version under test."""
    worker = rig.worker("qwen3", connectors.none())
    reasons = worker.hook("why_bypassed")
    assert reasons.pop("plain") is None
    assert reasons == {kind: kind for kind in reasons}
    assert {"lora", "multimodal", "pooling", "handed_over"} <= reasons.keys()


def test_an_adapters_state_is_nobody_elses(rig: Rig, store: Path, tmp_path: Path) -> None:
    """On an engine with LoRA: its requests are vLLM's alone, the base model's are ours."""
    adapter = str(write_adapter(tmp_path / "adapter"))
    prompt = tiny.prompt(400, seed=91)
    engine: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
    worker = rig.worker("qwen3", connectors.ours(store), **engine)
    with_adapter = worker.generate(prompt, lora=adapter)
    settle(worker)
    assert _records(store) == 0
    assert not oracle.same("qwen3", rig.cold("qwen3", prompt), with_adapter)
    base = worker.generate(prompt)
    assert base.cached == 0
    oracle.assert_same("qwen3", rig.cold("qwen3", prompt), base)
    settle(worker)
    assert worker.hook("connector_status")["bypassed_lora"] == 1
    worker.shutdown()
    after = rig.worker("qwen3", connectors.ours(store), **engine)
    again = after.generate(prompt, lora=adapter)
    assert again.cached == 0
    oracle.assert_same("qwen3", with_adapter, again)
    restored = after.generate(prompt)
    assert restored.cached == 399 // B * B
    oracle.assert_same("qwen3", rig.cold("qwen3", prompt), restored)


@pytest.mark.skipif(
    vllm_version() < (0, 31), reason="vLLM 0.30's rejection sampler needs Triton, on a CPU too"
)
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_drafts_that_were_rejected_are_not_stored(rig: Rig, family: str, store: Path) -> None:
    """n-gram drafts: of five letters every pair stood before, and mostly went on otherwise."""
    prompt = [0x61 + token % 5 for token in tiny.prompt(450, seed=92)]
    worker = rig.worker(family, connectors.ours(store), **NGRAM)
    worker.hook("count_drafts")
    answer = worker.generate(prompt, max_tokens=60)
    drafted = worker.hook("drafts")
    assert drafted["drafted"] > drafted["accepted"]
    oracle.assert_same(family, rig.cold(family, prompt, max_tokens=60), answer)
    settle(worker)
    worker.shutdown()
    after = rig.worker(family, connectors.ours(store), **NGRAM)
    following = [*prompt, *answer.tokens, *tiny.prompt(20, seed=93)]
    restored = after.generate(following)
    assert restored.cached >= 509 // B * B
    oracle.assert_same(family, rig.cold(family, following), restored)


def _records(store: Path) -> int:
    snapshot = StoreSnapshot(store)
    try:
        return sum(1 for _ in snapshot.entries())
    finally:
        snapshot.close()
