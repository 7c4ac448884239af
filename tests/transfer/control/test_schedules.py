"""Seeded schedules of workers that lend to and bring from one another, on real caches: no write
into somebody else's blocks, no wrong byte in the tree, nothing left, each bring over in time.

Two hundred here; more, or a range, by hand:

    python -m tests.transfer.control.test_schedules 0 100000
"""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from tests.support.ranges import play_range
from tests.support.removals import Removal
from tests.support.transfer_control.mutations import REMOVALS, SCHEDULES
from tests.support.transfer_control.world import play

CAUGHT_WITHIN = 2000


@pytest.mark.parametrize("first", range(0, 200, 10))
def test_schedules(first: int) -> None:
    for seed in range(first, first + 10):
        play(seed)


def test_a_schedule_is_the_same_each_time() -> None:
    assert play(7).counts == play(7).counts


def test_schedules_are_no_idle_talk() -> None:
    """They bring by each road, in many parts, and end in each way; nodes freeze and die."""
    counts = sum((play(seed).counts for seed in range(30)), Counter[str]())
    assert counts["bring brought"] > 30 and counts["parts"] > 60
    assert min(counts[f"by {road}"] for road in ("readv", "tcp", "rdma")) > 10
    ends = ("failed", "gone", "no_peer", "no_room", "refused", "short", "slow", "unwanted")
    assert all(counts[f"bring {end}"] for end in ends)
    assert counts["frozen"] and counts["killed"]


@pytest.mark.slow
@pytest.mark.parametrize("removal", REMOVALS, ids=lambda one: one.name)
def test_a_missing_check_is_noticed(removal: Removal) -> None:
    assert SCHEDULES.noticed(removal, CAUGHT_WITHIN) is not None


def counted(seed: int) -> Counter[str]:
    """Play one, and return what was in it."""
    world = play(seed)
    return world.counts + Counter(events=world.net.events)


if __name__ == "__main__":
    sys.exit(play_range(counted, int(sys.argv[1]), int(sys.argv[2])))
