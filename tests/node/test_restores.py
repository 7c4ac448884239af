"""A turn's state comes back at the least cost, or the turn starts without: scenarios."""

from __future__ import annotations

import pytest

from ownerserve.cache.outcomes import Begun, Replay, Restore, Resume, Shortage, Turn, Victim
from ownerserve.cache.pressure import Watermarks
from ownerserve.kv.ids import Incarnation, TurnId, WorkerId
from ownerserve.kv.messages import RoutingUnit, Tier
from ownerserve.kv.prefix import pack
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.node.retention.record_value import memory_price
from ownerserve.node.vocabulary.chains import prefix_of
from ownerserve.node.vocabulary.events import (
    DropOperation,
    Fetch,
    Fetched,
    Fill,
    Filled,
    FindRecords,
    NotFetched,
    PrefillOrder,
    RecordsFound,
    RestoreOutcome,
    StoreCopy,
    Tick,
    TurnArrived,
    TurnGone,
)
from ownerserve.node.vocabulary.settings import NodeSettings
from ownerserve.store.format.model import MissReason
from tests.support.node.node_driver import B, NodeDriver

LONG = list(range(10 * B + 5))
SHORT_WAIT = NodeSettings(record_blocks=4, spill_after_s=1.0, room_wait_s=20.0)


def stored_session(driver: NodeDriver, tokens: list[int] = LONG) -> None:
    """One turn, put away and gone from the device."""
    driver.turn(tokens)
    driver.idle()
    driver.forget_device()
    driver.check()
    assert driver.cache.match(b"\0" * 4 * B).range_tokens == 0


def test_an_unknown_prompt_starts_after_one_look() -> None:
    driver = NodeDriver()
    turn = driver.arrive(LONG)
    [asked] = driver.pending
    assert isinstance(asked, FindRecords) and not driver.started
    driver.settle()
    assert driver.started == [turn]
    assert driver.reports[turn].outcome is RestoreOutcome.NOTHING_STORED


def test_what_the_device_has_needs_no_look() -> None:
    driver = NodeDriver()
    driver.turn(LONG)
    turn = driver.arrive([*LONG[: 10 * B], 7])
    assert driver.started == [turn] and not driver.pending
    assert driver.run(turn).restored == 10 * B


def test_a_session_comes_back_from_the_store() -> None:
    driver = NodeDriver()
    stored_session(driver)
    turn = driver.arrive([*LONG, *range(900, 930)])
    driver.settle()
    report = driver.reports[turn]
    assert report.outcome is RestoreOutcome.LOADED
    assert report.loaded_bytes == 10 * 2 * 32 + 2 * 32
    assert report.brought == {Tier.DISK: 10 * B}
    begun = driver.run(turn)
    assert (begun.restored, begun.write_floor) == (10 * B, 10 * B)
    driver.check()


@pytest.mark.parametrize(
    ("ready_ms", "outcome"),
    [
        (0.0, RestoreOutcome.LOADED),
        (50.0, RestoreOutcome.LOADED),
        (1e4, RestoreOutcome.NOT_WORTH_IT),
    ],
)
def test_a_peer_that_has_to_read_first_is_asked_where_that_is_soon_enough(
    ready_ms: float, outcome: RestoreOutcome
) -> None:
    driver = NodeDriver()
    stored_session(driver)
    turn = driver.arrive(LONG)
    while driver.pending:
        asked = driver.pending.popleft()
        if isinstance(asked, FindRecords):
            held = {id_: Tier.PEER for id_ in asked.ids if id_ in driver.stored}
            driver.handle(RecordsFound(asked.operation_id, held, peer_ready_ms=ready_ms))
        else:
            driver.answer(asked)
    assert driver.reports[turn].outcome is outcome


