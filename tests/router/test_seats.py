"""Seats: who may begin, who waits, and in which order. A turn of a session inside never waits."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import Incarnation, SessionId
from ownerserve.kv.messages import RoutingUnit, Tier
from ownerserve.kv.wire.status import RefillShare, WorkerLoad
from ownerserve.plan.cost.prices import Coefficients, Medium
from ownerserve.router.admission import (
    Answer,
    SeatSettings,
    SessionAdmission,
    Wait,
    forked_from,
)
from ownerserve.router.entry.fair import Ticket
from ownerserve.router.entry.kept import PLACE_KEPT_S
from ownerserve.router.entry.terms import ENTER, Enter, LinePlace, WaitReason
from ownerserve.router.fleet import room_tokens
from ownerserve.router.messages import WorkerUp
from ownerserve.router.worker import Load, Profile, Worker
from tests.support.examples import examples
from tests.support.router.fleets import PLAIN, fleet_of, load
from tests.support.router.stays import FixedStay

KNOWN = Profile(speed=PLAIN.speed, kv_bytes_total=100_000_000)
"""100,000 tokens of 1,000 bytes."""
RULES = SeatSettings(share=1.0, growth_tokens=10_000, idle_s=60.0, patience_s=600.0)


def s(name: str) -> SessionId:
    return SessionId(name)


def seats(*profiles: Profile, rules: SeatSettings = RULES) -> SessionAdmission:
    """In front of workers that all have something to do."""
    fleet = fleet_of(*(profiles or (KNOWN,)))
    for worker in fleet:
        load(worker, sequences=1)
    return SessionAdmission(fleet, rules)


def idle_seats(
    *profiles: Profile, rules: SeatSettings = RULES
) -> tuple[SessionAdmission, list[Worker]]:
    """In front of workers that do nothing, and those."""
    fleet = fleet_of(*profiles)
    return SessionAdmission(fleet, rules), list(fleet)


def word(
    worker: Worker, *, free: int, evictable: int, pending: int = 0, as_of: float = 1.0
) -> WorkerLoad:
    """What the worker says of itself while it runs nothing."""
    return WorkerLoad(
        unit=RoutingUnit(worker.id, 0, Incarnation(1)), as_of=as_of, pending_prefill_tokens=pending,
        running_sequences=0, waiting_sequences=0, kv_bytes_free=free, kv_bytes_evictable=evictable,
        kv_bytes_total=100_000_000,
    )  # fmt: skip


def test_sessions_are_let_in_until_their_contexts_fill_the_fleet() -> None:
    room = seats(KNOWN, KNOWN)
    for number in range(4):
        assert room.ask(s(f"{number}"), 40_000, parent=None, now_s=0.0) == ENTER
    answer = room.ask(s("late"), 40_000, parent=None, now_s=1.0)
    assert isinstance(answer, Wait)
    assert room.due(2.0) == []
    room.ended(s("0"), 45_000, 3.0)
    assert room.due(3.0) == []  # it is idle, and keeps its seat
    room.over(s("0"))
    assert room.due(4.0) == [answer.ticket]
    room.check()


def test_later_turns_and_sub_agents_never_wait() -> None:
    room = seats()
    assert room.ask(s("a"), 95_000, parent=None, now_s=0.0) == ENTER  # alone: always
    assert isinstance(room.ask(s("b"), 1_000, parent=None, now_s=0.0), Wait)
    assert room.ask(s("a"), 300_000, parent=None, now_s=1.0) == ENTER
    assert room.ask(s("a/sub"), 50_000, parent=s("a"), now_s=1.0) == ENTER
    room.check()


@pytest.mark.parametrize(
    ("named", "like", "shared", "fork_of"),
    [
        ("main", "other", 0.0, "main"),
        ("main", "other", 1000.0, "main"),
        ("main", None, 0.0, "main"),
        (None, "other", 1000.0, "other"),
        (None, "other", 500.0, "other"),
        (None, "other", 499.0, None),
        (None, "other", 0.0, None),
        (None, None, 1000.0, None),
        (None, None, 0.0, None),
    ],
    ids=[
        "named, and like another", "named, and all another's", "named, like none", "all", "half",
        "less than half", "nothing", "like none", "new",
    ],
)  # fmt: skip
def test_who_is_a_fork_of_whom(
    named: str | None, like: str | None, shared: float, fork_of: str | None
) -> None:
    """Of a prompt of 1,000."""
    asked = [None if name is None else s(name) for name in (named, like)]
    assert forked_from(*asked, shared=shared, prompt=1000.0) == fork_of


def test_turns_and_sub_agents_that_wait_with_a_first_turn_enter_with_it() -> None:
    """Clients send a session's first requests side by side: with the first one it is inside."""
    room = seats()
    assert room.ask(s("a"), 95_000, parent=None, now_s=0.0) == ENTER
    asked = {"b": None, "late": None, "b/sub": s("b"), "b/sub/sub": s("b/sub")}
    waiting = [room.ask(s(name), 85_000, parent=asked[name], now_s=0.0) for name in (*asked, "b")]
    first, late, *others = [one.ticket for one in waiting if isinstance(one, Wait)]
    room.over(s("a"))
    assert room.due(1.0) == [first, *others]
    assert late not in room.due(2.0)
    room.check()


