"""The sizes that reports, engines and our own measurements state. Within 0.5 %."""

from __future__ import annotations

import pytest

from ownerserve.kv.geometry import exact_replay_tokens, layer_counts, pool_plans
from ownerserve.kv.specs import Role
from ownerserve.kv.units import GIB, KIB, MIB

FP4_INDEX, BF16 = "fp8_ds_mla-fp4-indexer", "bf16"


def close(expected: float) -> object:
    return pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize(
    ("name", "kv", "bytes_per_token"),
    [
        ("deepseek-v4-pro", None, 5511),
        ("deepseek-v4-pro", FP4_INDEX, 5031),
        ("deepseek-v4-pro", "vllm-v4-fp4-indexer", 5031),
        ("deepseek-v4-flash", None, 3850),
        ("deepseek-v4-flash", FP4_INDEX, 3514),
        ("deepseek-v3.2", None, 48_068),
        ("deepseek-v3.2", BF16, 85_888),
        ("deepseek-v3", BF16, 576 * 2 * 61),
        ("dense-gqa-80l", None, 327_680),
        ("glm-5", None, 61_464),
        ("qwen3-next-80b", None, 24_576),
        ("kimi-linear-48b", None, 8_064),
        ("gpt-oss-120b", None, 36_864),
        ("gemma-3-27b", None, 81_920),
        ("minimax-m3", None, 122_880 + 57 * 256),
        ("llama-3.1-8b", None, 131_072),
        ("qwen3-32b", None, 262_144),
        ("mistral-7b-v0.1", None, 0),
        ("llama-4-scout", None, 12 * 4096),
        ("gemma-2-9b", None, 172_032),
        ("command-a", None, 65_536),
        ("olmo-3-7b", None, 131_072),
        ("granite-4.0-h-small", None, 16_384),
        ("lfm2-1.2b", None, 12_288),
        ("mimo-v2-flash", None, 9 * 2_560),
        ("step-3.5-flash", None, 12 * 4096),
        ("longcat-flash", None, 56 * 1152),
        ("minimax-m1", None, 40_960),
        ("phi-4-mini-flash", None, 5_120),
        ("declared-hybrid", None, 8 * 4096),
    ],
)
def test_bytes_per_token(geometry, name, kv, bytes_per_token):
    assert geometry(name, kv).bytes_per_token == close(bytes_per_token)


@pytest.mark.parametrize(
    ("name", "kv", "size"),
    [
        ("deepseek-v4-pro", None, 5.38 * GIB),
        ("deepseek-v4-pro", FP4_INDEX, 4.91 * GIB),
        ("deepseek-v4-pro", BF16, 9.62 * GIB),  # published
        ("deepseek-v4-pro", "bf16-fp8-indexer", 8.7 * GIB),  # in circulation
        ("deepseek-v4-flash", None, 3.76 * GIB),
        ("deepseek-v4-flash", FP4_INDEX, 3.43 * GIB),
        ("deepseek-v3.2", None, 46.9 * GIB),
        ("deepseek-v3.2", BF16, 83.9 * GIB),
        ("dense-gqa-80l", None, 320 * GIB),
    ],
)
def test_size_of_a_million_tokens(geometry, name, kv, size):
    assert geometry(name, kv).range_bytes(1 << 20) == close(size)


def test_a_thousand_and_a_hundred_thousand_tokens(geometry):
    pro = geometry("deepseek-v4-pro")
    assert pro.range_bytes(1 << 10) == close(5.4 * MIB)
    assert pro.range_bytes(1 << 17) == close(689 * MIB)


@pytest.mark.parametrize(
    ("name", "kv", "role", "size"),
    [
        ("deepseek-v4-pro", None, Role.SWA, 4.35 * MIB),
        ("deepseek-v4-flash", None, Role.SWA, 3.07 * MIB),
        ("deepseek-v4-pro", None, Role.HCA_TAIL, 15.5 * MIB),
        ("deepseek-v4-flash", None, Role.HCA_TAIL, 10.0 * MIB),
        ("deepseek-v4-pro", "sglang-v4-online", Role.HCA_TAIL, 186 * KIB),
        ("gpt-oss-120b", None, Role.SWA, 4.5 * MIB),
        ("gemma-3-27b", None, Role.SWA, 416 * MIB),
    ],
)
def test_fixed_bytes_of_a_component(geometry, name, kv, role, size):
    component = next(c for c in geometry(name, kv).components if c.role is role)
    assert component.live_bytes == close(size)


@pytest.mark.parametrize(
    ("name", "kv", "size"),
    [
        ("qwen3-next-80b", None, 73.7 * MIB),
        ("qwen3-next-80b", "bf16-ssm-bf16", 37.7 * MIB),
        ("kimi-linear-48b", None, 41.4 * MIB),
    ],
)
def test_fixed_bytes_of_a_sequence(geometry, name, kv, size):
    assert geometry(name, kv).fixed_bytes_per_sequence == close(size)


