"""Qwen3-Next and Qwen3.5 have gated delta-net layers, every `full_attention_interval`-th one
full.
"""

from __future__ import annotations

from collections.abc import Sequence

from ownerserve.kv.descriptor import KvDescriptor
from ownerserve.kv.registry.entries import recurrent_pair
from ownerserve.kv.registry.family import (
    FULL,
    LINEAR,
    Family,
    attention_entry,
    attention_layer,
    recurrent_layer,
    ssm_precision,
)
from ownerserve.kv.registry.fields import Fields, agree, every_nth, layer_types
from ownerserve.kv.specs import LayerSpec, StateSpec

INTERVAL = "full_attention_interval"


def pattern(fields: Fields) -> tuple[str, ...]:
    """Return each layer's type, from `layer_types`, the interval, or both when they agree."""
    layers = fields.integer("num_hidden_layers")
    found: dict[str, tuple[str, ...]] = {}
    if fields.has("layer_types"):
        found["layer_types"] = layer_types(fields, layers, (FULL, LINEAR))
    if fields.has(INTERVAL) or not found:
        period = fields.integer(INTERVAL, "layer_types")
        found[INTERVAL] = every_nth(layers, period, nth=FULL, others=LINEAR)
    return agree(fields, found)


def delta_net(fields: Fields, kv: KvDescriptor) -> tuple[StateSpec, ...]:
    """Return a layer's state: a key-by-value matrix for each value head, and a convolution over q,
    k and v.
    """
    keys = fields.integer("linear_num_key_heads") * fields.integer("linear_key_head_dim")
    values = fields.integer("linear_num_value_heads") * fields.integer("linear_value_head_dim")
    return recurrent_pair(
        values * fields.integer("linear_key_head_dim"),
        2 * keys + values,
        fields.integer("linear_conv_kernel_dim"),
        ssm=ssm_precision(fields, kv, "mamba_ssm_dtype"),
        kv=kv,
    )


def make_layers(fields: Fields, kv: KvDescriptor) -> Sequence[LayerSpec]:
    """Return the layers that the config describes, first to last. Raises InvalidInput naming the
    field.
    """
    entry = attention_entry(fields, kv)
    linear = delta_net(fields, kv)
    return [
        attention_layer(index, kind, entry, window_tokens=0, kv=kv)
        if kind == FULL
        else recurrent_layer(index, linear, entry)
        for index, kind in enumerate(pattern(fields))
    ]


MODEL_TYPES = (
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
)
FAMILY = Family("qwen_next", MODEL_TYPES, "bf16", make_layers)