def test_a_turn_waits_no_more_when_another_of_its_session_found_an_idle_worker() -> None:
    room, _ = idle_seats(KNOWN)
    assert room.ask(s("a"), 95_000, parent=None, now_s=0.0) == ENTER
    long = room.ask(s("b"), 200_000, parent=None, now_s=0.0)
    assert isinstance(long, Wait)
    assert room.ask(s("b"), 1_000, parent=None, now_s=1.0) == ENTER
    assert room.due(1.0) == [long.ticket]
    room.check()


def test_they_wait_in_order_and_a_small_one_does_not_overtake() -> None:
    room = seats()
    room.ask(s("a"), 80_000, parent=None, now_s=0.0)
    big = room.ask(s("big"), 70_000, parent=None, now_s=1.0)
    small = room.ask(s("small"), 1_000, parent=None, now_s=2.0)
    assert isinstance(big, Wait) and isinstance(small, Wait)
    room.over(s("a"))
    assert room.due(3.0) == [big.ticket, small.ticket]


def test_an_idle_session_loses_its_seat_and_a_running_one_does_not() -> None:
    room = seats()
    room.ask(s("idle"), 80_000, parent=None, now_s=0.0)
    room.ended(s("idle"), 80_000, 5.0)
    waits = room.ask(s("new"), 20_000, parent=None, now_s=10.0)
    assert isinstance(waits, Wait)
    assert room.next_due_s() == 65.0
    assert room.due(64.9) == []
    assert room.due(65.1) == [waits.ticket]
    late = room.ask(s("later"), 90_000, parent=None, now_s=70.0)
    assert isinstance(late, Wait)
    assert room.due(500.0) == []  # `new` still runs its turn
    room.check()


def test_an_idle_seat_is_free_at_the_very_moment_that_is_named() -> None:
    """Rounded, 1.6990651760494409 + 300 - 300 is less: at that moment the seat was not free yet."""
    room = seats(rules=replace(RULES, idle_s=300.0))
    room.ask(s("idle"), 80_000, parent=None, now_s=0.0)
    room.ended(s("idle"), 80_000, 1.6990651760494409)
    waits = room.ask(s("new"), 20_000, parent=None, now_s=10.0)
    assert isinstance(waits, Wait)
    due_s = room.next_due_s()
    assert due_s is not None and room.due(due_s) == [waits.ticket]


def test_who_was_let_in_once_comes_back_at_once() -> None:
    room = seats()
    room.ask(s("a"), 80_000, parent=None, now_s=0.0)
    room.ended(s("a"), 80_000, 5.0)
    assert room.ask(s("b"), 70_000, parent=None, now_s=100.0) == ENTER  # a's seat went cold
    assert room.ask(s("a"), 81_000, parent=None, now_s=101.0) == ENTER
    assert room.ask(s("a/sub"), 30_000, parent=s("a"), now_s=102.0) == ENTER
    assert isinstance(room.ask(s("c"), 1_000, parent=None, now_s=103.0), Wait)
    room.over(s("a"))
    assert isinstance(room.ask(s("a"), 80_000, parent=None, now_s=104.0), Wait)  # a new one
    room.check()


def test_a_session_that_was_served_before_is_let_in_again() -> None:
    room = seats()
    room.ask(s("a"), 80_000, parent=None, now_s=0.0)
    room.ended(s("a"), 80_000, 1.0)
    room.ask(s("b"), 80_000, parent=None, now_s=100.0)  # a has lost its seat
    assert room.ask(s("a"), 81_000, parent=None, now_s=101.0) == ENTER
    room.over(s("a"))
    assert isinstance(room.ask(s("a"), 1_000, parent=None, now_s=102.0), Wait), "a new one"
    room.check()


def test_no_small_session_waits_beside_a_worker_that_does_nothing() -> None:
    """With the default growth of 40,000 tokens a second one never fitted a small worker."""
    small = Profile(speed=PLAIN.speed, kv_bytes_total=60_000 * 1000)
    room, _ = idle_seats(small, rules=SeatSettings(share=0.9))
    for number in range(3):
        assert room.ask(s(f"{number}"), 10, parent=None, now_s=0.0) == ENTER
        room.ended(s(f"{number}"), 20, 0.5)
    room.check()


def test_a_worker_that_becomes_idle_lets_in_one_who_waits_and_only_one() -> None:
    small = Profile(speed=PLAIN.speed, kv_bytes_total=60_000 * 1000)
    rules = SeatSettings(share=0.9, growth_tokens=40_000)
    room, (worker,) = idle_seats(small, rules=rules)
    assert room.ask(s("a"), 10, parent=None, now_s=0.0) == ENTER
    running = Load(0.0, 0, 10)
    worker.add(running)
    waits = [room.ask(s(name), 10, parent=None, now_s=0.0) for name in "bc"]
    assert room.due(1.0) == []
    worker.take(running)
    room.ended(s("a"), 20, 2.0)
    assert [Wait(ticket) for ticket in room.due(2.0)] == waits[:1]
    room.check()


