"""Slots that were given up while somebody writes into them are nobody's until that has ended."""

from __future__ import annotations

import pytest

from ownerserve.cache.ingest import HoldLevel
from ownerserve.cache.metrics import snapshot
from ownerserve.kv.ids import TurnId
from ownerserve.kv.prefix import pack
from ownerserve.node.vocabulary.events import NotFetched, RestoreOutcome, Tick, TurnGone
from ownerserve.node.vocabulary.settings import NodeSettings
from ownerserve.store.format.model import MissReason
from tests.support.node.node_driver import B, NodeDriver

LONG = list(range(10 * B + 5))


@pytest.mark.parametrize("below", [NodeSettings(record_blocks=4), NodeSettings(below=frozenset())])
def test_a_ticket_that_nobody_reads_ends_while_the_node_is_idle(below: NodeSettings) -> None:
    """No turn comes and no room is short: its own time brings the tick that ends it."""
    driver = NodeDriver(settings=below)
    if below.below:
        driver.turn(LONG, session=None)
    driver.idle(1.0)
    ticket = driver.cache.lends.lend((pack(LONG),), driver.now, idle_s=5.0)
    assert driver.state.next_due() == driver.now + 5.0
    driver.now += 5.0
    driver.handle(Tick())
    assert not driver.cache.lends.stands(ticket)
    assert snapshot(driver.cache, driver.now).pools["main"].protected == 0
    driver.check()


def writing(driver: NodeDriver) -> TurnId:
    """A turn into whose slots somebody writes."""
    driver.turn(LONG)
    driver.idle()
    driver.forget_device()
    driver.is_slow = True
    turn = driver.arrive([*LONG, 1, 2])
    driver.settle()
    assert driver.writes and turn not in driver.started
    driver.check()
    return turn


@pytest.mark.parametrize("is_late", [True, False])
def test_slots_that_are_written_to_are_nobody_elses_before_the_write_has_ended(
    is_late: bool,
) -> None:
    """The turn waits no longer: it is late, or its client hung up."""
    driver = NodeDriver(blocks=24)
    turn = writing(driver)
    if is_late:
        driver.now += driver.settings.restore_deadline_s
        driver.idle(0.0)
        assert driver.reports[turn].outcome is RestoreOutcome.LATE
    else:
        driver.handle(TurnGone(turn))
        del driver.waiting[turn]
    driver.check()
    driver.now += 3.0
    level = snapshot(driver.cache, driver.now)
    assert level.pools["main"].held == 10 and level.pools["main"].free == 14
    assert level.holds["store"] == HoldLevel(1, 10, 1, 3.0)
    if is_late:
        assert driver.run(turn).restored == 0, "it computes what is still on its way"
    driver.turn([*range(700, 700 + 13 * B)], session=None)  # takes all that is free
    driver.write()
    driver.check()
    level = snapshot(driver.cache, driver.now)
    assert level.holds["store"] == HoldLevel() and level.pools["main"].held == 0
    driver.turn([*range(800, 800 + 22 * B)], session=None)  # its blocks are room again
    driver.check()


def test_a_reads_second_answer_is_not_the_end_of_the_write_that_followed_it() -> None:
    driver = NodeDriver(blocks=16)
    turn = writing(driver)
    operation_id = driver.writes[0].operation_id
    driver.handle(NotFetched(operation_id, MissReason.CORRUPT))
    assert turn not in driver.started, "its bytes are on their way"
    driver.write()
    assert driver.reports[turn].outcome is RestoreOutcome.LOADED
    driver.check()


def test_a_write_that_nobody_hears_of_keeps_its_slots_and_shows() -> None:
    driver = NodeDriver(blocks=16)
    writing(driver)
    driver.now += driver.settings.restore_deadline_s
    for _ in range(3):
        driver.handle(Tick())
        driver.now += 100.0
    driver.check()
    assert snapshot(driver.cache, driver.now).holds["store"].oldest_s >= 300.0
    driver.forget_device()
    assert driver.cache.occupancy.blocks.used == 10
