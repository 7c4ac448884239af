"""Mistral, Mixtral, Phi-3 and StarCoder-2 slide in every layer when `sliding_window` is a number,
and in none when it is null. `layer_types` (Ministral) decides when present.
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
from ownerserve.kv.registry.fields import Fields, layer_types
from ownerserve.kv.specs import LayerSpec


def make_layers(fields: Fields, kv: KvDescriptor) -> Sequence[LayerSpec]:
    """Return the layers that the config describes, first to last. Raises InvalidInput naming the
    field.
    """
    layers = fields.integer("num_hidden_layers")
    if fields.has("layer_types"):
        kinds = layer_types(fields, layers, (FULL, SLIDING))
    else:
        kinds = (SLIDING if fields.has("sliding_window") else FULL,) * layers
    tokens = fields.integer("sliding_window", least=2) if SLIDING in kinds else 0
    entry = attention_entry(fields, kv)
    return [
        attention_layer(index, kind, entry, window_tokens=tokens, kv=kv)
        for index, kind in enumerate(kinds)
    ]


MODEL_TYPES = ("mistral", "ministral", "ministral3", "mixtral", "phi3", "phimoe", "starcoder2")
FAMILY = Family("mistral", MODEL_TYPES, "bf16", make_layers)
