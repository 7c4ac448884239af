"""Nemotron-H has Mamba-2, attention, MLP and MoE as separate layers; the last two keep nothing.

The pattern is `hybrid_override_pattern` ("M-M*E..."), `layers_block_type` or `layer_types`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ownerserve.kv.descriptor import KvDescriptor
from ownerserve.kv.registry.family import (
    FULL,
    LINEAR,
    Family,
    attention_entry,
    attention_layer,
    recurrent_layer,
    ssm_precision,
)
from ownerserve.kv.registry.fields import Fields, agree, layer_types
from ownerserve.kv.registry.hybrid.mamba import Mamba2
from ownerserve.kv.specs import LayerSpec

LETTERS = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
WORDS = {"mamba": LINEAR, "attention": FULL, **{word: word for word in LETTERS.values()}}
PATTERN = "hybrid_override_pattern"


def pattern(fields: Fields) -> tuple[str, ...]:
    """Return each layer's type, on which all spellings present must agree."""
    found: dict[str, tuple[str, ...]] = {}
    if fields.has(PATTERN):
        letters = fields.text(PATTERN)
        if unknown := sorted(set(letters) - set(LETTERS)):
            raise fields.unknown(PATTERN, "".join(unknown), LETTERS)
        found[PATTERN] = tuple(LETTERS[letter] for letter in letters)
    for spelling in ("layers_block_type", "layer_types"):
        if fields.has(spelling):
            count = len(fields.texts(spelling))
            words = layer_types(fields, count, WORDS, field=spelling)
            found[spelling] = tuple(WORDS[word] for word in words)
    if not found:
        fields.first_of(PATTERN, "layers_block_type", "layer_types")
    lengths = {field: len(kinds) for field, kinds in found.items()}
    if fields.has("num_hidden_layers"):
        lengths["num_hidden_layers"] = fields.integer("num_hidden_layers")
    (first, layers), *others = lengths.items()
    for field, count in others:
        if count != layers:
            raise fields.contradiction(field, first, problem=f"{count} layers, there {layers}")
    return agree(fields, found)


def make_layers(fields: Fields, kv: KvDescriptor) -> Sequence[LayerSpec]:
    """Return the layers that the config describes, first to last. Raises InvalidInput naming the
    field.
    """
    entry = attention_entry(fields, kv)
    mixer = Mamba2(
        heads=fields.integer("mamba_num_heads"),
        head_dim=fields.integer("mamba_head_dim"),
        groups=fields.integer("n_groups", "mamba_n_groups"),
        state=fields.integer("ssm_state_size"),
        conv_kernel=fields.integer("conv_kernel", "mamba_d_conv", least=2),
    )
    mamba = mixer.states(kv, ssm_precision(fields, kv, "mamba_ssm_cache_dtype"))
    layers = []
    for index, kind in enumerate(pattern(fields)):
        if kind == FULL:
            layers.append(attention_layer(index, kind, entry, window_tokens=0, kv=kv))
        elif kind == LINEAR:
            layers.append(recurrent_layer(index, mamba, entry))
        else:
            layers.append(LayerSpec(index, kind, (), dense_bytes=0))
    return layers


FAMILY = Family("nemotron_h", ("nemotron_h",), "bf16", make_layers)
