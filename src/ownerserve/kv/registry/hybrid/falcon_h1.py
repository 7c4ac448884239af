"""Falcon-H1 has attention and a Mamba-2 mixer side by side in every layer."""

from __future__ import annotations

from collections.abc import Sequence

from ownerserve.kv.descriptor import KvDescriptor
from ownerserve.kv.registry.entries import per_token
from ownerserve.kv.registry.family import Family, attention_entry, ssm_precision
from ownerserve.kv.registry.fields import Fields
from ownerserve.kv.registry.hybrid.mamba import read_mamba2
from ownerserve.kv.specs import LayerSpec, Role


def make_layers(fields: Fields, kv: KvDescriptor) -> Sequence[LayerSpec]:
    """Return the layers that the config describes, first to last. Raises InvalidInput naming the
    field.
    """
    entry = attention_entry(fields, kv)
    mamba = read_mamba2(fields).states(kv, ssm_precision(fields, kv))
    states = (per_token(Role.DENSE, entry, kv), *mamba)
    return [
        LayerSpec(index, "hybrid", states, entry.payload_bytes)
        for index in range(fields.integer("num_hidden_layers"))
    ]


FAMILY = Family("falcon_h1", ("falcon_h1",), "bf16", make_layers)
