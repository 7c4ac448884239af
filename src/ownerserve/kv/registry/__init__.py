"""The Attention Spec Registry takes a Hugging Face config.json and an engine's KV descriptor, and
gives the model's state specs.

Owns which fields mean what, one file a family. Must never guess: a field that is missing, or
contradicts another, is an InvalidInput that names it; a layer pattern is read, not assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ownerserve.kv.descriptor import NAMED, KvDescriptor
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.registry import declared
from ownerserve.kv.registry.attention import (
    deepseek_v4,
    deepseek_v41,
    dense,
    dsa,
    gemma3,
    gemma4,
    gpt_oss,
    interleaved,
    llama4,
    mimo,
    minimax_m3,
    mistral,
    mla,
    step,
)
from ownerserve.kv.registry.family import Family
from ownerserve.kv.registry.fields import Fields
from ownerserve.kv.registry.hybrid import (
    bamba,
    falcon_h1,
    granite,
    jamba,
    kimi_linear,
    lfm2,
    minimax,
    nemotron_h,
    phi4flash,
    qwen_next,
)
from ownerserve.kv.specs import ModelSpec

FAMILIES: tuple[Family, ...] = (
    dense.FAMILY,
    mistral.FAMILY,
    gemma3.FAMILY,
    gemma4.FAMILY,
    gpt_oss.FAMILY,
    interleaved.FAMILY,
    llama4.FAMILY,
    mimo.FAMILY,
    step.FAMILY,
    mla.FAMILY,
    dsa.FAMILY,
    deepseek_v4.FAMILY,
    deepseek_v41.FAMILY,
    qwen_next.FAMILY,
    kimi_linear.FAMILY,
    minimax_m3.FAMILY,
    jamba.FAMILY,
    bamba.FAMILY,
    nemotron_h.FAMILY,
    falcon_h1.FAMILY,
    declared.FAMILY,
    granite.FAMILY,
    lfm2.FAMILY,
    minimax.FAMILY,
    phi4flash.FAMILY,
)

BY_MODEL_TYPE = {name: family for family in FAMILIES for name in family.model_types}


def build_spec(config: Mapping[str, Any], kv: KvDescriptor | None = None) -> ModelSpec:
    """Return the state specs of the model that `config` describes.

    Without `kv`, the descriptor that the family's published figures assume. Raises InvalidInput
    naming the field that is missing, unknown or contradictory.
    """
    fields, family = find_family(config)
    descriptor = default_descriptor(config) if kv is None else kv
    layers = tuple(family.layers(fields, descriptor))
    return ModelSpec(
        family=family.name,
        kv_descriptor=descriptor.name,
        layers=layers,
        page_tokens=descriptor.page_tokens,
        draft_layers=fields.integer_or("num_nextn_predict_layers", 0, least=0),
        max_context=_max_context(fields),
    )


def default_descriptor(config: Mapping[str, Any]) -> KvDescriptor:
    """Return the engine descriptor that the published figures of this model's family assume."""
    _, family = find_family(config)
    return NAMED[family.default_kv]


def find_family(config: Mapping[str, Any]) -> tuple[Fields, Family]:
    """Return the family that reads `config`, and its fields (those of the nested text model, if
    any). Raises InvalidInput when no family reads it.
    """
    outer = Fields(config)
    fields = outer.nested("text_config") if outer.has("text_config") else outer
    named_by = fields if fields.has("model_type") else outer
    if not named_by.has("model_type"):
        raise InvalidInput(
            "model_type", "is missing", "pass a model's config.json as it was published"
        )
    model_type = named_by.text("model_type")
    if model_type not in BY_MODEL_TYPE:
        raise InvalidInput(
            named_by.name("model_type"),
            f"{model_type!r} belongs to no family that is known here",
            f"use one of {', '.join(sorted(BY_MODEL_TYPE))}; or declare its layers "
            "(docs/model-state.md)",
        )
    return fields, BY_MODEL_TYPE[model_type]


def _max_context(fields: Fields) -> int | None:
    for field in ("max_position_embeddings", "model_max_length"):
        if fields.has(field):
            return fields.integer(field)
    return None