def test_what_is_ordered_is_read_as_the_turns_own_also_where_it_is_one_part() -> None:
    """Peers are told whose it is: another turn's order may begin with the same."""
    driver = NodeDriver()
    stored_session(driver)
    lender = LenderAddress(RoutingUnit(WorkerId("p"), 0, Incarnation(1)), "tcp://127.0.0.1:1")
    turn, prompt = TurnId("ordered"), prefix_of(LONG, B)
    order = PrefillOrder(lender, bytes(prompt.tokens))
    driver.handle(TurnArrived(turn, None, prompt.tokens, hashed=prompt.hashed, order=order))
    while not isinstance(asked := driver.pending.popleft(), Fetch):
        assert isinstance(asked, FindRecords) and asked.peer is not None
        held = {id_: Tier.PEER for id_ in asked.ids if id_ in driver.stored}
        driver.handle(RecordsFound(asked.operation_id, held))
    assert (asked.turn_id, asked.computed) == (turn, (asked.wants,))


def test_only_what_is_not_resident_is_read() -> None:
    driver = NodeDriver()
    stored_session(driver)
    driver.turn(LONG[: 5 * B + 1], session=None)
    turn = driver.arrive(LONG)
    driver.answer(driver.pending.popleft())
    [fetch] = driver.pending
    assert isinstance(fetch, Fetch)
    units = [(want.first_unit, want.end_unit) for want in fetch.wants]
    # blocks 5 .. 9 of cells [4, 8) and [8, 10), for two components; then two point components
    assert units == [(1, 4), (1, 4), (0, 2), (0, 2), (0, None), (0, None)]
    driver.settle()
    assert driver.reports[turn].brought == {Tier.DISK: 5 * B}
    assert driver.run(turn).restored == 10 * B
    driver.check()


def test_a_branch_loads_what_it_shares_and_replays() -> None:
    """Cells of 4 blocks: of 6 shared blocks one cell comes back whole and the next in part."""
    driver = NodeDriver()
    stored_session(driver)
    begun = driver.turn([*LONG[: 6 * B], *range(500, 500 + 2 * B)], session="other")
    assert (begun.restored, begun.write_floor) == (4 * B, 6 * B)
    driver.check()


def test_a_device_branch_is_replayed_without_the_store() -> None:
    driver = NodeDriver()
    driver.turn(LONG)
    begun = driver.turn([*LONG[: 6 * B + 3], *range(500, 520)], session="other")
    assert (begun.restored, begun.write_floor) == (4 * B, 6 * B)
    driver.check()


def test_a_bad_record_is_planned_around_once() -> None:
    driver = NodeDriver()
    stored_session(driver)
    turn = driver.arrive([*LONG, 1, 2])
    driver.answer(driver.pending.popleft())
    driver.fail(driver.pending.popleft())  # the first record: without it there is no prefix
    assert driver.reports[turn].outcome is RestoreOutcome.MISS
    assert driver.reports[turn].misses == 1
    assert driver.run(turn).restored == 0
    driver.check()


def test_a_missing_point_is_replaced_by_a_replay() -> None:
    driver = NodeDriver()
    stored_session(driver)
    turn = driver.arrive([*LONG, 1, 2])
    find = driver.pending.popleft()
    assert isinstance(find, FindRecords)
    driver.answer(find)
    fetch = driver.pending.popleft()
    assert isinstance(fetch, Fetch)
    del driver.stored[fetch.wants[-1].id]
    driver.answer(fetch)
    driver.settle()
    assert driver.reports[turn].outcome is RestoreOutcome.LOADED
    begun = driver.run(turn)
    assert (begun.restored, begun.write_floor) == (8 * B, 10 * B)
    driver.check()


def test_a_late_answer_changes_nothing() -> None:
    driver = NodeDriver()
    stored_session(driver)
    turn = driver.arrive([*LONG, 1, 2])
    driver.answer(driver.pending.popleft())
    [fetch] = driver.pending
    driver.now += driver.settings.restore_deadline_s
    driver.idle(0.0)
    assert driver.reports[turn].outcome is RestoreOutcome.LATE
    rooms = driver.cache.occupancy
    assert rooms.blocks.used == 0, "its reservation is given up"
    driver.handle(Fetched(fetch.operation_id))
    driver.handle(RecordsFound(fetch.operation_id, {b"x": Tier.DISK}))
    assert driver.run(turn).restored == 0
    driver.check()


