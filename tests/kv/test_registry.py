"""What the registry reads, in which spellings, and what it refuses to guess."""

from __future__ import annotations

import re

import pytest

from ownerserve.kv.descriptor import NAMED, IndexFormat, KvDescriptor, load_descriptor
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.registry import BY_MODEL_TYPE, FAMILIES, build_spec
from ownerserve.kv.registry.source import example_names, find_config, read_config
from ownerserve.kv.specs import Role

CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


@pytest.mark.parametrize("name", example_names())
def test_every_shipped_example_is_read(example, name):
    spec = build_spec(example(name))
    assert spec.layers
    assert [layer.index for layer in spec.layers] == list(range(len(spec.layers)))


def test_every_family_has_a_shipped_example(example):
    assert {build_spec(example(name)).family for name in example_names()} == {
        f.name for f in FAMILIES
    }


def test_every_default_descriptor_exists():
    assert {family.default_kv for family in FAMILIES} <= NAMED.keys()


def test_both_v4_spellings_give_one_spec(example):
    config = example("deepseek-v4-flash")
    ratios = config.pop("compress_ratios")
    types = {0: SLIDING, 4: CSA, 128: HCA}
    config["layer_types"] = [types[ratio] for ratio in ratios[: config["num_hidden_layers"]]]
    config["compress_rates"] = {CSA: 4, HCA: 128}
    spec = build_spec(config)
    assert spec.layers == build_spec(example("deepseek-v4-flash")).layers
    assert spec.digest() == build_spec(example("deepseek-v4-flash")).digest()
    assert build_spec({**config, "compress_ratios": ratios}).layers == spec.layers


def test_glm_index_schedules_agree(example):
    config = example("glm-5.2")
    kinds = config["indexer_types"]
    pattern = "".join("F" if kind == "full" else "S" for kind in kinds)
    by_types = build_spec({**example("glm-5"), "indexer_types": kinds})
    by_pattern = build_spec({**example("glm-5"), "index_topk_pattern": pattern})
    by_frequency = build_spec(
        {**example("glm-5"), "index_topk_freq": 4, "index_skip_topk_offset": 3}
    )
    assert by_types.layers == by_pattern.layers == by_frequency.layers == build_spec(config).layers
    assert by_types.layers[4].index_source == 2


def test_v41_layers_read_the_source_before_them(example):
    layers = build_spec(example("deepseek-v4.1-flash")).layers
    assert [layers[i].kv_source for i in (0, 2, 3, 13, 14, 19, 20, 39)] == [
        None, None, 2, 8, None, 14, None, 20,
    ]  # fmt: skip
    assert layers[39].index_source == 36
    assert all(layer.states[0].role is Role.SWA for layer in layers)
    assert [state.role for state in layers[20].states] == [
        Role.SWA,
        Role.CSA_MAIN,
        Role.CSA_INDEX,
    ]


def test_phi4flash_computes_state_in_its_first_half_and_a_layer_more(example):
    layers = build_spec(example("phi-4-mini-flash")).layers
    assert layers[17].states[0].role is Role.DENSE
    assert all(not layer.states for layer in layers[18:])
    assert [layer.kv_source for layer in layers[16:22]] == [None, None, None, 17, None, 17]


def test_llama4_reads_both_spellings(example):
    config = example("llama-4-scout")
    by_rule = build_spec(config)
    config["text_config"]["no_rope_layers"] = [1, 1, 1, 0] * 12
    assert build_spec(config).layers == by_rule.layers


def test_step_leaves_out_its_draft_layers(example):
    config = example("step-3.5-flash")
    assert len(build_spec(config).layers) == 45
    shorter = {**config, "layer_types": config["layer_types"][:45]}
    assert build_spec(shorter).layers == build_spec(config).layers


def test_exaone_spells_a_period_out(example):
    config = {**example("command-a"), "model_type": "exaone4", "sliding_window_pattern": "LLLG"}
    assert build_spec(config).layers == build_spec(example("command-a")).layers


