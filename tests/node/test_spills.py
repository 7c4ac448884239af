"""Copies of idle sessions: called off when the session is back, counted when all of it is kept."""

from __future__ import annotations

from ownerserve.cache.outcomes import Begun, Turn
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.prefix import pack
from ownerserve.node.retention.spills import COPY_DEADLINE_S
from ownerserve.node.vocabulary.events import (
    DropOperation,
    FindRecords,
    StoreCopy,
    Tick,
    TurnGone,
)
from ownerserve.node.vocabulary.settings import NodeSettings
from ownerserve.store.format.model import ArtifactKind
from tests.support.node.node_driver import B, NodeDriver

LONG = list(range(10 * B + 5))
ONE_A_TICK = NodeSettings(record_blocks=4, spill_after_s=0.0, copy_bytes_a_tick=1)


def copies(driver: NodeDriver) -> list[StoreCopy]:
    return [asked for asked in driver.pending if isinstance(asked, StoreCopy)]


def test_a_session_that_is_back_is_copied_no_further() -> None:
    driver = NodeDriver(settings=ONE_A_TICK)
    driver.turn(LONG)
    driver.handle(Tick())
    driver.answer(driver.pending.popleft())
    driver.handle(Tick())
    begun = copies(driver)
    assert begun, "the first cell is being copied"
    driver.arrive([*LONG, 1])
    for _ in range(5):
        driver.handle(Tick())
    assert copies(driver) == begun


def test_an_answer_that_comes_when_the_session_is_back_begins_no_copy() -> None:
    driver = NodeDriver(settings=ONE_A_TICK)
    driver.turn(LONG)
    driver.handle(Tick())
    [look] = driver.pending
    assert isinstance(look, FindRecords)
    driver.arrive([*LONG, 1])
    driver.answer(look)
    for _ in range(5):
        driver.handle(Tick())
    assert not copies(driver)


def test_a_session_of_which_a_turn_runs_is_not_idle() -> None:
    """One of its turns is gone, another one runs: it waits for that one's end."""
    driver = NodeDriver()
    driver.turn(LONG)
    running = Turn(TurnId("running"), SessionId("s"), pack([*LONG, 1]))
    assert isinstance(driver.cache.begin(running, driver.now), Begun)
    gone = driver.arrive([*LONG, 2])
    driver.settle()
    driver.handle(TurnGone(gone))
    driver.idle(60.0)
    assert not driver.stored


def backed(driver: NodeDriver) -> bool:
    """Whether what would go first, were room short, is known to be in the store."""
    room = driver.cache.occupancy
    return room.shortage(room.blocks.free + 1).victims[0].is_backed


def test_a_point_is_in_the_store_when_all_its_components_are() -> None:
    for failing in (None, "swa", "overlap"):
        driver = NodeDriver()
        driver.turn(LONG)
        driver.now += 10.0
        for _ in range(20):
            driver.handle(Tick())
            while driver.pending:
                asked = driver.pending.popleft()
                is_failing = isinstance(asked, StoreCopy) and asked.component == failing
                (driver.fail if is_failing else driver.answer)(asked)
        points = [meta for meta in driver.metas.values() if meta.kind is ArtifactKind.POINT]
        assert {meta.component for meta in points} == {"swa", "overlap"} - {failing}
        assert backed(driver) == (failing is None), failing


def test_copies_that_nobody_answers_for_are_given_up() -> None:
    driver = NodeDriver()
    driver.turn(LONG)
    driver.now += 10.0
    driver.handle(Tick())
    driver.answer(driver.pending.popleft())
    driver.handle(Tick())
    flying = copies(driver)
    assert flying and driver.state.idle_spills.is_busy
    driver.now += COPY_DEADLINE_S
    dropped = driver.state.handle(Tick(), driver.now)
    assert all(DropOperation(copy.operation_id) in dropped for copy in flying)
    assert not driver.state.idle_spills.is_busy
    assert driver.state.idle_spills.counts["overdue"] == len(flying)