def test_contexts_that_fill_an_idle_worker_hold_the_next_unless_another_is_nobodys() -> None:
    room, (home, other) = idle_seats(KNOWN, KNOWN)
    home.bound_sessions = 2
    for name in "ab":
        room.ask(s(name), 95_000, parent=None, now_s=0.0)
        room.ended(s(name), 95_000, 1.0)
    assert room.ask(s("c"), 50_000, parent=None, now_s=2.0) == ENTER, "nobody lives on the other"
    other.bound_sessions = 1
    assert isinstance(room.ask(s("d"), 50_000, parent=None, now_s=3.0), Wait)
    room.check()


def test_what_an_idle_worker_can_not_free_is_no_room() -> None:
    room, (worker,) = idle_seats(KNOWN)
    room.ask(s("a"), 80_000, parent=None, now_s=0.0)
    room.ended(s("a"), 80_000, 1.0)
    worker.stamp(word(worker, free=5_000_000, evictable=20_000_000), 1.0)
    waits = room.ask(s("b"), 50_000, parent=None, now_s=2.0)
    assert isinstance(waits, Wait)
    worker.stamp(word(worker, free=5_000_000, evictable=60_000_000, as_of=3.0), 3.0)
    assert room.due(3.0) == [waits.ticket]


def test_a_worker_that_has_prefill_to_do_is_not_idle() -> None:
    room, (worker,) = idle_seats(KNOWN)
    room.ask(s("a"), 80_000, parent=None, now_s=0.0)
    worker.stamp(word(worker, free=100_000_000, evictable=0, pending=5_000), 1.0)
    assert isinstance(room.ask(s("b"), 50_000, parent=None, now_s=2.0), Wait)


def test_an_idle_worker_takes_the_first_in_line_that_fits_it_and_the_head_keeps_its_place() -> None:
    """Behind a head that fits no worker a session of ten tokens waited beside an idle one."""
    room, workers = idle_seats(KNOWN, KNOWN)
    running = [Load(0.0, 0, 10) for _ in workers]
    for worker, work in zip(workers, running, strict=True):
        worker.add(work)
    assert room.ask(s("a"), 90_000, parent=None, now_s=0.0) == ENTER
    giant = room.ask(s("giant"), 500_000, parent=None, now_s=1.0)
    second, third = (room.ask(s(name), 60_000, parent=None, now_s=2.0) for name in "bc")
    assert isinstance(giant, Wait) and isinstance(second, Wait) and isinstance(third, Wait)
    assert room.due(3.0) == []
    workers[1].take(running[1])
    assert room.due(4.0) == [second.ticket], "one at a time, in order"
    workers[1].add(Load(4.0, 0, 10))
    assert room.due(600.9) == []
    assert room.due(601.0) == [giant.ticket], "its patience is what it was"
    room.check()


def test_who_comes_while_others_wait_enters_where_none_of_them_fits() -> None:
    room, (busy, idle) = idle_seats(KNOWN, KNOWN)
    busy.add(Load(0.0, 0, 10))
    idle.add(work := Load(0.0, 0, 10))
    room.ask(s("a"), 90_000, parent=None, now_s=0.0)
    room.ask(s("giant"), 500_000, parent=None, now_s=1.0)
    idle.take(work)
    assert room.ask(s("small"), 10, parent=None, now_s=2.0) == ENTER
    idle.add(work := Load(0.0, 0, 10))
    first = room.ask(s("b"), 99_000, parent=None, now_s=3.0)
    idle.take(work)
    late = room.ask(s("c"), 99_000, parent=None, now_s=4.0)
    assert isinstance(first, Wait) and isinstance(late, Wait), "the idle worker is the first one's"
    assert room.due(4.0) == [first.ticket]


def test_while_no_worker_is_up_nobody_waits_and_nobody_is_promised_anything() -> None:
    """A new session waited 45 s for the refusal that it gets at once without seats."""
    fleet = fleet_of(KNOWN)
    (worker,), room = fleet, SessionAdmission(fleet, RULES)
    worker.add(Load(0.0, 0, 10))
    room.ask(s("a"), 95_000, parent=None, now_s=0.0)
    waits = room.ask(s("b"), 60_000, parent=None, now_s=1.0)
    assert isinstance(waits, Wait)
    fleet.take_down(worker.id)
    assert room.due(2.0) == [waits.ticket]
    assert room.ask(s("c"), 60_000, parent=None, now_s=2.0) == ENTER
    room.ended(s("b"), 0, 2.0)
    room.ended(s("c"), 0, 2.0)
    fleet.raise_up(WorkerUp(worker.id, 0, Incarnation(2), KNOWN))
    worker.add(Load(2.0, 0, 10))
    assert isinstance(room.ask(s("c"), 60_000, parent=None, now_s=3.0), Wait)
    assert room.impatient == 0
    room.check()


