"""Tiny checkpoints of five model families that vLLM runs on a CPU, written as real safetensors.

The same folder loads in vLLM and, where it has an adapter, in the hf engine. Weights are drawn by
the hf engine's `random_model`, so large that a wrong KV moves the logits (vLLM's dummy weights are
so small that overwriting the whole cache changes nothing: measured in the research).

Shapes obey vLLM's CPU kernels: attention heads of 32 or more, MLA with a latent of 512 + 64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ownerserve.engines.hf.model.tiny import random_model
from ownerserve.engines.hf.model.tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE, byte_tokenizer
from tests.support.vllm.seeing import SEEING, write_seeing

WINDOW_TOKENS = 64

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 32_768,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "tie_word_embeddings": False,
}
_GQA: dict[str, Any] = {**_COMMON, "num_key_value_heads": 2, "head_dim": 32}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}


def qwen3(**changes: Any) -> Any:
    """Dense attention, for vLLM's CPU kernels."""
    from transformers import Qwen3Config

    return Qwen3Config(**{**_GQA, "num_hidden_layers": 4, "intermediate_size": 128, **changes})


def _qwen3_wide() -> Any:
    """64 KiB of KV a token at little compute: restores of 256 MB from 4,096 tokens."""
    return qwen3(num_hidden_layers=8, num_key_value_heads=8, num_attention_heads=8, head_dim=128)


def _qwen3_long(**changes: Any) -> Any:
    """2 KiB of KV a token, and positions for 32k of them."""
    return qwen3(max_position_embeddings=65_536, **changes)


def _qwen3_long_thin() -> Any:
    """A quarter of a KiB of KV a token."""
    return _qwen3_long(num_hidden_layers=1, num_key_value_heads=1)


def _qwen3_long_wide() -> Any:
    """8 KiB of KV a token: restores of 268 MB from 32k tokens."""
    return _qwen3_long(num_key_value_heads=4, head_dim=64)


def _gemma3(**changes: Any) -> Any:
    """Four sliding layers and two full ones: three KV groups in vLLM."""
    from transformers import Gemma3TextConfig

    values = {
        **_GQA,
        "num_hidden_layers": 6,
        "intermediate_size": 128,
        "sliding_window_pattern": 3,
        "sliding_window": WINDOW_TOKENS,
        "query_pre_attn_scalar": 32,
    }
    return Gemma3TextConfig(**{**values, **changes})


def _gemma3_costly() -> Any:
    """A prompt that costs time to compute on a CPU: 4 windows of 64, 512 wide."""
    return _gemma3(hidden_size=512, num_attention_heads=8, head_dim=64, intermediate_size=2048)


def _mistral() -> Any:
    """Nothing but sliding layers: no state grows with the context."""
    from transformers import MistralConfig

    return MistralConfig(
        **_GQA, num_hidden_layers=4, intermediate_size=128, sliding_window=WINDOW_TOKENS + 26
    )


def _gptoss(**changes: Any) -> Any:
    from transformers import GptOssConfig

    values = {
        **_GQA,
        "num_hidden_layers": 4,
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW_TOKENS,
        # vLLM's gpt-oss knows YaRN only.
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    }
    return GptOssConfig(**{**values, **changes})


def _gptoss_costly() -> Any:
    """A prompt that costs time to compute on a CPU: 2 windows of 64, 1,024 wide."""
    return _gptoss(hidden_size=1024, num_attention_heads=16, head_dim=64, intermediate_size=1024)


def _llama4() -> Any:
    """Three layers that read their own chunk of the context, and one that reads all of it."""
    from transformers import Llama4TextConfig

    return Llama4TextConfig(
        **_GQA,
        num_hidden_layers=4,
        intermediate_size=64,
        intermediate_size_mlp=128,
        num_local_experts=2,
        num_experts_per_tok=1,
        interleave_moe_layer_step=4,
        attention_chunk_size=WINDOW_TOKENS,
        no_rope_layers=[1, 1, 1, 0],
    )


