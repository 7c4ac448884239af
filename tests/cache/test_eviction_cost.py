"""What a run under pressure looks at: what goes, not all that could have gone."""

from __future__ import annotations

from typing import ClassVar

from ownerserve.cache.policies.base import Candidate, Key
from ownerserve.cache.policies.cost_aware import CostAware
from ownerserve.cache.pools.evictor import LOOK_TAILS
from ownerserve.cache.pressure import EvictedState, Spill, Watermarks
from ownerserve.kv.ids import SessionId
from tests.support.cache.cache_driver import DENSE, Driver, blocks_of


class Counting(CostAware):
    """The default order; counts how often it is asked."""

    asked: ClassVar[int] = 0

    def key(self, candidate: Candidate) -> Key:
        Counting.asked += 1
        return super().key(candidate)


COUNT = 200


def test_a_run_asks_for_the_keys_of_what_it_evicts() -> None:
    """A pool full of idle sessions' state: 5 % are to go, a few are copied out first."""
    driver = Driver(blocks=4 * COUNT, points=COUNT, policy=Counting())
    cache = driver.cache
    driver.fill((f"s{number}", blocks_of(number + 1)) for number in range(COUNT))
    assert not cache.occupancy.points[0].free
    cache.pressure.watermarks = Watermarks(low=0.02, high=0.2, idle_s=1.0, spills=8, tier="disk")
    Counting.asked = 0
    spill, dropped = cache.pressure.relieve(driver.now + 100.0)
    assert isinstance(spill, Spill) and isinstance(dropped, EvictedState)
    assert len(spill.points) == 8 and dropped.points == 2 * (COUNT // 5 - 8)
    # Of each that goes: asked as it goes, as its second component is offered and goes, and for the
    # aging of the order. Asking all of them would take 400.
    assert Counting.asked <= 4 * (COUNT // 5)
    driver.check()
    # What was held is found again when its copy is made, and goes next.
    cache.pressure.spilled(spill.ticket)
    driver.check()
    held = cache.occupancy.points[0].free
    cache.pressure.evict_points(0, 8)
    assert cache.occupancy.points[0].free == held + 8
    for number in range(8):
        status = cache.sessions.status(SessionId(f"s{number}"))
        assert status is not None
    driver.check()


def test_a_look_at_what_goes_next_names_it_and_moves_nothing() -> None:
    driver = Driver(blocks=12, points=12)
    for number in range(4):
        driver.turn(
            f"t{number}", blocks_of(number + 1, number + 1, number + 1), session=f"s{number}"
        )
        driver.now += 1.0
    rooms, before = driver.cache.occupancy, driver.resident
    short = rooms.shortage(5)
    driver.check()
    assert driver.resident == before and rooms.blocks.free == 0
    assert [(v.blocks, v.position, v.is_expected) for v in short.victims] == [
        (1, 48, True),  # behind the state at 32, which none of its blocks is behind
        (1, 48, True),
        (1, 48, True),
        (1, 48, True),
    ]
    assert {v.tokens for v in short.victims} == {16}, "to compute again for who comes back"
    gone = before - (driver.evict(1) and driver.resident)
    assert len(gone) == 1 and short.victims[0].position == len(gone.pop()) // 4
    assert rooms.shortage(1).victims == (), "there is room for one"
    driver.cache.sessions.release(SessionId("s1"))
    assert not rooms.shortage(2).victims[0].is_expected, "whom nobody expects goes first"


def test_a_look_at_what_goes_next_is_bounded() -> None:
    driver = Driver(DENSE, blocks=4 * COUNT)
    driver.fill((f"s{number}", blocks_of(number + 1, number + 1)) for number in range(COUNT))
    short = driver.cache.occupancy.shortage(4 * COUNT)
    assert len(short.victims) == LOOK_TAILS < COUNT
    assert {v.tokens for v in short.victims} == {32}, "both blocks of each"
