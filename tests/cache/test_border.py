"""The border between range blocks and point slots: it moves to where state is worth more, and every
slot that moves keeps its bytes (the driver compares them after every step)."""

from __future__ import annotations

from ownerserve.cache.outcomes import SlotsReserved
from ownerserve.cache.policies.lru import Lru
from tests.support.cache.cache_driver import HYBRID, B, Driver, blocks_of
from tests.support.cache.readers import Readers

BLOCK_BYTES = sum(one.slot_bytes for one in HYBRID.components if one.name in HYBRID.range_names)
POINT_BYTES = sum(one.slot_bytes for one in HYBRID.components if one.name in HYBRID.point_names)


def sides(driver: Driver) -> tuple[int, int]:
    """The blocks and the point slots that there are."""
    rooms = driver.cache.occupancy
    assert len({pool.capacity for pool in rooms.points}) == 1
    return rooms.blocks.capacity, rooms.points[0].capacity


def fits(driver: Driver, arena_bytes: int) -> None:
    blocks, points = sides(driver)
    assert blocks * BLOCK_BYTES + points * POINT_BYTES <= arena_bytes
    assert blocks <= driver.cache.occupancy.most_blocks


def long_prompt(symbol: int, blocks: int) -> bytes:
    return blocks_of(*(1000 * symbol + number for number in range(blocks)))


def points_are_few() -> Driver:
    """Long conversations, one after another, leave points only as many slots as they have state."""
    driver = Driver(blocks=24, points=24, policy=Lru(), least_points=2)
    for number in range(1, 12):
        driver.turn(f"t{number}", long_prompt(number, 9))
        driver.divide()
        driver.now += 1.0
    return driver


def test_point_slots_that_nobody_uses_become_blocks() -> None:
    driver = points_are_few()
    blocks, points = sides(driver)
    assert points < 24 and blocks > 24
    fits(driver, 24 * (BLOCK_BYTES + POINT_BYTES))


def test_blocks_give_way_to_points_that_are_worth_more_and_move_with_their_bytes() -> None:
    driver = points_are_few()
    few = sides(driver)[1]
    shared, most = long_prompt(0, 8), few
    for number in range(40):  # forks: a block and a point each, on one prompt
        driver.turn(f"f{number}", shared + blocks_of(5000 + number, tail=1))
        driver.divide()
        driver.now += 1.0
        most = max(most, sides(driver)[1])
    assert most > few
    fits(driver, 24 * (BLOCK_BYTES + POINT_BYTES))


def test_blocks_that_somebody_reads_stay_where_they_are() -> None:
    """Blocks would give way to points, and those beyond the border move: none that is lent does."""
    driver = points_are_few()
    readers = Readers(driver)
    ticket = readers.lend(long_prompt(10, 9), idle_s=1e6)
    for number in range(40):
        driver.turn(f"f{number}", long_prompt(0, 8) + blocks_of(5000 + number, tail=1))
        driver.divide()
        readers.look()
        driver.now += 1.0
    assert readers.read(ticket)


def test_a_running_turn_gets_all_blocks_that_there_can_be() -> None:
    driver = Driver(blocks=8, points=12, least_points=1)
    most = driver.cache.occupancy.most_blocks
    assert most > 8 and driver.cache.occupancy.obtainable_blocks() == most
    driver.turn("idle", blocks_of(1, 2, 3, tail=1), session="s")
    assert driver.turn("long", long_prompt(7, most), session="t").restored == 0
    assert sides(driver)[0] == most


def test_a_prompt_that_never_fits_is_refused_by_what_there_can_be() -> None:
    driver = Driver(blocks=8, points=12, least_points=1)
    most = driver.cache.occupancy.most_blocks
    assert not hasattr(driver.begin("t", long_prompt(7, most + 1)), "restored")


def test_slots_that_somebody_writes_to_stay_where_they_are() -> None:
    driver = Driver(blocks=4, points=6, least_points=1)
    got = driver.arrive(blocks_of(1, 2), points=(2 * B,))
    assert isinstance(got, SlotsReserved)
    top = max(max(slots.values()) for slots in got.points.values())
    long = long_prompt(7, driver.cache.occupancy.most_blocks)
    driver.begin("long", long)
    assert not driver.prefill("long"), "the arrival has blocks of its own, and keeps them"
    assert sides(driver)[1] > top
    driver.land(got.ticket, b"digest")
    assert driver.prefill("long")
    driver.finish("long")


def test_pools_of_their_own_have_no_border() -> None:
    driver = Driver(blocks=8, points=12)
    for number in range(8):
        driver.turn(f"t{number}", long_prompt(number, 5))
        assert driver.cache.border.move(driver.now) == ()
    assert sides(driver) == (8, 12) and driver.cache.occupancy.most_blocks == 8