def test_a_declared_model_is_what_it_declares(example):
    declared = example("declared-hybrid")
    layers = build_spec(declared).layers
    assert [layer.type for layer in layers].count("sliding_attention") == 24
    gemma = {
        "model_type": "gemma3_text",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": 1024,
        "layer_types": [SLIDING] * 24 + [FULL] * 8,
    }
    assert build_spec(gemma).layers == layers


def test_gemma4_shared_layers_own_nothing(example):
    config = example("gemma-4-31b")
    config["text_config"]["num_kv_shared_layers"] = 12
    layers = build_spec(config).layers
    assert all(not layer.states for layer in layers[48:])
    assert (layers[48].kv_source, layers[59].kv_source) == (46, 47)
    assert layers[47].states[0].entry.payload_bytes == 2 * 4 * 512 * 2


def test_kimi_layers_count_from_one(example):
    layers = build_spec(example("kimi-linear-48b")).layers
    assert [layer.index for layer in layers if layer.type == "mla"] == [3, 7, 11, 15, 19, 23, 26]


def test_draft_layers_are_not_the_models_own(example):
    config = example("deepseek-v4-flash")
    config["compress_ratios"] = config["compress_ratios"][:43]
    assert len(build_spec(config).layers) == 43


def test_the_engine_decides_ssm_precision_before_the_config(example):
    config = example("qwen3.5-35b-a3b")
    config["text_config"]["mamba_ssm_dtype"] = "bfloat16"
    state = next(s for s in build_spec(config).states if s.role is Role.RECURRENT)
    assert state.entry.payload_bytes == 32 * 128 * 128 * 2
    spec = build_spec(config, load_descriptor("fp32"))
    assert next(s for s in spec.states if s.role is Role.RECURRENT) == state
    forced = KvDescriptor(ssm=NAMED["bf16-ssm-bf16"].ssm)
    assert next(s for s in build_spec(config, forced).states if s.role is Role.RECURRENT) == state


