"""MiMo-V2 has keys wider than values, and its sliding layers have key-value heads of their own.

The releases list sliding layers as 1 in `hybrid_layer_pattern` and give them `swa_*` fields;
transformers writes `layer_types`, and gives them twice the key-value heads.
"""

from __future__ import annotations

from collections.abc import Sequence

from ownerserve.kv.descriptor import KvDescriptor
from ownerserve.kv.registry.entries import heads_entry
from ownerserve.kv.registry.family import FULL, SLIDING, Family, attention_layer
from ownerserve.kv.registry.fields import Fields, agree, flagged_layers, layer_types
from ownerserve.kv.specs import LayerSpec

PATTERN = "hybrid_layer_pattern"


def pattern(fields: Fields) -> tuple[str, ...]:
    """Return each layer's type, on which both spellings must agree."""
    layers = fields.integer("num_hidden_layers")
    found: dict[str, tuple[str, ...]] = {}
    if fields.has("layer_types"):
        found["layer_types"] = layer_types(fields, layers, (FULL, SLIDING))
    if fields.has(PATTERN) or not found:
        found[PATTERN] = flagged_layers(
            fields, layers, PATTERN, "layer_types", flagged=SLIDING, others=FULL
        )
    return agree(fields, found)


def make_layers(fields: Fields, kv: KvDescriptor) -> Sequence[LayerSpec]:
    """Return the layers that the config describes, first to last. Raises InvalidInput naming the
    field.
    """
    heads = fields.integer("num_key_value_heads")
    keys, values = fields.integer("head_dim"), fields.integer("v_head_dim")
    full = heads_entry(heads, keys, kv.kv, value_dim=values)
    sliding = heads_entry(
        fields.integer_or("swa_num_key_value_heads", 2 * heads),
        fields.integer_or("swa_head_dim", keys),
        kv.kv,
        value_dim=fields.integer_or("swa_v_head_dim", values),
    )
    kinds = pattern(fields)
    tokens = 0
    if SLIDING in kinds:
        tokens = fields.integer("sliding_window", "sliding_window_size", least=2)
    return [
        attention_layer(
            index, kind, sliding if kind == SLIDING else full, window_tokens=tokens, kv=kv
        )
        for index, kind in enumerate(kinds)
    ]


FAMILY = Family("mimo_v2", ("mimo_v2_flash", "mimo_v2"), "bf16", make_layers)
