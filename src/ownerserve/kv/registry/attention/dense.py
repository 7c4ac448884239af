"""Llama, Qwen2, Qwen3 and the like have dense grouped-query or multi-head attention.

Qwen's `use_sliding_window` off, all layers are full. On, `layer_types` says which are sliding;
without it, those of Qwen2 and Qwen3 from `max_window_layers` on. The MoE models read the same
fields differently from version to version, so there the list is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from ownerserve.kv.descriptor import KvDescriptor
from ownerserve.kv.registry.family import (
    FULL,
    SLIDING,
    Family,
    attention_entry,
    attention_layer,
)
from ownerserve.kv.registry.fields import Fields, agree, layer_types
from ownerserve.kv.specs import LayerSpec

MODEL_TYPES = (
    "llama",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "qwen3_vl_text",
    "qwen3_vl_moe_text",
    "apertus",
    "arcee",
    "cohere",
    "ernie4_5",
    "ernie4_5_moe",
    "gemma",
    "glm",
    "glm4",
    "glm4_moe",
    "granite",
    "granitemoe",
    "granitemoeshared",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "minimax_m2",
    "nemotron",
    "olmo",
    "olmo2",
    "olmoe",
    "phi",
    "seed_oss",
    "smollm3",
    "solar_open",
    "stablelm",
)


SLIDING_BY_DEPTH = ("qwen2", "qwen3")


def pattern(fields: Fields) -> tuple[str, ...]:
    """Return each layer's type, on which all spellings present must agree."""
    layers = fields.integer("num_hidden_layers")
    found: dict[str, tuple[str, ...]] = {}
    if fields.has("layer_types"):
        found["layer_types"] = layer_types(fields, layers, (FULL, SLIDING))
    sliding = bool(fields.raw("use_sliding_window"))
    if sliding and fields.text("model_type") in SLIDING_BY_DEPTH:
        first = fields.integer("max_window_layers", least=0)
        kinds = (FULL if index < first else SLIDING for index in range(layers))
        found["max_window_layers"] = tuple(kinds)
    elif sliding:
        fields.first_of("layer_types")
    elif not found:
        found["num_hidden_layers"] = (FULL,) * layers
    return agree(fields, found)


def make_layers(fields: Fields, kv: KvDescriptor) -> Sequence[LayerSpec]:
    """Return the layers that the config describes, first to last. Raises InvalidInput naming the
    field.
    """
    entry = attention_entry(fields, kv)
    kinds = pattern(fields)
    tokens = fields.integer("sliding_window", least=2) if SLIDING in kinds else 0
    return [
        attention_layer(index, kind, entry, window_tokens=tokens, kv=kv)
        for index, kind in enumerate(kinds)
    ]


FAMILY = Family("dense", MODEL_TYPES, "bf16", make_layers)
