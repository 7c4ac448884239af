"""Seeded fault schedules: no double owner, no lost request, all owned two leases after healing.

Two hundred in CI. More, or a range, by hand:

    python -m tests.directory.test_faults 0 100000 --processes 2
"""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from tests.support.directory.fault_run import main, run
from tests.support.directory.fault_world import World, play
from tests.support.directory.mutations import REMOVALS, SCHEDULES
from tests.support.removals import Removal

pytestmark = pytest.mark.slow

CAUGHT_WITHIN = 2000
ONCE_VIOLATED = {
    350: "an owner that ceased to be one went on where it had read before",
    1450: "the answer to a probe that was counted as bad brought a former life back",
    7390: "a directory without memory gave a session below an epoch that its owner had heard",
    30622: "who gave a session up and was given it back asked for it no more",
    69932: "who was told again and again that a session is its own put off asking for it",
}
"""Schedules that found something, and what."""


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_fault_schedules(first: int) -> None:
    for seed in range(first, first + 50):
        play(seed)


@pytest.mark.parametrize("seed", ONCE_VIOLATED)
def test_schedules_that_once_found_something(seed: int) -> None:
    play(seed)


def test_a_schedule_is_the_same_each_time() -> None:
    one, other = World(7), World(7)
    one.play()
    other.play()
    assert [one.journals[name].done for name in one.sessions] == [
        other.journals[name].done for name in other.sessions
    ]


def test_schedules_are_no_idle_talk() -> None:
    """They serve, hand over, lose memory, start terms; nodes restore, refuse and die."""
    worlds = [World(seed) for seed in range(30)]
    for world in worlds:
        world.play()
    journals = [one for world in worlds for one in world.journals.values()]
    assert sum(len(one.done) for one in journals) > 30 * 5  # owners' turns
    assert sum(len(one.guests.union(one.done)) for one in journals) > 30 * 20
    assert any(world.state.term.ordinal > 2 for world in worlds)
    assert any(world.zombies for world in worlds)
    counts = sum((world.counts for world in worlds), Counter[str]())
    assert counts["of them resumed"] > 100 and counts["restore loaded"] > 10
    assert counts["turns of guests"] > 100 and counts["turns that died"]
    assert counts["published"] > 1000 and counts["told as gone"] > 100
    assert counts["hand-overs"] > 20 and counts["releases asked"] > 20
    assert counts["release stale_epoch"] and counts["release not_owner"]


def test_a_run_is_the_same_on_any_number_of_processes() -> None:
    one, two = run(0, 24), run(0, 24, processes=2)
    assert one.schedules == two.schedules == 24
    assert (one.digest, one.counts, one.failures) == (two.digest, two.counts, [])


@pytest.mark.slow
@pytest.mark.parametrize("removal", REMOVALS, ids=lambda one: one.name)
def test_a_missing_check_is_noticed(removal: Removal) -> None:
    assert SCHEDULES.noticed(removal, CAUGHT_WITHIN) is not None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
