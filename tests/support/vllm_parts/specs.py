"""vLLM's KV cache groups as plain objects: what `shape` reads of them, without vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
class SlidingWindowMLASpec(SlidingWindowSpec):
    head_size_v: int | None = 0


@dataclass
class ChunkedLocalAttentionSpec(FullAttentionSpec):
    attention_chunk_size: int = 64


@dataclass
class MambaSpec:
    block_size: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    mamba_type: str = "MAMBA2"
    mamba_cache_mode: str = "align"


@dataclass
class CrossAttentionSpec(FullAttentionSpec):
    pass


@dataclass
class Group:
    layer_names: list[str]
    kv_cache_spec: Any


@dataclass
class KVCacheTensor:
    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int = 0


@dataclass
class Config:
    kv_cache_groups: list[Group]
    num_blocks: int = 64
    kv_cache_tensors: list[KVCacheTensor] = field(default_factory=list)


class Cached(NamedTuple):
    """One layer's cache: `held` bytes a block, in a page of `page` bytes."""

    name: str
    held: int
    page: int


def packed_config(groups: list[tuple[list[Cached], Any]], *, blocks: int = 96) -> Config:
    """Groups packed block-outermost, as vLLM does: pages side by side from byte 0 of a block."""
    stride = max(sum(cached.page for cached in cacheds) for cacheds, _ in groups)
    tensors = []
    for cacheds, _ in groups:
        offset = 0
        for cached in cacheds:
            tensors.append(KVCacheTensor([cached.name], cached.page, stride, offset))
            offset += cached.page
    own = [Group([cached.name for cached in cacheds], spec) for cacheds, spec in groups]
    return Config(own, blocks, tensors)


def packed_views(config: Config, held: dict[str, int]) -> dict[str, torch.Tensor]:
    """Every layer's view [blocks, 1, 1, bytes] of one allocation."""
    stride = config.kv_cache_tensors[0].block_stride
    memory = torch.zeros(stride * config.num_blocks, dtype=torch.uint8)
    return {
        name: memory.as_strided(
            (config.num_blocks, 1, 1, held[name]),
            (tensor.block_stride, held[name], held[name], 1),
            tensor.offset,
        )
        for tensor in config.kv_cache_tensors
        for name in tensor.layers
    }


def layers(*numbers: int) -> list[str]:
    return [f"model.layers.{number}.self_attn.attn" for number in numbers]


def dense(*numbers: int, block: int = 32, heads: int = 2, dim: int = 8) -> Group:
    return Group(layers(*numbers), FullAttentionSpec(block, heads, dim))


def sliding(*numbers: int, block: int = 32, window: int = 64) -> Group:
    return Group(layers(*numbers), SlidingWindowSpec(block, 2, 8, sliding_window=window))
