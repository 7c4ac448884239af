"""This module makes entries as engines lay them out, from dimensions and an engine's format.
Arithmetic only.

V4 latent, fp8_ds_mla    | 448 fp8 NoPE | 64 bf16 RoPE | 7 ue8m0 + 1 pad |   584 B
V3.2 latent, fp8_ds_mla  | 512 fp8 NoPE | 64 bf16 RoPE | 4 fp32 scales   |   656 B
"""

from __future__ import annotations

import msgspec

from ownerserve.kv.descriptor import IndexFormat, KvDescriptor, KvFormat
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.specs import (
    Entry,
    Part,
    PerToken,
    Precision,
    Recurrent,
    Role,
    Sharding,
    StateSpec,
    Window,
)


class LatentShape(msgspec.Struct, frozen=True):
    """A latent shape gives the dimensions of a latent shared by all heads: `nope` plain and `rope`
    rotated ones.

    `scale_group` dimensions share a scale of `scale_precision` in the fp8_ds_mla layout, whose
    scale area is filled up to whole 8 bytes.
    """

    nope: int
    rope: int
    scale_group: int
    scale_precision: Precision


def latent_entry(shape: LatentShape, layout: KvFormat) -> Entry:
    """Return the entry of one latent in `layout`."""
    dims = shape.nope + shape.rope
    match layout:
        case KvFormat.FP8_DS_MLA:
            scales = -(-shape.nope // shape.scale_group)
            scale_bytes = scales * shape.scale_precision.bits // 8
            parts = [
                Part("nope", shape.nope, Precision.FP8),
                Part("rope", shape.rope, Precision.BF16),
                Part("scale", scales, shape.scale_precision),
                Part("pad", -scale_bytes % 8, Precision.UE8M0),
            ]
            return Entry(tuple(part for part in parts if part.elements))
        case KvFormat.MXFP8:
            scale = Part("scale", -(-dims // 32), Precision.UE8M0)
            return Entry((Part("latent", dims, Precision.FP8), scale))
        case KvFormat.NVFP4:
            scale = Part("scale", -(-dims // 16), Precision.FP8)
            return Entry((Part("latent", dims, Precision.FP4), scale))
        case _:
            return Entry((Part("latent", dims, Precision(layout)),))


def heads_entry(
    heads: int, head_dim: int, layout: KvFormat, *, value_dim: int | None = None
) -> Entry:
    """Return the entry of keys and values of `heads` heads, values `value_dim` wide (None: as keys
    are). Raises InvalidInput for a layout of latents.
    """
    if layout.latent_only:
        raise InvalidInput(
            "--kv",
            f"{layout} lays out latents; this model keeps keys and values by head",
            "use bf16, fp16, fp32 or fp8",
        )
    precision = Precision(layout)
    keys = Part("keys", heads * head_dim, precision)
    values = Part("values", heads * (value_dim or head_dim), precision)
    return Entry((keys, values))


def index_entry(dim: int, layout: IndexFormat) -> Entry:
    """Return the entry of one indexer key of `dim` dimensions."""
    key = Part("key", dim, Precision(layout))
    match layout:
        case IndexFormat.FP8:
            return Entry((key, Part("scale", 1, Precision.FP32)))
        case IndexFormat.FP4:
            return Entry((key, Part("scale", -(-dim // 32), Precision.UE8M0)))
        case _:
            return Entry((key,))


def per_token(role: Role, entry: Entry, kv: KvDescriptor) -> StateSpec:
    """Return a state of one entry a token; only keys and values by head are sharded."""
    sharding = Sharding.BY_HEAD if role is Role.DENSE else Sharding.REPLICATED
    return StateSpec(role, PerToken(), entry, sharding, kv.align_bytes)


def window(entry: Entry, tokens: int, kv: KvDescriptor, *, sharding: Sharding) -> StateSpec:
    """Return the state of the last `tokens` entries, widened by what the engine speculates."""
    extra_bytes = kv.lookahead_tokens * entry.payload_bytes
    return StateSpec(Role.SWA, Window(tokens), entry, sharding, kv.align_bytes, extra_bytes)


def recurrent_pair(
    state_elements: int, conv_channels: int, conv_kernel: int, *, ssm: Precision, kv: KvDescriptor
) -> tuple[StateSpec, StateSpec]:
    """Return recurrent state, and the k-1 columns that its convolution remembers.

    An engine that speculates keeps one recurrent state for each token it may have to return to,
    and as many more convolution columns.
    """
    state = Entry((Part("state", state_elements, ssm),))
    extra = kv.lookahead_tokens * state.payload_bytes
    return (
        StateSpec(Role.RECURRENT, Recurrent(), state, Sharding.BY_HEAD, extra_bytes=extra),
        conv_columns(conv_channels, conv_kernel, kv),
    )


def conv_columns(channels: int, kernel: int, kv: KvDescriptor) -> StateSpec:
    """Return the columns that a causal convolution remembers: all of its kernel but the newest, and
    one for each token that an engine may have to take back."""
    columns = Entry((Part("columns", channels * (kernel - 1), kv.conv),))
    extra = kv.lookahead_tokens * channels * kv.conv.bits // 8
    return StateSpec(Role.CONV, Recurrent(), columns, Sharding.BY_HEAD, extra_bytes=extra)
