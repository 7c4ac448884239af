"""DeepSeek-V4.1 has windows everywhere; its compressed KV is in a few source layers, read by the
others.

    ratio 0              swa
    a KV source          swa + main + index (+ main tail where the ratio is above 1)
    any other layer      swa, and reads the KV source before it

No overlap; index keys are projected from the main entry, so only KV sources keep them and they
need no tail of their own. `index_source_layer_ids` choose entries; the layers after re-use that
choice (V4.1 report; field values as published for V4.1-Flash).
"""

from __future__ import annotations

from collections.abc import Sequence

from ownerserve.kv.descriptor import KvDescriptor
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.registry.attention.deepseek_v4 import Builder, latent_shape
from ownerserve.kv.registry.entries import index_entry
from ownerserve.kv.registry.family import SLIDING, Family
from ownerserve.kv.registry.fields import Fields, ratios_of_layers
from ownerserve.kv.specs import Compressed, LayerSpec, Role, StateSpec

KV_SOURCES, INDEX_SOURCES = "kv_source_layer_ids", "index_source_layer_ids"


def sources(fields: Fields, name: str, ratios: Sequence[int]) -> tuple[int | None, ...]:
    """Return for each layer the nearest source at or before it; None where the ratio is 0."""
    ids = fields.integers(name)
    for source in ids:
        if source >= len(ratios) or ratios[source] == 0:
            raise fields.contradiction(
                name, "compress_ratios", problem=f"layer {source} compresses nothing"
            )
    found: list[int | None] = []
    for index, ratio in enumerate(ratios):
        before = [source for source in ids if source <= index]
        if ratio and not before:
            raise InvalidInput(
                fields.name(name), f"names no source for layer {index}", f"add one up to {index}"
            )
        found.append(max(before) if ratio else None)
    return tuple(found)


def make_layers(fields: Fields, kv: KvDescriptor) -> Sequence[LayerSpec]:
    """Return the layers that the config describes, first to last. Raises InvalidInput naming the
    field.
    """
    ratios = ratios_of_layers(fields, fields.integer("num_hidden_layers"))
    kv_sources = sources(fields, KV_SOURCES, ratios)
    index_sources = sources(fields, INDEX_SOURCES, ratios)
    make = Builder(latent_shape(fields), kv)
    swa = make.swa(fields.integer("sliding_window", least=2))
    index_key = index_entry(fields.integer("index_head_dim"), kv.index)
    layers = []
    for index, ratio in enumerate(ratios):
        source = kv_sources[index]
        if source is not None and ratios[source] != ratio:
            raise fields.contradiction(
                KV_SOURCES,
                "compress_ratios",
                problem=f"layer {index} has ratio {ratio}, its source {source} {ratios[source]}",
            )
        states: tuple[StateSpec, ...] = (swa,)
        if source == index:
            kind = Compressed(ratio)
            states += (
                make.compressed(Role.CSA_MAIN, make.entry, kind),
                make.compressed(Role.CSA_INDEX, index_key, kind),
            )
            if ratio > 1:
                states += (make.tail(Role.CSA_TAIL, make.dims, kind),)
        layers.append(
            LayerSpec(
                index,
                f"ratio_{ratio}" if ratio else SLIDING,
                states,
                make.dense_bytes(states),
                kv_source=None if source == index else source,
                index_source=None if index_sources[index] == index else index_sources[index],
            )
        )
    return layers


MODEL_TYPES = ("deepseek_v41", "deepseek_v41_text")
FAMILY = Family("deepseek_v41", MODEL_TYPES, "v41-fp4", make_layers)
