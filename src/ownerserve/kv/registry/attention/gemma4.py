"""Gemma-4 has sliding and full layers of different head dimensions; the last layers own no keys.

`num_kv_shared_layers` layers at the end read the last owning layer of their own type. With
`attention_k_eq_v` full layers use `num_global_key_value_heads`; values are cached all the same,
since keys are rotated after the projection and values are not.
"""

from __future__ import annotations

from collections.abc import Sequence

from ownerserve.kv.descriptor import KvDescriptor
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.registry.entries import heads_entry
from ownerserve.kv.registry.family import (
    FULL,
    SLIDING,
    Family,
    attention_layer,
    kv_heads,
)
from ownerserve.kv.registry.fields import Fields, by_layer, layer_types
from ownerserve.kv.specs import Entry, LayerSpec


def entries(fields: Fields, kinds: Sequence[str], kv: KvDescriptor) -> tuple[Entry, ...]:
    """Return the entry (keys and values of one token) of each layer.

    transformers writes what differs from the model's own dimensions into `per_layer_config`;
    published configs have `global_head_dim` and `num_global_key_value_heads` for full layers.
    """
    heads, dims = kv_heads(fields), fields.integer("head_dim")
    if fields.has("per_layer_config"):
        overrides = by_layer(fields, "per_layer_config")
        return tuple(
            heads_entry(
                own.integer_or("num_key_value_heads", heads),
                own.integer_or("head_dim", dims),
                kv.kv,
            )
            for own in (overrides.get(index, Fields({})) for index in range(len(kinds)))
        )
    global_heads = heads
    if fields.raw("attention_k_eq_v") and fields.has("num_global_key_value_heads"):
        global_heads = fields.integer("num_global_key_value_heads")
    sliding = heads_entry(heads, dims, kv.kv)
    full = heads_entry(global_heads, fields.integer("global_head_dim"), kv.kv)
    return tuple(full if kind == FULL else sliding for kind in kinds)


def sources(fields: Fields, kinds: Sequence[str]) -> tuple[int | None, ...]:
    """Return for each layer the layer whose keys it reads; None for one that owns its own."""
    shared = fields.integer_or("num_kv_shared_layers", 0, least=0)
    first_shared = len(kinds) - shared
    owner = {kind: index for index, kind in enumerate(kinds[: max(first_shared, 0)])}
    for kind in kinds[max(first_shared, 0) :]:
        if kind not in owner:
            raise fields.contradiction(
                "num_kv_shared_layers",
                "layer_types",
                problem=f"no {kind} layer is left that owns keys",
            )
    return tuple(None if index < first_shared else owner[kind] for index, kind in enumerate(kinds))


def make_layers(fields: Fields, kv: KvDescriptor) -> Sequence[LayerSpec]:
    """Return the layers that the config describes, first to last. Raises InvalidInput naming the
    field.
    """
    kinds = layer_types(fields, fields.integer("num_hidden_layers"), (FULL, SLIDING))
    if kinds[-1] != FULL:
        raise InvalidInput(
            fields.name("layer_types"),
            f"the last layer is {kinds[-1]}",
            "Gemma-4 ends with full_attention; list it so",
        )
    tokens = fields.integer("sliding_window", least=2)
    layers = []
    plan = zip(kinds, entries(fields, kinds, kv), sources(fields, kinds), strict=True)
    for index, (kind, entry, source) in enumerate(plan):
        if source is None:
            layer = attention_layer(index, kind, entry, window_tokens=tokens, kv=kv)
        else:
            layer = LayerSpec(index, kind, (), entry.payload_bytes, kv_source=source)
        layers.append(layer)
    return layers


FAMILY = Family("gemma4", ("gemma4", "gemma4_text"), "bf16", make_layers)