def test_a_session_that_no_idle_worker_can_hold_waits_for_the_fleet() -> None:
    room, _ = idle_seats(KNOWN, KNOWN)
    room.ask(s("a"), 80_000, parent=None, now_s=0.0)
    assert isinstance(room.ask(s("giant"), 150_000, parent=None, now_s=0.0), Wait)


def test_what_a_sequence_takes_at_all_is_counted_for_each() -> None:
    """Point state of 20,000 tokens' worth a session: four of 10,000 tokens fill a worker."""
    speed = replace(PLAIN.speed, kv_bytes_per_sequence=20_000_000.0)
    rules = SeatSettings(share=1.0, growth_tokens=0)
    room = seats(Profile(speed=speed, kv_bytes_total=100_000_000), rules=rules)
    answers = [room.ask(s(name), 10_000, parent=None, now_s=0.0) for name in "abcd"]
    assert [isinstance(answer, Enter) for answer in answers] == [True, True, True, False]


def test_nobody_waits_for_ever_and_one_at_a_time_is_let_in_without_room() -> None:
    """All at once would be no seats at all: the fleet would thrash as without them."""
    room = seats(rules=SeatSettings())
    room.ask(s("a"), 95_000, parent=None, now_s=0.0)
    waiting = [room.ask(s(name), 90_000, parent=None, now_s=0.0) for name in "bcd"]
    tickets = [one.ticket for one in waiting if isinstance(one, Wait)]
    assert len(tickets) == 3
    for place, ticket in enumerate(tickets, start=1):
        assert room.next_due_s() == 3600.0 * place
        assert room.due(3600.0 * place - 1.0) == []
        assert room.due(3600.0 * place) == [ticket]
    assert room.impatient == 3


def away_for(
    room: SessionAdmission, away_s: float, *, absent: int, stay_s: float = RULES.idle_s / 2
) -> Answer:
    """Fill the room with "a", which goes away for longer than seats are kept, and "b"; "a" comes
    back with as much lost."""
    room.stay = FixedStay(stay_s)
    room.ask(s("a"), 60_000, parent=None, now_s=0.0)
    room.ended(s("a"), 60_000, 1.0)
    room.ask(s("b"), 60_000, parent=None, now_s=400.0)
    return room.ask(s("a"), 60_500, parent=None, now_s=400.0 + away_s, absent_tokens=absent)


def test_who_was_inside_and_lost_its_state_waits_for_room_before_all_new_ones() -> None:
    room = seats()
    back = away_for(room, 1.0, absent=60_000)
    new = room.ask(s("n"), 30_000, parent=None, now_s=402.0)
    assert isinstance(back, Wait) and isinstance(new, Wait)
    assert (back.reason, new.reason) == (WaitReason.STATE, WaitReason.SEAT)
    again = room.ask(s("a"), 60_500, parent=None, now_s=403.0, absent_tokens=60_000)
    assert isinstance(again, Wait) and room.waiting == 3
    assert room.places() == {
        back.ticket: LinePlace(1, 2), again.ticket: LinePlace(2, 2), new.ticket: LinePlace(1, 1)
    }  # fmt: skip
    assert room.place(again.ticket) == LinePlace(2, 2)
    assert room.due(404.0) == []
    room.over(s("b"))
    assert room.due(405.0) == [back.ticket, again.ticket]
    room.ended(s("a"), 60_500, 406.0)
    room.ended(s("a"), 60_500, 406.0)
    room.over(s("a"))
    assert room.due(407.0) == [new.ticket]


def test_who_was_inside_waits_for_its_room_no_longer_than_is_set() -> None:
    room = seats()
    back = away_for(room, 1.0, absent=60_000)
    assert isinstance(back, Wait)
    assert room.next_due_s() == 701.0
    assert room.due(700.5) == []
    assert room.due(701.0) == [back.ticket]
    assert room.impatient == 0


def outgrown(
    *refilled: float | None, busy: float | None = 0.9, to: int = 70_000
) -> SessionAdmission:
    """Two sessions that were let in small have grown, and no turn of them runs. Workers say what
    part of their time refills would take, or nothing, and how busy they are, or nothing."""
    room, workers = idle_seats(*[KNOWN] * len(refilled))
    for worker, share in zip(workers, refilled, strict=True):
        shares = () if share is None else (RefillShare(1, share),)
        said = word(worker, free=0, evictable=0)
        worker.stamp(replace(said, refill_shares=shares, busy_share=busy), 0.0)
        load(worker, sequences=1)
    for name in "ab":
        assert room.ask(s(name), 30_000, parent=None, now_s=0.0) == ENTER
    for name in "ab":
        room.ended(s(name), to, 1.0)
    return room


