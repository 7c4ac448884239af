"""Seeded fault schedules: no double owner, no lost request, all done two leases after healing.

Two hundred in CI. More, or a range, by hand:

    python tests/directory/test_faults.py 0 100000
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fault_world import World, play
from mutations import MUTATIONS, Mutation, first_caught

CAUGHT_WITHIN = 1000


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_fault_schedules(first: int) -> None:
    for seed in range(first, first + 50):
        play(seed)


def test_a_schedule_is_the_same_each_time() -> None:
    one, other = World(7), World(7)
    one.play()
    other.play()
    assert [one.journals[name].done for name in one.sessions] == [
        other.journals[name].done for name in other.sessions
    ]


def test_schedules_are_no_idle_talk() -> None:
    """They serve, hand over, lose memory and start terms."""
    worlds = [World(seed) for seed in range(20)]
    for world in worlds:
        world.play()
    turns = sum(len(one.done) for world in worlds for one in world.journals.values())
    assert turns > 20 * 20
    assert any(world.state.term.ordinal > 2 for world in worlds)
    assert any(world.zombies for world in worlds)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.name)
def test_a_missing_check_is_noticed(mutation: Mutation) -> None:
    assert first_caught(mutation, CAUGHT_WITHIN) is not None


def run(low: int, high: int) -> None:
    """By command: many schedules in one process, with a line for each thousand."""
    # A schedule is one heap of cycles that ends at once: looking for garbage in it costs a third.
    gc.set_threshold(100_000, 20, 100)
    began_s, slowest = time.process_time(), {True: (0.0, 0), False: (0.0, 0)}
    for seed in range(low, high):
        world = play(seed)
        has_file = world.has_term_file
        slowest[has_file] = max(slowest[has_file], (world.settled_s, seed))
        if (seed + 1 - low) % 1000 == 0 or seed + 1 == high:
            print(
                f"{seed + 1 - low} fault schedules, no violation, "
                f"{time.process_time() - began_s:.0f} s CPU; all served after healing within "
                f"{slowest[True][0]:.2f} s (seed {slowest[True][1]}), without a term file "
                f"{slowest[False][0]:.2f} s (seed {slowest[False][1]})",
                flush=True,
            )


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]))
