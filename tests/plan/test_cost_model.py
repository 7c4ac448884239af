"""Costs are measured: fits converge on what really happens and report how wrong they have been."""

from __future__ import annotations

from itertools import pairwise
from math import exp
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.messages import Tier
from ownerserve.kv.registry import build_spec
from ownerserve.kv.registry.source import find_config, read_config
from ownerserve.plan.cost.events import Loaded, Prefilled, Replayed, Waited
from ownerserve.plan.cost.model import ComputeFit, CostModel, Defaults, fit
from ownerserve.plan.cost.prices import (
    NODE_BYTES,
    Coefficients,
    ErrorTrack,
    EstimateSource,
    Medium,
    TierLoad,
)
from ownerserve.plan.cost.roofline import defaults, find_gpu
from ownerserve.plan.cost.shape import shape_of
from ownerserve.plan.inputs import Backlog
from tests.support.examples import examples

TRUTH = Coefficients(9.0, 0.03, 2.5e-6)

# research/simulators-traces.md §4: ms of (new, prefix) on H200, interpolated operator tables.
OPERATOR_TABLE = {
    "Qwen3-30B-A3B TP1": [138, 3364, 50, 121, 625],
    "Qwen3-Coder-480B TP8": [271, 3065, 68, 101, 412],
    "DeepSeek-V3 TP8": [406, 4770, 88, 154, 713],
    "Qwen3.5-35B-A3B TP1": [113, 1241, 31, 43, 163],
}
PASSES = [(8192, 0), (65536, 0), (713, 30_000), (713, 110_000), (4096, 110_000)]