def _lfm2() -> Any:
    """Short convolutions, whose state vLLM keeps as it keeps recurrent ones."""
    from transformers import Lfm2Config

    width = 128
    return Lfm2Config(
        **{**_GQA, "hidden_size": width},
        num_hidden_layers=4,
        intermediate_size=width,
        block_dim=width,
        block_ff_dim=width,
        block_multiple_of=32,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
        conv_dim=width,
        conv_dim_out=width,
        conv_L_cache=3,
        conv_bias=False,
        layer_types=["conv", "conv", "full_attention", "conv"],
    )


def _qwen3next() -> Any:
    """vLLM pads an attention block to the size of a recurrent state: wide heads keep it short."""
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        **{**_GQA, **_EXPERTS, "num_key_value_heads": 4, "head_dim": 128},
        num_hidden_layers=4,
        intermediate_size=128,
        num_experts=2,  # both, always: in bfloat16 a flipped routing hides what the cache did
        shared_expert_intermediate_size=64,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    )


def _deepseek3() -> Any:
    """MLA. Reference kernels of vLLM's CPU build know one shape: 512 + 64, blocks of 16."""
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        **_COMMON,
        **_EXPERTS,
        num_key_value_heads=4,
        num_hidden_layers=3,
        intermediate_size=128,
        q_lora_rank=32,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=3,  # no experts: a flipped routing hides what the cache did
        topk_method="noaux_tc",
    )


def _ernie() -> Any:
    """Dense: its one layer with experts would be beyond the last. vLLM has a multi-token predictor
    for this family that is of full attention."""
    from transformers import Ernie4_5_MoeConfig

    return Ernie4_5_MoeConfig(
        **_GQA,
        num_hidden_layers=4,
        intermediate_size=128,
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=64,
        moe_num_shared_experts=1,
        moe_layer_start_index=4,
        moe_layer_end_index=4,
    )


FAMILIES: Mapping[str, Callable[[], Any]] = {
    "qwen3": qwen3,
    "qwen3-wide": _qwen3_wide,
    "qwen3-long": _qwen3_long,
    "qwen3-long-thin": _qwen3_long_thin,
    "qwen3-long-wide": _qwen3_long_wide,
    "gemma3": _gemma3,
    "gemma3-costly": _gemma3_costly,
    "mistral": _mistral,
    "llama4": _llama4,
    "lfm2": _lfm2,
    "gptoss": _gptoss,
    "gptoss-costly": _gptoss_costly,
    "qwen3next": _qwen3next,
    "deepseek3": _deepseek3,
    "ernie": _ernie,
}

ENGINE_ARGS: Mapping[str, dict[str, Any]] = {
    # The CPU kernel of the recurrent layers takes bfloat16 only.
    "qwen3next": {
        "dtype": "bfloat16",
        "enable_prefix_caching": True,
        "mamba_cache_mode": "align",
        "mamba_ssm_cache_dtype": "bfloat16",  # else the processor decides, and with it the block
    },
    "llama4": {"max_model_len": 1024},  # its groups have unlike sizes, so the pool holds less
    "lfm2": {"enable_prefix_caching": True, "mamba_cache_mode": "align"},
    # vLLM's reference MLA kernel knows this block size only.
    "deepseek3": {"block_size": 16},
}
"""What a family needs of vLLM beside the harness's defaults."""


IMPORTS: Mapping[str, tuple[str, ...]] = {SEEING: ("tests.support.vllm.without_torchvision",)}
"""Modules that a family's worker imports before its engine is built."""


RUNS_FROM: Mapping[str, tuple[int, ...]] = {"gptoss": (0, 31), "lfm2": (0, 32)}
"""The first vLLM whose CPU build runs a family at all: 0.30's attention sinks take bfloat16 only
(`expected scalar type BFloat16 but found Float`); 0.31's short convolutions are four wide
(`causal_conv1d_weight_pack: support only width of 4`), LFM2's are three."""


def write_checkpoint(family: str, folder: Path, *, seed: int = 0) -> Path:
    """config.json, safetensors and tokenizer of a tiny model, float32; returns the folder."""
    if family == SEEING:
        return write_seeing(folder, seed=seed)
    model = random_model(FAMILIES[family](), seed=seed)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def prompt(tokens: int, *, seed: int) -> list[int]:
    """A prompt of printable bytes, different from its first block on for each seed."""
    import numpy as np

    return np.random.default_rng(seed).integers(0x20, 0x7F, tokens).tolist()
