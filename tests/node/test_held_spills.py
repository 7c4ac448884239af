"""Turns wait for room while others end: what those leave is stored before its room is taken."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ownerserve.cache.outcomes import Turn
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.node.retention.holds import HOLD_S
from ownerserve.node.vocabulary.events import FindRecords, SessionOver, StoreCopy, Tick
from ownerserve.node.vocabulary.settings import NodeSettings
from tests.support.node.node_driver import B, NodeDriver

LATE = NodeSettings(record_blocks=4, spill_after_s=60.0)
"""Nobody is copied by time alone here."""
FIRST = [*range(12 * B), 1]
SECOND = [*range(5000, 5000 + 12 * B), 1]


def one_ends_and_one_waits(settings: NodeSettings = LATE) -> tuple[NodeDriver, TurnId]:
    """A device for one and a half of two turns: the first is over, the second waits."""
    driver = NodeDriver(blocks=18, settings=settings)
    first = driver.arrive(FIRST, "first")
    driver.settle()
    second = driver.arrive(SECOND, "second")
    driver.settle()
    assert second not in driver.started
    driver.run(first)
    return driver, second


def test_who_waits_for_room_lets_what_a_turn_left_be_stored_first() -> None:
    driver, second = one_ends_and_one_waits()
    driver.handle(Tick())
    assert len(driver.state.room_queue) == 1, "what the first left is looked up, and copied"
    driver.settle()
    driver.idle(0.0)
    driver.run(second)
    driver.idle(0.0)
    again = driver.turn([*FIRST, 2], "first")
    assert again.restored == 12 * B, "all of it is brought back"
    driver.check()


def test_what_is_held_is_read_in_fewer_ticks_than_what_nobody_waits_for() -> None:
    """A byte a tick lets one cell of two components through; a held session has three cells."""
    slow = replace(LATE, copy_bytes_a_tick=1)
    driver, _ = one_ends_and_one_waits(slow)
    driver.handle(Tick())
    driver.settle()
    driver.handle(Tick())
    assert len([one for one in driver.pending if isinstance(one, StoreCopy)]) > 2 * 2

    calm = NodeDriver(blocks=18, settings=replace(slow, spill_after_s=0.0))
    calm.turn(FIRST, "first")
    calm.handle(Tick())
    calm.settle()
    calm.handle(Tick())
    assert len([one for one in calm.pending if isinstance(one, StoreCopy)]) <= 2


def test_a_store_that_does_not_answer_is_waited_for_no_longer_than_a_moment() -> None:
    driver, second = one_ends_and_one_waits()
    driver.handle(Tick())
    [look] = driver.pending
    assert isinstance(look, FindRecords)
    driver.now += 0.9 * HOLD_S
    driver.handle(Tick())
    assert len(driver.state.room_queue) == 1
    due_s = driver.state.next_due()
    assert due_s is not None and due_s <= HOLD_S, "it wakes by itself"
    driver.now = HOLD_S
    driver.handle(Tick())
    driver.pending.remove(look)  # nobody ever answers it
    driver.settle()
    assert second in driver.started
    driver.idle(60.0)
    assert not len(driver.cache.lends)
    driver.check()


def test_a_session_that_is_back_takes_the_hold_away() -> None:
    driver, _ = one_ends_and_one_waits()
    assert len(driver.cache.lends) == 1
    driver.arrive([*FIRST, 2], "first")
    assert not len(driver.cache.lends)
    driver.check()


def test_nothing_is_held_where_nobody_waits() -> None:
    driver = NodeDriver(blocks=18, settings=LATE)
    driver.turn(FIRST, "first")
    assert not len(driver.cache.lends)
    driver.handle(Tick())
    assert not [one for one in driver.pending if isinstance(one, StoreCopy)]


@pytest.mark.parametrize("begins", ["before", "after"])
def test_a_session_of_which_another_turn_is_here_is_not_held(begins: str) -> None:
    """As one turn ends the other has the session's state in use, or is about to: nothing is copied
    before that one's end. It was held all the same, and the node's books said that it ran."""
    driver = NodeDriver(blocks=18, settings=LATE)
    first = driver.arrive([*range(4 * B), 1], "one")
    beside = driver.arrive([*range(4 * B), 2], "one")
    driver.settle()
    driver.arrive(SECOND, "second")
    driver.settle()
    assert len(driver.state.room_queue) == 1
    event = driver.waiting[beside]
    turn = Turn(beside, event.session_id, event.tokens)
    if begins == "before":
        driver.cache.begin(turn, driver.now)
    driver.run(first)
    if begins == "after":
        driver.handle(Tick())
        driver.cache.begin(turn, driver.now)
    driver.check()
    assert not len(driver.cache.lends)


def test_what_a_session_left_that_is_over_is_not_waited_for() -> None:
    driver, second = one_ends_and_one_waits()
    driver.handle(Tick())
    driver.cache.sessions.release(SessionId("first"))
    driver.handle(SessionOver(SessionId("first")))
    assert driver.state.next_due() == 0.0, "there is room for who waits"
    driver.handle(Tick())
    driver.settle()
    assert second in driver.started
    driver.check()