def change(name, **fields):
    """An edit of an example: field -> new value; None deletes. Nested as the example nests."""
    config = read_config(find_config(name))
    text = config.get("text_config", config)
    for field, value in fields.items():
        if value is None:
            del text[field]
        else:
            text[field] = value
    return config


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({}, ["model_type"]),
        ({"model_type": "mystery"}, ["model_type", "mystery", "llama"]),
        ({"model_type": 7}, ["model_type", "7"]),
        ({"model_type": "gemma3", "text_config": 3}, ["text_config"]),
        (change("llama-3.1-8b", num_hidden_layers=None), ["num_hidden_layers", "missing"]),
        (change("llama-3.1-8b", num_hidden_layers=0), ["num_hidden_layers", "1 or more"]),
        (change("llama-3.1-8b", num_hidden_layers="32"), ["num_hidden_layers", "whole number"]),
        (change("llama-3.1-8b", num_hidden_layers=True), ["num_hidden_layers", "whole number"]),
        (change("llama-3.1-8b", hidden_size=4095), ["hidden_size", "num_attention_heads"]),
        (change("qwen3-32b", use_sliding_window=True, max_window_layers=32), ["sliding_window"]),
        (change("qwen3-30b-a3b", use_sliding_window=True), ["layer_types"]),
        (
            change("gemma-3-27b", sliding_window_pattern=None),
            ["sliding_window_pattern", "layer_types"],
        ),
        (
            change("gemma-3-27b", layer_types=[FULL] * 62),
            ["layer_types", "sliding_window_pattern", "layer 0"],
        ),
        (change("gpt-oss-120b", layer_types=None), ["layer_types", "missing"]),
        (change("gpt-oss-120b", layer_types=[FULL] * 35), ["layer_types", "35", "36"]),
        (change("gpt-oss-120b", layer_types=[CSA] * 36), ["layer_types[0]", CSA]),
        (change("gpt-oss-120b", sliding_window=1), ["sliding_window", "2 or more"]),
        (change("qwen3-next-80b", full_attention_interval=None), ["full_attention_interval"]),
        (change("qwen3-next-80b", full_attention_interval=0), ["full_attention_interval"]),
        (
            change("qwen3.5-35b-a3b", full_attention_interval=5),
            ["text_config.full_attention_interval", "text_config.layer_types", "layer 3"],
        ),
        (change("qwen3.5-35b-a3b", mamba_ssm_dtype="int3"), ["mamba_ssm_dtype", "int3"]),
        (change("deepseek-v3", kv_lora_rank=None), ["kv_lora_rank"]),
        (change("deepseek-v3.2", index_head_dim=None), ["index_head_dim"]),
        (change("glm-5.2", index_topk_freq=3), ["index_topk_freq", "indexer_types"]),
        (change("glm-5", index_topk_freq=4), ["index_skip_topk_offset"]),
        (change("glm-5", index_topk_pattern="FX"), ["index_topk_pattern"]),
        (change("glm-5", index_topk_pattern="S" * 78), ["index_topk_pattern", "layer 0"]),
        (change("deepseek-v4-pro", compress_ratios=None), ["compress_ratios", "layer_types"]),
        (change("deepseek-v4-pro", compress_ratios=[4] * 60), ["compress_ratios", "60", "61"]),
        (change("deepseek-v4-pro", compress_ratios=[4] * 62), ["compress_ratios", "62"]),
        (change("deepseek-v4-pro", compress_ratios=[16] * 61), ["compress_ratios[0]", "16"]),
        (change("deepseek-v4-pro", compress_ratios=[-4] * 61), ["compress_ratios"]),
        (
            change("deepseek-v4-pro", compress_ratios=None, layer_types=[CSA] * 61),
            ["compress_rates", CSA],
        ),
        (
            change(
                "deepseek-v4-pro",
                compress_ratios=None,
                layer_types=[CSA] * 61,
                compress_rates={CSA: 0},
            ),
            [f"compress_rates.{CSA}", "1 or more"],
        ),
        (
            change("deepseek-v4-pro", compress_rates={CSA: 8, HCA: 128}),
            ["compress_rates", "compress_ratios", "8"],
        ),
        (
            change("deepseek-v4-pro", layer_types=[CSA] * 61),
            ["layer_types", "compress_ratios", "layer 0"],
        ),
        (change("deepseek-v4-pro", qk_rope_head_dim=513), ["qk_rope_head_dim", "head_dim"]),
        (change("deepseek-v4-pro", sliding_window=None), ["sliding_window"]),
        (change("deepseek-v4.1-flash", kv_source_layer_ids=None), ["kv_source_layer_ids"]),
        (
            change("deepseek-v4.1-flash", kv_source_layer_ids=[1]),
            ["kv_source_layer_ids", "layer 1"],
        ),
        (change("deepseek-v4.1-flash", kv_source_layer_ids=[2, 8]), ["ratio 1", "source 8"]),
        (change("deepseek-v4.1-flash", kv_source_layer_ids=[8, 20]), ["no source for layer 2"]),
        (change("gemma-4-31b", global_head_dim=None), ["global_head_dim"]),
        (change("gemma-4-31b", num_kv_shared_layers=60), ["num_kv_shared_layers"]),
        (change("kimi-linear-48b", linear_attn_config=None), ["linear_attn_config", "layer_types"]),
        (
            change(
                "kimi-linear-48b",
                linear_attn_config={
                    "kda_layers": [0, 1],
                    "full_attn_layers": [2],
                    "head_dim": 128,
                    "num_heads": 32,
                    "short_conv_kernel_size": 4,
                },
            ),
            ["kda_layers", "count from 1"],
        ),
        (
            change("minimax-m3", sparse_attention_config={"sparse_attention_freq": [1]}),
            ["sparse_attention_freq", "60"],
        ),
        (change("jamba-v0.1", attn_layer_offset=8), ["attn_layer_offset", "attn_layer_period"]),
        (change("bamba-9b", attn_layer_indices=[32]), ["attn_layer_indices", "32"]),
        (change("bamba-9b", attn_layer_indices=None), ["attn_layer_indices", "missing"]),
        (change("bamba-9b", mamba_d_head=65), ["mamba_d_head", "mamba_expand"]),
        (change("nemotron-h-8b", hybrid_override_pattern=None), ["hybrid_override_pattern"]),
        (change("nemotron-h-8b", hybrid_override_pattern="MX"), ["hybrid_override_pattern", "X"]),
        (change("nemotron-h-8b", hybrid_override_pattern="M*"), ["num_hidden_layers", "52"]),
        (change("command-a", sliding_window_pattern=None), ["sliding_window_pattern", "missing"]),
        (change("command-a", sliding_window_pattern="LXG"), ["sliding_window_pattern", "LXG"]),
        (change("granite-4.0-h-small", layer_types=None), ["layer_types", "missing"]),
        (change("granite-4.0-h-small", layer_types=["mamba"]), ["layer_types", "40"]),
        (change("lfm2-1.2b", full_attn_idxs=[16]), ["full_attn_idxs", "16"]),
        (change("mimo-v2-flash", hybrid_layer_pattern=[0, 1]), ["hybrid_layer_pattern", "48"]),
        (change("mimo-v2-flash", v_head_dim=None), ["v_head_dim", "missing"]),
        (change("step-3.5-flash", layer_types=[FULL]), ["layer_types", "45"]),
        (change("longcat-flash", num_hidden_layers=28), ["num_hidden_layers", "num_layers"]),
        (change("minimax-m1", attn_type_list=[1]), ["attn_type_list", "80"]),
        (change("phi-4-mini-flash", mb_per_layer=3), ["mb_per_layer", "3"]),
        (change("phi-4-mini-flash", sliding_window=[512, 256]), ["sliding_window", "256"]),
        (change("declared-hybrid", layers=None), ["layers", "missing"]),
        (change("declared-hybrid", layers=[]), ["layers", "empty"]),
        (change("declared-hybrid", layers=[{"type": "x"}]), ["layers", "dense_bytes"]),
        (
            change("declared-hybrid", layers=[{"type": "x", "dense_bytes": 0, "kv_source": 0}]),
            ["kv_source", "layer 0"],
        ),
        (
            change("declared-hybrid", layers=[{"type": "x", "dense_bytes": 0, "repeat": 0}]),
            ["repeat"],
        ),
    ],
)
def test_a_config_it_cannot_read_is_refused_by_field(config, names):
    with pytest.raises(InvalidInput) as caught:
        build_spec(config)
    for name in names:
        assert name in str(caught.value)
    assert caught.value.mend


