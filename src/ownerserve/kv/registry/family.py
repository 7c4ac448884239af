"""This module states what a family's file provides, and has the attention layers that several
families share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ownerserve.kv.descriptor import KvDescriptor
from ownerserve.kv.registry.entries import heads_entry, per_token, window
from ownerserve.kv.registry.fields import Fields
from ownerserve.kv.specs import Entry, LayerSpec, Precision, Role, Sharding, StateSpec

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


class Family(msgspec.Struct, frozen=True):
    """A family of models says which `model_type`s it reads, which engine descriptor its published
    figures assume, and how it makes layers.
    """

    name: str
    model_types: tuple[str, ...]
    default_kv: str
    layers: Callable[[Fields, KvDescriptor], Sequence[LayerSpec]]


def head_dim(fields: Fields) -> int:
    """Return `head_dim` (early Nemotron-H: `attention_head_dim`), or hidden size over heads: what
    every modeling code without the field does.
    """
    for spelling in ("head_dim", "attention_head_dim"):
        if fields.has(spelling):
            return fields.integer(spelling)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden % heads:
        raise fields.contradiction(
            "hidden_size", "num_attention_heads", problem=f"{hidden} is no multiple of {heads}"
        )
    return hidden // heads


def kv_heads(fields: Fields) -> int:
    """Return `num_key_value_heads`, or all heads when the field is absent (multi-head
    attention).
    """
    if fields.has("num_key_value_heads"):
        return fields.integer("num_key_value_heads")
    return fields.integer("num_attention_heads")


def attention_entry(fields: Fields, kv: KvDescriptor) -> Entry:
    """Return the entry of one token in one layer: its keys and values."""
    return heads_entry(kv_heads(fields), head_dim(fields), kv.kv)


def attention_layer(
    index: int, kind: str, entry: Entry, *, window_tokens: int, kv: KvDescriptor
) -> LayerSpec:
    """Return a layer of keys and values by head: all of them, or those of a window."""
    if kind == SLIDING:
        state = window(entry, window_tokens, kv, sharding=Sharding.BY_HEAD)
    else:
        state = per_token(Role.DENSE, entry, kv)
    return LayerSpec(index, kind, (state,), entry.payload_bytes)


def recurrent_layer(index: int, states: tuple[StateSpec, ...], attention: Entry) -> LayerSpec:
    """Return a layer of recurrent state; `attention` is what it would keep were it attention."""
    return LayerSpec(index, LINEAR, states, attention.payload_bytes)


def ssm_precision(fields: Fields, kv: KvDescriptor, *spellings: str) -> Precision:
    """Return the precision of recurrent state: the engine's, else the config's field, else FP32."""
    if kv.ssm is not None:
        return kv.ssm
    for field in spellings:
        if fields.has(field):
            return _precision_of(fields, field)
    return Precision.FP32


def _precision_of(fields: Fields, field: str) -> Precision:
    names = {
        "float32": Precision.FP32,
        "bfloat16": Precision.BF16,
        "float16": Precision.FP16,
    }
    value = fields.text(field)
    if value not in names:
        raise fields.unknown(field, value, names)
    return names[value]
