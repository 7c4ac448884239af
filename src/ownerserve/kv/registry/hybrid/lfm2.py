"""LFM2 has short convolutions over the hidden channels, with attention at some layers.

A convolution of `conv_L_cache` columns remembers all but the newest. Attention is where
`layer_types` says so, or at `full_attn_idxs`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ownerserve.kv.descriptor import KvDescriptor
from ownerserve.kv.registry.entries import conv_columns
from ownerserve.kv.registry.family import (
    FULL,
    Family,
    attention_entry,
    attention_layer,
)
from ownerserve.kv.registry.fields import Fields, agree, layer_types
from ownerserve.kv.specs import LayerSpec

CONV = "conv"
INDEXES = "full_attn_idxs"


def pattern(fields: Fields) -> tuple[str, ...]:
    """Return each layer's type, on which both spellings must agree."""
    layers = fields.integer("num_hidden_layers")
    found: dict[str, tuple[str, ...]] = {}
    if fields.has("layer_types"):
        found["layer_types"] = layer_types(fields, layers, (FULL, CONV))
    if fields.has(INDEXES) or not found:
        attention = set(fields.integers(INDEXES, "layer_types"))
        if beyond := sorted(index for index in attention if index >= layers):
            raise fields.contradiction(
                INDEXES, "num_hidden_layers", problem=f"{beyond} of {layers} layers"
            )
        found[INDEXES] = tuple(FULL if index in attention else CONV for index in range(layers))
    return agree(fields, found)


def make_layers(fields: Fields, kv: KvDescriptor) -> Sequence[LayerSpec]:
    """Return the layers that the config describes, first to last. Raises InvalidInput naming the
    field.
    """
    entry = attention_entry(fields, kv)
    channels, kernel = fields.integer("hidden_size"), fields.integer("conv_L_cache", least=2)
    states = (conv_columns(channels, kernel, kv),)
    return [
        attention_layer(index, FULL, entry, window_tokens=0, kv=kv)
        if kind == FULL
        else LayerSpec(index, CONV, states, entry.payload_bytes)
        for index, kind in enumerate(pattern(fields))
    ]


FAMILY = Family("lfm2", ("lfm2", "lfm2_moe"), "bf16", make_layers)