def fetching(driver: NodeDriver) -> tuple[TurnId, Fetch]:
    """A turn whose session is being read from the store."""
    stored_session(driver)
    turn = driver.arrive([*LONG, 1, 2])
    driver.answer(driver.pending.popleft())
    [fetch] = driver.pending
    assert isinstance(fetch, Fetch)
    return turn, fetch


def test_an_answer_to_another_step_than_the_present_one_changes_nothing() -> None:
    driver = NodeDriver()
    turn, fetch = fetching(driver)
    driver.handle(Filled(fetch.operation_id, tuple(want.id for want in fetch.wants)))
    driver.handle(RecordsFound(fetch.operation_id, {}))
    assert turn not in driver.started, "nothing is read yet, and nothing filled"
    driver.settle()
    assert driver.reports[turn].outcome is RestoreOutcome.LOADED
    assert driver.run(turn).restored == 10 * B
    driver.check()


def test_records_are_asked_for_in_the_layout_that_they_are_to_have() -> None:
    driver = NodeDriver()
    _, fetch = fetching(driver)
    components = {driver.metas[want.id].component for want in fetch.wants}
    assert components == {"main", "index", "swa", "overlap"}
    for want in fetch.wants:
        component = driver.metas[want.id].component
        assert want.descriptor == driver.names.descriptor(component)


def test_a_load_that_comes_too_late_is_not_tried_again() -> None:
    driver = NodeDriver()
    turn, fetch = fetching(driver)
    driver.pending.clear()
    driver.handle(NotFetched(fetch.operation_id, MissReason.DEADLINE, b""))
    assert driver.reports[turn].outcome is RestoreOutcome.LATE
    assert not driver.pending


def test_a_load_that_nobody_waits_for_is_called_off() -> None:
    driver = NodeDriver()
    turn, fetch = fetching(driver)
    gone = driver.state.handle(TurnGone(turn), driver.now)
    assert DropOperation(fetch.operation_id) in gone
    driver = NodeDriver()
    _, fetch = fetching(driver)
    driver.now += driver.settings.restore_deadline_s
    assert DropOperation(fetch.operation_id) in driver.state.handle(Tick(), driver.now)


def test_records_that_were_filled_in_another_order_are_not_what_was_asked_for() -> None:
    driver = NodeDriver()
    turn, fetch = fetching(driver)
    [fill] = driver.state.handle(Fetched(fetch.operation_id), driver.now)
    assert isinstance(fill, Fill) and len(fetch.wants) > 1
    driver.handle(Filled(fetch.operation_id, tuple(want.id for want in reversed(fetch.wants))))
    assert driver.reports[turn].outcome is RestoreOutcome.MISS
    assert driver.cache.occupancy.blocks.used == 0
    driver.pending.clear()
    assert driver.run(turn).restored == 0
    driver.check()


def test_a_turn_tries_only_so_many_bad_records() -> None:
    driver = NodeDriver()
    turn, _ = fetching(driver)
    fetches = 0
    while driver.pending:
        asked = driver.pending.popleft()
        if isinstance(asked, Fetch):
            fetches += 1
            bad = asked.wants[-1].id  # what is before it can be read, and computed on from
            driver.handle(NotFetched(asked.operation_id, MissReason.CORRUPT, bad))
        else:
            driver.answer(asked)
    assert fetches == driver.settings.attempts
    assert driver.reports[turn].outcome is RestoreOutcome.MISS
    assert driver.run(turn).restored == 0
    driver.check()


def test_a_restore_waits_for_room_and_is_made_then() -> None:
    driver = NodeDriver(blocks=16)
    stored_session(driver)
    blocker = blocked(driver)
    turn, later = driver.arrive(LONG), driver.arrive([1, 2], session=None)
    driver.idle(1.0)
    assert not driver.pending and turn not in driver.started
    assert later not in driver.started, "nobody passes who waits"
    driver.cache.abort(blocker, driver.now)
    driver.handle(TurnGone(blocker))
    driver.idle(0.0)
    assert driver.reports[turn].outcome is RestoreOutcome.LOADED
    assert driver.started == [turn, later] or driver.started == [later, turn]
    assert driver.run(turn).restored == 10 * B
    driver.check()


