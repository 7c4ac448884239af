"""A model in units: the same bytes, fewer positions."""

from __future__ import annotations

import math

import pytest

from ownerserve.cache.hetero import HeteroCache
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.geometry import block_unit
from ownerserve.kv.specs import Coverage
from ownerserve.kv.units import GIB
from ownerserve.plan.cost.prices import Coefficients
from ownerserve.plan.question import model_state
from ownerserve.sim.storage.layout import (
    slots_for,
    unit_coefficients,
    unit_layout,
    unit_model,
    unit_policy,
)
from tests.support.sim.sim_node_driver import geometry_of

CONFIGS = (
    "qwen3-30b-a3b",
    "llama-3.1-8b",
    "deepseek-v3",
    "deepseek-v4-flash",
    "deepseek-v4-pro",
    "qwen3.5-35b-a3b",
    "gpt-oss-120b",
)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("unit_tokens", [16, 64, 512])
def test_bytes_are_those_of_the_model(config: str, unit_tokens: int) -> None:
    geometry = geometry_of(config)
    model = unit_model(geometry, unit_tokens)
    assert model.block_tokens == math.lcm(unit_tokens, block_unit(geometry.spec))
    assert model.layout.block_tokens * unit_tokens == model.block_tokens
    payload = dict.fromkeys(Coverage, 0)
    for component in model.layout.components:
        payload[component.coverage] += component.payload_bytes
    assert payload[Coverage.RANGE] == pytest.approx(geometry.bytes_per_token * model.block_tokens)
    assert payload[Coverage.POINT] == geometry.point_bytes
    assert model.layout.state_bytes == geometry.state_bytes
    assert model.state.range_bytes_per_token >= geometry.bytes_per_token * unit_tokens * 0.999


def test_a_dense_model_has_one_unit_a_block_and_a_window_model_as_many_as_it_needs() -> None:
    assert unit_layout(geometry_of("qwen3-30b-a3b"), 64).block_tokens == 1
    flash = unit_layout(geometry_of("deepseek-v4-flash"), 64)
    assert flash.block_tokens == 2
    assert {tail.name: tail.period for tail in flash.tails} == {"hca_tail": 2}
    assert unit_layout(geometry_of("deepseek-v4-flash"), 512).tails == ()


def test_a_unit_that_cuts_a_window_is_refused() -> None:
    with pytest.raises(InvalidInput, match="cuts a window"):
        unit_layout(geometry_of("deepseek-v4-flash"), 48)
    with pytest.raises(InvalidInput, match="unit_tokens"):
        unit_layout(geometry_of("qwen3-30b-a3b"), 0)


def test_replays_are_never_too_short() -> None:
    geometry = geometry_of("deepseek-v4-pro")
    exact = model_state(geometry).exact_replay_tokens
    units = unit_model(geometry, 64).state.exact_replay_tokens
    assert exact is not None and units is not None
    assert exact <= units * 64 < exact + 64
    assert unit_model(geometry_of("qwen3.5-35b-a3b"), 64).state.exact_replay_tokens is None


def test_prices_in_units_are_the_prices_in_tokens() -> None:
    tokens = Coefficients(10.0, 0.05, 2e-7)
    units = unit_coefficients(tokens, 64)
    assert units.ms(100, 1000) == pytest.approx(tokens.ms(6400, 64_000))


def test_periods_of_checkpoints_are_in_units() -> None:
    assert unit_policy("periodic:8192", 64) == "periodic:128"
    assert unit_policy("periodic:100", 64) == "periodic:2"
    assert unit_policy("turn-end", 64) == "turn-end"


@pytest.mark.parametrize("config", CONFIGS)
def test_the_device_is_shared_as_an_engine_shares_it(config: str) -> None:
    model = unit_model(geometry_of(config), 64)
    sizes = slots_for(model.layout, 40 * GIB, 32)
    taken = sum(c.slot_bytes * sizes.slots[c.name] for c in model.layout.components)
    taken += sizes.state_slots * model.layout.state_bytes
    assert 0.9 * 40 * GIB < taken <= 40 * GIB
    HeteroCache(model.layout, sizes.slots, sizes.state_slots).check()


def test_lengths_round_up() -> None:
    model = unit_model(geometry_of("llama-3.1-8b"), 64)
    assert [model.units(n) for n in (1, 64, 65)] == [1, 1, 2]