@pytest.mark.parametrize(("name", "size"), [("pro", 2.34 * MIB), ("flash", 1.64 * MIB)])
def test_csa_compressor_state(geometry, name, size):
    tails = [
        c.live_bytes
        for c in geometry(f"deepseek-v4-{name}").components
        if c.role in (Role.CSA_TAIL, Role.CSA_INDEX_TAIL)
    ]
    assert sum(tails) == close(size)


def test_a_v4_pro_checkpoint_is_window_rows_and_overlap_rows(geometry):
    pro = geometry("deepseek-v4-pro")
    points = {p.name: p.payload_bytes for p in pool_plans(pro) if p.coverage == "point"}
    assert points == {"swa": 61 * 127 * 584, "csa_overlap": 30 * 4 * (4096 + 1024)}
    assert pro.point_bytes == sum(points.values()) == close(4.9 * MIB)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("deepseek-v4-pro", 7_747),
        ("deepseek-v4-flash", 43 * 127),
        ("gpt-oss-120b", 2_286),
        ("gemma-3-27b", 53_196),
        ("llama-3.1-8b", 0),
        ("llama-4-scout", 36 * 8191),
        ("step-3.5-flash", 33 * 511),
        ("declared-hybrid", 24 * 1023),
        ("qwen3-next-80b", None),
        ("minimax-m1", None),
        ("phi-4-mini-flash", None),
        ("falcon-h1-7b", None),
    ],
)
def test_exact_replay(geometry, name, tokens):
    assert exact_replay_tokens(geometry(name).spec) == tokens


@pytest.mark.parametrize(
    ("name", "role_counts"),
    [
        ("deepseek-v4-pro", {Role.CSA_MAIN: 30, Role.HCA: 31, Role.SWA: 61}),
        ("deepseek-v4-flash", {Role.CSA_MAIN: 21, Role.HCA: 20, Role.SWA: 43}),
        ("deepseek-v4.1-flash", {Role.CSA_MAIN: 4, Role.CSA_TAIL: 3, Role.SWA: 40}),
        ("gpt-oss-120b", {Role.SWA: 18, Role.DENSE: 18}),
        ("gemma-3-27b", {Role.SWA: 52, Role.DENSE: 10}),
        ("qwen3-next-80b", {Role.RECURRENT: 36, Role.DENSE: 12}),
        ("kimi-linear-48b", {Role.RECURRENT: 20, Role.MLA_LATENT: 7}),
        ("minimax-m3", {Role.DENSE: 60, Role.INDEX: 57}),
        ("glm-5.2", {Role.MLA_LATENT: 78, Role.INDEX: 21}),
        ("jamba-v0.1", {Role.RECURRENT: 28, Role.DENSE: 4}),
        ("bamba-9b", {Role.RECURRENT: 29, Role.DENSE: 3}),
        ("nemotron-h-8b", {Role.RECURRENT: 24, Role.DENSE: 4}),
        ("falcon-h1-7b", {Role.RECURRENT: 44, Role.DENSE: 44}),
        ("llama-4-scout", {Role.SWA: 36, Role.DENSE: 12}),
        ("gemma-2-9b", {Role.SWA: 21, Role.DENSE: 21}),
        ("command-a", {Role.SWA: 48, Role.DENSE: 16}),
        ("granite-4.0-h-small", {Role.RECURRENT: 36, Role.CONV: 36, Role.DENSE: 4}),
        ("lfm2-1.2b", {Role.CONV: 10, Role.DENSE: 6}),
        ("mimo-v2-flash", {Role.SWA: 39, Role.DENSE: 9}),
        ("step-3.5-flash", {Role.SWA: 33, Role.DENSE: 12}),
        ("longcat-flash", {Role.MLA_LATENT: 56}),
        ("minimax-m1", {Role.RECURRENT: 70, Role.DENSE: 10}),
        ("phi-4-mini-flash", {Role.RECURRENT: 9, Role.SWA: 8, Role.DENSE: 1}),
        ("declared-hybrid", {Role.SWA: 24, Role.DENSE: 8}),
    ],
)
def test_layers_by_role(geometry, name, role_counts):
    spec = geometry(name).spec
    assert {role: spec.count(role) for role in role_counts} == role_counts


def test_v4_layer_pattern_starts_as_published(geometry):
    assert layer_counts(geometry("deepseek-v4-flash").spec) == {
        "sliding_attention": 2,
        "compressed_sparse_attention": 21,
        "heavily_compressed_attention": 20,
    }
    pro = geometry("deepseek-v4-pro").spec
    assert [layer.type[:5] for layer in pro.layers[:4]] == ["heavi", "heavi", "compr", "heavi"]
    assert (pro.draft_layers, len(pro.layers)) == (1, 61)


def test_a_csa_layer_keeps_five_states(geometry):
    states = geometry("deepseek-v4-pro").spec.layers[2].states
    assert {state.role for state in states} == {
        Role.SWA,
        Role.CSA_MAIN,
        Role.CSA_INDEX,
        Role.CSA_TAIL,
        Role.CSA_INDEX_TAIL,
    }