def test_room_is_given_once_to_those_who_wait_for_it() -> None:
    driver = NodeDriver(blocks=16)
    blocker = blocked(driver)
    first = driver.arrive([*range(1000, 1000 + 9 * B)], session=None)
    second = driver.arrive([*range(3000, 3000 + 9 * B)], session=None)
    driver.cache.abort(blocker, driver.now)
    driver.handle(TurnGone(blocker))
    driver.idle(0.0)
    assert driver.started == [first], "its room is not taken yet, and is not the other's"
    driver.run(first)
    driver.idle(0.0)
    assert driver.started == [second]
    driver.run(second)
    driver.check()


def blocked(driver: NodeDriver) -> TurnId:
    """A running turn that holds 12 of 16 blocks."""
    blocker = driver.arrive([*range(700, 700 + 12 * B)], session=None)
    driver.settle()
    driver.started.remove(blocker)
    event = driver.waiting.pop(blocker)
    assert isinstance(driver.cache.begin(Turn(blocker, None, event.tokens), 0.0), Begun)
    assert driver.cache.reserve(blocker, 12 * B, 0.0) == ()
    return blocker


def test_one_who_has_waited_long_enough_starts_without() -> None:
    driver = NodeDriver(blocks=16, settings=SHORT_WAIT)
    stored_session(driver)
    blocked(driver)
    turn = driver.arrive(LONG)
    driver.idle(SHORT_WAIT.room_wait_s)
    assert driver.reports[turn].outcome is RestoreOutcome.NO_ROOM


def test_what_was_brought_stays_until_its_turn_begins() -> None:
    """Idle sessions go before it, though they have ended since."""
    driver = NodeDriver(blocks=32)
    stored_session(driver)
    turn = driver.arrive([*LONG, 1])
    driver.settle()
    assert driver.reports[turn].outcome is RestoreOutcome.LOADED
    driver.now += 1.0
    driver.turn([*range(700, 700 + 12 * B)], session="other")
    driver.cache.pressure.evict_blocks(12)
    assert driver.run(turn).restored == 10 * B
    assert not driver.cache.sessions.expected
    driver.check()


def test_what_is_resident_of_a_turn_in_line_stays() -> None:
    driver = NodeDriver(blocks=16, settings=SHORT_WAIT)
    driver.turn(LONG[: 3 * B], session=None)
    driver.now += 1.0
    driver.turn([*range(400, 400 + B)], session=None)
    turn = driver.arrive([*LONG[: 3 * B], *range(900, 900 + 12 * B)], session=None)
    driver.settle()
    assert driver.started == [turn]
    driver.cache.pressure.evict_blocks(1)
    assert driver.cache.match(driver.waiting[turn].tokens).range_tokens == 3 * B
    driver.handle(TurnGone(turn))
    driver.cache.pressure.evict_blocks(1)
    assert driver.cache.match(driver.waiting[turn].tokens).range_tokens == 2 * B


def test_a_prefetch_gives_way_to_who_waits_for_room() -> None:
    driver = NodeDriver(blocks=16, settings=SHORT_WAIT)
    stored_session(driver)
    blocked(driver)
    driver.arrive(LONG)
    driver.idle(1.0)
    assert not any(isinstance(asked, Fetch) for asked in driver.pending)


def test_two_turns_of_one_prefix_leave_one_copy() -> None:
    driver = NodeDriver()
    stored_session(driver)
    turns = [driver.arrive([*LONG, n], session=None) for n in range(2)]
    driver.settle()
    assert [driver.reports[turn].outcome for turn in turns] == [RestoreOutcome.LOADED] * 2
    assert driver.cache.occupancy.blocks.used == 10
    driver.check()


