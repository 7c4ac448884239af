"""What vLLM keeps, held against what the registry says of the model."""

from __future__ import annotations

from typing import Any

import pytest

from ownerserve.engines.vllm.layout.shape import NotServed, describe
from ownerserve.kv.registry import build_spec
from ownerserve.kv.specs import ModelSpec
from tests.support.vllm_parts import specs

pytestmark = pytest.mark.engine

W = 64


def known(*types: str, window: int = W) -> ModelSpec:
    """gpt-oss with these layers: S slides, F is full."""
    names = {"S": "sliding_attention", "F": "full_attention"}
    return build_spec(
        {
            "model_type": "gpt_oss",
            "num_hidden_layers": len(types),
            "layer_types": [names[kind] for kind in types],
            "sliding_window": window,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "hidden_size": 32,
        }
    )


CONFIG = specs.Config([specs.sliding(0, 2, window=W), specs.dense(1, 3)])


def test_what_agrees_bears_the_name_that_vllms_specs_give_it() -> None:
    shape = describe(CONFIG, model=known("S", "F", "S", "F"))
    assert shape == describe(CONFIG)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(known("S", "F", "S", "F", window=W // 2), id="a shorter window"),
        pytest.param(known("S", "S", "S", "S"), id="windows, where vLLM keeps every token"),
        pytest.param(known("S", "F"), id="layers of a draft beside it"),
    ],
)
def test_more_than_is_needed_is_served(model: ModelSpec) -> None:
    assert describe(CONFIG, model=model) == describe(CONFIG)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            known("F", "F", "S", "F"),
            "layers.0.self_attn.attn keeps swa; the model's spec has dense",
        ),
        (known("S", "F", "S", "F", window=2 * W), "layers.0.self_attn.attn keeps swa"),
    ],
)
def test_less_than_is_needed_is_not_served(model: ModelSpec, reason: str) -> None:
    with pytest.raises(NotServed, match=reason):
        describe(CONFIG, model=model)


def test_attention_where_the_model_keeps_recurrent_state_is_not_served() -> None:
    recurrent: dict[str, Any] = {
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_num_value_heads": 2,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
    }
    model = build_spec(
        {
            "model_type": "qwen3_next",
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            **recurrent,
        }
    )
    with pytest.raises(NotServed, match="keeps dense; the model's spec has recurrent, conv"):
        describe(specs.Config([specs.dense(0, 1)]), model=model)


def test_bytes_that_vllm_alone_understands_are_its_own_business() -> None:
    """fp8 with scales inside of a page: kept whole, whatever kind of layer it is."""
    spec = specs.FullAttentionSpec(32, 2, 8)
    spec.__dict__["state_content_bytes"] = 512
    cached = specs.Cached(specs.layers(0)[0], 1024, 1024)
    config = specs.packed_config([([cached], spec)])
    assert describe(config, model=known("S")).components.keys() == {"pages"}
