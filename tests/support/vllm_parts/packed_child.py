"""Runs in vLLM's environment: DeepSeek's specs by vLLM's own layers, packed and allocated by vLLM's
own functions, on the CPU or PACKED_DEVICE; then the scenarios of `packed_play` over them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.models.deepseek_v4.attention import DeepseekV4Attention, DeepseekV4IndexerCache
from vllm.models.deepseek_v4.compressor import CompressorStateCache
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
)
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.worker.utils import allocate_kv_cache

from ownerserve.engines.vllm.layout.shape import describe
from tests.support.vllm_parts import packed_play
from tests.support.vllm_parts.packed_play import Pool

HEAD, INDEX_HEAD = 512, 128
RATIOS = (1, 4, 128, 4, 128, 1)
POOL_BYTES = 24 << 20
DEVICE = torch.device(os.environ.get("PACKED_DEVICE", "cpu"))


def v4_specs(config: VllmConfig, dtype: str) -> dict[str, Any]:
    """What a V4 model's layers ask for, in the order in which they are made."""
    cache = config.cache_config
    cache.cache_dtype = dtype
    is_packed = dtype == "fp8_ds_mla"
    torch_dtype = torch.uint8 if is_packed else torch.bfloat16
    layers: dict[str, AttentionLayerBase] = {}
    specs: dict[str, Any] = {}
    for number, ratio in enumerate(RATIOS):
        at = f"model.layers.{number}.attn"
        main = SimpleNamespace(
            compress_ratio=ratio,
            kv_cache_dtype=dtype,
            kv_cache_torch_dtype=torch_dtype,
            head_dim=HEAD,
        )
        if (spec := DeepseekV4Attention.get_kv_cache_spec(main, config)) is not None:
            specs[at] = spec
        own: dict[str, AttentionLayerBase] = {
            f"{at}.swa_cache": DeepseekV4SWACache(
                HEAD, 128, torch_dtype, f"{at}.swa_cache", cache_config=cache
            )
        }
        if ratio == 4:
            # 128 values, and their scale as four bytes.
            name = f"{at}.indexer.k_cache"
            own[name] = DeepseekV4IndexerCache(
                INDEX_HEAD + 4, torch.uint8, name, cache, compress_ratio=4
            )
            name = f"{at}.indexer.compressor.state_cache"
            own[name] = CompressorStateCache(4 * INDEX_HEAD, torch.float32, 4, name)
        if ratio > 1:
            name = f"{at}.compressor.state_cache"
            wide = (2 if ratio == 4 else 1) * 2 * HEAD
            own[name] = CompressorStateCache(wide, torch.float32, ratio, name)
        layers |= own
        specs |= {name: layer.get_kv_cache_spec(config) for name, layer in own.items()}
    return specs


def v32_specs(config: VllmConfig) -> dict[str, Any]:
    """Latents with scales inside, and an indexer's keys: unlike layers in one group."""
    cache = config.cache_config
    cache.cache_dtype = "fp8_ds_mla"
    specs: dict[str, Any] = {}
    for number in range(3):
        at = f"model.layers.{number}.self_attn"
        specs[f"{at}.attn"] = MLAAttentionSpec(
            block_size=cache.block_size,
            num_kv_heads=1,
            head_size=576,
            dtype=torch.uint8,
            cache_dtype_str="fp8_ds_mla",
            state_content_bytes=656,
        )
        name = f"{at}.indexer.k_cache"
        layer = DeepseekV4IndexerCache(INDEX_HEAD + 4, torch.uint8, name, cache)
        specs[name] = layer.get_kv_cache_spec(config)
    return specs


def play(folder: Path, model: str) -> dict[str, Any]:
    config = VllmConfig()
    with set_current_vllm_config(config):
        config.cache_config.block_size = 64 if model == "v3.2" else 256
        config.cache_config.kv_cache_layout = "LBNHC" if model == "v3.2" else "BLHNC"
        dtypes = {"v4": "fp8_ds_mla", "v4 plain rows": "bfloat16"}
        specs = v32_specs(config) if model == "v3.2" else v4_specs(config, dtypes[model])
        groups = get_kv_cache_groups(config, specs)
        own = get_kv_cache_config_from_groups(config, groups, POOL_BYTES)
        layout = config.cache_config.get_resolved_kv_cache_layout()
        caches = allocate_kv_cache(own, DEVICE, layout)
    pool = Pool(own, caches)
    scheduler = describe(generate_scheduler_kv_cache_config([own]), packed_by="test")
    block = pool.shape.payload.block_tokens
    for position in (block, 3 * block):
        packed_play.comes_back_in_other_blocks(pool, folder / str(position), position)
    packed_play.one_spoilt_byte_shows(pool, 2 * block)
    packed_play.own_hits_stay_as_they_are(pool, 3 * block, block)
    if DEVICE.type == "cuda":
        packed_play.queued_work_comes_first(pool, folder / "queued", 2 * block)
    return {
        "device": DEVICE.type,
        "components": sorted(pool.shape.components),
        "groups": len(own.kv_cache_groups),
        "blocks": own.num_blocks,
        "block_tokens": block,
        "padding": packed_play.padding_is_left_behind(pool, 2 * block),
        "same_for_the_scheduler": scheduler.payload == pool.shape.payload,
    }


if __name__ == "__main__":
    print(json.dumps({model: play(Path(sys.argv[1]) / model, model) for model in sys.argv[2:]}))