def test_a_client_that_hangs_up_gives_its_slots_back() -> None:
    driver = NodeDriver()
    stored_session(driver)
    turn = driver.arrive([*LONG, 1])
    driver.answer(driver.pending.popleft())
    assert driver.cache.occupancy.blocks.used == 10
    driver.handle(TurnGone(turn))
    assert driver.cache.occupancy.blocks.used == 0
    driver.settle()
    driver.check()


# ---- spills


def copies(driver: NodeDriver) -> list[tuple[str, int, int]]:
    return [
        (item.component, item.meta.first_token // B, item.meta.end_token // B)
        for item in driver.pending
        if isinstance(item, StoreCopy)
    ]


def test_an_idle_session_is_copied_after_its_time() -> None:
    driver = NodeDriver()
    driver.turn(LONG)
    assert driver.state.next_due() == 1.0
    driver.now = 1.0
    driver.handle(Tick())
    driver.answer(driver.pending.popleft())  # nothing is stored yet
    driver.handle(Tick())
    assert copies(driver) == [
        *(("main", 0, 4), ("index", 0, 4)),
        *(("main", 4, 8), ("index", 4, 8)),
        *(("main", 8, 10), ("index", 8, 10)),
        *(("swa", 10, 10), ("overlap", 10, 10)),
    ]


def test_the_next_turns_end_copies_only_what_is_new() -> None:
    driver = NodeDriver()
    driver.turn(LONG)
    driver.idle()
    before = set(driver.stored)
    driver.turn([*LONG, *range(900, 900 + 3 * B)])
    driver.idle()
    # the unfinished cell [8, 10) again as [8, 12), the new one [12, 13), and one point
    assert len(set(driver.stored) - before) == 2 + 2 + 2


def test_a_turn_that_arrives_wins_over_the_copies() -> None:
    driver = NodeDriver()
    driver.turn(LONG)
    turn = driver.arrive([*LONG, 1, 2, 3])
    driver.idle()
    assert not driver.stored, "the session is not idle"
    driver.run(turn)
    driver.idle()
    assert driver.stored


def test_what_was_evicted_first_is_not_copied() -> None:
    driver = NodeDriver()
    driver.turn(LONG)
    driver.now = 1.0
    driver.handle(Tick())
    driver.forget_device()
    driver.settle()
    driver.idle()
    assert not driver.stored
    assert driver.state.idle_spills.counts["evicted_first"] == 4
    driver.check()


def test_copies_are_spread_over_ticks() -> None:
    settings = NodeSettings(record_blocks=4, spill_after_s=0.0, copy_bytes_a_tick=1)
    driver = NodeDriver(settings=settings)
    driver.turn(LONG)
    driver.handle(Tick())
    driver.answer(driver.pending.popleft())
    sizes = []
    for _ in range(5):
        driver.handle(Tick())
        sizes.append(len(driver.pending))
    assert sizes == [2, 4, 6, 8, 8]


def test_sessionless_turns_are_not_put_away() -> None:
    driver = NodeDriver()
    driver.turn(LONG, session=None)
    driver.idle()
    assert not driver.stored


# ---- the price of memory


def resumed_with(driver: NodeDriver, tokens: list[int]) -> Resume | None:
    """How a turn of `tokens` would begin now."""
    return driver.state.resume(pack(tokens))


def branched(driver: NodeDriver) -> list[int]:
    """A prompt with 160 tokens on the device, whose state stands at 144: going on there, or from
    there in a replay that keeps the blocks up to 160, computes the same."""
    said = list(range(1000, 1200))
    driver.turn(said[:150])
    driver.turn(said)
    return said[:165] + [7] * 40


def fill(driver: NodeDriver, *, free: int) -> None:
    """Somebody else's session takes all room but so many blocks."""
    driver.watermarks(Watermarks(low=0.0, high=0.0))
    driver.turn([77] * ((driver.cache.occupancy.blocks.free - free) * B), session="other")
    assert driver.cache.occupancy.blocks.free == free


def test_a_plan_changes_when_memory_is_dear() -> None:
    """With room to spare the turn goes on at its state; where others would lose theirs for it, it
    keeps the 16 tokens that are resident, and takes no second block for them."""
    driver = NodeDriver(blocks=40)
    prompt = branched(driver)
    assert driver.cache.occupancy.blocks.free > len(prompt) // B
    assert resumed_with(driver, prompt) == Restore(144)
    fill(driver, free=0)
    assert resumed_with(driver, prompt) == Replay(144, 160)


@pytest.mark.parametrize("free", [0, 1, 2, 3])
def test_memory_has_a_price_as_soon_as_something_would_go(free: int) -> None:
    """A turn of 13 blocks, 10 of them resident, wants 3."""
    driver = NodeDriver(blocks=40)
    prompt = branched(driver)
    fill(driver, free=free)
    short = driver.cache.occupancy.shortage(3)
    assert sum(victim.blocks for victim in short.victims) == 3 - free
    price = memory_price(short, driver.state.costs.prices())
    assert (price > 0.0) is (free < 3)
    assert isinstance(resumed_with(driver, prompt), Replay if price else Restore)


def test_what_was_copied_is_cheaper_to_evict_and_what_nobody_waits_for_cheaper_still() -> None:
    prices = NodeDriver().state.costs.prices()
    [lost, backed, old] = [
        memory_price(Shortage(2, 0, 64, (Victim(2, 320, 32, is_backed, is_expected),)), prices)
        for is_backed, is_expected in ((False, True), (True, True), (True, False))
    ]
    assert lost > backed > old > 0.0


# ---- prefetches

FREE_MEMORY = NodeSettings(record_blocks=4, spill_after_s=1.0, hold_ms_per_s=0.0)


def regular_session(driver: NodeDriver, turns: int = 6, gap_s: float = 100.0) -> list[int]:
    """A session whose tool takes as long every time."""
    tokens = list(LONG)
    for n in range(turns):
        driver.turn(tokens)
        tokens += [600 + n] * B
        driver.idle()
        driver.now += gap_s - 10.0
    return tokens


def test_a_regular_session_is_fetched_back_before_it_comes() -> None:
    driver = NodeDriver(settings=FREE_MEMORY)
    tokens = regular_session(driver)
    driver.turn(tokens)
    driver.idle()
    driver.forget_device()
    while not driver.state.idle_spills.counts["prefetch_loaded"]:
        due = driver.state.next_due()
        assert due is not None and due < driver.now + 100.0, "before its usual gap is over"
        driver.now = max(driver.now, due)
        driver.handle(Tick())
        driver.settle()
    assert driver.state.idle_spills.counts["prefetch_loaded"] == 1
    driver.check()
    turn = driver.arrive([*tokens, 1, 2])
    assert driver.started == [turn], "nothing is left to load"
    assert driver.run(turn).restored == len(tokens) // B * B


def test_nothing_is_evicted_for_a_prefetch() -> None:
    driver = NodeDriver(blocks=20, settings=FREE_MEMORY)
    tokens = regular_session(driver)
    driver.turn(tokens)
    driver.idle()
    driver.forget_device()
    driver.turn(range(5000, 5000 + 15 * B), session=None)
    evicted = driver.cache.counters.evicted_tokens
    driver.idle(200.0)
    assert driver.cache.counters.evicted_tokens == evicted
    assert not driver.state.idle_spills.counts["prefetch_loaded"]


def test_memory_that_costs_more_than_the_load_is_not_spent() -> None:
    driver = NodeDriver()
    tokens = regular_session(driver)
    driver.turn(tokens)
    driver.idle()
    due = driver.cache.sessions.next_due()
    assert driver.state.next_due() == due, "nothing but a soft reference's end"


def test_a_prompt_of_one_resident_block_begins() -> None:
    """Its last token is computed in any case, so there is no point to go on from."""
    driver = NodeDriver()
    driver.turn(range(3 * B))
    assert driver.turn(range(B)).restored == 0
