"""MiniMax-Text-01 and M1 have lightning attention: a key-by-value matrix for each head, and no
convolution. Some layers are full: 1 in `attn_type_list`, or by `layer_types`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ownerserve.kv.descriptor import KvDescriptor
from ownerserve.kv.registry.family import (
    FULL,
    LINEAR,
    Family,
    attention_entry,
    attention_layer,
    head_dim,
    recurrent_layer,
    ssm_precision,
)
from ownerserve.kv.registry.fields import Fields, agree, flagged_layers, layer_types
from ownerserve.kv.specs import Entry, LayerSpec, Part, Recurrent, Role, Sharding, StateSpec

LIST = "attn_type_list"


def pattern(fields: Fields) -> tuple[str, ...]:
    """Return each layer's type, on which both spellings must agree."""
    layers = fields.integer("num_hidden_layers")
    found: dict[str, tuple[str, ...]] = {}
    if fields.has("layer_types"):
        found["layer_types"] = layer_types(fields, layers, (FULL, LINEAR))
    if fields.has(LIST) or not found:
        found[LIST] = flagged_layers(
            fields, layers, LIST, "layer_types", flagged=FULL, others=LINEAR
        )
    return agree(fields, found)


def make_layers(fields: Fields, kv: KvDescriptor) -> Sequence[LayerSpec]:
    """Return the layers that the config describes, first to last. Raises InvalidInput naming the
    field.
    """
    dim = head_dim(fields)
    elements = fields.integer("num_attention_heads") * dim * dim
    state = Entry((Part("state", elements, ssm_precision(fields, kv)),))
    # A lightning layer that speculates keeps one matrix for each token it may return to.
    extra = kv.lookahead_tokens * state.payload_bytes
    lightning = (
        StateSpec(Role.RECURRENT, Recurrent(), state, Sharding.BY_HEAD, extra_bytes=extra),
    )
    entry = attention_entry(fields, kv)
    return [
        attention_layer(index, FULL, entry, window_tokens=0, kv=kv)
        if kind == FULL
        else recurrent_layer(index, lightning, entry)
        for index, kind in enumerate(pattern(fields))
    ]


MODEL_TYPES = ("minimax", "minimax_m1", "minimax_text_01")
FAMILY = Family("minimax_lightning", MODEL_TYPES, "bf16", make_layers)
