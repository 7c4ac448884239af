"""This module makes tiny random models of each family in memory: real architectures, equal for
equal seeds.

Weights are drawn so that state matters: at the usual std of 0.02 a wrong cache hardly moves the
logits. The output rows of all tokens that are not printable ASCII are zero: greedy text is ASCII
and survives the tokenizer's round trip. The end-of-sequence row is among them, so a greedy answer
is as long as was asked for (its logit is 0, the largest of 96 others practically never below).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ownerserve.engines.hf.model.tokenizer import BOS_ID, EOS_ID, PAD_ID, PRINTABLE_IDS, VOCAB_SIZE
from ownerserve.engines.hf.state.v4 import register_v4_attention
from ownerserve.kv.errors import InvalidInput

MAX_POSITIONS = 32_768
WINDOW_TOKENS = 16
CSA_RATE, HCA_RATE = 4, 16

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "tie_word_embeddings": False,
}
_GQA: dict[str, Any] = {**_COMMON, "num_key_value_heads": 2, "head_dim": 16}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}


def v4_config(**changes: Any) -> Any:
    """Return the configuration of DeepSeek-V4 at W 16, rates 4 and 16; `index_topk` covers every
    entry of a full context."""
    from transformers import DeepseekV4Config

    values: dict[str, Any] = {
        **_COMMON,
        **_EXPERTS,
        "num_hidden_layers": 4,
        "layer_types": [
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "sliding_attention",
            "compressed_sparse_attention",
        ],
        "compress_rates": {
            "compressed_sparse_attention": CSA_RATE,
            "heavily_compressed_attention": HCA_RATE,
        },
        "sliding_window": WINDOW_TOKENS,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "partial_rotary_factor": 0.25,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "n_routed_experts": 4,
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": MAX_POSITIONS // CSA_RATE,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 4,
    }
    return DeepseekV4Config(**{**values, **changes})


def qwen3_config() -> Any:
    """Return the config of a tiny Qwen3: dense attention."""
    from transformers import Qwen3Config

    return Qwen3Config(**_GQA, num_hidden_layers=4, intermediate_size=128)


def gemma3_config() -> Any:
    """Return the config of a tiny Gemma 3: sliding windows and full layers."""
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        **_GQA,
        num_hidden_layers=6,
        intermediate_size=128,
        sliding_window_pattern=3,  # every third layer is full
        sliding_window=WINDOW_TOKENS,
        query_pre_attn_scalar=16,
    )


def gptoss_config() -> Any:
    """Return the config of a tiny gpt-oss: sliding windows and full layers."""
    from transformers import GptOssConfig

    return GptOssConfig(
        **_GQA,
        num_hidden_layers=4,
        intermediate_size=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 150_000.0},
    )


def qwen3next_config() -> Any:
    """Return the config of a tiny Qwen3-Next: recurrent and full layers."""
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        **_GQA,
        **_EXPERTS,
        num_hidden_layers=4,
        intermediate_size=128,
        num_experts=4,
        shared_expert_intermediate_size=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    )


TINY_MODELS: Mapping[str, Callable[[], Any]] = {
    "tiny-v4": v4_config,
    "tiny-qwen3": qwen3_config,
    "tiny-gemma3": gemma3_config,
    "tiny-gptoss": gptoss_config,
    "tiny-qwen3next": qwen3next_config,
}


def tiny_config(name: str) -> Any:
    """Return the configuration of the tiny model called `name`. Raises InvalidInput for an unknown
    name."""
    make = TINY_MODELS.get(name)
    if make is None:
        raise InvalidInput(
            "model", f"no tiny model {name!r}", f"use one of {', '.join(TINY_MODELS)}"
        )
    return make()


def random_model(
    config: Any, *, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Any:
    """Make a model of `config` with weights drawn from `seed`, on the CPU whatever the device."""
    from transformers import AutoModelForCausalLM

    attention = {"attn_implementation": attention_for(config)}
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, **{k: v for k, v in attention.items() if v}
        )
    _draw_weights(model, torch.Generator().manual_seed(seed))
    return model.to(device).eval()


def attention_for(config: Any) -> str | None:
    """Return the attention implementation to load with; None: the family's own choice."""
    return register_v4_attention() if config.model_type == "deepseek_v4" else None


@torch.no_grad()
def _draw_weights(model: Any, generator: torch.Generator) -> None:
    for name, weight in sorted(model.named_parameters()):
        drawn = _draw(name, weight, generator, family=model.config.model_type)
        if drawn is not None:
            weight.copy_(drawn)
    for name, table in sorted(model.named_buffers()):
        if name.endswith("tid2eid"):  # hash routing: which experts a token goes to
            experts = model.config.n_routed_experts
            table.copy_(torch.randint(experts, table.shape, generator=generator))
    silent = torch.ones(model.lm_head.weight.shape[0], dtype=torch.bool)
    silent[list(PRINTABLE_IDS)] = False
    model.lm_head.weight[silent] = 0


def _draw(name: str, weight: Tensor, generator: torch.Generator, *, family: str) -> Tensor | None:
    """Draw new values of one parameter; None leaves norms and scales as they are."""
    normal = torch.randn(weight.shape, generator=generator)
    if name.endswith("A_log"):  # decay exp(A_log): 0.01 to 0.06, else the state is forgotten
        return torch.empty(weight.shape).uniform_(0.01, 0.06, generator=generator).log()
    if name.endswith(("embed_tokens.weight", "sinks", "position_bias")):
        return normal
    if weight.ndim < 2:
        return 0.1 * normal if name.endswith("bias") and "dt_bias" not in name else None
    # gpt-oss multiplies from the left (x @ W), all others are Linear weights.
    transposed = family == "gpt_oss" and ".experts." in name and weight.ndim == 3
    fan_in = weight.shape[-2 if transposed else -1]
    return normal / math.sqrt(fan_in)
