"""Step-3.5 and 3.7 list full and sliding layers; `attention_other_setting` gives the sliding ones
heads of their own. Entries of `layer_types` beyond the layers belong to draft layers.
"""

from __future__ import annotations

from collections.abc import Sequence

from ownerserve.kv.descriptor import KvDescriptor
from ownerserve.kv.registry.entries import heads_entry
from ownerserve.kv.registry.family import FULL, SLIDING, Family, attention_layer, head_dim
from ownerserve.kv.registry.fields import Fields
from ownerserve.kv.specs import Entry, LayerSpec

HEADS = ("num_attention_groups", "num_key_value_heads")
OTHER = "attention_other_setting"


def pattern(fields: Fields) -> tuple[str, ...]:
    """Return the type of each of the model's own layers."""
    layers = fields.integer("num_hidden_layers")
    drafts = fields.integer_or("num_nextn_predict_layers", 0, least=0)
    types = fields.texts("layer_types")
    if len(types) not in (layers, layers + drafts):
        raise fields.contradiction(
            "layer_types",
            "num_hidden_layers",
            problem=f"{len(types)} entries for {layers} layers and {drafts} draft layers",
        )
    for index, word in enumerate(types):
        if word not in (FULL, SLIDING):
            raise fields.unknown(f"layer_types[{index}]", word, (FULL, SLIDING))
    return types[:layers]


def sliding_entry(fields: Fields, kv: KvDescriptor) -> Entry:
    """Return the entry of one token in a sliding layer."""
    heads, dim = fields.integer(*HEADS), head_dim(fields)
    if fields.has(OTHER):
        other = fields.nested(OTHER)
        heads = other.integer(*HEADS) if any(map(other.has, HEADS)) else heads
        dim = other.integer_or("head_dim", dim)
    return heads_entry(heads, dim, kv.kv)


def make_layers(fields: Fields, kv: KvDescriptor) -> Sequence[LayerSpec]:
    """Return the layers that the config describes, first to last. Raises InvalidInput naming the
    field.
    """
    kinds = pattern(fields)
    full = heads_entry(fields.integer(*HEADS), head_dim(fields), kv.kv)
    sliding = sliding_entry(fields, kv)
    tokens = fields.integer("sliding_window", least=2) if SLIDING in kinds else 0
    return [
        attention_layer(
            index, kind, sliding if kind == SLIDING else full, window_tokens=tokens, kv=kv
        )
        for index, kind in enumerate(kinds)
    ]


FAMILY = Family("step", ("step3p5", "step3p7_text", "step3p7"), "bf16", make_layers)
