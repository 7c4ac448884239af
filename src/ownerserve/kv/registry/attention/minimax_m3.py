"""MiniMax-M3 has grouped-query attention everywhere; its sparse layers keep one index key a token
too.

Sparse layers are flagged in `sparse_attention_config.sparse_attention_freq`, or named
`minimax_m3_sparse` in transformers' `layer_types`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ownerserve.kv.descriptor import KvDescriptor
from ownerserve.kv.registry.entries import index_entry, per_token
from ownerserve.kv.registry.family import FULL, Family, attention_entry
from ownerserve.kv.registry.fields import Fields, agree, layer_types
from ownerserve.kv.specs import LayerSpec, Role, StateSpec

SPARSE, NESTED, FREQ = "minimax_m3_sparse", "sparse_attention_config", "sparse_attention_freq"


def pattern(fields: Fields) -> tuple[str, ...]:
    """Return each layer's type, on which all spellings present must agree."""
    layers = fields.integer("num_hidden_layers")
    found: dict[str, tuple[str, ...]] = {}
    if fields.has("layer_types"):
        found["layer_types"] = layer_types(fields, layers, (FULL, SPARSE))
    if fields.has(NESTED) and (fields.nested(NESTED).has(FREQ) or not found):
        flags = fields.nested(NESTED).integers(FREQ)
        if len(flags) != layers:
            raise fields.contradiction(
                f"{NESTED}.{FREQ}",
                "num_hidden_layers",
                problem=f"{len(flags)} entries for {layers} layers",
            )
        found[NESTED] = tuple(SPARSE if flag else FULL for flag in flags)
    if not found:
        fields.first_of(NESTED, "layer_types")
    return agree(fields, found)


def index_dims(fields: Fields) -> int:
    """Return the dimensions of an index key, given in the nested object or flat."""
    if fields.has(NESTED) and fields.nested(NESTED).has("sparse_index_dim"):
        return fields.nested(NESTED).integer("sparse_index_dim")
    return fields.integer("index_head_dim")


def make_layers(fields: Fields, kv: KvDescriptor) -> Sequence[LayerSpec]:
    """Return the layers that the config describes, first to last. Raises InvalidInput naming the
    field.
    """
    kinds = pattern(fields)
    entry = attention_entry(fields, kv)
    states: dict[str, tuple[StateSpec, ...]] = {FULL: (per_token(Role.DENSE, entry, kv),)}
    if SPARSE in kinds:
        key = per_token(Role.INDEX, index_entry(index_dims(fields), kv.index), kv)
        states[SPARSE] = (*states[FULL], key)
    return [
        LayerSpec(index, kind, states[kind], sum(s.entry.payload_bytes for s in states[kind]))
        for index, kind in enumerate(kinds)
    ]


MODEL_TYPES = ("minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text")
FAMILY = Family("minimax_m3", MODEL_TYPES, "bf16", make_layers)