def test_who_lost_its_state_makes_room_where_contexts_outgrow_what_refills_can_bring_back() -> None:
    """Else all turns of all inside compute all they had, displace each other, and that for ever."""
    room = outgrown(1.5)
    lost = room.ask(s("a"), 70_500, parent=None, now_s=2.0, absent_tokens=60_000)
    assert isinstance(lost, Wait) and lost.reason is WaitReason.STATE
    assert room.due(3.0) == []
    new = room.ask(s("n"), 1_000, parent=None, now_s=3.0)
    assert isinstance(new, Wait), "it has room, but those who began come first"
    room.over(s("b"))
    assert room.due(4.0) == [lost.ticket, new.ticket]
    room.check()


def test_it_waits_for_its_room_no_longer_than_is_set() -> None:
    room = outgrown(1.5)
    assert room.ask(s("b"), 70_000, parent=None, now_s=1.5) == ENTER
    lost = room.ask(s("a"), 70_500, parent=None, now_s=2.0, absent_tokens=60_000)
    assert isinstance(lost, Wait)
    assert room.due(3.0) == [], "it has no seat"
    assert room.due(100.0) == [], "b runs, so its seat does not go cold"
    assert room.due(301.0) == []
    assert room.due(302.0) == [lost.ticket]


@pytest.mark.parametrize(
    ("refilled", "busy", "to", "absent"),
    [
        ((1.0,), 0.9, 70_000, 60_000),
        ((None,), 0.9, 70_000, 60_000),
        ((1.5,), 0.7, 70_000, 60_000),
        ((1.5,), None, 70_000, 60_000),
        ((1.5,), 0.9, 45_000, 40_000),
        ((1.5,), 0.9, 70_000, 8_000),
        ((1.5, 0.9), 0.9, 140_000, 60_000),
        ((1.5, None), 0.9, 140_000, 60_000),
    ],
    ids=[
        "time for refills", "refills untold", "idle time", "idle time untold", "room",
        "little lost", "time elsewhere", "untold elsewhere",
    ],
)  # fmt: skip
def test_it_goes_on_where_there_is_room_or_time(
    refilled: tuple[float | None, ...], busy: float | None, to: int, absent: int
) -> None:
    room = outgrown(*refilled, busy=busy, to=to)
    assert room.ask(s("a"), to, parent=None, now_s=2.0, absent_tokens=absent) == ENTER


def test_it_goes_on_where_another_turn_of_it_runs_and_beside_its_parent() -> None:
    room = outgrown(1.5)
    assert room.ask(s("a"), 70_000, parent=None, now_s=2.0) == ENTER
    assert room.ask(s("a"), 70_000, parent=None, now_s=2.0, absent_tokens=60_000) == ENTER
    child = room.ask(s("c"), 70_000, parent=s("b"), now_s=2.0, absent_tokens=60_000)
    assert child == ENTER


def test_who_finds_its_state_or_lost_little_of_it_never_waits() -> None:
    assert away_for(seats(), 1.0, absent=0) == ENTER
    assert away_for(seats(), 1.0, absent=8_000) == ENTER


def test_who_was_away_for_longer_than_the_longest_stay_never_waits() -> None:
    """Nothing else is kept for those inside, then: to wait costs 3 % of work and gains nothing."""
    assert away_for(seats(), 1.0, absent=60_000, stay_s=RULES.idle_s) == ENTER


def test_who_comes_back_and_hangs_up_leaves_the_line() -> None:
    room = seats()
    back = away_for(room, 1.0, absent=60_000)
    assert isinstance(back, Wait)
    room.leave(back.ticket, 700.0)
    assert room.waiting == 0 and room.due(900.0) == []


def test_patience_ends_and_is_counted() -> None:
    room = seats()
    room.ask(s("a"), 95_000, parent=None, now_s=0.0)
    waits = room.ask(s("b"), 50_000, parent=None, now_s=1.0)
    assert isinstance(waits, Wait)
    assert room.next_due_s() == 601.0
    assert room.due(601.0) == [waits.ticket]
    assert room.impatient == 1


def test_who_hangs_up_leaves_the_queue() -> None:
    room = seats()
    room.ask(s("a"), 95_000, parent=None, now_s=0.0)
    first = room.ask(s("b"), 50_000, parent=None, now_s=1.0)
    second = room.ask(s("c"), 50_000, parent=None, now_s=1.0)
    assert isinstance(first, Wait) and isinstance(second, Wait)
    room.leave(first.ticket, 1.5)
    room.leave(first.ticket, 1.5)
    room.over(s("a"))
    assert room.due(2.0) == [second.ticket]


def test_who_hangs_up_and_asks_again_has_its_place_and_its_time_back() -> None:
    """A client that does not stream gives up after its own minute, and tries again, for ever."""
    room = seats()
    room.ask(s("a"), 95_000, parent=None, now_s=0.0)
    first = room.ask(s("b"), 50_000, parent=None, now_s=1.0)
    second = room.ask(s("c"), 50_000, parent=None, now_s=2.0)
    assert isinstance(first, Wait) and isinstance(second, Wait)
    for left_s in (60.0, 120.0, 180.0, 240.0):
        room.leave(first.ticket, left_s)
        assert room.place(second.ticket) == LinePlace(1, 1)
        assert room.ask(s("b"), 50_000, parent=None, now_s=left_s + PLACE_KEPT_S / 2) == first
        assert room.place(first.ticket) == LinePlace(1, 2)
    assert room.next_due_s() == 601.0
    assert room.due(601.0) == [first.ticket]
    room.check()


