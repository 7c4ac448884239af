"""Components and slot bytes follow from the configuration alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("transformers", reason="the hf engine needs the [engine] extra")

import torch

from ownerserve.engines.hf.model.tiny import TINY_MODELS, tiny_config, v4_config
from ownerserve.engines.hf.state.states import describe
from ownerserve.kv.descriptor import IndexFormat, KvDescriptor, KvFormat
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.geometry import Geometry, pool_plans
from ownerserve.kv.registry import build_spec
from ownerserve.kv.specs import Coverage, Precision

pytestmark = pytest.mark.engine

FLOAT = 4
BYTES = {
    "tiny-qwen3": {"dense": 4 * 16 * 2 * 2 * 16 * FLOAT},
    "tiny-gemma3": {"dense": 2 * 16 * 2 * 2 * 16 * FLOAT, "swa": 4 * 15 * 2 * 2 * 16 * FLOAT},
    "tiny-gptoss": {"dense": 2 * 16 * 2 * 2 * 16 * FLOAT, "swa": 2 * 15 * 2 * 2 * 16 * FLOAT},
    "tiny-qwen3next": {
        "dense": 16 * 2 * 2 * 16 * FLOAT,
        "conv": 3 * (2 * 32 + 64) * 3 * FLOAT,
        "recurrent": 3 * 4 * 16 * 16 * FLOAT,
    },
    "tiny-v4": {
        "swa": 4 * 15 * 32 * FLOAT,  # one row for key and value
        "hca": 1 * 32 * FLOAT,
        "csa_main": 2 * 4 * 32 * FLOAT,
        "csa_index": 2 * 4 * 16 * FLOAT,
        "csa_overlap": 2 * 4 * 2 * (32 + 16) * FLOAT,
    },
}


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_payload_bytes(name):
    layout = describe(tiny_config(name), torch.float32).layout()
    assert {c.name: c.payload_bytes for c in layout.components} == BYTES[name]
    assert layout.block_tokens == 16


NAMES = {
    "tiny-gemma3": "52451164258cca56",
    "tiny-gptoss": "8c284f74e2e7a07a",
    "tiny-qwen3": "ffa642a899764f1a",
    "tiny-qwen3next": "27f768ef252fc191",
    "tiny-v4": "6a72e2cde8a8d393",
}
"""How the names begin under which a store has these models' state, at blocks of 64 in float32."""


def test_what_is_stored_keeps_its_name():
    found = {name: describe(tiny_config(name), torch.float32, block_tokens=64) for name in NAMES}
    assert {name: states.digest().hex()[:16] for name, states in found.items()} == NAMES


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_kv_geometry_counts_the_same_bytes(name, precision):
    """The tensors transformers hands over are what the registry says the model keeps."""
    config = tiny_config(name)
    dtype = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16}[precision]
    kv = KvDescriptor(
        kv=KvFormat(precision),
        index=IndexFormat(precision),
        tail_precision=precision,
        conv=precision,
        ssm=Precision.FP32,
    )
    ours = describe(config, dtype, block_tokens=64).layout()
    theirs = pool_plans(Geometry.of(build_spec(config.to_dict(), kv), 64))
    assert {(c.name, c.coverage.value, c.payload_bytes) for c in ours.components} == {
        (plan.name, plan.coverage.value, plan.payload_bytes) for plan in theirs
    }


def test_v4_state_block_is_snapshot_and_tails():
    """Tails: m-1 waiting rows, both series in CSA, for value and gate."""
    layout = describe(tiny_config("tiny-v4"), torch.float32).layout()
    point = sum(c.slot_bytes for c in layout.components if c.coverage is Coverage.POINT)
    csa_tail = 2 * 3 * 2 * 2 * (32 + 16) * FLOAT
    hca_tail = 15 * 2 * 32 * FLOAT
    assert layout.state_bytes == point + csa_tail + hca_tail


def test_v4_pro_snapshot_has_no_hca_tail():
    """Design 001: 128 rows of 512 (here W-1) and the Ca rows, not the 15.5 MiB of HCA rings."""
    layers = ["heavily_compressed_attention"] * 2 + [
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ] * 29
    layers += ["compressed_sparse_attention"]
    config = v4_config(
        num_hidden_layers=61,
        layer_types=layers,
        mlp_layer_types=["moe"] * 61,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        sliding_window=128,
        head_dim=512,
        index_head_dim=128,
    )
    layout = describe(config, torch.bfloat16, block_tokens=256).layout()
    payload = {c.name: c.payload_bytes for c in layout.components}
    assert payload["swa"] == 61 * 127 * 512 * 2
    assert payload["csa_overlap"] == 30 * 4 * 2 * (512 + 128) * 2
    assert payload["hca"] == 31 * 2 * 512 * 2
    assert payload["csa_main"] + payload["csa_index"] == 30 * 64 * (512 + 128) * 2


def test_parts_are_padded_to_their_alignment():
    config = tiny_config("tiny-qwen3next")
    config.linear_conv_kernel_dim = 2
    config.linear_num_value_heads = 3
    config.linear_key_head_dim = config.linear_value_head_dim = 1
    conv = next(c for c in describe(config, torch.bfloat16).layout().components if c.name == "conv")
    assert (conv.payload_bytes, conv.slot_bytes) == (3 * 7 * 2, 48)


@pytest.mark.parametrize("block", [8, 24])
def test_block_length_must_hold_whole_windows(block):
    with pytest.raises(InvalidInput, match=r"block_tokens.*use a multiple of 16"):
        describe(tiny_config("tiny-v4"), torch.float32, block_tokens=block)


def test_unknown_family_is_named():
    with pytest.raises(InvalidInput, match=r"model_type: 'llama'.*deepseek_v4, gemma3_text"):
        describe(SimpleNamespace(model_type="llama"), torch.float32)


def test_unknown_layer_type_is_named():
    config = tiny_config("tiny-qwen3")
    config.layer_types[1] = "chunked_attention"
    with pytest.raises(InvalidInput, match=r"layer_types\[1\]: .chunked_attention. is unknown"):
        describe(config, torch.float32)


def test_bidirectional_attention_is_refused():
    config = tiny_config("tiny-gemma3")
    config.use_bidirectional_attention = True
    with pytest.raises(InvalidInput, match="use_bidirectional_attention"):
        describe(config, torch.float32)


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-gemma3"])
def test_a_rotation_that_depends_on_length_is_refused(name):
    config = tiny_config(name)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    rope["rope_type"] = "dynamic"
    with pytest.raises(InvalidInput, match=r"rope_type: 'dynamic'"):
        describe(config, torch.float32)
