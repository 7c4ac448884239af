"""Kimi-Linear has Kimi delta attention, and MLA in the layers between.

`linear_attn_config` counts layers from 1 (`kda_layers`, `full_attn_layers`); transformers writes
`layer_types` and flat `linear_*` fields instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from ownerserve.kv.descriptor import KvDescriptor
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.registry.attention.mla import mla_entry
from ownerserve.kv.registry.entries import per_token, recurrent_pair
from ownerserve.kv.registry.family import (
    FULL,
    LINEAR,
    Family,
    recurrent_layer,
    ssm_precision,
)
from ownerserve.kv.registry.fields import Fields, agree, layer_types
from ownerserve.kv.specs import LayerSpec, Role, StateSpec

NESTED = "linear_attn_config"


def pattern(fields: Fields) -> tuple[str, ...]:
    """Return each layer's type, from the two lists of layer numbers, `layer_types`, or both."""
    layers = fields.integer("num_hidden_layers")
    found: dict[str, tuple[str, ...]] = {}
    if fields.has("layer_types"):
        found["layer_types"] = layer_types(fields, layers, (FULL, LINEAR))
    if fields.has(NESTED) and (fields.nested(NESTED).has("kda_layers") or not found):
        found[NESTED] = _from_numbers(fields.nested(NESTED), layers)
    if not found:
        fields.first_of(NESTED, "layer_types")
    return agree(fields, found)


def _from_numbers(nested: Fields, layers: int) -> tuple[str, ...]:
    full, linear = set(nested.integers("full_attn_layers")), set(nested.integers("kda_layers"))
    expected = set(range(1, layers + 1))
    if full & linear or full | linear != expected:
        wrong = sorted((full & linear) | ((full | linear) ^ expected))
        raise InvalidInput(
            nested.name("kda_layers"),
            f"with full_attn_layers does not name layers {wrong} once",
            f"list each of 1 to {layers} in one of the two (they count from 1)",
        )
    return tuple(FULL if number in full else LINEAR for number in sorted(expected))


def delta_attention(fields: Fields, kv: KvDescriptor) -> tuple[StateSpec, ...]:
    """Return a layer's state: a square matrix for each head, and short convolutions over q, k and
    v.
    """
    if fields.has(NESTED):
        where, names = fields.nested(NESTED), ("head_dim", "num_heads", "short_conv_kernel_size")
    else:
        where = fields
        names = ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
    dims, heads, kernel = (where.integer(name) for name in names)
    return recurrent_pair(
        heads * dims * dims, 3 * heads * dims, kernel, ssm=ssm_precision(fields, kv), kv=kv
    )


def make_layers(fields: Fields, kv: KvDescriptor) -> Sequence[LayerSpec]:
    """Return the layers that the config describes, first to last. Raises InvalidInput naming the
    field.
    """
    kinds = pattern(fields)
    latent = mla_entry(fields, kv)
    linear = delta_attention(fields, kv)
    full = (per_token(Role.MLA_LATENT, latent, kv),)
    return [
        LayerSpec(index, "mla", full, latent.payload_bytes)
        if kind == FULL
        else recurrent_layer(index, linear, latent)
        for index, kind in enumerate(kinds)
    ]


FAMILY = Family("kimi_linear", ("kimi_linear",), "bf16", make_layers)