def test_a_place_is_not_kept_for_ever() -> None:
    room = seats()
    room.ask(s("a"), 95_000, parent=None, now_s=0.0)
    first = room.ask(s("b"), 50_000, parent=None, now_s=1.0)
    second = room.ask(s("c"), 50_000, parent=None, now_s=2.0)
    assert isinstance(first, Wait) and isinstance(second, Wait)
    room.leave(first.ticket, 10.0)
    late = room.ask(s("b"), 50_000, parent=None, now_s=10.1 + PLACE_KEPT_S)
    assert isinstance(late, Wait) and late.ticket > second.ticket
    assert room.place(late.ticket) == LinePlace(2, 2)


def test_who_comes_back_gives_up_and_asks_again_waits_no_longer_for_it() -> None:
    room = seats()
    back = away_for(room, 1.0, absent=60_000)
    assert isinstance(back, Wait)
    room.leave(back.ticket, 500.0)
    again = room.ask(s("a"), 70_000, parent=None, now_s=560.0, absent_tokens=60_000)
    assert again == back
    assert room.next_due_s() == 701.0


def test_sessions_of_one_model_keep_nobody_from_another() -> None:
    one, other = replace(KNOWN, model="one"), replace(KNOWN, model="other")
    room = seats(one, other)
    answers = [room.ask(s(f"{n}"), 90_000, parent=None, now_s=0.0) for n in range(9)]
    assert all(isinstance(answer, Enter) for answer in answers)


def test_without_a_word_on_memory_there_is_no_limit() -> None:
    room = seats(KNOWN, PLAIN)
    answers = [room.ask(s(f"{n}"), 90_000, parent=None, now_s=0.0) for n in range(9)]
    assert all(isinstance(answer, Enter) for answer in answers)


def entered(room: SessionAdmission, tokens: int) -> int:
    """How many new sessions of so many tokens are let in."""
    asked = [room.ask(s(f"n{n}"), tokens, parent=None, now_s=0.0) for n in range(99)]
    return sum(one == ENTER for one in asked)


@pytest.mark.parametrize(
    ("tiers", "sessions"),
    [
        ({}, 10),
        ({Tier.HOST: 400_000_000}, 30),
        ({Tier.HOST: 100_000_000}, 10),
        ({Tier.DISK: 400_000_000}, 10),
        ({Tier.HOST: 200_000_000, Tier.DISK: 800_000_000}, 15),
    ],
    ids=["none", "host", "less than the device", "a slow disk", "both"],
)
def test_host_memory_counts_where_it_brings_state_back_quickly(
    tiers: dict[Tier, int], sessions: int
) -> None:
    """A first prompt of 8,192 tokens takes 8 ms to compute, 1 ms from host memory, 4 from disk."""
    speed = replace(
        PLAIN.speed,
        prefill=Coefficients(0.0, 0.001, 0.0),
        media={**PLAIN.speed.media, Tier.HOST: Medium(0.0, 8e6), Tier.DISK: Medium(0.0, 2e6)},
    )
    profile = replace(KNOWN, speed=speed, tier_bytes=tiers)
    room = seats(profile, rules=replace(RULES, growth_tokens=0))
    assert entered(room, 10_000) == sessions


def says(room_of: Profile, *shares: float | None, busy: float | None = 0.5) -> SessionAdmission:
    """In front of busy workers that say what refills would take, or nothing."""
    room, workers = idle_seats(*[room_of] * len(shares), rules=replace(RULES, overbooked=1.2))
    for worker, share in zip(workers, shares, strict=True):
        said = () if share is None else (RefillShare(1, share),)
        stamp = word(worker, free=0, evictable=0)
        worker.stamp(replace(stamp, refill_shares=said, busy_share=busy), 0.0)
        load(worker, sequences=1)
    return room


def test_sessions_are_expected_to_outgrow_the_memory_a_little_where_they_can_be_suspended() -> None:
    """Each is expected to take 20,000 tokens of 100,000: five of them, or one more."""
    assert entered(says(KNOWN, 0.5), 10_000) == 6
    assert entered(says(KNOWN, None), 10_000) == 5
    assert entered(says(KNOWN, 0.5, busy=None), 10_000) == 5
    assert entered(says(KNOWN, 0.5, 0.5), 10_000) == 12
    assert entered(says(KNOWN, 0.5, None), 10_000) == 10, "one that does not say will do"


@pytest.mark.parametrize("field", ["share", "overbooked", "idle_s", "return_s", "patience_s"])
def test_a_setting_out_of_range_is_named(field: str) -> None:
    with pytest.raises(InvalidInput, match=field):
        replace(SeatSettings(), **{field: 0.0})


