"""What changes the state that vLLM computes changes its name, so that nothing is found; what does
not change it leaves it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.vllm import connectors, tiny
from tests.support.vllm.fleet import VllmWorker
from tests.support.vllm.rig import Rig, settle

pytestmark = pytest.mark.vllm

FLAGS: dict[str, dict[str, Any]] = {
    "another dtype": {"dtype": "bfloat16"},
    "quantised at start": {"quantization": "fp8_per_tensor", "dtype": "bfloat16"},
    "quantised otherwise": {"quantization": "fp8_per_channel", "dtype": "bfloat16"},
    "a quantised cache": {"kv_cache_dtype": "fp8"},
    "an override": {"hf_overrides": {"rms_norm_eps": 1e-3}},
    "another override": {"hf_overrides": {"rms_norm_eps": 1e-4}},
    "a field of nobody's": {"hf_overrides": {"unheard_of": 2}},
    "an override by a function": {"overriding_function": True},
    "drawn weights": {"load_format": "dummy"},
    "drawn from another seed": {"load_format": "dummy", "seed": 7},
}
FIELDS: dict[str, Any] = {
    "num_experts_per_tok": 1,
    "rms_norm_eps": 1e-3,
    "attn_logit_softcapping": 30.0,
    "rope_theta": 500.0,
    "norm_topk_prob": True,
    "query_pre_attn_scalar": 7,
    "hidden_act": "gelu",
    "unheard_of": {"nested": 1},
}
HARMLESS: dict[str, Any] = {
    "transformers_version": "9.9.9",
    "_name_or_path": "/elsewhere",
    "use_cache": False,
    "initializer_range": 0.5,
}


def edited(model: Path, folder: Path, **fields: Any) -> str:
    """A copy of the checkpoint whose config.json says otherwise."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return str(folder)


def name_of(worker: VllmWorker, model: str, engine_args: dict[str, Any] | None = None) -> str:
    return str(worker.hook("name_of", model=model, engine_args=engine_args or {}))


def test_every_change_makes_another_name(rig: Rig, tmp_path: Path) -> None:
    worker = rig.worker("qwen3", connectors.none())
    model = rig.checkpoint("qwen3")
    plain = edited(model, tmp_path / "plain")
    names = {"unchanged": name_of(worker, plain)}
    names |= {why: name_of(worker, plain, given) for why, given in FLAGS.items()}
    for field, value in FIELDS.items():
        names[field] = name_of(worker, edited(model, tmp_path / field, **{field: value}))
    by_name: dict[str, list[str]] = {}
    for why, name in names.items():
        by_name.setdefault(name, []).append(why)
    assert [alike for alike in by_name.values() if len(alike) > 1] == []
    for field, value in HARMLESS.items():
        again = edited(model, tmp_path / f"again-{field}", **{field: value})
        assert name_of(worker, again) == names["unchanged"], field


def test_an_overridden_model_finds_nothing(rig: Rig, store: Path) -> None:
    """End to end, and both find their own again."""
    prompt = tiny.prompt(400, seed=151)
    for engine_args, cached in (
        ({}, 0),
        ({"hf_overrides": {"rms_norm_eps": 1e-2}}, 0),
        ({}, 384),
        ({"hf_overrides": {"rms_norm_eps": 1e-2}}, 384),
    ):
        worker = rig.worker("qwen3", connectors.ours(store), **engine_args)
        assert worker.generate(prompt).cached == cached
        settle(worker)
        worker.shutdown()
