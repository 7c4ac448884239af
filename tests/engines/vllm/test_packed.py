"""Pages that no canonical payload describes: kept byte by byte, and for nobody else.

The scenarios run over stand-ins for vLLM's specs here, and over vLLM's own in `packed_child`.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ownerserve.engines.vllm.layout.codec import PageCodec
from ownerserve.engines.vllm.layout.shape import NotServed, StateShape, describe
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import PrefixHash
from ownerserve.kv.prefix import Identity, Numerics, PointKey
from ownerserve.store.format.model import meta_of
from tests.support.children import importing
from tests.support.vllm_parts import packed_play, specs
from tests.support.vllm_parts.packed_play import Pool
from tests.support.vllm_parts.specs import Cached

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / os.environ.get("OWNERSERVE_VLLM_VENV", ".venv-vllm") / "bin/python"
MODELS: dict[str, tuple[list[str], int, int]] = {
    "v4": (["pages", "window_pages"], 256, 4),
    "v4 plain rows": (["pages", "window_pages"], 256, 4),
    "v3.2": (["pages"], 64, 1),
}
"""Of `packed_child`: components, block of tokens, least number of KV groups."""
FULL, WINDOW, STATE = 64, 16, 4
"""Tokens a block of each kind of group, in the proportions of DeepSeek-V4's."""


def v4(**changes: Any) -> tuple[list[tuple[list[Cached], Any]], dict[str, int]]:
    """DeepSeek-V4 in small: main entries and an indexer's, a window, two compressors' states."""
    full = specs.MLAAttentionSpec(FULL, 1, 512, torch.uint8)
    window = specs.SlidingWindowMLASpec(WINDOW, 1, 512, torch.uint8, sliding_window=32)
    state = specs.SlidingWindowMLASpec(STATE, 1, 64, torch.float32, sliding_window=8)
    for spec in (full, window):
        spec.__dict__.update(model_version="deepseek_v4", cache_dtype_str="fp8_ds_mla")
    full.__dict__.update(tokens_per_state=4, state_content_bytes=584, **changes)
    groups = [
        (
            [
                Cached("model.layers.0.attn", 16 * 60, 1152),
                Cached("model.layers.0.attn.indexer.k_cache", 16 * 18, 288),
                Cached("model.layers.1.attn", 60, 576),
            ],
            full,
        ),
        ([Cached(f"model.layers.{n}.attn.swa_cache", 16 * 60, 1152) for n in (0, 1)], window),
        (
            [
                Cached("model.layers.0.attn.compressor.state_cache", 4 * 160, 1152),
                Cached("model.layers.0.attn.indexer.compressor.state_cache", 4 * 40, 288),
            ],
            state,
        ),
    ]
    return groups, {cached.name: cached.held for cacheds, _ in groups for cached in cacheds}


@pytest.fixture
def pool() -> Pool:
    groups, held = v4()
    config = specs.packed_config(groups)
    return Pool(config, specs.packed_views(config, held))


def shape_of(groups: Any, *, packed_by: str = "vllm 0.32 cuda") -> StateShape:
    return describe(specs.packed_config(groups), packed_by=packed_by)


pytestmark = pytest.mark.engine


def test_a_packed_model_is_two_components(pool: Pool) -> None:
    shape = pool.shape
    assert shape.payload.block_tokens == FULL
    assert shape.layout().range_names == ("pages",)
    assert shape.layout().point_names == ("window_pages",)
    ranges, points = (shape.components[name] for name in ("pages", "window_pages"))
    assert [part.shape for part in ranges.section.parts] == [(1, 1, 1152 + 288 + 576)]
    assert [part.shape for part in points.section.parts] == [(1, 2, 2304), (1, 2, 1440)]
    assert points.reaches == (32, 8)
    assert shape.span("window_pages", 128) == (96, 128)


@pytest.mark.parametrize("position", [64, 256, 640])
def test_all_of_it_comes_back_in_other_blocks(pool: Pool, tmp_path: Path, position: int) -> None:
    packed_play.comes_back_in_other_blocks(pool, tmp_path, position)


def test_one_spoilt_byte_of_any_component_shows(pool: Pool) -> None:
    packed_play.one_spoilt_byte_shows(pool, 192)


@pytest.mark.parametrize("hit", [64, 192])
def test_what_the_engine_found_itself_is_not_written(pool: Pool, hit: int) -> None:
    packed_play.own_hits_stay_as_they_are(pool, 256, hit)


def test_bytes_between_pages_stay_behind(pool: Pool) -> None:
    assert packed_play.padding_is_left_behind(pool, 128) > 0


def long_window() -> Pool:
    """A window of 200 tokens over blocks of 16, B = 32."""
    spec = specs.SlidingWindowSpec(16, 1, 8, sliding_window=200)
    spec.__dict__["kv_quant_mode"] = SimpleNamespace(value=2)
    groups = [([Cached("model.layers.0.attn", 96, 100)], spec)]
    config = specs.packed_config(groups)
    return Pool(config, specs.packed_views(config, {"model.layers.0.attn": 96}), block_tokens=32)


