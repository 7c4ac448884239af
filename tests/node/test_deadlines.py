"""A medium that never answers, at each wait of a node: what happens then, and after it."""

from __future__ import annotations

import threading

import pytest

from ownerserve.cache.hetero import parts_of
from ownerserve.cache.pressure import Watermarks
from ownerserve.kv.ids import TurnId
from ownerserve.node.retention.spills import COPY_DEADLINE_S, ECHO_S, FIND_DEADLINE_S, PRESS_WAIT_S
from ownerserve.node.storage import backing
from ownerserve.node.storage.backing import Upkeep
from ownerserve.node.vocabulary.events import (
    Fetch,
    FindRecords,
    Kept,
    NotKept,
    RestoreOutcome,
    StoreCopy,
    Tick,
)
from ownerserve.node.vocabulary.settings import NodeSettings
from tests.support.node.node_driver import B, NodeDriver

LATER = NodeSettings(record_blocks=4, spill_after_s=1000.0)


def unanswered(driver: NodeDriver, kind: type) -> list[FindRecords | Fetch | StoreCopy]:
    """What waits for an answer of this kind; nobody will give it."""
    return [asked for asked in driver.pending if isinstance(asked, kind)]


def test_a_silent_spill_locks_nothing_beyond_its_tick() -> None:
    """21 of 32 blocks stayed locked for ever: the bytes are off the device, and nobody asked."""
    driver = NodeDriver(blocks=32, points=6, settings=LATER)
    for n in range(6):
        driver.turn(range(1000 * n, 1000 * n + 3 * B + 1), f"s{n}")
    driver.watermarks(Watermarks(low=0.2, high=0.5, idle_s=10.0))
    driver.now = 20.0
    driver.handle(Tick())
    asked = unanswered(driver, StoreCopy)
    assert asked and len(driver.cache.lends), "the copies are being made"
    assert driver.state.next_due() == 0.0
    for _ in range(2):
        driver.handle(Tick())
    assert not len(driver.cache.lends)
    assert parts_of(driver.cache).tree.protected == 0
    driver.cache.pressure.evict_blocks(driver.cache.occupancy.evictable_blocks())
    assert driver.cache.occupancy.blocks.free == 32, "all of it can be had"
    driver.check()
    assert driver.state.is_busy
    driver.now += COPY_DEADLINE_S
    driver.handle(Tick())
    assert driver.cache.counters.failed_spills == 1
    assert not driver.state.pressure_relief.is_busy
    driver.check()
    for late in asked:  # the medium wakes up
        driver.handle(Kept(late.operation_id) if late is asked[0] else NotKept(late.operation_id))
    assert driver.cache.counters.spilled_points == 0
    driver.check()


def test_a_spill_that_is_answered_after_its_lock_went_still_counts() -> None:
    driver = NodeDriver(blocks=200, points=6, settings=LATER)
    for n in range(6):
        driver.turn(range(1000 * n, 1000 * n + 2 * B + 1), f"s{n}")
    driver.watermarks(Watermarks(low=0.2, high=0.5, idle_s=10.0))
    driver.now = 20.0
    for _ in range(3):
        driver.handle(Tick())
    driver.settle()
    assert driver.cache.counters.spilled_points == 3
    driver.check()


def test_silent_copies_of_idle_sessions_give_their_places_to_others() -> None:
    settings = NodeSettings(record_blocks=4, spill_after_s=1.0, copies_in_flight=4)
    driver = NodeDriver(settings=settings)
    driver.turn(range(10 * B + 1), "a")
    driver.now = 2.0
    driver.handle(Tick())
    driver.answer(driver.pending.popleft())  # the look-up
    driver.handle(Tick())
    stuck = unanswered(driver, StoreCopy)
    assert len(stuck) >= 4
    driver.pending.clear()
    driver.turn(range(5000, 5000 + 4 * B + 1), "b")
    driver.now = 10.0
    driver.handle(Tick())
    driver.settle()
    driver.handle(Tick())
    assert not driver.pending, "all places are taken"
    driver.now += COPY_DEADLINE_S
    driver.idle(1.0)
    counts = driver.state.idle_spills.counts
    assert counts["overdue"] == len(stuck)
    assert counts["sessions"] == 2, "the others went on"
    assert not driver.state.is_busy
    for late in stuck:
        driver.handle(Kept(late.operation_id))
    assert counts["kept"] == len(driver.stored)
    driver.check()


