"""vLLM's KV cache groups as plain objects: what `shape` reads of them, without vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class FullAttentionSpec:
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype = torch.float32
    head_size_v: int | None = None


@dataclass
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int = 64


@dataclass
class MLAAttentionSpec(FullAttentionSpec):
    head_size_v: int | None = 0


@dataclass
class ChunkedLocalAttentionSpec(FullAttentionSpec):
    pass


@dataclass
class Group:
    layer_names: list[str]
    kv_cache_spec: Any


@dataclass
class Config:
    kv_cache_groups: list[Group]
    num_blocks: int = 64
    extra: dict[str, Any] = field(default_factory=dict)


def layers(*numbers: int) -> list[str]:
    return [f"model.layers.{number}.self_attn.attn" for number in numbers]


def dense(*numbers: int, block: int = 32, heads: int = 2, dim: int = 8) -> Group:
    return Group(layers(*numbers), FullAttentionSpec(block, heads, dim))


def sliding(*numbers: int, block: int = 32, window: int = 64) -> Group:
    return Group(layers(*numbers), SlidingWindowSpec(block, 2, 8, sliding_window=window))
