"""Where a hot session can go: everybody with room is looked at, whatever else is less loaded."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ownerserve.router.decision import DispatchReason
from ownerserve.router.fleet import room_tokens
from ownerserve.router.policies import make_policy
from ownerserve.router.pricing import least_with_room, takes_all
from ownerserve.router.settings import Settings
from tests.support.examples import examples
from tests.support.router.fleets import ABLE, GIB, fleet_of, load, owned, status

PROFILE = replace(ABLE, kv_bytes_total=50 * GIB)
HOT = 2_000_000
SETTINGS = Settings(hot_ms=100.0)


@pytest.mark.parametrize("name", ["ear", "ownerserve"])
def test_full_workers_hide_none_that_has_room(name: str) -> None:
    """Free GB [0, 1, 1, 1, 1, 50, 50, 50], and a context of 5 GB: the full ones are least busy."""
    fleet = fleet_of(*[PROFILE] * 8)
    for worker, free in zip(fleet, (0, 1, 1, 1, 1, 50, 50, 50), strict=True):
        pending = HOT if free == 0 else 0 if free == 1 else 100 * (worker.order - 4)
        fleet.heard(status(worker.id, 1.0, free=free * GIB, pending=pending), 1.0)
    home, *_, first_free, _, _ = fleet
    turn = owned(home, context=5_000_000)
    moved = make_policy(name, SETTINGS).decide(turn, fleet.candidates(None))
    assert (moved.worker, moved.reason) == (first_free, DispatchReason.HOT_OWNER)


loads = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 40)), min_size=2, max_size=12
)  # (free, in steps that a context of about one fills; pending)


@settings(max_examples=examples(150), deadline=None)
@given(told=st.lists(loads, min_size=1, max_size=4), tokens=st.integers(1, 400_000),
       gone=st.integers(0, 11))  # fmt: skip
def test_it_is_the_least_loaded_of_those_with_room(
    told: list[list[tuple[int, int]]], tokens: int, gone: int
) -> None:
    """Against a look at every worker, over changes of load and a worker that leaves."""
    fleet = fleet_of(*[PROFILE] * max(map(len, told)))
    candidates, workers = fleet.candidates(None), list(fleet)
    for at, words in enumerate(told, start=1):
        for worker, (free, pending) in zip(workers, words, strict=False):
            free_bytes = int(free * 100_000 * 1000)
            fleet.heard(status(worker.id, at, free=free_bytes, pending=pending * 1000), at)
        if at == 2 and gone < len(workers) - 1 and workers[gone].up:
            fleet.take_down(workers[gone].id)
        home = next(iter(candidates))
        found = candidates.least_with_room(tokens, but=home, takes=takes_all)
        others = [worker for worker in candidates if worker is not home]
        surely = [worker for worker in others if room_tokens(worker) > tokens * 2 ** (1 / 8)]
        if found is None:
            assert not surely
        else:
            assert found in others
            assert room_tokens(found) >= tokens
            if surely:
                assert found.queue_ms <= min(worker.queue_ms for worker in surely)
        fleet.check()


def test_what_says_nothing_of_its_memory_has_room() -> None:
    fleet = fleet_of(ABLE, ABLE, ABLE)
    home, *_, last = fleet
    load(home, pending=HOT)
    load(list(fleet)[1], pending=500)
    assert fleet.candidates(None).least_with_room(10**9, but=home, takes=takes_all) is last


def test_who_may_not_take_it_is_passed_over_however_idle() -> None:
    fleet = fleet_of(ABLE, ABLE, ABLE)
    home, idle, busier = fleet
    load(home, pending=HOT)
    load(busier, pending=500)
    found = [
        least_with_room(owned(home, context=1000), home, fleet.candidates(None), takes=takes)
        for takes in (takes_all, lambda worker: worker is not idle, lambda worker: False)
    ]
    assert found == [idle, busier, None]
