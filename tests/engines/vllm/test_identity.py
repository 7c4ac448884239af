"""What has no identity is bypassed by name; what has one is named by files and numerics."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ownerserve.engines.vllm.identity import why_bypassed, why_not
from ownerserve.engines.vllm.layout import shape
from ownerserve.kv.errors import InvalidInput
from ownerserve.node.storage.weights import weight_files_digest
from tests.support.vllm_parts import specs

pytestmark = pytest.mark.engine


def request(**fields: Any) -> SimpleNamespace:
    plain = {
        "kv_transfer_params": None,
        "lora_request": None,
        "mm_features": [],
        "pooling_params": None,
    }
    return SimpleNamespace(**(plain | fields))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"lora_request": object()}, "lora"),
        ({"mm_features": [object()]}, "multimodal"),
        ({"prompt_embeds": object()}, "embeddings"),
        ({"pooling_params": object()}, "pooling"),
        ({"resumable": True}, "streaming"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "handed_over"),
        ({"kv_transfer_params": {"other": 1}}, None),
        ({"skip_reading_prefix_cache": True}, "not_wanted"),
    ],
)
def test_a_request_is_bypassed_by_name(fields: dict[str, Any], reason: str | None) -> None:
    assert why_bypassed(request(**fields)) == reason


def engine(method: str | None, *, scales: str = "given") -> SimpleNamespace:
    speculative = None if method is None else SimpleNamespace(method=method)
    cache = SimpleNamespace(calculate_kv_scales=scales == "dynamic")
    return SimpleNamespace(speculative_config=speculative, cache_config=cache)


@pytest.mark.parametrize(
    ("method", "recurrent", "reason"),
    [
        (None, True, None),
        ("ngram", False, None),
        ("ngram", True, "speculative_decoding"),
        ("eagle3", False, None),
        ("draft_model", False, None),
        ("mtp", True, "speculative_decoding"),
    ],
)
def test_an_engine_that_drafts_over_recurrent_state_keeps_none(
    method: str | None, recurrent: bool, reason: str | None
) -> None:
    assert why_not(engine(method), is_recurrent=recurrent) == reason


def test_scales_that_follow_the_traffic_name_nothing() -> None:
    assert why_not(engine(None, scales="dynamic"), is_recurrent=False) == "dynamic_kv_scales"


def write(folder: Path, **files: bytes) -> Path:
    folder.mkdir()
    for name, data in files.items():
        (folder / f"{name}.safetensors").write_bytes(data)
    return folder


def test_weights_are_named_by_their_files_and_not_by_their_folder(tmp_path: Path) -> None:
    one = write(tmp_path / "one", a=b"weights", b=b"more")
    copy = write(tmp_path / "copy", a=b"weights", b=b"more")
    digest = weight_files_digest(one)
    assert weight_files_digest(copy, cache=tmp_path / "cache.json") == digest
    assert weight_files_digest(copy, cache=tmp_path / "cache.json") == digest  # from the cache
    (copy / "b.safetensors").write_bytes(b"MORE!")
    assert weight_files_digest(copy, cache=tmp_path / "cache.json") != digest
    renamed = write(tmp_path / "renamed", a=b"weights", c=b"more")
    assert weight_files_digest(renamed) != digest
    with pytest.raises(InvalidInput, match="no weight files"):
        weight_files_digest(write(tmp_path / "none"))


PACKED: dict[str, dict[str, Any]] = {
    "compressed": {"tokens_per_state": 4},
    "bytes": {"dtype": torch.uint8},
    "uneven": {"head_size_v": 64},
    "packed": {"state_content_bytes": 584},
    "packed by version": {"model_version": "deepseek_v4"},
    "fp8 latent": {"cache_dtype_str": "fp8_ds_mla"},
    "indexer": {"cache_role": SimpleNamespace(name="INDEXER")},
    "quantised": {"kv_quant_mode": SimpleNamespace(value=2)},
}


@pytest.mark.parametrize("fields", PACKED.values(), ids=PACKED)
def test_packed_pages_are_never_taken_for_plain_rows(fields: dict[str, Any]) -> None:
    """DeepSeek-V4's and V3.2's, and quantised ones: read as plain rows they would be wrong KV."""
    spec = specs.MLAAttentionSpec(64, 1, 576)
    plain = specs.packed_config([([specs.Cached("layers.0", 64, 64)], spec)])
    assert set(shape.describe(plain).components) == {"mla"}
    for name, value in fields.items():
        setattr(spec, name, value)
    assert set(shape.describe(plain).components) == {"pages"}
    config = specs.Config([specs.Group(specs.layers(0), spec)])
    with pytest.raises(InvalidInput, match="no place for"):
        shape.describe(config)
