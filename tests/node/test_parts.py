"""A long session comes back part by part, each into room of its own: scenarios."""

from __future__ import annotations

import pytest

from ownerserve.cache.outcomes import Begun, Turn
from ownerserve.kv.ids import Incarnation, SessionId, TurnId, WorkerId
from ownerserve.kv.messages import RestoreAction, RoutingUnit
from ownerserve.kv.prefix import TOKEN_BYTES, pack
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.node.vocabulary.chains import prefix_of
from ownerserve.node.vocabulary.events import (
    Fetch,
    RestoreOutcome,
    SessionComing,
    Tick,
    TurnArrived,
    TurnEnded,
    TurnGone,
)
from ownerserve.node.vocabulary.settings import NodeSettings
from ownerserve.plan.cost.prices import Prices
from ownerserve.plan.inputs import RestoreQuery
from ownerserve.plan.outcome import RestorePlan
from ownerserve.plan.restore import Planner
from tests.support.node.node_driver import B, NodeDriver

PART = 4
"""Blocks of a part: a record's."""
IN_PARTS = NodeSettings(
    record_blocks=PART, spill_after_s=1.0, room_wait_s=20.0, part_tokens=PART * B, step_tokens=B
)
LONG = list(range(10 * B + 5))
OTHER = list(range(5000, 5000 + 10 * B + 5))


def with_stored(
    *prompts: list[int],
    blocks: int,
    settings: NodeSettings = IN_PARTS,
    least_points: int | None = None,
) -> NodeDriver:
    """A node whose store has the sessions of these prompts, and whose device has nothing."""
    driver = NodeDriver(blocks=max(blocks, 16), settings=settings, least_points=least_points)
    for n, tokens in enumerate(prompts):
        driver.turn(tokens, session=f"s{n}")
        driver.idle()
        driver.forget_device()
    assert not driver.cache.occupancy.blocks.used
    return driver


def running(driver: NodeDriver, blocks: int) -> TurnId:
    """A turn that runs on and holds so many blocks."""
    blocker = driver.arrive([*range(70_000, 70_000 + blocks * B)], session=None)
    driver.settle()
    driver.started.remove(blocker)
    event = driver.waiting.pop(blocker)
    assert isinstance(driver.cache.begin(Turn(blocker, None, event.tokens), driver.now), Begun)
    assert driver.cache.reserve(blocker, blocks * B, driver.now) == ()
    return blocker


