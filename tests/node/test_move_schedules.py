"""Seeded schedules of sessions that move between workers, and of turns that move amid their
answers, under a clock of their own: one may write, versions never go back, no session is lost, each
token of an answer comes once, and nothing is left of a move that has ended.
tests/support/node/schedules/moving_world.py says what happens in them, and what must hold.

Two hundred here; more, or a range, by hand:

    python -m tests.node.test_move_schedules 0 100000
"""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from tests.support.node.move_mutations import REMOVALS, SCHEDULES
from tests.support.node.schedules.moving_world import play
from tests.support.ranges import play_range
from tests.support.removals import Removal

pytestmark = pytest.mark.slow

CAUGHT_WITHIN = 100


@pytest.mark.parametrize("first", range(0, 200, 10))
def test_schedules(first: int) -> None:
    for seed in range(first, first + 10):
        play(seed)


def test_a_schedule_is_the_same_each_time() -> None:
    assert play(7) == play(7)


def test_schedules_are_no_idle_talk() -> None:
    """Sessions move, at gateways' word and by hand, and stay for each reason; turns move amid their
    answers; all goes wrong that may."""
    counts = sum((play(seed) for seed in range(24)), Counter[str]())
    assert counts["answered by its owner"] > 50 and counts["answered by a guest"] > 50, counts
    assert counts["take taken"] > 20 and counts["installed"] > 10, counts
    assert counts["move taken"] > 5 and counts["sessions to leave"] > 5, counts
    for end in ("no_answer", "not_brought", "not_owner", "session_is_moving", "stale_epoch"):
        assert counts[f"take {end}"], counts
    assert counts["turns moved"] > 10 and counts["answered where it went on"] > 10, counts
    for end in ("TurnSent", "unknown_turn"):
        assert counts[f"turn ordered: {end}"], counts
    for fault in ("frozen", "killed", "left", "apart", "gateways killed", "directories", "crowds"):
        assert counts[fault], counts


@pytest.mark.parametrize("removal", REMOVALS, ids=lambda one: one.name)
def test_a_missing_check_is_noticed(removal: Removal) -> None:
    assert SCHEDULES.noticed(removal, CAUGHT_WITHIN) is not None


if __name__ == "__main__":
    sys.exit(play_range(play, int(sys.argv[1]), int(sys.argv[2])))
