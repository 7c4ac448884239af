"""Tiny drafters with random weights, for vLLM's `speculative_config`."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ownerserve.engines.hf.model.tiny import random_model
from ownerserve.engines.hf.model.tokenizer import byte_tokenizer
from tests.support.vllm import tiny

DRAFTED = 3
"""Tokens that a drafter proposes at once."""
WIDE = 128


def model(folder: Path, *, seed: int = 0, **changes: Any) -> dict[str, Any]:
    """A draft model: as it is the tiny Qwen3 itself, whose drafts are all right."""
    if not folder.exists():
        random_model(tiny.qwen3(**changes), seed=seed).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
    return _speculation("draft_model", model=str(folder), max_model_len=2048)


def eagle(folder: Path, *, method: str = "eagle") -> dict[str, Any]:
    """A head of one layer over the tiny Qwen3's hidden states (`eagle3`: over those of three)."""
    if not folder.exists():
        config = tiny.qwen3().to_dict()
        is_third = method == "eagle3"
        width, head = config["hidden_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        own = {
            "architectures": ["LlamaForCausalLMEagle3" if is_third else "LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "rms_norm_eps": config["rms_norm_eps"],
            "head_dim": head,
            "hidden_size": width,
            "intermediate_size": WIDE,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": config["vocab_size"],
            "max_position_embeddings": config["max_position_embeddings"],
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "dtype": "float32",
        }
        if is_third:
            own["draft_vocab_size"] = config["vocab_size"]
            own["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
        shapes: dict[str, Sequence[int]] = {"fc.weight": (width, (3 if is_third else 2) * width)}
        layer = "midlayer" if is_third else "layers.0"
        into = 2 * width if is_third else width
        shapes |= _layer(layer, into=into, width=width, sizes=(heads * head, kv_heads * head))
        shapes[f"{layer}.post_attention_layernorm.weight"] = (width,)
        if is_third:
            shapes[f"{layer}.hidden_norm.weight"] = (width,)
            shapes[f"{layer}.input_layernorm.weight"] = (width,)
            shapes["norm.weight"] = (width,)
            shapes["lm_head.weight"] = (config["vocab_size"], width)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(own))
        save_file(_drawn(shapes), folder / "model.safetensors")
    return _speculation(method, model=str(folder))


def mtp(folder: Path, target: Path, *, family: str) -> dict[str, Any]:
    """A checkpoint of `family` that has a multi-token predictor beside its layers: `target` and one
    more file."""
    if not folder.exists():
        shutil.copytree(target, folder)
        config = json.loads((folder / "config.json").read_text())
        config["num_nextn_predict_layers"] = 1
        (folder / "config.json").write_text(json.dumps(config))
        own = MTP_SHAPES[family](config)
        save_file(_drawn(own), folder / "mtp.safetensors")
    return _speculation("mtp", num_speculative_tokens=1)


def _ernie(config: Mapping[str, Any]) -> dict[str, Sequence[int]]:
    width, head = config["hidden_size"], config.get("head_dim") or 32
    sizes = (config["num_attention_heads"] * head, config["num_key_value_heads"] * head)
    shapes: dict[str, Sequence[int]] = {
        f"model.mtp_{norm}.0.weight": (width,) for norm in ("emb_norm", "hidden_norm")
    }
    block = "model.mtp_block.0"
    shapes["model.mtp_linear_proj.0.weight"] = (width, 2 * width)
    shapes |= _layer(block, into=width, width=width, sizes=sizes)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{block}.{norm}.weight"] = (width,)
    return shapes


def _deepseek(config: Mapping[str, Any]) -> dict[str, Sequence[int]]:
    width, layer = config["hidden_size"], f"model.layers.{config['num_hidden_layers']}"
    heads, latent = config["num_attention_heads"], config["kv_lora_rank"]
    rope, nope = config["qk_rope_head_dim"], config["qk_nope_head_dim"]
    attention = f"{layer}.self_attn"
    norms = ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "shared_head.norm")
    shapes: dict[str, Sequence[int]] = {f"{layer}.{norm}.weight": (width,) for norm in norms}
    shapes |= {
        f"{layer}.eh_proj.weight": (width, 2 * width),
        f"{layer}.embed_tokens.weight": (config["vocab_size"], width),
        f"{layer}.shared_head.head.weight": (config["vocab_size"], width),
        f"{attention}.q_a_proj.weight": (config["q_lora_rank"], width),
        f"{attention}.q_a_layernorm.weight": (config["q_lora_rank"],),
        f"{attention}.q_b_proj.weight": (heads * (rope + nope), config["q_lora_rank"]),
        f"{attention}.kv_a_proj_with_mqa.weight": (latent + rope, width),
        f"{attention}.kv_a_layernorm.weight": (latent,),
        f"{attention}.kv_b_proj.weight": (heads * (nope + config["v_head_dim"]), latent),
        f"{attention}.o_proj.weight": (width, heads * config["v_head_dim"]),
        f"{layer}.mlp.gate.weight": (config["n_routed_experts"], width),
        f"{layer}.mlp.gate.e_score_correction_bias": (config["n_routed_experts"],),
    }
    wide = config["moe_intermediate_size"]
    experts = [f"experts.{number}" for number in range(config["n_routed_experts"])]
    for expert in (*experts, "shared_experts"):
        shapes[f"{layer}.mlp.{expert}.gate_proj.weight"] = (wide, width)
        shapes[f"{layer}.mlp.{expert}.up_proj.weight"] = (wide, width)
        shapes[f"{layer}.mlp.{expert}.down_proj.weight"] = (width, wide)
    return shapes


MTP_SHAPES: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Sequence[int]]]] = {
    "ernie": _ernie,
    "deepseek3": _deepseek,
}


def _layer(name: str, *, into: int, width: int, sizes: tuple[int, int]) -> dict[str, Sequence[int]]:
    queries, keys = sizes
    return {
        f"{name}.self_attn.q_proj.weight": (queries, into),
        f"{name}.self_attn.k_proj.weight": (keys, into),
        f"{name}.self_attn.v_proj.weight": (keys, into),
        f"{name}.self_attn.o_proj.weight": (width, queries),
        f"{name}.mlp.gate_proj.weight": (WIDE, width),
        f"{name}.mlp.up_proj.weight": (WIDE, width),
        f"{name}.mlp.down_proj.weight": (width, WIDE),
    }


def _drawn(shapes: Mapping[str, Sequence[int]], seed: int = 3) -> dict[str, torch.Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(*shape)
        if len(shape) == 1
        else torch.randn(*shape, generator=dice) / math.sqrt(shape[-1])
        for name, shape in shapes.items()
    }


def _speculation(method: str, **more: Any) -> dict[str, Any]:
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": DRAFTED, **more}
    return {"speculative_config": config}
