"""Blocks, boundaries, padding and what changes a model's spec digest."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerserve.kv.descriptor import NAMED, KvDescriptor
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.geometry import Geometry, block_unit, pool_plans
from ownerserve.kv.messages import RestoreAction
from ownerserve.kv.registry import build_spec
from ownerserve.kv.registry.source import example_names, find_config, read_config
from ownerserve.kv.specs import Coverage, Role

V4 = NAMED["fp8_ds_mla"]


def test_block_is_a_multiple_of_every_ratio_and_of_the_page(geometry):
    assert geometry("deepseek-v4-pro").block_tokens == 128
    assert geometry("deepseek-v4-pro", "vllm-v4").block_tokens == 256
    assert geometry("llama-3.1-8b").block_tokens == 16
    assert geometry("deepseek-v4-pro", None, 512).block_tokens == 512


@pytest.mark.parametrize("block_tokens", [0, 64, 200, -128])
def test_a_block_that_cuts_an_entry_is_refused(geometry, block_tokens):
    with pytest.raises(InvalidInput, match="multiple of 128"):
        geometry("deepseek-v4-pro", None, block_tokens)


def test_padding_is_counted_apart_from_payload(geometry):
    hca = next(c for c in geometry("deepseek-v4-pro", "vllm-v4").components if c.role is Role.HCA)
    assert hca.block_payload_bytes == 31 * 2 * 584
    assert hca.block_bytes == 31 * 3 * 576  # 1,168 bytes take three units of 576


@pytest.mark.parametrize("name", example_names())
def test_blocks_add_up_to_the_context(name):
    geometry = GEOMETRY[name]
    per_block = sum(c.block_payload_bytes for c in geometry.components)
    for blocks in (1, 2, 7, 1000):
        whole = blocks * geometry.block_tokens
        assert geometry.range_bytes(whole) == blocks * per_block
        assert geometry.range_bytes(whole) == pytest.approx(whole * geometry.bytes_per_token)
        assert geometry.range_bytes(whole - 1) <= geometry.range_bytes(whole)
        assert geometry.allocated_bytes(whole) >= geometry.total_bytes(whole)
    pools = sum(p.payload_bytes for p in pool_plans(geometry) if p.coverage is Coverage.RANGE)
    assert pools == per_block
    points = sum(p.payload_bytes for p in pool_plans(geometry) if p.coverage is Coverage.POINT)
    assert points == geometry.point_bytes <= geometry.fixed_bytes_per_sequence


GEOMETRY = {
    name: Geometry.of(build_spec(read_config(find_config(name)))) for name in example_names()
}


@settings(max_examples=30)
@given(tokens=st.integers(0, 2_000))
def test_restorable_points_leave_a_token_to_compute(tokens):
    points = GEOMETRY["deepseek-v4-pro"].restorable_points(tokens)
    assert list(points) == [b for b in range(1, tokens) if b % 128 == 0]


def test_sessions_are_counted_in_whole_blocks(geometry):
    llama = geometry("llama-3.1-8b")
    one_block = 16 * 131_072
    assert llama.sessions_that_fit(10 * one_block, 1) == 10
    assert llama.sessions_that_fit(10 * one_block, 17) == 5


class TestDigest:
    """Equal digests mean: artifacts can be converted into each other."""

    def digest(self, name="deepseek-v4-pro", kv=V4):
        return build_spec(read_config(find_config(name)), kv).digest()

    @pytest.mark.parametrize(
        "layout",
        [
            {"align_bytes": 576},
            {"page_tokens": 256},
            {"lookahead_tokens": 4},
            {"tail": "online"},
            {"name": "other"},
        ],
    )
    def test_layout_and_live_form_do_not_change_it(self, layout):
        other = msgspec.convert({**msgspec.to_builtins(V4), **layout}, KvDescriptor)
        assert self.digest(kv=other) == self.digest()

    @pytest.mark.parametrize(
        "meaning", [{"index": "fp4"}, {"kv": "bf16"}, {"tail_precision": "bf16"}]
    )
    def test_precision_changes_it(self, meaning):
        other = msgspec.convert({**msgspec.to_builtins(V4), **meaning}, KvDescriptor)
        assert self.digest(kv=other) != self.digest()

    def test_every_model_has_its_own(self):
        digests = {name: GEOMETRY[name].spec.digest() for name in example_names()}
        assert len(set(digests.values())) == len(digests)


def test_lookahead_widens_live_state_only():
    config = read_config(find_config("qwen3-next-80b"))
    plain = Geometry.of(build_spec(config))
    wide = Geometry.of(build_spec(config, KvDescriptor(lookahead_tokens=2)))
    assert wide.point_bytes == plain.point_bytes
    conv, state = 36 * 8192 * 2, 36 * 32 * 128 * 128 * 4
    extra = wide.fixed_bytes_per_sequence - plain.fixed_bytes_per_sequence
    assert extra == 2 * (conv + state)


def test_restore_actions_follow_the_kind():
    by_role = {s.role: s.restore_actions for s in GEOMETRY["deepseek-v4-pro"].spec.states}
    assert RestoreAction.REPLAY in by_role[Role.SWA]
    assert RestoreAction.RECOMPUTE_TAIL in by_role[Role.HCA_TAIL]
    assert by_role[Role.CSA_MAIN] == (RestoreAction.LOAD_GLOBAL, RestoreAction.PREFILL)
    recurrent = {s.role: s.restore_actions for s in GEOMETRY["jamba-v0.1"].spec.states}
    assert RestoreAction.REPLAY not in recurrent[Role.RECURRENT]


def test_block_unit_of_v41_is_its_largest_ratio():
    assert block_unit(GEOMETRY["deepseek-v4.1-flash"].spec) == 2