def begun(driver: NodeDriver, turn: TurnId) -> TurnArrived:
    """A turn that was started runs, and goes on from what has come."""
    driver.started.remove(turn)
    event = driver.waiting.pop(turn)
    opened = Turn(turn, event.session_id, event.tokens)
    assert isinstance(driver.cache.begin(opened, driver.now), Begun)
    assert driver.cache.reserve(turn, len(event.tokens) // TOKEN_BYTES, driver.now) == ()
    return event


def finished(driver: NodeDriver, event: TurnArrived) -> None:
    """It has ended, with its prompt alone."""
    count, at = len(event.tokens) // TOKEN_BYTES, 10 * B
    driver.cache.advance(event.turn_id, event.tokens[at * TOKEN_BYTES :], driver.now)
    driver.cache.finish(event.turn_id, driver.now, tip=None)
    driver.handle(TurnEnded(event.turn_id, at, count, count))


def idle(driver: NodeDriver, blocks: int) -> None:
    """A turn has run and left so many blocks, for which nobody is known to come back."""
    turn, cache = Turn(TurnId("idle"), None, pack(range(80_000, 80_000 + blocks * B))), driver.cache
    assert isinstance(cache.begin(turn, driver.now), Begun)
    assert cache.reserve(turn.turn_id, blocks * B, driver.now) == ()
    cache.advance(turn.turn_id, turn.tokens, driver.now)
    cache.finish(turn.turn_id, driver.now, tip=None)


def ends(driver: NodeDriver, blocker: TurnId) -> None:
    """The running turn is over, and leaves nothing."""
    driver.cache.abort(blocker, driver.now)
    driver.handle(TurnGone(blocker))
    driver.idle(0.0)


def resident(driver: NodeDriver, turn: TurnId) -> int:
    """Blocks of the turn's prompt that are on the device."""
    return driver.cache.match(driver.waiting[turn].tokens).range_tokens // B


def reserved(driver: NodeDriver) -> int:
    return driver.cache.ingest.counts()[0]


def answer_next(driver: NodeDriver) -> None:
    driver.answer(driver.pending.popleft())


def test_each_part_is_reserved_read_and_committed_by_itself() -> None:
    driver = with_stored(LONG, blocks=16)
    turn = driver.arrive([*LONG, 1], session="s0")
    answer_next(driver)
    steps = []
    while driver.pending:
        [fetch] = driver.pending
        assert isinstance(fetch, Fetch)
        steps.append((resident(driver, turn), reserved(driver)))
        answer_next(driver)
        driver.check()
    assert steps == [(0, 4), (4, 4), (8, 2)]
    report = driver.reports[turn]
    assert report.outcome is RestoreOutcome.LOADED
    assert report.loaded_bytes == 10 * 2 * 32 + 2 * 32, "the last part has the point state"
    assert report.brought_tokens == 10 * B
    assert driver.run(turn).restored == 10 * B
    driver.check()


def test_the_parts_of_a_session_are_planned_once() -> None:
    """A plan that loads though computing is said to cost less would not be made again."""
    driver = with_stored(LONG, blocks=16)
    plan, planned = driver.state.restores.trials.plan, list[RestoreQuery]()

    def watched(planner: Planner, query: RestoreQuery, prices: Prices) -> RestorePlan:
        planned.append(query)
        return plan(planner, query, prices)

    driver.state.restores.trials.plan = watched  # type: ignore[method-assign]
    turn = driver.arrive([*LONG, 1], session="s0")
    driver.settle()
    assert driver.reports[turn].outcome is RestoreOutcome.LOADED and len(planned) == 1


def test_whole_is_one_part() -> None:
    whole = NodeSettings(record_blocks=PART, spill_after_s=1.0, part_tokens=0)
    driver = with_stored(LONG, blocks=16, settings=whole)
    driver.arrive([*LONG, 1], session="s0")
    answer_next(driver)
    assert reserved(driver) == 10


def test_point_slots_give_way_to_parts_which_were_let_on_into_their_room() -> None:
    driver = with_stored(LONG, OTHER, blocks=16, least_points=2)
    running(driver, 14)
    levels = driver.cache.occupancy
    assert levels.blocks.free + levels.evictable_blocks() < PART < levels.obtainable_blocks()
    turn = driver.arrive([*LONG, 1], session="s0")
    driver.settle()
    assert driver.reports[turn].outcome is RestoreOutcome.LOADED
    assert resident(driver, turn) == 10 and levels.blocks.capacity > 16
    driver.check()
    other = driver.arrive([*OTHER, 1], session="s1")  # in line behind it, in what it leaves
    assert driver.run(turn).restored == 10 * B
    driver.settle()
    assert driver.reports[other].outcome is RestoreOutcome.LOADED
    driver.check()


def test_what_has_come_for_a_turn_outlasts_what_those_in_line_behind_it_go_on_from() -> None:
    """Else each bring would take the room of the one before it, and nobody's would be of use: each
    session is back in line as soon as it is answered."""
    third = list(range(9000, 9000 + 10 * B + 5))
    driver = with_stored(LONG, OTHER, third, blocks=24)
    before = driver.arrive([*LONG, 1], session="s0")
    driver.settle()
    run = begun(driver, before)
    brought = driver.arrive([*OTHER, 1], session="s1")
    driver.settle()
    assert driver.reports[brought].outcome is RestoreOutcome.LOADED
    waits = driver.arrive([*third, 1], session="s2")
    assert waits not in driver.reports and not driver.pending, "there is no room for it yet"
    finished(driver, run)
    again = driver.arrive([*LONG, 1, 2, 3], session="s0")
    assert driver.pending, "the next one in line is brought, in the room of the last one"
    driver.settle()
    assert resident(driver, brought) == 10 > resident(driver, again)
    assert driver.run(brought).restored == 10 * B


def test_a_part_that_fails_leaves_what_came_before_it_and_the_rest_is_computed() -> None:
    driver = with_stored(LONG, blocks=16)
    turn = driver.arrive([*LONG, 1], session="s0")
    answer_next(driver)
    answer_next(driver)
    assert resident(driver, turn) == 4
    driver.fail(driver.pending.popleft())
    report = driver.reports[turn]
    assert (report.outcome, report.misses) == (RestoreOutcome.MISS, 1)
    assert (report.brought_tokens, report.loads) == (4 * B, (RestoreAction.LOAD_GLOBAL,))
    assert resident(driver, turn) == 4 and not reserved(driver)
    assert driver.run(turn).write_floor == 4 * B, "none of that is computed into new blocks"
    driver.check()


def test_a_part_that_is_late_leaves_what_came_before_it() -> None:
    driver = with_stored(LONG, blocks=16)
    turn = driver.arrive([*LONG, 1], session="s0")
    answer_next(driver)
    driver.now += IN_PARTS.restore_deadline_s - 1.0
    answer_next(driver)
    driver.now += 2.0
    driver.handle(Tick())
    assert turn not in driver.reports, "each part has its own time"
    driver.now += IN_PARTS.restore_deadline_s
    driver.handle(Tick())
    assert driver.reports[turn].outcome is RestoreOutcome.LATE
    assert resident(driver, turn) == 4 and not reserved(driver)


def test_a_session_comes_while_there_is_no_room_for_all_of_it() -> None:
    """Ten of 16 blocks are wanted and eight are there: two parts come, the last one waits."""
    driver = with_stored(LONG, blocks=16)
    blocker = running(driver, blocks=7)
    turn = driver.arrive([*LONG, 1], session="s0")
    driver.settle()
    assert resident(driver, turn) == 8 and turn not in driver.reports
    assert not reserved(driver) and driver.cache.occupancy.evictable_blocks() >= 8, "nothing holds"
    ends(driver, blocker)
    assert driver.reports[turn].outcome is RestoreOutcome.LOADED
    assert driver.run(turn).restored == 10 * B
    driver.check()


def test_all_that_has_come_is_kept_for_a_turn_that_is_back_in_line() -> None:
    driver = with_stored(LONG, blocks=16)
    blocker = running(driver, blocks=7)
    turn = driver.arrive([*LONG, 1], session="s0")
    driver.settle()
    assert resident(driver, turn) == 8 and turn not in driver.reports
    kept = driver.cache.sessions.expected[turn]
    assert kept.stop.depth == 8, "its second part too, though there is no room for the third"
    ends(driver, blocker)


def test_a_part_leaves_room_for_a_step() -> None:
    """Four blocks are free and a part has four: the step of those that run would take them."""
    driver = with_stored(LONG, blocks=16)
    blocker = running(driver, blocks=12)
    turn = driver.arrive([*LONG, 1], session="s0")
    driver.settle()
    assert resident(driver, turn) == 0 and not driver.pending
    ends(driver, blocker)
    assert driver.reports[turn].outcome is RestoreOutcome.LOADED


def test_only_the_first_that_lacks_room_is_brought_on() -> None:
    driver = with_stored(LONG, OTHER, blocks=16)
    blocker = running(driver, blocks=7)
    first = driver.arrive([*LONG, 1], session="s0")
    second = driver.arrive([*OTHER, 1], session="s1")
    cold = driver.arrive([1, 2], session=None)
    driver.settle()
    driver.idle(1.0)
    assert (resident(driver, first), resident(driver, second)) == (8, 0)
    assert not driver.started, "and nobody passes it"
    ends(driver, blocker)
    assert first in driver.started
    driver.run(first)
    driver.idle(0.0)
    assert driver.reports[second].outcome is RestoreOutcome.LOADED
    assert cold in driver.started
    driver.check()


def test_what_has_come_goes_after_what_is_idle() -> None:
    driver = with_stored(LONG, blocks=24)
    blocker = running(driver, blocks=8)
    turn = driver.arrive([*LONG, 1], session="s0")
    answer_next(driver)
    answer_next(driver)
    driver.now += 1.0
    idle(driver, blocks=4)
    driver.pending.clear()  # the second part never comes
    driver.now += IN_PARTS.restore_deadline_s
    driver.handle(Tick())
    assert driver.reports[turn].outcome is RestoreOutcome.LATE and resident(driver, turn) == 4
    driver.cache.pressure.evict_blocks(4)
    assert resident(driver, turn) == 4, "though that was used later"
    ends(driver, blocker)


def test_a_part_that_begins_inside_a_record_is_no_longer_for_it() -> None:
    """Two blocks of the first record went: the next part is its other two, and not six."""
    driver = with_stored(LONG, blocks=16)
    blocker = running(driver, blocks=9)
    turn = driver.arrive([*LONG, 1], session="s0")
    driver.settle()
    assert resident(driver, turn) == 4
    driver.cache.pressure.evict_blocks(2)
    driver.idle(0.0)
    assert turn not in driver.reports, "it was let on into room that there is"
    assert resident(driver, turn) == 4
    ends(driver, blocker)
    assert driver.reports[turn].outcome is RestoreOutcome.LOADED
    driver.check()


def test_what_came_and_went_again_is_brought_once_more() -> None:
    driver = with_stored(LONG, blocks=16)
    blocker = running(driver, blocks=7)
    turn = driver.arrive([*LONG, 1], session="s0")
    driver.settle()
    driver.cache.pressure.evict_blocks(8)  # as a decode that grows does
    assert resident(driver, turn) == 0
    ends(driver, blocker)
    assert driver.reports[turn].outcome is RestoreOutcome.LOADED
    assert driver.run(turn).restored == 10 * B
    driver.check()


def test_what_goes_again_and_again_is_computed() -> None:
    driver = with_stored(LONG, blocks=16)
    blocker = running(driver, blocks=7)
    turn = driver.arrive([*LONG, 1], session="s0")
    for _ in range(2):  # eight blocks each time, of ten
        driver.settle()
        driver.idle(0.0)
        assert turn not in driver.reports and resident(driver, turn) == 8
        driver.cache.pressure.evict_blocks(8)
    driver.idle(0.0)
    assert driver.reports[turn].outcome is RestoreOutcome.NO_ROOM
    ends(driver, blocker)
    assert driver.run(turn).restored == 0
    driver.check()


def test_a_part_is_waited_for_as_long_as_a_turn_waits_for_room() -> None:
    driver = with_stored(LONG, blocks=16)
    running(driver, blocks=7)
    turn = driver.arrive([*LONG, 1], session="s0")
    driver.settle()
    driver.idle(IN_PARTS.room_wait_s - 1.0)
    assert turn not in driver.reports
    driver.idle(1.0)
    report = driver.reports[turn]
    assert (report.outcome, report.brought_tokens) == (RestoreOutcome.NO_ROOM, 8 * B)


def test_a_client_that_hangs_up_between_two_parts_leaves_ordinary_state() -> None:
    driver = with_stored(LONG, blocks=16)
    blocker = running(driver, blocks=7)
    turn = driver.arrive([*LONG, 1], session="s0")
    driver.settle()
    driver.handle(TurnGone(turn))
    driver.check()
    assert resident(driver, turn) == 8 and not driver.cache.sessions.expected
    later = driver.arrive([1, 2], session=None)
    driver.settle()
    assert later in driver.started, "nobody is before it any more"
    ends(driver, blocker)


def lent(driver: NodeDriver, first: int, blocks: int) -> tuple[int, list[int]]:
    """A turn has left so many blocks, and a peer reads them: the ticket, and their tokens."""
    name, tokens = TurnId(f"lent{first}"), [*range(first, first + blocks * B)]
    turn, cache = Turn(name, None, pack(tokens)), driver.cache
    assert isinstance(cache.begin(turn, driver.now), Begun)
    assert cache.reserve(name, blocks * B, driver.now) == ()
    cache.advance(name, turn.tokens, driver.now)
    cache.finish(name, driver.now, tip=None)
    return cache.lends.lend([turn.tokens], driver.now, idle_s=1000.0), tokens


def test_a_turn_in_line_revokes_the_oldest_lends_that_keep_room_from_it() -> None:
    """It waited for them to end by themselves. No lend keeps room from a turn (invariant 7)."""
    driver = with_stored(LONG, blocks=16)
    tickets = [lent(driver, first, blocks)[0] for first, blocks in ((50_000, 9), (60_000, 5))]
    turn = driver.arrive([*LONG, 1], session="s0")
    answer_next(driver)
    lends = driver.cache.lends
    assert [lends.stands(ticket) for ticket in tickets] == [False, True], "enough for its part"
    driver.settle()
    assert driver.reports[turn].outcome is RestoreOutcome.LOADED
    assert driver.run(turn).restored == 10 * B
    assert lends.stands(tickets[1]), "that one is in nobody's way"
    driver.state.check()


def test_blocks_that_wait_for_their_reader_are_a_turns_that_waits() -> None:
    """What an aborted turn gave back is kept for who reads it layer by layer, and no longer."""
    driver = with_stored(blocks=16)
    blocker, lends = running(driver, blocks=14), driver.cache.lends
    ticket = lends.lend((), driver.now, idle_s=1000.0)
    lends.follow(ticket, blocker)
    waits = driver.arrive(LONG, session=None)
    driver.settle()
    assert waits not in driver.started and lends.stands(ticket), "a turn that runs has them"
    ends(driver, blocker)
    driver.settle()
    assert waits in driver.started and not lends.withheld()
    driver.check()


def test_a_turn_in_line_waits_for_a_spill_that_reads() -> None:
    """That takes a moment, and what it was to keep would be computed again."""
    driver = with_stored(blocks=16)
    ticket, tokens = lent(driver, 50_000, 15)
    driver.cache.pressure.open_spills[ticket] = (pack(tokens),)
    turn = driver.arrive(LONG, session=None)
    driver.settle()
    assert turn not in driver.started and driver.cache.lends.stands(ticket)
    driver.cache.pressure.copied(ticket)
    driver.idle(0.0)
    assert turn in driver.started
    driver.cache.pressure.spill_failed(ticket)


def test_a_turn_goes_on_where_lends_yield_less_than_was_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen in a simulated fleet of a hybrid model: the line asked for the same for ever."""
    driver = with_stored(blocks=16)
    ticket, _ = lent(driver, 50_000, 15)
    lends = driver.cache.lends
    monkeypatch.setattr(lends.room, "revoke_for", lambda blocks, now: False)
    turn = driver.arrive(LONG, session=None)
    driver.settle()
    assert turn in driver.started and lends.stands(ticket)
    driver.state.check()


def test_no_lend_is_revoked_where_that_makes_no_room() -> None:
    """Nor one of what the turn itself goes on from: it would have to be had again."""
    driver = with_stored(blocks=16)
    blocker = running(driver, blocks=11)
    ticket, tokens = lent(driver, 50_000, 4)
    lends, queue = driver.cache.lends, driver.state.room_queue
    own = driver.arrive([*tokens, *range(10 * B)], session=None)
    driver.settle()
    assert own not in driver.started and lends.stands(ticket)
    assert queue.next_due() == driver.now + IN_PARTS.room_wait_s, "nor is it tried again and again"
    ends(driver, blocker)
    driver.settle()
    assert own in driver.started and lends.stands(ticket)
    driver.state.check()


def test_two_turns_of_one_session_bring_each_part_once() -> None:
    driver = with_stored(LONG, blocks=40)
    turns = [driver.arrive([*LONG, n], session=None) for n in range(2)]
    driver.settle()
    assert [driver.reports[turn].outcome for turn in turns] == [RestoreOutcome.LOADED] * 2
    assert driver.cache.occupancy.blocks.used == 10
    driver.check()


def test_52_sessions_over_room_for_one_and_a_half_all_go_on_in_order() -> None:
    """Each errand is a step, and each turn that runs. Nobody waits for another that waits."""
    prompts = [[*range(n * 1000, n * 1000 + 12 * B + 5)] for n in range(52)]
    driver = with_stored(*prompts, blocks=18)
    turns = [driver.arrive([*tokens, 1], session=f"s{n}") for n, tokens in enumerate(prompts)]
    ran, steps, most = list[TurnId](), 0, 0
    while len(ran) < len(turns):
        steps += 1
        most = max(most, reserved(driver))
        if driver.started:
            ran.append(driver.started[0])
            assert driver.run(ran[-1]).restored == 12 * B
        elif driver.pending:
            answer_next(driver)
        else:
            driver.handle(Tick())
        assert steps < 52 * 10, "a look, three parts, a run, a look at what it left, a copy"
    assert ran == turns and most <= 2 * PART
    assert all(driver.reports[turn].outcome is RestoreOutcome.LOADED for turn in turns)
    driver.check()


def test_a_session_that_comes_takes_for_each_part_the_room_that_a_turn_would() -> None:
    """It is awaited here: what nobody is known to come back for makes way."""
    driver = with_stored(LONG, blocks=16)
    idle(driver, blocks=12)
    comes = TurnId("comes")
    lender = LenderAddress(RoutingUnit(WorkerId("s"), 0, Incarnation(1)), "tcp://s:1")
    driver.handle(SessionComing(comes, SessionId("s0"), prefix_of(LONG, B).hashed, lender))
    driver.settle()
    assert driver.cache.match(pack(LONG)).range_tokens == 10 * B
    assert comes not in driver.state.coming and not reserved(driver)
    driver.state.check()


def coming(driver: NodeDriver) -> TurnId:
    """A session is on its way here, and slots are reserved for a part of it."""
    comes = TurnId("comes")
    lender = LenderAddress(RoutingUnit(WorkerId("s"), 0, Incarnation(1)), "tcp://s:1")
    driver.handle(SessionComing(comes, SessionId("s0"), prefix_of(LONG, B).hashed, lender))
    while not any(isinstance(asked, Fetch) for asked in driver.pending):
        answer_next(driver)
    assert reserved(driver) == PART
    return comes


def test_a_session_that_comes_makes_way_for_a_turn_that_waits_for_room() -> None:
    driver = with_stored(LONG, blocks=16)
    running(driver, blocks=9)
    comes = coming(driver)
    turn = driver.arrive(OTHER, session=None)  # 3 blocks are left: no room for its first part
    assert comes not in driver.state.coming and not reserved(driver)
    driver.idle(0.0)
    assert turn in driver.started
    driver.state.check()


def test_a_session_that_comes_makes_way_for_turns_that_grow() -> None:
    """No step of the engine may lack room for it: who runs would be preempted."""
    driver = with_stored(LONG, blocks=16)
    blocker = running(driver, blocks=11)
    comes = coming(driver)
    driver.handle(Tick())
    assert comes in driver.state.coming, "there is room for a step still"
    assert driver.cache.reserve(blocker, 12 * B, driver.now) == ()
    driver.handle(Tick())
    assert comes not in driver.state.coming and not reserved(driver)
    driver.state.check()


def test_a_prefetch_takes_no_part_that_is_not_free() -> None:
    settings = NodeSettings(
        record_blocks=PART, spill_after_s=1.0, hold_ms_per_s=0.0, part_tokens=PART * B
    )
    driver = NodeDriver(blocks=24, settings=settings)
    tokens = list(LONG)
    for n in range(7):  # a session whose tool takes as long every time
        driver.turn(tokens)
        tokens += [600 + n]
        driver.idle()
        driver.forget_device()
        driver.now += 90.0 if n < 6 else 0.0
    counts = driver.state.idle_spills.counts
    while not any(isinstance(asked, Fetch) for asked in driver.pending):
        due = driver.state.next_due()
        assert due is not None and due < driver.now + 100.0
        driver.now = max(driver.now, due)
        driver.handle(Tick())
        for asked in [asked for asked in driver.pending if not isinstance(asked, Fetch)]:
            driver.pending.remove(asked)
            driver.answer(asked)
    idle(driver, blocks=18)
    evicted = driver.cache.counters.evicted_tokens
    driver.settle()
    assert counts["prefetch_no_room"] == 1 and not counts["prefetch_loaded"]
    assert not reserved(driver) and not driver.pending
    assert driver.cache.counters.evicted_tokens == evicted
    driver.state.check()
