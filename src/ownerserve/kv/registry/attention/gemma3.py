"""Gemma-3 has sliding layers, with a full one at every `sliding_window_pattern`-th.

transformers assumes a pattern of 6 when a config has none; we ask for it. It also writes the
pattern it assumed as `_sliding_window_pattern`, beside a `layer_types` that may say otherwise:
that echo is read only where there is nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from ownerserve.kv.descriptor import KvDescriptor
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.registry.family import (
    FULL,
    SLIDING,
    Family,
    attention_entry,
    attention_layer,
)
from ownerserve.kv.registry.fields import Fields, agree, every_nth, layer_types
from ownerserve.kv.specs import LayerSpec

PATTERN, ECHO = "sliding_window_pattern", "_sliding_window_pattern"


def make_layers(fields: Fields, kv: KvDescriptor) -> Sequence[LayerSpec]:
    """Return the layers that the config describes, first to last. Raises InvalidInput naming the
    field.
    """
    layers = fields.integer("num_hidden_layers")
    found: dict[str, tuple[str, ...]] = {}
    if fields.has("layer_types"):
        found["layer_types"] = layer_types(fields, layers, (FULL, SLIDING))
    if not found and not fields.has(PATTERN) and not fields.has(ECHO):
        raise InvalidInput(
            fields.name(PATTERN),
            "is missing, and so is layer_types",
            "add one of them (transformers assumes a pattern of 6)",
        )
    if fields.has(PATTERN) or not found:
        period = fields.integer(PATTERN, ECHO)
        found[PATTERN] = every_nth(layers, period, nth=FULL, others=SLIDING)
    kinds = agree(fields, found)
    tokens = fields.integer("sliding_window", least=2) if SLIDING in kinds else 0
    entry = attention_entry(fields, kv)
    return [
        attention_layer(index, kind, entry, window_tokens=tokens, kv=kv)
        for index, kind in enumerate(kinds)
    ]


FAMILY = Family("gemma3", ("gemma3", "gemma3_text"), "bf16", make_layers)
