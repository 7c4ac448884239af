"""Decode steps: what is learnt from them, whatever else the machine did meanwhile."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.messages import Tier
from ownerserve.node.runtime.node_runtime import UNMEASURED, Calibration
from ownerserve.node.runtime.stating import speed_statement, tier_statements
from ownerserve.plan.cost.events import Loaded, Prefilled, Stepped
from ownerserve.plan.cost.model import ASSUMED, CostModel, StepFit, StepTimes


def test_until_a_step_was_seen_the_default_stands() -> None:
    assert StepFit().times() == ASSUMED
    assert StepFit(StepTimes(3.0, 0.5)).times() == StepTimes(3.0, 0.5)


def test_the_line_is_found_among_stragglers() -> None:
    """Every fifth step waits for a busy machine, ten times as long."""
    fit, draw = StepFit(), random.Random(1)
    for number in range(200):
        batch = draw.choice((1, 2, 4, 8, 40))
        ms = (5.0 + 0.5 * batch) * draw.uniform(0.95, 1.05)
        fit.observe(batch, ms * (10.0 if number % 5 == 0 else 1.0))
    times = fit.times()
    for batch in (1, 4, 16, 40):
        assert times.ms(batch) == pytest.approx(5.0 + 0.5 * batch, rel=0.1)


def test_one_batch_size_takes_the_defaults_shape() -> None:
    fit = StepFit(StepTimes(9.0, 1.0))
    fit.observe(1, 5.0)
    assert fit.times() == StepTimes(4.5, 0.5)


@pytest.mark.parametrize(("batch", "ms"), [(0, 1.0), (1, 0.0), (-1, 1.0), (1, -2.0)])
def test_what_is_no_step_is_refused(batch: int, ms: float) -> None:
    with pytest.raises(InvalidInput, match="step"):
        StepFit().observe(batch, ms)


@given(st.lists(st.tuples(st.integers(1, 4096), st.floats(1e-3, 1e6)), min_size=1, max_size=60))
def test_no_part_of_the_line_is_negative_and_no_step_is_free(
    steps: list[tuple[int, float]],
) -> None:
    fit = StepFit()
    for batch, ms in steps:
        fit.observe(batch, ms)
    times = fit.times()
    assert times.step_ms >= 0.0 <= times.sequence_ms
    assert times.ms(1) > 0.0
    assert len(fit.cells) < 128


def test_what_was_measured_bears_its_date_also_after_a_restart() -> None:
    model = CostModel(UNMEASURED)
    assert speed_statement(model, replay_tokens=0).prefill_measured_s is None
    model.observe(Prefilled(100, 0, 50.0), 1000.0)
    model.observe(Stepped(1, 4.0), 1001.0)
    model.observe(Loaded(Tier.DISK, 1 << 20, 2.0), 1002.0)
    again = CostModel.restore(model.dump())
    speed = speed_statement(again, replay_tokens=7)
    assert (speed.prefill_measured_s, speed.step_measured_s) == (1000.0, 1001.0)
    assert speed.step_ms + speed.step_ms_per_sequence == pytest.approx(4.0)
    assert speed.replay_tokens == 7
    host, disk = tier_statements(again, {Tier.HOST: 1 << 30, Tier.DISK: None})
    assert (host.name, host.bytes_total, host.measured_s) == ("host", 1 << 30, None)
    assert (disk.name, disk.bytes_total, disk.measured_s) == ("disk", None, 1002.0)
    assert disk.latency_ms + (1 << 20) / disk.bytes_per_ms == pytest.approx(2.0, rel=0.1)


def test_a_file_of_an_older_build_has_no_steps_and_no_dates() -> None:
    """A fleet runs both during an upgrade."""
    import msgspec

    tree = msgspec.json.decode(CostModel(UNMEASURED).dump())
    del tree["steps"], tree["measured_s"]
    model = CostModel.restore(msgspec.json.encode(tree))
    assert model.steps() == ASSUMED
    assert speed_statement(model, replay_tokens=0).step_measured_s is None


def test_a_calibration_dates_what_it_observes() -> None:
    calibration = Calibration(None)
    calibration.observe((Stepped(2, 3.0),))
    assert speed_statement(calibration.model, replay_tokens=0).step_measured_s is not None
