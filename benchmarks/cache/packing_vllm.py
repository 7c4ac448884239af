"""What vLLM's own packer makes of a model's layers. Runs in .venv-vllm.

The specs are those that its model code makes on CUDA (models/deepseek_v4, attention layers, GDN);
grouping and bytes are `get_kv_cache_groups` and `_max_memory_usage_bytes_from_groups`, unchanged.
The engine's configuration is stood for by the few fields they read.
"""

from __future__ import annotations

from math import ceil
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.core.kv_cache_utils import (
    _max_memory_usage_bytes_from_groups,
    _pool_bytes_per_block,
    get_kv_cache_groups,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from cache.serve import serve

Specs = dict[str, KVCacheSpec]
Fields = dict[str, Any]

V4_BLOCK, V4_SWA_BLOCK, V4_ALIGN = 256, 64, 576
IN_FLIGHT_TOKENS = 1
"""A decoding request: what chunked prefill reserves for a moment is left out."""


def deepseek_v4(config: Fields) -> Specs:
    """`fp8_ds_mla` with the FP8 indexer."""
    specs: Specs = {}
    for number, ratio in enumerate(config["compress_ratios"][: config["num_hidden_layers"]]):
        specs[f"{number}.swa"] = SlidingWindowMLASpec(
            block_size=V4_SWA_BLOCK,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=config["head_dim"],
            dtype=torch.uint8,
            sliding_window=config["sliding_window"],
            cache_dtype_str="fp8_ds_mla",
            state_content_bytes=584,
            alignment=V4_ALIGN,
            model_version="deepseek_v4",
        )
        if ratio:
            specs[f"{number}.main"] = _v4_main(config["head_dim"], ratio)
            specs[f"{number}.state"] = _v4_state(config["head_dim"], ratio)
        if ratio == 4:
            specs[f"{number}.index"] = _v4_index(config["index_head_dim"], ratio)
            specs[f"{number}.index_state"] = _v4_state(config["index_head_dim"], ratio)
    return specs


def _v4_main(head_dim: int, ratio: int) -> KVCacheSpec:
    return MLAAttentionSpec(
        block_size=V4_BLOCK,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=head_dim,
        dtype=torch.uint8,
        tokens_per_state=ratio,
        cache_dtype_str="fp8_ds_mla",
        alignment=V4_ALIGN,
        model_version="deepseek_v4",
        state_content_bytes=584,
    )


def _v4_index(head_dim: int, ratio: int) -> KVCacheSpec:
    return MLAAttentionSpec(
        block_size=V4_BLOCK,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=head_dim + head_dim // 128 * 4,
        dtype=torch.uint8,
        tokens_per_state=ratio,
        alignment=V4_ALIGN,
    )


def _v4_state(head_dim: int, ratio: int) -> KVCacheSpec:
    overlap = 2 if ratio == 4 else 1
    return SlidingWindowMLASpec(
        block_size=4 if ratio == 4 else 8,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=2 * overlap * head_dim,
        dtype=torch.float32,
        sliding_window=overlap * ratio,
        alignment=V4_ALIGN,
    )


def windowed(config: Fields) -> Specs:
    """gpt-oss, Gemma-3: full and sliding attention layers of one head shape, blocks of 16."""
    shape = {
        "block_size": 16,
        "num_kv_heads": config["num_key_value_heads"],
        "head_size": config["head_dim"],
        "dtype": torch.bfloat16,
    }
    return {
        f"{number}": SlidingWindowSpec(**shape, sliding_window=config["sliding_window"])
        if kind == "sliding_attention"
        else FullAttentionSpec(**shape)
        for number, kind in enumerate(config["layer_types"])
    }


def gated_delta(config: Fields) -> Specs:
    """Qwen3-Next: the attention block is widened until its page holds a layer's state, as
    Platform._align_hybrid_block_size does, and the state is padded to that page."""
    heads, size = config["num_key_value_heads"], config["head_dim"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    shapes = (
        (config["linear_conv_kernel_dim"] - 1, 2 * keys + values),
        (
            config["linear_num_value_heads"],
            config["linear_value_head_dim"],
            config["linear_key_head_dim"],
        ),
    )
    dtypes = (torch.bfloat16, torch.float32)
    state = MambaSpec(block_size=16, shapes=shapes, dtypes=dtypes)
    token_bytes = 2 * heads * size * 2
    block = 16 * ceil(state.page_size_bytes / (16 * token_bytes))
    page = block * token_bytes
    specs: Specs = {}
    for number, kind in enumerate(config["layer_types"]):
        specs[f"{number}"] = (
            FullAttentionSpec(
                block_size=block, num_kv_heads=heads, head_size=size, dtype=torch.bfloat16
            )
            if kind == "full_attention"
            else MambaSpec(
                block_size=block,
                shapes=shapes,
                dtypes=dtypes,
                page_size_padded=page,
                mamba_cache_mode="align",
            )
        )
    return specs


FAMILIES = {
    "deepseek_v4": deepseek_v4,
    "gpt_oss": windowed,
    "gemma3_text": windowed,
    "qwen3_next": gated_delta,
}


def pack(config: Fields, contexts: list[int]) -> dict[str, Any]:
    """Bytes a request at each context, by the layout that needs least; and what was chosen."""
    found: dict[str, Any] = {}
    for layout in (KVCacheLayout.LBNHC, KVCacheLayout.BLNHC):
        specs = FAMILIES[config["model_type"]](config)
        engine = _engine(layout)
        try:
            groups = get_kv_cache_groups(engine, specs)
        except (NotImplementedError, ValueError, AssertionError) as error:
            found[layout.name] = {"error": str(error)[:200]}
            continue
        sizes = []
        for context in contexts:
            engine.model_config.max_model_len = context
            sizes.append(_max_memory_usage_bytes_from_groups(engine, groups))
        found[layout.name] = {
            "bytes": sizes,
            "groups": len(groups),
            "block_bytes": _pool_bytes_per_block(engine, groups),
        }
    return found


def _engine(layout: KVCacheLayout) -> Any:
    """The fields of VllmConfig that the packer reads."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            kv_cache_layout=layout.name,
            mamba_cache_mode="align",
            num_gpu_blocks_override=None,
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        model_config=SimpleNamespace(
            max_model_len=0, hf_config=SimpleNamespace(model_type="", architectures=[])
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        max_in_flight_tokens=IN_FLIGHT_TOKENS,
        speculative_config=None,
        num_speculative_tokens=0,
    )


if __name__ == "__main__":
    serve({"pack": pack})
