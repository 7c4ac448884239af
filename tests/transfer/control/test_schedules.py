"""Seeded schedules of workers that lend to and bring from one another, on real caches: no write
into somebody else's blocks, no wrong byte in the tree, nothing left, each bring over in time.

Two hundred here; more, or a range, by hand:

    python -m tests.transfer.control.test_schedules 0 100000
"""

from __future__ import annotations

import sys
import time
from collections import Counter

import pytest

from ownerserve.kv.errors import OwnerServeError
from tests.support.transfer_control.mutations import (
    MUTATIONS,
    Instead,
    first_caught,
    likely_first,
    name_of,
)
from tests.support.transfer_control.world import play

CAUGHT_WITHIN = 2000
TOLD_EVERY_S = 10.0


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
@pytest.mark.parametrize("mutation", MUTATIONS, ids=name_of)
def test_a_missing_check_is_noticed(mutation: Instead) -> None:
    assert first_caught(mutation, likely_first(mutation, CAUGHT_WITHIN)) is not None


def main(low: int, high: int) -> int:
    """Play a range, tell how far it is, and go on behind a violation; 1 when there was one."""
    counts, failures = Counter[str](), 0
    began_s = told_s = time.monotonic()
    for seed in range(low, high):
        try:
            world = play(seed)
            counts += world.counts
            counts["events"] += world.net.events
        except (AssertionError, OwnerServeError, LookupError, ValueError) as error:
            failures += 1
            print(f"schedule {seed}: {type(error).__name__}: {error}", flush=True)
        now_s = time.monotonic()
        if now_s - told_s >= TOLD_EVERY_S:
            told_s, done = now_s, seed + 1 - low
            left_s = (now_s - began_s) / done * (high - seed - 1)
            print(
                f"{done:,} of {high - low:,} schedules, {failures} violations, "
                f"{left_s / 60:.0f} min left",
                file=sys.stderr,
                flush=True,
            )
    told = ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))
    print(f"{high - low:,} schedules, {failures} violations; in them: {told}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
