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
TINY = {
    "qwen3": SMALL,
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


@pytest.mark.parametrize("name", sorted(set(example_names()) - {"deepseek-v4.1-flash"}))
def test_transformers_normal_form_gives_the_same_spec(example, name):
    config = example(name)
    fields = {key: value for key, value in config.items() if key != "model_type"}
    normal = transformers.AutoConfig.for_model(config["model_type"], **fields).to_dict()
    assert build_spec(normal).digest() == build_spec(config).digest()


@pytest.mark.parametrize("tokens", [64, 75])
@pytest.mark.parametrize("model_type", TINY)
def test_a_cache_holds_as_many_bytes_as_the_spec_says(model_type, tokens):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **TINY[model_type])
    config._attn_implementation = "eager"  # noqa: SLF001 - so transformers calls it
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    cache = transformers.DynamicCache(config=config)
    with torch.no_grad():
        ids = torch.arange(tokens)[None] % 64
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    geometry = Geometry.of(build_spec(config.to_dict(), load_descriptor("fp32")))
    held = geometry.range_bytes(tokens) + geometry.point_bytes + waiting(geometry, tokens)
    assert cache_bytes(cache) == held + slack(geometry, config)


def waiting(geometry: Geometry, tokens: int) -> int:
    """Bytes of rows that do not fill a compressed entry yet."""
    rings = [(s.kind, s.entry) for s in geometry.spec.states if isinstance(s.kind, Ring)]
    return sum(tokens % ring.period * entry.payload_bytes for ring, entry in rings)


def slack(geometry: Geometry, config) -> int:
    """What transformers keeps though nothing needs it: k convolution columns where k-1 suffice,
    and in V4's pure window layers a second copy of K as V."""
    conv = [c.live_bytes for c in geometry.components if c.role is Role.CONV]
    columns = sum(conv) // (config.linear_conv_kernel_dim - 1) if conv else 0
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
    return sum(seen.values())
