"""Phi-4-flash (SambaY) computes state in its first half and one layer more; the rest reads it.

    layer   0 2 .. N/2    Mamba-1           N/2+2 ..   even: gates over layer N/2's output, no state
            1 3 .. N/2-1  sliding window               odd: reads the keys and values of N/2+1
            N/2+1         full attention

The releases leave the Mamba dimensions to the modeling code: state 16, convolution 4, expansion 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from ownerserve.kv.descriptor import KvDescriptor
from ownerserve.kv.registry.entries import recurrent_pair
from ownerserve.kv.registry.family import (
    FULL,
    SLIDING,
    Family,
    attention_entry,
    attention_layer,
    recurrent_layer,
    ssm_precision,
)
from ownerserve.kv.registry.fields import Fields
from ownerserve.kv.specs import LayerSpec

GATED, CROSS = "gated_memory", "cross_attention"
STATE, KERNEL, EXPANSION = 16, 4, 2
PERIOD = 2
LAYERS_UNIT = 4


def window_tokens(fields: Fields) -> int:
    """Return `sliding_window`: a number, or one a layer with null where none slides."""
    value = fields.raw("sliding_window")
    if not isinstance(value, list):
        return fields.integer("sliding_window", least=2)
    lengths = {length for length in value if length is not None}
    length = next(iter(lengths), None)
    if len(lengths) != 1 or not isinstance(length, int):
        raise fields.unknown("sliding_window", value, ("one length for all sliding layers",))
    return length


def make_layers(fields: Fields, kv: KvDescriptor) -> Sequence[LayerSpec]:
    """Return the layers that the config describes, first to last. Raises InvalidInput naming the
    field.
    """
    layers = fields.integer("num_hidden_layers")
    if layers % LAYERS_UNIT:
        raise fields.unknown("num_hidden_layers", layers, ("a multiple of 4",))
    if (period := fields.integer("mb_per_layer")) != PERIOD:
        raise fields.unknown("mb_per_layer", period, (str(PERIOD),))
    entry, tokens = attention_entry(fields, kv), window_tokens(fields)
    inner = fields.integer_or("mamba_expand", EXPANSION) * fields.integer("hidden_size")
    mamba = recurrent_pair(
        inner * fields.integer_or("mamba_d_state", STATE),
        inner,
        fields.integer_or("mamba_d_conv", KERNEL, least=2),
        ssm=ssm_precision(fields, kv),
        kv=kv,
    )
    half = layers // 2

    def layer(index: int) -> LayerSpec:
        if index > half + 1:
            source, kind = (half + 1, CROSS) if index % PERIOD else (None, GATED)
            dense_bytes = entry.payload_bytes if source else 0
            return LayerSpec(index, kind, (), dense_bytes, kv_source=source)
        if index % PERIOD == 0:
            return recurrent_layer(index, mamba, entry)
        kind = FULL if index > half else SLIDING
        return attention_layer(index, kind, entry, window_tokens=tokens, kv=kv)

    return [layer(index) for index in range(layers)]


FAMILY = Family("phi4flash", ("phi4flash",), "bf16", make_layers)
