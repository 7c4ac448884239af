"""Gemma-2, Cohere-2, OLMo-3, EXAONE-4 and the like interleave sliding layers with full ones.

`layer_types` says which, when present: transformers writes its class's period beside it, whatever
the list says. Else every n-th is full: n is `sliding_window_pattern` (older Cohere-2:
`layer_switch`), of which EXAONE-4 writes one period out, "LLLG". Gemma-2's releases state neither:
its modeling code knows no period but two.
"""

from __future__ import annotations

from collections.abc import Sequence

from ownerserve.kv.descriptor import KvDescriptor
from ownerserve.kv.registry.family import (
    FULL,
    SLIDING,
    Family,
    attention_entry,
    attention_layer,
)
from ownerserve.kv.registry.fields import Fields, every_nth, layer_types
from ownerserve.kv.specs import LayerSpec

PERIODS = ("sliding_window_pattern", "layer_switch")
GEMMA2_PERIOD = 2
LETTERS = {"L": SLIDING, "G": FULL}


def pattern(fields: Fields) -> tuple[str, ...]:
    """Return each layer's type."""
    layers = fields.integer("num_hidden_layers")
    if fields.has("layer_types"):
        return layer_types(fields, layers, (FULL, SLIDING))
    if fields.text("model_type") == "gemma2":
        return every_nth(layers, GEMMA2_PERIOD, nth=FULL, others=SLIDING)
    spelling = fields.first_of(*PERIODS, "layer_types")
    if isinstance(fields.raw(spelling), str):
        return spelled_out(fields, spelling, layers)
    return every_nth(layers, fields.integer(spelling), nth=FULL, others=SLIDING)


def spelled_out(fields: Fields, spelling: str, layers: int) -> tuple[str, ...]:
    """Return the types that one period of letters gives: L slides, G is full."""
    letters = fields.text(spelling)
    if not letters or set(letters) - set(LETTERS):
        raise fields.unknown(spelling, letters, LETTERS)
    return tuple(LETTERS[letters[index % len(letters)]] for index in range(layers))


def make_layers(fields: Fields, kv: KvDescriptor) -> Sequence[LayerSpec]:
    """Return the layers that the config describes, first to last. Raises InvalidInput naming the
    field.
    """
    kinds = pattern(fields)
    tokens = fields.integer("sliding_window", least=2) if SLIDING in kinds else 0
    entry = attention_entry(fields, kv)
    return [
        attention_layer(index, kind, entry, window_tokens=tokens, kv=kv)
        for index, kind in enumerate(kinds)
    ]


MODEL_TYPES = (
    "afmoe",
    "cohere2",
    "cohere2_moe",
    "cwm",
    "exaone4",
    "exaone_moe",
    "gemma2",
    "granite_swa",
    "granitemoe_swa",
    "olmo3",
    "vaultgemma",
)
FAMILY = Family("interleaved", MODEL_TYPES, "bf16", make_layers)
