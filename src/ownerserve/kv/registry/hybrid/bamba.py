"""Bamba has Mamba-2 layers, with attention at the layers that `attn_layer_indices` lists."""

from __future__ import annotations

from collections.abc import Sequence

from ownerserve.kv.descriptor import KvDescriptor
from ownerserve.kv.registry.family import (
    FULL,
    Family,
    attention_entry,
    attention_layer,
    recurrent_layer,
    ssm_precision,
)
from ownerserve.kv.registry.fields import Fields
from ownerserve.kv.registry.hybrid.mamba import read_mamba2
from ownerserve.kv.specs import LayerSpec


def make_layers(fields: Fields, kv: KvDescriptor) -> Sequence[LayerSpec]:
    """Return the layers that the config describes, first to last. Raises InvalidInput naming the
    field.
    """
    layers = fields.integer("num_hidden_layers")
    attention = set(fields.integers("attn_layer_indices"))
    if beyond := sorted(index for index in attention if index >= layers):
        raise fields.contradiction(
            "attn_layer_indices", "num_hidden_layers", problem=f"{beyond} of {layers} layers"
        )
    entry = attention_entry(fields, kv)
    mamba = read_mamba2(fields).states(kv, ssm_precision(fields, kv))
    return [
        attention_layer(index, FULL, entry, window_tokens=0, kv=kv)
        if index in attention
        else recurrent_layer(index, mamba, entry)
        for index in range(layers)
    ]


FAMILY = Family("bamba", ("bamba",), "bf16", make_layers)
