"""Granite-4-H has Mamba-2 layers, with attention where `layer_types` says so; each has an MLP."""

from __future__ import annotations

from collections.abc import Sequence

from ownerserve.kv.descriptor import KvDescriptor
from ownerserve.kv.registry.family import (
    FULL,
    LINEAR,
    Family,
    attention_entry,
    attention_layer,
    recurrent_layer,
    ssm_precision,
)
from ownerserve.kv.registry.fields import Fields, agree, layer_types
from ownerserve.kv.registry.hybrid.mamba import read_mamba2
from ownerserve.kv.specs import LayerSpec

WORDS = {"mamba": LINEAR, LINEAR: LINEAR, "attention": FULL, FULL: FULL}
SPELLINGS = ("layer_types", "layers_block_type")


def make_layers(fields: Fields, kv: KvDescriptor) -> Sequence[LayerSpec]:
    """Return the layers that the config describes, first to last. Raises InvalidInput naming the
    field.
    """
    layers = fields.integer("num_hidden_layers")
    fields.first_of(*SPELLINGS)
    kinds = agree(
        fields,
        {
            spelling: tuple(
                WORDS[word] for word in layer_types(fields, layers, WORDS, field=spelling)
            )
            for spelling in SPELLINGS
            if fields.has(spelling)
        },
    )
    entry = attention_entry(fields, kv)
    # Without a Mamba layer (Granite-4 Micro) the fields of one may be absent.
    mamba = read_mamba2(fields).states(kv, ssm_precision(fields, kv)) if LINEAR in kinds else ()
    return [
        attention_layer(index, FULL, entry, window_tokens=0, kv=kv)
        if kind == FULL
        else recurrent_layer(index, mamba, entry)
        for index, kind in enumerate(kinds)
    ]


FAMILY = Family("granite_hybrid", ("granitemoehybrid",), "bf16", make_layers)
