"""Our sizes against transformers' own: its normal form of every config, and the tensors that its
caches really hold after a run.
"""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

from ownerserve.kv.descriptor import load_descriptor  # noqa: E402
from ownerserve.kv.geometry import Geometry  # noqa: E402
from ownerserve.kv.registry import build_spec  # noqa: E402
from ownerserve.kv.registry.attention import dense, interleaved, mistral  # noqa: E402
from ownerserve.kv.registry.source import example_names  # noqa: E402
from ownerserve.kv.specs import Ring, Role  # noqa: E402

pytestmark = pytest.mark.engine

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"

SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONV = "conv"
PLAIN = {**SMALL, **IDS, **EXPERTS, "num_local_experts": 4}
WINDOWED = {**PLAIN, "sliding_window": 16}
INTERLEAVED = {**WINDOWED, "layer_types": [SLIDING, SLIDING, FULL, FULL]}
LIKE_OTHERS = {
    **dict.fromkeys(dense.MODEL_TYPES, PLAIN),
    **dict.fromkeys(mistral.MODEL_TYPES, WINDOWED),
    **dict.fromkeys(interleaved.MODEL_TYPES, INTERLEAVED),
}
NOT_RUN = {
    "qwen3_vl_text": "is the text part of a model with pictures",
    "qwen3_vl_moe_text": "is the text part of a model with pictures",
}
"""Model types that transformers builds no causal model of alone."""
TINY = {
    "qwen3": SMALL,
    "llama4_text": {
        **SMALL,
        **IDS,
        "num_local_experts": 4,
        "intermediate_size_mlp": 64,
        "attention_chunk_size": 16,
        "no_rope_layers": [1, 1, 0, 1],
    },
    "mimo_v2_flash": {
        **SMALL,
        **IDS,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "sliding_window": 16,
        "layer_types": [FULL, SLIDING, SLIDING, FULL],
    },
    "longcat_flash": {
        **IDS,
        "vocab_size": 64,
        "hidden_size": 64,
        "num_layers": 2,
        "num_attention_heads": 4,
        "ffn_hidden_size": 64,
        "q_lora_rank": 32,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "head_dim": 8,
        "moe_topk": 2,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "expert_ffn_hidden_size": 32,
    },
    "granitemoehybrid": {
        **SMALL,
        **IDS,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    "lfm2": {**SMALL, **IDS, "conv_L_cache": 3, "layer_types": [CONV, CONV, FULL, CONV]},
    "gemma3_text": {**SMALL, "sliding_window": 16, "layer_types": [SLIDING, SLIDING, FULL, FULL]},
    "gpt_oss": {
        **SMALL,
        "num_local_experts": 4,
        "sliding_window": 16,
        "layer_types": [SLIDING, FULL] * 2,
    },
    "qwen3_next": {
        **SMALL,
        **EXPERTS,
        "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
    },
    "deepseek_v4": {
        **SMALL,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "layer_types": [HCA, CSA, SLIDING, CSA],
        "compress_rates": {CSA: 4, HCA: 16},
        "sliding_window": 16,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "index_topk": 64,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 2,
    },
}


OF_OTHERS = {
    "declared-hybrid",
    "deepseek-v4.1-flash",
    "minimax-m1",
    "phi-4-mini-flash",
    "step-3.5-flash",
}
"""Examples whose configuration class is not transformers' own."""


@pytest.mark.parametrize("name", sorted(set(example_names()) - OF_OTHERS))
def test_transformers_normal_form_gives_the_same_spec(example, name):
    config = example(name)
    fields = {key: value for key, value in config.items() if key != "model_type"}
    normal = transformers.AutoConfig.for_model(config["model_type"], **fields).to_dict()
    assert build_spec(normal).digest() == build_spec(config).digest()


@pytest.mark.parametrize("tokens", [64, 75])
@pytest.mark.parametrize("model_type", TINY)
def test_a_cache_holds_as_many_bytes_as_the_spec_says(model_type, tokens):
    check_cache(model_type, TINY[model_type], tokens)


@pytest.mark.parametrize("model_type", sorted(set(LIKE_OTHERS) - set(NOT_RUN) - set(TINY)))
def test_every_model_type_of_a_family_keeps_what_the_family_says(model_type):
    check_cache(model_type, LIKE_OTHERS[model_type], tokens=75)


def test_lightning_attention_keeps_a_matrix_for_each_head():
    config = {
        **SMALL,
        **IDS,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "block_size": 16,
        "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
    }
    check_cache("minimax", config, tokens=75)


def check_cache(model_type: str, fields: dict, tokens: int) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **fields)
    config._attn_implementation = "eager"  # noqa: SLF001 - so transformers calls it
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    # MiniMax's cache is of a class of its own, which the model makes.
    cache = None if model_type == "minimax" else transformers.DynamicCache(config=config)
    with torch.no_grad():
        ids = torch.arange(tokens)[None] % 64
        cache = model(input_ids=ids, past_key_values=cache, use_cache=True).past_key_values
    geometry = Geometry.of(build_spec(config.to_dict(), load_descriptor("fp32")))
    held = geometry.range_bytes(tokens) + geometry.point_bytes + waiting(geometry, tokens)
    assert cache_bytes(cache) == held + slack(geometry, config)


KERNELS = ("linear_conv_kernel_dim", "mamba_d_conv", "conv_L_cache")


def waiting(geometry: Geometry, tokens: int) -> int:
    """Bytes of rows that do not fill a compressed entry yet."""
    rings = [(s.kind, s.entry) for s in geometry.spec.states if isinstance(s.kind, Ring)]
    return sum(tokens % ring.period * entry.payload_bytes for ring, entry in rings)


def slack(geometry: Geometry, config) -> int:
    """What transformers keeps though nothing needs it: k convolution columns where k-1 suffice,
    and in V4's pure window layers a second copy of K as V."""
    conv = [c.live_bytes for c in geometry.components if c.role is Role.CONV]
    kernels = [getattr(config, name, None) for name in KERNELS]
    columns = sum(conv) // (next(filter(None, kernels)) - 1) if conv else 0
    copies = [layer.states[0] for layer in geometry.spec.layers if layer.type == SLIDING]
    twice = config.model_type == "deepseek_v4"
    return columns + sum(state.boundary_bytes for state in copies if twice)


def cache_bytes(cache) -> int:
    """Bytes of all distinct tensors of numbers that a cache holds, shared storage once."""
    seen: dict[tuple[int, int], int] = {}

    def visit(thing) -> None:
        if isinstance(thing, torch.Tensor):
            if thing.numel() and thing.is_floating_point():
                seen[thing.data_ptr(), thing.numel()] = thing.numel() * thing.element_size()
        elif isinstance(thing, dict):
            for value in thing.values():
                visit(value)
        elif isinstance(thing, list | tuple):
            for value in thing:
                visit(value)
        elif hasattr(thing, "__dict__") and type(thing).__module__.startswith("transformers"):
            visit({k: v for k, v in vars(thing).items() if k != "config"})

    visit(cache.layers)
    visit(getattr(cache, "linear_cache", []))
    return sum(seen.values())
