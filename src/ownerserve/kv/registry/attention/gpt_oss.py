"""gpt-oss has sliding and full layers as `layer_types` lists them. Sinks live in the weights."""

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
    kinds = layer_types(fields, fields.integer("num_hidden_layers"), (FULL, SLIDING))
    tokens = fields.integer("sliding_window", least=2) if SLIDING in kinds else 0
    entry = attention_entry(fields, kv)
    return [
        attention_layer(index, kind, entry, window_tokens=tokens, kv=kv)
        for index, kind in enumerate(kinds)
    ]


FAMILY = Family("gpt_oss", ("gpt_oss",), "bf16", make_layers)