def agent_passes(rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
    """Small turns on long contexts, a few cold prefills: what a worker really sees."""
    passes = []
    for _ in range(count):
        if rng.random() < 0.1:
            passes.append((int(rng.integers(2_000, 60_000)), 0))
        else:
            passes.append((int(rng.lognormal(6.5, 0.8)) + 1, int(rng.integers(5_000, 120_000))))
    return passes


@pytest.mark.parametrize("off", [0.05, 1.0, 20.0])
def test_prefill_converges_from_a_default_that_is_far_off(off: float) -> None:
    rng = np.random.default_rng(7)
    model = ComputeFit.from_default(
        Coefficients(TRUTH.a_ms * off, TRUTH.b_ms / off, TRUTH.c_ms * off)
    )
    for new, prefix in agent_passes(rng, 400):
        model.observe(new, prefix, TRUTH.ms(new, prefix) * rng.lognormal(0.0, 0.05))
    for new, prefix in PASSES:
        assert model.fitted.ms(new, prefix) == pytest.approx(TRUTH.ms(new, prefix), rel=0.06)


def test_stragglers_do_not_move_the_fit() -> None:
    rng = np.random.default_rng(3)
    model = ComputeFit.from_default(TRUTH.scaled(2.0))
    for i, (new, prefix) in enumerate(agent_passes(rng, 400)):
        late = 8.0 if i % 10 == 0 else 1.0
        model.observe(new, prefix, TRUTH.ms(new, prefix) * rng.lognormal(0.0, 0.03) * late)
    for new, prefix in PASSES:
        assert model.fitted.ms(new, prefix) == pytest.approx(TRUTH.ms(new, prefix), rel=0.08)


def test_one_long_prefill_is_not_washed_out_by_hundreds_of_small_turns() -> None:
    rng = np.random.default_rng(5)
    model = ComputeFit.from_default(TRUTH.scaled(3.0))
    model.observe(60_000, 0, TRUTH.ms(60_000, 0))
    for _ in range(400):
        new = int(rng.integers(600, 900))
        model.observe(new, 110_000, TRUTH.ms(new, 110_000) * rng.lognormal(0.0, 0.02))
    assert model.fitted.ms(60_000, 0) == pytest.approx(TRUTH.ms(60_000, 0), rel=0.1)


def test_the_reported_error_is_the_true_one() -> None:
    # With noise uniform in +-20 %, no fit can miss by less than E|ln(1 + U)| = 10.1 %.
    rng = np.random.default_rng(11)
    model = ComputeFit.from_default(TRUTH)
    reported = []
    for new, prefix in agent_passes(rng, 800):
        model.observe(new, prefix, TRUTH.ms(new, prefix) * rng.uniform(0.8, 1.2))
        reported.append(model.error.factor - 1.0)
    assert np.mean(reported[300:]) == pytest.approx(exp(0.101) - 1.0, rel=0.15)


@pytest.mark.parametrize("off", [0.1, 10.0])
def test_being_off_by_ten_shows_whichever_way_it_is(off: float) -> None:
    track = ErrorTrack()
    for _ in range(20):
        track.add(1.0, off)
    assert track.factor == pytest.approx(10.0)
    assert not track.is_trusted


def test_the_form_fits_the_operator_tables() -> None:
    for name, times in OPERATOR_TABLE.items():
        rows = [(new, prefix, float(ms)) for (new, prefix), ms in zip(PASSES, times, strict=True)]
        found = fit(rows, Coefficients(5.0, 0.02, 5e-7))
        errors = [abs(found.ms(new, prefix) / ms - 1.0) for new, prefix, ms in rows]
        assert max(errors) < 0.30, (name, errors)
        assert float(np.median(errors)) < 0.15, (name, errors)


def test_a_tier_learns_each_size_class_apart() -> None:
    # An SSD of two regimes, as measured: 64 KiB at 0.55 GB/s, 4 MiB at 2.3 GB/s.
    tier = TierLoad(Medium(0.1, 5e6))
    for _ in range(30):
        tier.observe(65_536, 65_536 / 0.55e6)
        tier.observe(4 << 20, (4 << 20) / 2.3e6)
    table = tier.table()
    assert table.ms(65_536) == pytest.approx(65_536 / 0.55e6, rel=0.01)
    assert table.ms(4 << 20) == pytest.approx((4 << 20) / 2.3e6, rel=0.01)
    # Sizes never seen lean on the nearest seen.
    assert table.ms(1 << 30) == pytest.approx((1 << 30) / 2.3e6, rel=0.2)


@settings(max_examples=examples(60), deadline=None)
@given(
    seen=st.lists(st.tuples(st.integers(1, 1 << 33), st.floats(1e-3, 1e5)), max_size=20),
    sizes=st.lists(st.integers(0, 1 << 34), min_size=2, max_size=10),
)
def test_more_bytes_never_take_less(seen: list[tuple[int, float]], sizes: list[int]) -> None:
    tier = TierLoad(Medium(0.1, 1e6))
    for count, ms in seen:
        tier.observe(count, ms)
    table = tier.table()
    probes = sorted([*sizes, *NODE_BYTES, *(n - 1 for n in NODE_BYTES)])
    times = [table.ms(n) for n in probes]
    assert all(b >= a * (1 - 1e-9) - 1e-9 for a, b in pairwise(times))


def test_an_estimate_says_where_it_comes_from(costs: CostModel) -> None:
    before = costs.load(Tier.DISK, 1 << 20)
    assert (before.source, before.samples) == (EstimateSource.DEFAULT, 0)
    costs.observe(Loaded(Tier.DISK, 1 << 20, 2.0 * before.ms))
    after = costs.load(Tier.DISK, 1 << 20)
    assert (after.source, after.samples) == (EstimateSource.MEASURED, 1)
    assert after.ms == pytest.approx(2.0 * before.ms)
    assert after.relative_error == pytest.approx(1.0)
    assert costs.sources()["disk"] is EstimateSource.MEASURED
    assert costs.sources()["host"] is EstimateSource.DEFAULT


def test_a_replay_is_priced_as_a_prefill_until_replays_were_seen(costs: CostModel) -> None:
    for i in range(12):
        costs.observe(Prefilled(1000 + i, 0, 40.0))
    assert costs.replay(1000, 0).ms == costs.prefill(1000, 0).ms
    for i in range(12):
        costs.observe(Replayed(1000 + i, 0, 20.0))
    assert costs.replay(1000, 0).ms == pytest.approx(20.0, rel=0.1)
    assert costs.prefill(1000, 0).ms == pytest.approx(40.0, rel=0.1)


def test_waits_correct_the_queue_but_not_the_prefill(costs: CostModel) -> None:
    backlog = Backlog(prefill_tokens=10_000, requests=2, context_tokens=20_000)
    asked = costs.queue(backlog).ms
    prefill = costs.prefill(10_000, 20_000).ms
    for _ in range(80):
        costs.observe(Waited(backlog, 1.6 * asked))
    assert costs.queue(backlog).ms == pytest.approx(1.6 * asked, rel=0.02)
    assert costs.prefill(10_000, 20_000).ms == prefill


def test_what_was_learnt_survives_a_restart(world: SimpleNamespace, costs: CostModel) -> None:
    rng = np.random.default_rng(1)
    for new, prefix in agent_passes(rng, 60):
        costs.observe(Prefilled(new, prefix, TRUTH.ms(new, prefix)))
        costs.observe(Loaded(Tier.HOST, new * 5511, 1.0 + new * 1e-4))
    again = CostModel.restore(costs.dump())
    assert again.prices() == costs.prices()
    assert again.label == "test"
    # And it goes on learning from there.
    for model in (costs, again):
        model.observe(Prefilled(700, 50_000, 99.0))
    assert again.dump() == costs.dump()


@pytest.mark.parametrize("document", [b"", b"{}", b'{"version": 2}', b"\xff"])
def test_a_damaged_or_newer_document_is_refused_with_a_mend(document: bytes) -> None:
    with pytest.raises(InvalidInput, match="measured anew"):
        CostModel.restore(document)


def test_a_document_of_another_version_names_both(costs: CostModel) -> None:
    other = costs.dump().replace(b'"version":1', b'"version":7')
    with pytest.raises(InvalidInput, match="version 7, this build reads 1"):
        CostModel.restore(other)


def test_an_unknown_tier_is_named(costs: CostModel) -> None:
    with pytest.raises(InvalidInput, match="peer"):
        costs.load(Tier.PEER, 1)
    with pytest.raises(InvalidInput, match="positive"):
        costs.observe(Loaded(Tier.DISK, 0, 1.0))


def test_defaults_hold_no_opinion_of_their_error(world: SimpleNamespace) -> None:
    model = CostModel(Defaults("t", world.prefill, world.media))
    assert model.prices().untrusted == {}
    for _ in range(8):
        model.observe(Loaded(Tier.DISK, 1 << 20, 100.0))
        model.observe(Loaded(Tier.DISK, 1 << 20, 0.1))
    assert model.prices().untrusted.keys() == {"disk"}


@pytest.mark.parametrize(
    ("model", "gpus", "parameters", "times", "within"),
    [
        ("qwen3-30b-a3b", 1, 3.3e9, OPERATOR_TABLE["Qwen3-30B-A3B TP1"], 1.5),
        ("deepseek-v3", 8, 37e9, OPERATOR_TABLE["DeepSeek-V3 TP8"], 2.2),
        ("deepseek-v4-pro", 8, None, [557, 4073, 107, 113, 371], 2.2),
    ],
)
def test_roofline_defaults_are_near_the_operator_tables(
    model: str, gpus: int, parameters: float | None, times: list[int], within: float
) -> None:
    config = read_config(find_config(model))
    shape = shape_of(build_spec(config), config, active_parameters=parameters)
    prefill = defaults(shape, find_gpu("H200"), gpus=gpus).prefill
    for (new, prefix), ms in zip(PASSES, times, strict=True):
        ratio = prefill.ms(new, prefix) / ms
        assert 1 / within < ratio < within, (new, prefix, ratio)


def test_a_slower_gpu_is_priced_slower() -> None:
    config = read_config(find_config("qwen3-30b-a3b"))
    shape = shape_of(build_spec(config), config)
    h20, h200 = (defaults(shape, find_gpu(name)) for name in ("H20", "h200"))
    assert h20.prefill.ms(8192, 0) == pytest.approx(6.68 * h200.prefill.ms(8192, 0), rel=0.06)
    assert find_gpu("rtx-pro_6000").name == "RTX PRO 6000"
