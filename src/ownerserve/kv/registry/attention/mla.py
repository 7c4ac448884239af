"""DeepSeek-V2, V3, R1 and Kimi-K2 have multi-head latent attention: one latent a token and
layer. A layer of LongCat-Flash has two attentions, each with a latent, so it counts as two.
"""

from __future__ import annotations

from collections.abc import Sequence

from ownerserve.kv.descriptor import KvDescriptor
from ownerserve.kv.registry.entries import LatentShape, latent_entry, per_token
from ownerserve.kv.registry.family import Family
from ownerserve.kv.registry.fields import Fields
from ownerserve.kv.specs import Entry, LayerSpec, Precision, Role


def mla_entry(fields: Fields, kv: KvDescriptor) -> Entry:
    """Return the latent's entry: `kv_lora_rank` compressed and `qk_rope_head_dim` rotated
    dimensions.
    """
    shape = LatentShape(
        nope=fields.integer("kv_lora_rank"),
        rope=fields.integer("qk_rope_head_dim", least=0),
        scale_group=128,
        scale_precision=Precision.FP32,
    )
    return latent_entry(shape, kv.kv)


def make_layers(fields: Fields, kv: KvDescriptor) -> Sequence[LayerSpec]:
    """Return the layers that the config describes, first to last. Raises InvalidInput naming the
    field.
    """
    entry = mla_entry(fields, kv)
    states = (per_token(Role.MLA_LATENT, entry, kv),)
    return [
        LayerSpec(index, "mla", states, entry.payload_bytes) for index in range(attentions(fields))
    ]


def attentions(fields: Fields) -> int:
    """Return how many attentions the model has: its layers, or twice LongCat's `num_layers`."""
    if fields.text("model_type") != LONGCAT or not fields.has("num_layers"):
        return fields.integer("num_hidden_layers")
    count = 2 * fields.integer("num_layers")
    if fields.has("num_hidden_layers") and (other := fields.integer("num_hidden_layers")) != count:
        raise fields.contradiction(
            "num_hidden_layers", "num_layers", problem=f"{other} attentions, there {count}"
        )
    return count


LONGCAT = "longcat_flash"
MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", LONGCAT)
FAMILY = Family("mla", MODEL_TYPES, "bf16", make_layers)
