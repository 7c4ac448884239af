"""Memory runs short: what has no copy is copied first, then room is made. Events to effects."""

from __future__ import annotations

import pytest

from ownerserve.cache.metrics import snapshot
from ownerserve.cache.outcomes import Begun, NoRoom, Turn
from ownerserve.cache.pressure import Watermarks
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import TurnId
from ownerserve.kv.prefix import pack
from ownerserve.node.vocabulary.events import FindRecords, RestoreOutcome, StoreCopy, Tick
from ownerserve.node.vocabulary.settings import NodeSettings
from ownerserve.plan.cost.model import CostModel
from tests.support.node.node_driver import LAYOUT, PRICES, B, NodeDriver

LATER = NodeSettings(record_blocks=4, spill_after_s=1000.0)
"""Sessions are put away only when room is short."""


def short_of_points(*, points: int = 6, sessions: int = 6) -> NodeDriver:
    """One point of each session is on the device, and there is room for no other."""
    driver = NodeDriver(blocks=200, points=points, settings=LATER)
    for n in range(sessions):
        driver.turn(range(1000 * n, 1000 * n + 2 * B + 1), f"s{n}")
    marks = Watermarks(low=0.2, high=0.5, idle_s=10.0)
    driver.watermarks(marks)
    return driver


def copies(driver: NodeDriver) -> list[tuple[str, int]]:
    return [
        (c.component, c.meta.end_token // B) for c in driver.pending if isinstance(c, StoreCopy)
    ]


def test_point_state_is_copied_before_it_goes_and_comes_back() -> None:
    driver = short_of_points()
    driver.now = 20.0
    driver.handle(Tick())
    assert copies(driver) == [("swa", 2), ("overlap", 2)] * 3
    assert snapshot(driver.cache, 0.0).pools["swa"].free == 0, "nothing goes before it is safe"
    driver.settle()
    driver.handle(Tick())
    counters = driver.cache.counters
    assert counters.spilled_points == 3
    assert counters.evicted_points == {"swa": 3, "overlap": 3}
    driver.check()
    turn = driver.arrive(range(2 * B + 5), "s0")
    driver.settle()
    assert driver.reports[turn].outcome is RestoreOutcome.LOADED
    assert driver.reports[turn].loaded_bytes == 2 * 32, "range state was there all the time"
    assert driver.run(turn).restored == 2 * B
    driver.check()


def test_a_store_that_fails_does_not_keep_room_from_being_made() -> None:
    driver = short_of_points()
    driver.now = 20.0
    driver.handle(Tick())
    while driver.pending:
        driver.fail(driver.pending.popleft())
    driver.handle(Tick())
    assert not driver.pending, "the next run evicts without"
    counters = driver.cache.counters
    assert (counters.failed_spills, counters.spilled_points) == (1, 0)
    assert counters.evicted_points == {"swa": 3, "overlap": 3}
    driver.check()


def test_one_lost_copy_fails_its_whole_spill() -> None:
    driver = short_of_points()
    driver.now = 20.0
    driver.handle(Tick())
    driver.fail(driver.pending.popleft())
    driver.settle()
    assert driver.cache.counters.failed_spills == 1
    assert not driver.cache.pressure.open_spills
    driver.check()


def test_copies_of_a_spill_are_spread_over_ticks() -> None:
    driver = short_of_points()
    settings = NodeSettings(record_blocks=4, spill_after_s=1000.0, copy_bytes_a_tick=1)
    driver = NodeDriver(blocks=200, points=6, settings=settings)
    for n in range(6):
        driver.turn(range(1000 * n, 1000 * n + 2 * B + 1), f"s{n}")
    driver.watermarks(Watermarks(low=0.2, high=0.5, idle_s=10.0))
    driver.now = 20.0
    sizes = []
    for _ in range(6):
        driver.handle(Tick())
        sizes.append(len(driver.pending))
    assert sizes == [1, 2, 3, 4, 5, 6]
    assert driver.state.next_due() == 0.0 or driver.state.is_busy
    driver.settle()
    driver.check()


def test_a_turn_meets_state_that_is_being_copied() -> None:
    driver = short_of_points()
    driver.now = 20.0
    driver.handle(Tick())
    begun = driver.turn(range(2 * B + 9), "s0")
    assert begun.restored == 2 * B, "held, but there for whoever wants it"
    driver.settle()
    driver.check()


def test_idle_sessions_are_stored_before_their_blocks_go() -> None:
    driver = NodeDriver(blocks=20, points=16, settings=LATER)
    for n in range(4):
        driver.turn(range(1000 * n, 1000 * n + 5 * B), f"s{n}")
        driver.now += 1.0
    driver.watermarks(Watermarks(low=0.1, high=0.5))
    driver.handle(Tick())
    assert driver.cache.occupancy.blocks.free == 0, "the sessions are looked up first"
    assert [type(asked) for asked in driver.pending] == [FindRecords] * 4
    for _ in range(20):
        driver.settle()
        driver.handle(Tick())
    assert driver.cache.occupancy.blocks.free == 10
    driver.check()
    turn = driver.arrive(range(5 * B + 3), "s0")
    driver.settle()
    assert driver.reports[turn].outcome is RestoreOutcome.LOADED
    assert driver.run(turn).restored == 5 * B
    driver.check()


def test_a_store_that_is_silent_delays_room_only_so_long() -> None:
    driver = NodeDriver(blocks=20, points=16, settings=LATER)
    for n in range(4):
        driver.turn(range(1000 * n, 1000 * n + 5 * B), f"s{n}")
    driver.watermarks(Watermarks(low=0.1, high=0.5))
    driver.handle(Tick())
    due_s = driver.state.next_due()
    assert due_s is not None and 0.0 < due_s < 1.0
    driver.now = due_s
    driver.handle(Tick())
    assert driver.cache.occupancy.blocks.free == 10
    driver.check()


def test_what_a_spill_by_idle_time_has_stored_is_not_copied_again() -> None:
    driver = NodeDriver(blocks=200, points=4)
    for n in range(4):
        driver.turn(range(1000 * n, 1000 * n + 2 * B + 1), f"s{n}")
    driver.idle()
    before = dict(driver.stored)
    driver.watermarks(Watermarks(low=0.3, high=0.5, idle_s=1.0))
    driver.now += 20.0
    driver.handle(Tick())
    assert not driver.pending and driver.stored == before
    assert driver.cache.counters.evicted_points == {"swa": 2, "overlap": 2}
    driver.check()


def test_the_youngest_turn_is_snapshotted_when_nothing_can_go() -> None:
    driver = NodeDriver(blocks=8, points=4)
    for name, first in (("old", 0), ("young", 1000)):
        turn = Turn(TurnId(name), None, pack(range(first, first + 4 * B)))
        assert isinstance(driver.cache.begin(turn, 0.0), Begun)
        assert driver.cache.reserve(turn.turn_id, 4 * B, 0.0) == ()
    driver.watermarks(Watermarks(low=0.1, high=0.5))
    driver.handle(Tick())
    driver.handle(Tick())
    assert driver.checkpointed == ["young"], "once"


def test_nothing_is_done_while_there_is_room() -> None:
    driver = NodeDriver(blocks=200, points=16, settings=LATER)
    driver.turn(range(5 * B))
    driver.now = 500.0
    driver.handle(Tick())
    assert not driver.pending and not driver.cache.counters.relief_runs


def test_watermarks_are_ordered_shares() -> None:
    with pytest.raises(InvalidInput, match="low <= high"):
        Watermarks(low=0.5, high=0.1)


# ---- prices


def test_records_bear_what_a_hit_without_them_would_cost() -> None:
    driver = NodeDriver()
    tokens = list(range(10 * B + 5))
    driver.turn(tokens)
    driver.now = 1.0
    driver.handle(Tick())
    driver.answer(driver.pending.popleft())
    driver.handle(Tick())
    cost = {
        (c.component, c.meta.first_token // B): c.restore_cost_ms
        for c in driver.pending
        if isinstance(c, StoreCopy)
    }
    assert cost["main", 0] == cost["index", 0], "shared by bytes, and these are as large"
    assert cost["main", 0] > cost["main", 4] > cost["main", 8] > 0, "behind a gap all is lost"
    prefill_ms, load_ms = CostModel(PRICES).prefill(10 * B, 0).ms, 2.0
    assert cost["main", 0] * 2 == pytest.approx(prefill_ms, abs=load_ms + 1.0)
    # without the point state its boundary is replayed: 24 tokens at 1 ms, less the load
    assert cost["swa", 10] * 2 == pytest.approx(24.0, abs=load_ms + 1.0)


def test_what_is_as_cheap_to_compute_is_not_stored() -> None:
    driver = NodeDriver(ms_per_token=1e-6)
    driver.turn(range(10 * B + 5))
    driver.idle()
    assert not driver.stored
    assert driver.state.idle_spills.counts["low_utility"] == 1


def test_what_others_were_forked_from_is_stored_however_cheap_it_is() -> None:
    driver = NodeDriver(ms_per_token=1e-6)
    driver.turn(range(10 * B + 5))
    driver.run(driver.arrive(range(10 * B + 9), "fork", parent="s"))
    driver.idle()
    assert driver.stored and driver.state.idle_spills.counts["low_utility"] == 1, "the fork's"
    driver.forget_device()
    assert "s" in {word.session for word in driver.state.inventory if word.tier == "disk"}


def test_what_others_were_forked_from_is_copied_first_when_room_is_short() -> None:
    driver = NodeDriver(blocks=200, settings=LATER)
    for n in range(4):
        driver.turn(range(1000 * n, 1000 * n + 4 * B + 1), f"s{n}")
    driver.run(driver.arrive(range(3000, 3000 + 4 * B + 3), "fork", parent="s3"))
    assert driver.state.idle_spills.press(2) == {"s3", "s0"}


def test_measured_costs_reach_the_evictions_order() -> None:
    """Two points cost as much to compute again. One has a copy: how much dearer than a load a
    prefill is says how much earlier it goes."""
    assert LAYOUT.point_names
    driver = NodeDriver()
    policy = driver.cache.policy
    driver.handle(Tick())
    assert policy.prices.context_tokens > 1e9, "PRICES have no quadratic term"  # type: ignore[attr-defined]
    per_byte = policy.prices.reload_tokens_per_byte  # type: ignore[attr-defined]
    assert per_byte == pytest.approx(1e-6, rel=0.1), "1e6 bytes a ms against 1 ms a token"


def test_a_spill_whose_room_a_turn_took_is_copied_no_further() -> None:
    """One copy a tick, so a turn comes in between: the others' slots may be its own by then."""
    settings = NodeSettings(record_blocks=4, spill_after_s=1000.0, copy_bytes_a_tick=1)
    driver = NodeDriver(blocks=16, points=6, settings=settings)
    for n in range(6):
        driver.turn(range(1000 * n, 1000 * n + 2 * B + 1), f"s{n}")
    driver.watermarks(Watermarks(low=0.2, high=0.5, idle_s=10.0))
    driver.now = 20.0
    driver.handle(Tick())
    asked = copies(driver)
    assert len(asked) == 1 and len(driver.cache.lends) == 1
    turn = Turn(TurnId("new"), None, pack(range(9000, 9000 + 15 * B)))
    assert isinstance(driver.cache.begin(turn, driver.now), Begun)
    got = driver.cache.reserve(turn.turn_id, 15 * B, driver.now)
    assert not isinstance(got, NoRoom), "a turn that finds no room takes it from the spill"
    assert not len(driver.cache.lends)
    driver.handle(Tick())
    assert copies(driver) == asked, "nothing is read any more that may be somebody else's"
    driver.settle()
    assert driver.cache.counters.failed_spills == 1
    assert not driver.cache.pressure.open_spills
    driver.cache.abort(turn.turn_id, driver.now)
    driver.check()
