"""Jamba has Mamba-1 layers, with attention at every `attn_layer_period`-th from an offset on."""

from __future__ import annotations

from collections.abc import Sequence

from ownerserve.kv.descriptor import KvDescriptor
from ownerserve.kv.registry.entries import recurrent_pair
from ownerserve.kv.registry.family import (
    FULL,
    Family,
    attention_entry,
    attention_layer,
    recurrent_layer,
    ssm_precision,
)
from ownerserve.kv.registry.fields import Fields
from ownerserve.kv.specs import LayerSpec


def make_layers(fields: Fields, kv: KvDescriptor) -> Sequence[LayerSpec]:
    """Return the layers that the config describes, first to last. Raises InvalidInput naming the
    field.
    """
    period = fields.integer("attn_layer_period")
    offset = fields.integer("attn_layer_offset", least=0)
    if offset >= period:
        raise fields.contradiction(
            "attn_layer_offset", "attn_layer_period", problem=f"{offset} is not below {period}"
        )
    entry = attention_entry(fields, kv)
    inner = fields.integer("mamba_expand") * fields.integer("hidden_size")
    mamba = recurrent_pair(
        inner * fields.integer("mamba_d_state"),
        inner,
        fields.integer("mamba_d_conv", least=2),
        ssm=ssm_precision(fields, kv),
        kv=kv,
    )
    return [
        attention_layer(index, FULL, entry, window_tokens=0, kv=kv)
        if index % period == offset
        else recurrent_layer(index, mamba, entry)
        for index in range(fields.integer("num_hidden_layers"))
    ]


FAMILY = Family("jamba", ("jamba",), "bf16", make_layers)
