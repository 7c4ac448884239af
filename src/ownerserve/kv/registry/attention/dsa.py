"""DeepSeek-V3.2 and GLM-5 have MLA with a sparse-attention indexer (DSA).

An indexer keeps one key a token. A GLM-5 layer may be `shared`: it re-uses the choice of the
`full` layer before it and keeps no keys. That is written in one of three ways: `indexer_types`,
`index_topk_pattern` ("FSSF..."), or `index_topk_freq` with `index_skip_topk_offset` (transformers
5.19, GlmMoeDsaConfig). None of them: every layer has an indexer.
"""

from __future__ import annotations

from collections.abc import Sequence

from ownerserve.kv.descriptor import KvDescriptor
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.registry.attention.mla import mla_entry
from ownerserve.kv.registry.entries import index_entry, per_token
from ownerserve.kv.registry.family import Family
from ownerserve.kv.registry.fields import Fields, agree, layer_types
from ownerserve.kv.specs import LayerSpec, Role

FULL, SHARED = "full", "shared"
PATTERN, FREQ, OFFSET = "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"


def indexers(fields: Fields, layers: int) -> tuple[str, ...]:
    """Return `full` or `shared` for each layer; all spellings present must agree."""
    found: dict[str, tuple[str, ...]] = {}
    if fields.has("indexer_types"):
        found["indexer_types"] = layer_types(fields, layers, (FULL, SHARED), field="indexer_types")
    if fields.has(PATTERN):
        found[PATTERN] = _from_letters(fields, layers)
    elif fields.has(FREQ):
        found[FREQ] = _from_frequency(fields, layers)
    if not found:
        return (FULL,) * layers
    pattern = agree(fields, found)
    if pattern[0] != FULL:
        raise InvalidInput(
            fields.name(next(iter(found))),
            "layer 0 is shared, and no layer stands before it",
            "make layer 0 full",
        )
    return pattern


def _from_letters(fields: Fields, layers: int) -> tuple[str, ...]:
    letters = fields.text(PATTERN)
    if len(letters) != layers or set(letters) - {"F", "S"}:
        raise fields.contradiction(
            PATTERN, "num_hidden_layers", problem=f"{letters!r} is no F or S for {layers} layers"
        )
    return tuple(FULL if letter == "F" else SHARED for letter in letters)


def _from_frequency(fields: Fields, layers: int) -> tuple[str, ...]:
    every = fields.integer(FREQ)
    if every == 1:
        return (FULL,) * layers
    offset = fields.integer(OFFSET, least=0)
    since = (max(index - offset + 1, 0) for index in range(layers))
    return tuple(SHARED if count % every else FULL for count in since)


def make_layers(fields: Fields, kv: KvDescriptor) -> Sequence[LayerSpec]:
    """Return the layers that the config describes, first to last. Raises InvalidInput naming the
    field.
    """
    latent = mla_entry(fields, kv)
    index_key = index_entry(fields.integer("index_head_dim"), kv.index)
    layers = []
    last_full = 0
    for index, indexer in enumerate(indexers(fields, fields.integer("num_hidden_layers"))):
        states = [per_token(Role.MLA_LATENT, latent, kv)]
        if indexer == FULL:
            states.append(per_token(Role.INDEX, index_key, kv))
            last_full = index
        source = None if indexer == FULL else last_full
        dense_bytes = sum(state.entry.payload_bytes for state in states)
        layers.append(
            LayerSpec(index, f"dsa_{indexer}", tuple(states), dense_bytes, index_source=source)
        )
    return layers


FAMILY = Family("dsa", ("deepseek_v32", "glm_moe_dsa"), "fp8_ds_mla", make_layers)
