"""Llama-4 reads, in layers with RoPE, only its own chunk of `attention_chunk_size` tokens; in
those without, the whole context.

    tokens   0 ........ C ........ 2C .. t      a chunked layer at t reads [floor(t / C) * C, t]

Engines keep a chunked layer's last C rows, whatever the position, and so do we: a window of C
tokens is what a boundary may need at most. `no_rope_layers` is 1 where a layer has RoPE; empty, as
in the releases, the modeling code's rule stands: none at every `no_rope_layer_interval`-th (4).
"""

from __future__ import annotations

from collections.abc import Sequence

from ownerserve.kv.descriptor import KvDescriptor
from ownerserve.kv.registry.entries import window
from ownerserve.kv.registry.family import FULL, Family, attention_entry, attention_layer
from ownerserve.kv.registry.fields import Fields, agree, every_nth, flagged_layers, layer_types
from ownerserve.kv.specs import LayerSpec, Sharding

CHUNKED = "chunked_attention"
NO_ROPE, INTERVAL = "no_rope_layers", "no_rope_layer_interval"
RELEASED_INTERVAL = 4


def pattern(fields: Fields) -> tuple[str, ...]:
    """Return each layer's type, on which all spellings present must agree."""
    layers = fields.integer("num_hidden_layers")
    found: dict[str, tuple[str, ...]] = {}
    if fields.has("layer_types"):
        found["layer_types"] = layer_types(fields, layers, (FULL, CHUNKED))
    if fields.raw(NO_ROPE):
        found[NO_ROPE] = flagged_layers(fields, layers, NO_ROPE, flagged=CHUNKED, others=FULL)
    if not found:
        period = fields.integer_or(INTERVAL, RELEASED_INTERVAL)
        found[INTERVAL] = every_nth(layers, period, nth=FULL, others=CHUNKED)
    return agree(fields, found)


def make_layers(fields: Fields, kv: KvDescriptor) -> Sequence[LayerSpec]:
    """Return the layers that the config describes, first to last. Raises InvalidInput naming the
    field.
    """
    kinds = pattern(fields)
    entry = attention_entry(fields, kv)
    chunk = fields.integer("attention_chunk_size", least=2) if CHUNKED in kinds else 0
    return [
        LayerSpec(
            index,
            CHUNKED,
            (window(entry, chunk, kv, sharding=Sharding.BY_HEAD),),
            entry.payload_bytes,
        )
        if kind == CHUNKED
        else attention_layer(index, FULL, entry, window_tokens=0, kv=kv)
        for index, kind in enumerate(kinds)
    ]


FAMILY = Family("llama4", ("llama4_text",), "bf16", make_layers)