def test_a_window_longer_than_the_prefix_is_kept_from_its_begin(tmp_path: Path) -> None:
    pool = long_window()
    for position in (32, 192, 224):
        packed_play.comes_back_in_other_blocks(pool, tmp_path / str(position), position)


@pytest.mark.parametrize("hit", [64, 192])
def test_of_a_window_only_what_the_engine_lacks_is_written(hit: int) -> None:
    packed_play.own_hits_stay_as_they_are(long_window(), 224, hit)


def pool_of(*specs_of: Any, block_tokens: int = 0) -> Pool:
    """A layer for each spec, in groups of their own, packed side by side."""
    groups, held = [], {}
    for number, spec in enumerate(specs_of):
        name = f"model.layers.{number}.attn"
        held[name] = 96 + 32 * number
        groups.append(([Cached(name, held[name], held[name] + 16)], spec))
    config = specs.packed_config(groups, blocks=192)
    return Pool(config, specs.packed_views(config, held), block_tokens=block_tokens)


QUANTISED = {"kv_quant_mode": SimpleNamespace(value=2)}


def full(block: int = 32, heads: int = 2) -> Any:
    spec = specs.FullAttentionSpec(block, heads, 8)
    spec.__dict__.update(QUANTISED)
    return spec


@pytest.mark.parametrize("position", [32, 96, 128, 160, 448])
def test_a_chunk_is_kept_from_its_begin(tmp_path: Path, position: int) -> None:
    """Llama-4: at a multiple of the chunk nothing is needed, and before it nothing older."""
    pool = pool_of(full(), specs.ChunkedLocalAttentionSpec(32, 2, 8, attention_chunk_size=128))
    at = pool.shape.components["window_pages"]
    blocks = [position // 32 - first for first in at.firsts(0, position)]
    assert blocks == [position % 128 // 32]
    if position % 128:
        packed_play.comes_back_in_other_blocks(pool, tmp_path, position)
        packed_play.one_spoilt_byte_shows(pool, position)


@pytest.mark.parametrize("kind", ["MAMBA1", "MAMBA2", "SHORT_CONV", "LINEAR", "KDA"])
def test_recurrent_state_of_any_kind_is_its_last_block(tmp_path: Path, kind: str) -> None:
    state = specs.MambaSpec(64, ((4, 3), (2, 8, 8)), (torch.float32,) * 2, mamba_type=kind)
    pool = pool_of(full(64), state)
    assert pool.shape.is_recurrent
    assert pool.shape.payload.block_tokens == 64
    for position in (64, 320):
        packed_play.comes_back_in_other_blocks(pool, tmp_path / str(position), position)
        packed_play.one_spoilt_byte_shows(pool, position)


def test_recurrent_state_that_stands_at_no_boundary_is_not_served() -> None:
    state = specs.MambaSpec(64, ((4, 3),), (torch.float32,), mamba_cache_mode="none")
    with pytest.raises(NotServed, match="mamba_cache_mode"):
        pool_of(full(64), state)


def test_windows_and_heads_of_several_sizes_are_kept_as_bytes(tmp_path: Path) -> None:
    """A canonical section has one shape; what has several is this engine's own."""
    pool = pool_of(
        specs.FullAttentionSpec(32, 2, 8),
        specs.FullAttentionSpec(32, 4, 8),
        specs.SlidingWindowSpec(32, 2, 8, sliding_window=64),
        specs.SlidingWindowSpec(32, 2, 8, sliding_window=200),
    )
    assert pool.shape.components.keys() == {"pages", "window_pages"}
    assert pool.shape.components["window_pages"].reaches == (64, 224)
    for position in (32, 192, 448):
        packed_play.comes_back_in_other_blocks(pool, tmp_path / str(position), position)
    packed_play.one_spoilt_byte_shows(pool, 192)


def test_one_shape_of_each_kind_stays_canonical() -> None:
    groups = [specs.dense(0), specs.sliding(1), specs.sliding(2)]
    assert describe(specs.Config(groups)).components.keys() == {"dense", "swa", "swa_lead"}


def test_layers_apart_are_rows_of_their_own(tmp_path: Path) -> None:
    """Layer-outermost: one group of unlike layers, as DeepSeek-V3.2's latents and indexer."""
    names = [f"model.layers.{n}.{part}" for n in (0, 1) for part in ("attn", "indexer.k_cache")]
    sizes = dict(zip(names, (640, 96, 640, 96), strict=True))
    blocks, offset, tensors = 64, 0, []
    memory = torch.zeros(blocks * sum(sizes.values()), dtype=torch.uint8)
    views = {}
    for name, size in sizes.items():
        tensors.append(specs.KVCacheTensor([name], size * blocks, size, offset))
        views[name] = memory[offset : offset + size * blocks].view(blocks, 1, 1, size)
        offset += size * blocks
    spec = specs.MLAAttentionSpec(32, 1, 10, torch.bfloat16)
    config = specs.Config([specs.Group(names, spec)], blocks, tensors)
    pool = Pool(config, views)
    assert [p.shape for p in pool.shape.components["pages"].section.parts] == [
        (2, 1, 640),
        (2, 1, 96),
    ]
    packed_play.comes_back_in_other_blocks(pool, tmp_path, 320)
    packed_play.one_spoilt_byte_shows(pool, 64)


def test_scheduler_and_worker_come_to_the_same_shape() -> None:
    """vLLM gives its scheduler the first layer's spec for all of a group of unlike layers."""
    groups, _ = v4()
    scheduler = specs.packed_config(groups)
    worker = copy.deepcopy(scheduler)
    for group in worker.kv_cache_groups:
        each = {name: copy.deepcopy(group.kv_cache_spec) for name in group.layer_names}
        for number, spec in enumerate(each.values()):
            spec.__dict__["head_size"] += number
        group.kv_cache_spec = SimpleNamespace(kv_cache_specs=each)
    assert describe(worker).payload == describe(scheduler).payload


def test_the_name_says_whose_bytes_they_are() -> None:
    """Another version, device, format, page size or kind of attention never reads them."""
    groups, _ = v4()
    same, _ = v4()
    assert shape_of(groups).payload.digest() == shape_of(same).payload.digest()
    wider, _ = v4()
    wider[1][0][0] = wider[1][0][0]._replace(page=1728)
    renamed, _ = v4()
    renamed[2][0][0] = renamed[2][0][0]._replace(name="model.layers.1.attn.compressor.state_cache")
    plain = specs.Config([specs.Group(specs.layers(0), specs.MLAAttentionSpec(FULL, 1, 512))])
    others = [
        shape_of(groups, packed_by="vllm 0.33 cuda"),
        shape_of(v4(model_version="deepseek_v5")[0]),
        shape_of(v4(cache_dtype_str="nvfp4_ds_mla")[0]),
        shape_of(wider),
        shape_of(renamed),
        describe(plain),
    ]
    digests = {shape_of(groups).payload.digest(), *(o.payload.digest() for o in others)}
    assert len(digests) == len(others) + 1


def test_a_page_in_pieces_is_refused() -> None:
    """Heads outside of blocks: a block of such a layer is no range of bytes."""
    spec = specs.FullAttentionSpec(32, 4, 8)
    spec.__dict__["kv_quant_mode"] = SimpleNamespace(value=2)
    name, blocks, head = specs.layers(0)[0], 64, 32 * 16
    config = specs.Config(
        [specs.Group([name], spec)],
        blocks,
        [specs.KVCacheTensor([name], 4 * head * blocks, head, 0)],
    )
    shape = describe(config)
    views = {name: torch.zeros(4, blocks, 32, 16, dtype=torch.uint8).transpose(0, 1)}
    with pytest.raises(InvalidInput, match="not in one piece"):
        PageCodec(shape, views, num_blocks=blocks, key_orders={})
    views = {name: torch.zeros(blocks + 1, 1, 1, head, dtype=torch.uint8)[1:]}
    with pytest.raises(InvalidInput, match="lies elsewhere"):
        PageCodec(shape, views, num_blocks=blocks, key_orders={})


def test_what_can_not_be_restored_is_refused() -> None:
    """DeepSeek-V4.1's window, which vLLM computes again; state in another pool (HiSparse)."""
    groups, _ = v4()
    groups[1][1].__dict__["bounded_replay"] = True
    with pytest.raises(InvalidInput, match="computing its window again"):
        shape_of(groups)
    groups, _ = v4()
    config = specs.packed_config(groups)
    config.kv_cache_groups[0].__dict__["host_resident"] = True
    with pytest.raises(InvalidInput, match="host memory"):
        describe(config)


def test_a_quantised_models_records_have_a_header() -> None:
    """Their numerics are longer than a header's field for them."""
    long = Numerics("bfloat16/kv:fp8_ds_mla", '{"quant_method":"fp8","fmt":"e4m3"}', "")
    for numerics in (long, Numerics(long.dtype, "", "")):
        identity = Identity(
            model_id="deepseek_v4",
            weights="w",
            tokenizer="t",
            spec_digest=bytes(32),
            numerics=numerics,
            tenant_salt=bytes(32),
        )
        meta_of(identity, PointKey(PrefixHash(bytes(32)), 256, "window_pages")).check()


@pytest.mark.vllm
def test_vllms_own_packing_of_its_own_specs(tmp_path: Path) -> None:
    """Groups, tensors and views by vLLM's functions from the specs that its layers give."""
    if not PYTHON.exists():
        pytest.skip("no vLLM: make bench-envs")
    run = subprocess.run(
        [PYTHON, "-m", "tests.support.vllm_parts.packed_child", tmp_path, *MODELS],
        env=importing(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    report = json.loads(run.stdout.splitlines()[-1])
    for model, (components, block_tokens, least_groups) in MODELS.items():
        found = report[model]
        assert found["components"] == components
        assert found["block_tokens"] == block_tokens
        assert found["groups"] >= least_groups and found["padding"] > 0
        assert found["same_for_the_scheduler"]
