"""Seeded schedules of workers that compute for one another and fetch from one another, under a
clock of their own: each turn has a cold engine's answer in time, nothing is left, and nobody writes
where nobody may. tests/support/node/schedules/node.py says what of them is real.

Two hundred here; more, or a range, by hand:

    python -m tests.node.test_prefill_schedules 0 100000
"""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from tests.support.node.schedules.world import play
from tests.support.ranges import play_range


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 10))
def test_schedules(first: int) -> None:
    for seed in range(first, first + 10):
        play(seed)


def test_a_schedule_is_the_same_each_time() -> None:
    assert play(7) == play(7)


@pytest.mark.slow
def test_schedules_are_no_idle_talk() -> None:
    """Turns are answered by what peers computed and without, and prompts end in each way."""
    counts = sum((play(seed) for seed in range(12)), Counter[str]())
    assert counts["answered, computed by a peer"] > 20 and counts["answered"] > 20, counts
    for end in ("read", "left", "called_off"):
        assert counts[f"prompt {end}"], counts
    for end in ("brought", "stopped"):
        assert counts[f"bring {end}"], counts
    assert counts["frozen"] and counts["killed"] and counts["preempted"], counts


if __name__ == "__main__":
    sys.exit(play_range(play, int(sys.argv[1]), int(sys.argv[2])))