def test_a_silent_look_up_of_an_idle_session_is_given_up() -> None:
    driver = NodeDriver()
    driver.turn(range(10 * B + 1), "a")
    driver.now = 2.0
    driver.handle(Tick())
    [asked] = unanswered(driver, FindRecords)
    assert driver.state.is_busy
    driver.pending.clear()
    assert driver.state.next_due() == 2.0 + FIND_DEADLINE_S + ECHO_S
    driver.now = 2.0 + FIND_DEADLINE_S + ECHO_S
    driver.handle(Tick())
    assert not driver.state.is_busy
    driver.answer(asked)
    driver.handle(Tick())
    assert not driver.pending, "a late answer copies nothing"
    driver.check()


@pytest.mark.parametrize("answers", [0, 1], ids=["looking", "loading"])
def test_a_silent_restore_starts_its_turn(answers: int) -> None:
    driver = NodeDriver()
    driver.turn(range(10 * B + 1), "a")
    driver.idle()
    driver.forget_device()
    turn = driver.arrive(range(10 * B + 9), "a")
    for _ in range(answers):
        driver.answer(driver.pending.popleft())
    late = list(driver.pending)
    assert late and turn not in driver.started
    driver.now += driver.settings.restore_deadline_s
    driver.handle(Tick())
    assert driver.reports[turn].outcome is RestoreOutcome.LATE
    driver.check()
    driver.run(turn)
    for asked in late:
        driver.answer(asked)
    driver.check()


def test_a_silent_prefetch_may_be_wished_for_again() -> None:
    settings = NodeSettings(record_blocks=4, spill_after_s=1.0, hold_ms_per_s=0.0)
    driver = NodeDriver(settings=settings)
    tokens = list(range(10 * B + 5))
    for n in range(7):  # a tool that takes as long every time
        driver.turn(tokens)
        tokens += [600 + n] * B
        driver.idle()
        driver.now += 90.0 if n < 6 else 0.0
    driver.forget_device()
    while not driver.pending:
        due = driver.state.next_due()
        assert due is not None
        driver.now = due
        driver.handle(Tick())
    driver.now += driver.settings.restore_deadline_s
    driver.handle(Tick())
    assert not driver.state.prefetches.landed(TurnId("prefetch/s")), "none is under way"
    assert not len(driver.state.restores)
    driver.check()


def test_a_turn_waits_for_room_for_a_bounded_time() -> None:
    settings = NodeSettings(record_blocks=4, room_wait_s=3.0)
    driver = NodeDriver(blocks=12, settings=settings)
    first = driver.arrive(range(10 * B), "a")
    driver.settle()
    second = driver.arrive(range(5000, 5000 + 8 * B), "b")
    driver.settle()
    assert first in driver.started and second not in driver.started
    assert driver.state.next_due() is not None
    driver.now += 3.0
    driver.handle(Tick())
    driver.settle()
    assert second in driver.started
    assert isinstance(second, str) and TurnId(second)


def test_pressed_sessions_are_waited_for_and_then_tails_go_without_them() -> None:
    """Blocks are short, sessions are looked up and copied at once, and the medium says nothing."""
    driver = NodeDriver(blocks=32, points=32, settings=LATER)
    for n in range(6):
        driver.turn(range(1000 * n, 1000 * n + 5 * B + 1), f"s{n}")
    driver.watermarks(Watermarks(low=0.2, high=0.5, idle_s=10.0))
    driver.now = 20.0
    free = driver.cache.occupancy.blocks.free
    for _ in range(3):
        driver.handle(Tick())
    asked = unanswered(driver, FindRecords)
    assert asked, "their state is looked for in the store"
    assert driver.cache.occupancy.blocks.free == free, "nothing goes before it is safe"
    due = driver.state.next_due()
    assert due is not None and due <= 20.0 + PRESS_WAIT_S
    driver.now = 20.0 + PRESS_WAIT_S
    driver.handle(Tick())
    assert driver.cache.occupancy.blocks.free >= 16
    driver.check()
    for late in asked:
        driver.answer(late)
    driver.check()


class _SilentTier:
    """A medium whose clean-up never returns."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self.has_answered = False

    def expire(self, limit: int) -> int:
        self.entered.set()
        self.go_on.wait()
        self.has_answered = True
        return 0


def test_a_silent_upkeep_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backing, "STOP_S", 0.1)
    tier = _SilentTier()
    keeper = Upkeep([tier], 0.01)  # type: ignore[list-item]
    keeper.start()
    assert tier.entered.wait(60)
    keeper.stop()
    assert not tier.has_answered
    tier.go_on.set()