def test_latent_layouts_need_latents(example):
    with pytest.raises(InvalidInput, match="--kv"):
        build_spec(example("llama-3.1-8b"), load_descriptor("fp8_ds_mla"))


class TestDescriptors:
    def test_a_file_changes_a_named_one(self, tmp_path):
        path = tmp_path / "mine.json"
        path.write_text('{"base": "fp8_ds_mla", "index": "fp4", "page_tokens": 256}')
        mine = load_descriptor(str(path))
        assert (mine.index, mine.page_tokens, mine.name) == (IndexFormat.FP4, 256, "mine.json")
        assert mine.kv is NAMED["fp8_ds_mla"].kv

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ('{"kv": "int4"}', "int4"),
            ('{"kvv": "bf16"}', "kvv"),
            ('{"base": "nothing"}', "nothing"),
            ('{"page_tokens": 0}', "page_tokens"),
            ("[]", "mine.json"),
            ("{", "mine.json"),
        ],
    )
    def test_a_wrong_file_is_refused(self, tmp_path, text, says):
        path = tmp_path / "mine.json"
        path.write_text(text)
        with pytest.raises(InvalidInput, match=re.escape(says)):
            load_descriptor(str(path))

    def test_an_unknown_name_lists_the_known(self):
        with pytest.raises(InvalidInput, match="fp8_ds_mla"):
            load_descriptor("fp9")


def test_model_types_belong_to_one_family_each():
    assert len(BY_MODEL_TYPE) == sum(len(family.model_types) for family in FAMILIES)
