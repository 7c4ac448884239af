"""Aborts at random points between real worker processes that compute for one another and fetch from
one another: nothing is left, nothing is written where nobody may write, no answer is wrong.
tests/support/hf/aborts/worker.py says what of them is real. Ten thousand, by hand:

    python -m tests.support.hf.aborts.storm 10000
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.support.hf.aborts.storm import storm

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ABORTS = 800


def test_aborts_at_random_points_leave_nothing_and_cost_no_answer() -> None:
    came = storm(ABORTS, seed=1)
    assert all(came.by[kind] > 20 for kind in ("hang up", "call off", "drop")), came
    assert came.answered["remote_prefill"] > 50, "turns are answered with what peers computed"
    assert came.answered["cold_prefill"] > 50, "and without"
    ends = came.counts["prefills"]
    assert ends["read"] and ends["called_off"] and ends["left"], came.counts
    assert came.counts["told"]["layer"], came.counts
    assert came.counts["brings"]["stopped"] and came.counts["brings"]["short"], came.counts