class SeatsPlay(RuleBasedStateMachine):
    """Turns come and end in any order; nobody is let in beyond the room but by the rules."""

    def __init__(self) -> None:
        super().__init__()
        self.room = seats()
        self.now = 0.0
        self.waiting: dict[int, str] = {}
        self.order: list[int] = []
        self.gone: dict[str, tuple[int, float]] = {}
        """Who hung up had which ticket, and when it left."""
        self.live: dict[str, int] = {}
        self.count = 0

    @rule(tokens=st.integers(1, 60_000))
    def a_session_comes(self, tokens: int) -> None:
        self.count += 1
        name = f"n{self.count}"
        answer = self.room.ask(s(name), tokens, parent=None, now_s=self.now)
        if isinstance(answer, Wait):
            self.waiting[answer.ticket] = name
            self.order.append(answer.ticket)
        else:
            assert not self.waiting, "nobody overtakes"
            self.live[name] = 1

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.integers(0, 90_000))
    def a_turn_ends(self, data: st.DataObject, tokens: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.live[name] -= 1
        if not self.live[name]:
            del self.live[name]
        self.room.ended(s(name), tokens, self.now)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def a_turn_follows(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        assert self.room.ask(s(name), 10, parent=None, now_s=self.now) == ENTER
        self.live[name] += 1

    @rule(passed_s=st.floats(0.0, 400.0))
    def time_passes(self, passed_s: float) -> None:
        self.now += passed_s
        for ticket in self.room.due(self.now):
            assert self.order.pop(0) == ticket, "first come, first served"
            self.live[self.waiting.pop(ticket)] = 1

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def one_hangs_up(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.order))
        self.order.remove(ticket)
        self.gone[self.waiting.pop(ticket)] = (ticket, self.now)
        self.room.leave(Ticket(ticket), self.now)

    @precondition(lambda self: self.gone)
    @rule(data=st.data(), tokens=st.integers(1, 60_000))
    def one_tries_again(self, data: st.DataObject, tokens: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.gone)))
        ticket, left_s = self.gone.pop(name)
        answer = self.room.ask(s(name), tokens, parent=None, now_s=self.now)
        if isinstance(answer, Wait):
            assert (answer.ticket == ticket) is (self.now <= left_s + PLACE_KEPT_S)
            self.waiting[answer.ticket] = name
            self.order = sorted([*self.order, answer.ticket])
        else:
            assert not self.waiting, "nobody overtakes"
            self.live[name] = 1

    @invariant()
    def books_agree(self) -> None:
        self.room.check()
        assert self.room.waiting == len(self.waiting)

    def teardown(self) -> None:
        for ticket in list(self.order):
            if ticket in self.order:
                self.now += RULES.patience_s
                for found in self.room.due(self.now):
                    assert self.order.pop(0) == found, "first come, first served"
            assert ticket not in self.order, "nobody waits for ever"


SeatsPlay.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
TestSeatsPlay = SeatsPlay.TestCase


