"""This module adds what transformers' DeepSeek-V4 lacks for a batch of sequences of different
lengths.

Owns two small pieces of V4 mathematics, taken from transformers' own functions: masking of padded
HCA entries, and the rotation of a new entry to its row's own position. And hands out what an online
HCA tail must know of the compressors: their biases. Transformers 5.19.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.registry.attention.deepseek_v4 import HCA

V4_ATTENTION = "ownerserve_v4_eager"

Rotation = Callable[[Tensor, Tensor], Tensor]
"""Entries [R, 1, dim] and their windows' first positions [R, 1] to rotated entries."""


class Borrowed(msgspec.Struct, frozen=True):
    """`Borrowed` is what compressed layers take from their model. `hca_biases` [m', dim] are, for
    each HCA layer, what its compressor adds to the gates, by place in the window."""

    rotate: Rotation
    hca_biases: tuple[Tensor, ...]


def borrow(model: Any) -> Borrowed:
    """Take what compressed layers need from a DeepSeek-V4 model whose weights are in place."""
    attentions = [layer.self_attn for layer in model.model.layers]
    biases = [a.compressor.position_bias for a in attentions if a.layer_type == HCA]
    return Borrowed(_entry_rotation(model), tuple(biases))


def register_v4_attention() -> str:
    """Make `V4_ATTENTION` known to transformers and return the name to load V4 models with.

    V4's own eager attention lets a decoding query see every HCA entry it is given, which is right
    for one sequence and wrong for the padding of a batch.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(V4_ATTENTION, _v4_attention)
    AttentionMaskInterface.register(V4_ATTENTION, eager_mask)
    return V4_ATTENTION


def _v4_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    hca_padding: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import eager_attention_forward

    if hca_padding is not None and module.layer_type == HCA:
        entries = hca_padding.shape[-1]
        assert attention_mask is not None, "a batch always has a mask"
        attention_mask = torch.cat(
            (attention_mask[..., : attention_mask.shape[-1] - entries], hca_padding), dim=-1
        )
    return eager_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _entry_rotation(model: Any) -> Rotation:
    """Return the RoPE of compressed entries, as the model's compressors apply it.

    They place all rows of a batch at one position. Placed at 0, where RoPE is the identity,
    their entries can be rotated once more, each row's to where it belongs.
    """
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

    rotary = model.model.rotary_emb
    if rotary.compress_attention_scaling != 1.0:
        raise InvalidInput(
            "rope_parameters.compress.attention_factor",
            f"{rotary.compress_attention_scaling} would be applied twice in a batch",
            "use 1.0, as DeepSeek-V4 does",
        )

    def rotate(entries: Tensor, positions: Tensor) -> Tensor:
        cos, sin = rotary(entries, position_ids=positions, layer_type="compress")
        rotated: Tensor = apply_rotary_pos_emb(entries.unsqueeze(1), cos, sin).squeeze(1)
        return rotated

    return rotate