class IdlePlay(RuleBasedStateMachine):
    """Three workers, of which some do nothing: who waits, and who of them is let in first.

    A session that is let in runs where a router would send it: at an idle worker that has room.
    """

    def __init__(self) -> None:
        super().__init__()
        self.room, self.workers = idle_seats(*[KNOWN] * 3, rules=SeatSettings(patience_s=45.0))
        self.now = 0.0
        self.line: dict[Ticket, tuple[str, int, float]] = {}
        self.live: dict[str, tuple[Worker, Load]] = {}
        self.count = 0

    def nobodys(self) -> list[Worker]:
        """Idle workers at which no session lives."""
        return [one for one in self.workers if not one.batch and not one.bound_sessions]

    def fits(self, tokens: int) -> bool:
        return any(tokens <= room_tokens(worker) for worker in self.nobodys())

    def begin(self, name: str, tokens: int) -> None:
        idle = [w for w in self.workers if not w.batch and room_tokens(w) >= tokens]
        nobodys = [w for w in idle if not w.bound_sessions]
        worker = (nobodys or idle or self.workers)[0]
        work = Load(self.now, 0, tokens)
        worker.add(work)
        worker.bound_sessions += 1
        self.live[name] = worker, work

    def let_in(self) -> None:
        free = len(self.nobodys())
        for ticket in self.room.due(self.now):
            name, tokens, _ = self.line[ticket]
            before = [other for other in self.line if other < ticket]
            if before:
                assert not any(self.fits(self.line[other][1]) for other in before), "not the first"
            del self.line[ticket]
            self.begin(name, tokens)
        assert free == 0 or len(self.nobodys()) <= free

    @rule(tokens=st.sampled_from([10, 60_000, 90_000, 150_000]))
    def a_session_comes(self, tokens: int) -> None:
        self.count += 1
        name, fits = f"n{self.count}", self.fits(tokens)
        answer = self.room.ask(s(name), tokens, parent=None, now_s=self.now)
        if isinstance(answer, Enter):
            self.begin(name, tokens)
        else:
            assert self.line or not fits, "it waits beside a worker that does nothing"
            until_s = self.now + 45.0 * (len(self.line) + 1)
            self.line[answer.ticket] = name, tokens, until_s

    @precondition(lambda self: self.live)
    @rule(data=st.data(), is_over=st.booleans())
    def a_turn_ends(self, data: st.DataObject, is_over: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        worker, work = self.live.pop(name)
        worker.take(work)
        self.room.ended(s(name), 0, self.now)
        if is_over:
            worker.bound_sessions -= 1
            self.room.over(s(name))
        self.let_in()

    @rule(passed_s=st.floats(0.0, 100.0))
    def time_passes(self, passed_s: float) -> None:
        end_s = self.now + passed_s
        while (due_s := self.room.next_due_s()) is not None and due_s <= end_s:
            self.now = max(due_s, self.now)
            self.let_in()
            assert self.room.next_due_s() != due_s, "at that moment something changes"
        self.now = end_s
        self.let_in()

    @invariant()
    def nobody_who_fits_an_idle_worker_waits_and_nobody_beyond_his_place_in_line(self) -> None:
        self.room.check()
        for _, tokens, until_s in self.line.values():
            assert until_s > self.now - 1e-6  # sums of the same times in another order
            assert not self.fits(tokens)


IdlePlay.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
TestIdlePlay = IdlePlay.TestCase


class OutgrownPlay(RuleBasedStateMachine):
    """Sessions that outgrow the memory, whose state goes, at workers whose time for refills comes
    and goes: who has begun waits so long at most as is set, and nobody waits twice at once."""

    LONGEST_S = 300.0
    """A session that has begun waits so long for memory."""

    def __init__(self) -> None:
        super().__init__()
        self.room, self.workers = idle_seats(KNOWN, KNOWN, rules=RULES)
        self.now = 0.0
        self.contexts: dict[str, int] = {}
        self.live: set[str] = set()
        self.held: dict[Ticket, tuple[str, float]] = {}
        self.new: dict[Ticket, str] = {}
        for worker in self.workers:
            load(worker, sequences=1)

    @rule(worker=st.integers(0, 1), share=st.sampled_from([0.0, 0.9, 1.1, 1000.0]))
    def a_worker_says_what_refills_take(self, worker: int, share: float) -> None:
        said = word(self.workers[worker], free=0, evictable=0, as_of=self.now)
        said = replace(said, refill_shares=(RefillShare(1, share),), busy_share=0.9)
        self.workers[worker].stamp(said, self.now)

    @rule(tokens=st.integers(1, 90_000))
    def a_session_comes(self, tokens: int) -> None:
        name = f"n{len(self.contexts)}"
        self.contexts[name] = tokens
        answer = self.room.ask(s(name), tokens, parent=None, now_s=self.now)
        if isinstance(answer, Wait):
            assert answer.reason is WaitReason.SEAT
            self.new[answer.ticket] = name
        else:
            self.live.add(name)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=st.integers(0, 60_000), is_over=st.booleans())
    def a_turn_ends(self, data: st.DataObject, more: int, is_over: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.live.remove(name)
        self.contexts[name] += more
        self.room.ended(s(name), self.contexts[name], self.now)
        if is_over:
            self.room.over(s(name))
            del self.contexts[name]
            self.contexts[f"{name} is over"] = 0
        self.let_in()

    def idle(self) -> list[str]:
        away = self.live | set(self.new.values()) | {name for name, _ in self.held.values()}
        return sorted(name for name, tokens in self.contexts.items() if tokens and name not in away)

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), is_lost=st.booleans())
    def a_session_comes_back(self, data: st.DataObject, is_lost: bool) -> None:
        name = data.draw(st.sampled_from(self.idle()))
        tokens = self.contexts[name]
        answer = self.room.ask(
            s(name), tokens, parent=None, now_s=self.now, absent_tokens=tokens if is_lost else 0
        )
        if isinstance(answer, Wait):
            assert is_lost and answer.reason is WaitReason.STATE
            self.held[answer.ticket] = name, self.now
        else:
            self.live.add(name)

    @rule(passed_s=st.floats(0.0, 200.0))
    def time_passes(self, passed_s: float) -> None:
        end_s = self.now + passed_s
        while (due_s := self.room.next_due_s()) is not None and due_s <= end_s:
            self.now = max(due_s, self.now)
            if not self.let_in():
                break
        self.now = end_s
        while self.let_in():
            pass

    def let_in(self) -> bool:
        found = self.room.due(self.now)
        for ticket in found:
            name = self.new.pop(ticket, None) or self.held.pop(ticket)[0]
            self.live.add(name)
        return bool(found)

    @invariant()
    def books_agree_and_nobody_who_has_begun_waits_for_too_long(self) -> None:
        self.room.check()
        assert self.room.waiting == len(self.held) + len(self.new)
        for name, since_s in self.held.values():
            assert self.now <= since_s + self.LONGEST_S, name


OutgrownPlay.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
TestOutgrownPlay = OutgrownPlay.TestCase
