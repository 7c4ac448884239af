"""What a turn waits for before the fleet, where it stands in line, and what it is told of that."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ownerserve.kv.ids import SessionId
from ownerserve.router.admission import SeatSettings, SessionAdmission
from ownerserve.router.entry.fair import FairLine, InLine, Ticket
from ownerserve.router.entry.queue import AdmissionQueue, HeldTurn, QueueSettings
from ownerserve.router.entry.running import RunningLimit
from ownerserve.router.entry.terms import (
    EnteringTurn,
    LinePlace,
    SessionClass,
    TenantTerms,
    TurnAwayReason,
    TurnedAway,
    TurnWait,
    WaitReason,
)
from ownerserve.router.worker import Load, Profile
from tests.support.router.fleets import PLAIN, fleet_of

SEATS = SeatSettings(share=1.0, growth_tokens=0, idle_s=10_000.0, patience_s=10_000.0)
TOKENS = 900
SEAT, RUNNING = WaitReason.SEAT, WaitReason.RUNNING


class Waits:
    """A queue's watch that remembers what turns waited for."""

    def __init__(self) -> None:
        self.seen: list[TurnWait] = []

    def let_in(self, turn: EnteringTurn, waited_s: float) -> None: ...

    def waited(self, wait: TurnWait) -> None:
        self.seen.append(wait)

    def turned_away(self, turn: EnteringTurn, reason: TurnAwayReason) -> None: ...


class Session:
    """A session's first turn, before a fleet whose memory takes one."""

    def __init__(self, play: Fleet, name: str) -> None:
        self.play = play
        self.name = SessionId(name)
        self.is_in = False
        self.no: TurnedAway | None = None
        self.held: HeldTurn | None = None

    def come(self, now_s: float, deadline_s: float = inf) -> Session:
        turn = EnteringTurn(
            session=self.name,
            prompt_tokens=TOKENS,
            cost_tokens=TOKENS,
            came_s=now_s,
            deadline_s=deadline_s,
        )
        self.held = self.play.queue.enter(turn, self, now_s=now_s)
        return self

    def go(self, now_s: float) -> None:
        self.is_in = True
        self.play.work.append(Load(now_s, 0, 0))
        self.play.worker.add(self.play.work[-1])

    def turned_away(self, no: TurnedAway) -> None:
        self.no = no


class Fleet:
    """One worker that holds one session; `running_max` turns at once."""

    def __init__(self, running_max: int | None = None) -> None:
        bytes_total = int(1000 * PLAIN.speed.kv_bytes_per_token)
        fleet = fleet_of(Profile(speed=PLAIN.speed, kv_bytes_total=bytes_total))
        (self.worker,) = fleet
        self.work: list[Load] = []
        self.waits = Waits()
        self.queue = AdmissionQueue(
            SessionAdmission(fleet, SEATS),
            None if running_max is None else RunningLimit(fleet, running_max),
            settings=QueueSettings(running_max=running_max, wait_s=inf),
            running=lambda: len(self.work),
            watch=self.waits,
        )

    def end(self, session: Session, now_s: float) -> None:
        """The session is over, and so is its turn."""
        self.worker.take(self.work.pop())
        self.queue.ended(session.name, TOKENS, now_s)
        self.queue.over(session.name, now_s)


def test_a_turn_knows_what_it_waits_for_and_where_it_stood() -> None:
    fleet = Fleet()
    first, second, third = (Session(fleet, name).come(0.0) for name in "abc")
    assert first.held is None and first.is_in
    assert second.held is not None and third.held is not None
    assert (third.held.reason, third.held.came) == (SEAT, LinePlace(2, 2))
    assert fleet.queue.place(third.held) == LinePlace(2, 2)
    fleet.end(first, 7.0)
    assert second.held.waited == fleet.waits.seen == [TurnWait(SEAT, LinePlace(1, 1), 7.0)]
    assert fleet.queue.place(third.held) == LinePlace(1, 1)
    assert fleet.queue.places() == {third.held.one.ticket: LinePlace(1, 1)}
    assert [one.turn.session for one in fleet.queue.waiting()] == ["c"]
    fleet.queue.leave(third.held, 8.0)
    assert not third.held.waited and len(fleet.waits.seen) == 1


def test_a_turn_that_waits_for_a_seat_and_then_to_run_says_both() -> None:
    fleet = Fleet(running_max=1)
    first = Session(fleet, "a").come(0.0)
    other = fleet.queue.enter(
        EnteringTurn(session=first.name, prompt_tokens=1, cost_tokens=1, came_s=0.0),
        Session(fleet, "a"),
        now_s=0.0,
    )
    assert other is not None and other.reason is RUNNING
    second = Session(fleet, "b").come(1.0)
    assert second.held is not None and second.held.reason is SEAT
    fleet.queue.over(first.name, 4.0)
    assert second.held.waits and second.held.reason is RUNNING and not second.is_in
    assert fleet.queue.place(second.held) == LinePlace(2, 2)
    assert len(fleet.queue.places()) == 2
    for at_s in (5.0, 6.0):
        fleet.worker.take(fleet.work.pop())
        fleet.queue.ended(None, 0, at_s)
    assert second.is_in
    assert second.held.waited == [
        TurnWait(SEAT, LinePlace(1, 1), 3.0),
        TurnWait(RUNNING, LinePlace(2, 2), 2.0),
    ]


def test_who_is_turned_away_has_waited_too() -> None:
    fleet = Fleet()
    Session(fleet, "a").come(0.0)
    late = Session(fleet, "b").come(1.0, deadline_s=3.0)
    fleet.queue.look(3.0)
    assert late.no is not None and late.held is not None
    assert late.held.waited == [TurnWait(SEAT, LinePlace(1, 1), 2.0)]
    assert not fleet.waits.seen, "it did not go on"


def test_who_refuses_to_wait_for_a_seat_hears_the_measured_wait() -> None:
    """A session takes 20 s: with two in line before it, one that comes waits for 60 s."""
    fleet = Fleet()
    came = [Session(fleet, f"s{number}").come(0.0) for number in range(6)]
    for number in range(3):
        fleet.end(came[number], 20.0 * (number + 1))
    assert [one.is_in for one in came] == [True] * 4 + [False] * 2
    hasty = Session(fleet, "hasty").come(60.0, deadline_s=60.001)
    fleet.queue.look(60.001)
    assert hasty.no is not None and hasty.no.reason is TurnAwayReason.DEADLINE_PAST
    assert hasty.no.retry_after_s == pytest.approx(60.0, rel=0.05)


def test_time_in_which_nobody_waits_for_a_seat_is_not_counted() -> None:
    fleet = Fleet()
    first, second, third = (Session(fleet, name).come(0.0) for name in "abc")
    fleet.end(first, 2.0)
    fleet.end(second, 4.0)
    gone = Session(fleet, "d").come(30.0)
    assert gone.held is not None
    fleet.queue.leave(gone.held, 30.0)
    hasty = Session(fleet, "e").come(60.0, deadline_s=60.001)
    fleet.queue.look(60.001)
    assert third.is_in and hasty.no is not None
    assert hasty.no.retry_after_s == pytest.approx(2.0, rel=0.05)


@given(
    turns=st.lists(
        st.tuples(
            st.sampled_from("abc"), st.sampled_from(SessionClass), st.integers(1, 1000)
        ),
        min_size=1,
        max_size=12,
    ),
    gone=st.sets(st.integers(0, 11)),
)  # fmt: skip
def test_places_are_the_order_in_which_all_would_be_let_in(
    turns: list[tuple[str, SessionClass, int]], gone: set[int]
) -> None:
    line = FairLine()
    for number, (tenant, session_class, cost) in enumerate(turns):
        turn = EnteringTurn(
            session=None,
            prompt_tokens=cost,
            cost_tokens=cost,
            tenant=tenant,
            terms=TenantTerms(weight=1.0 + (tenant == "a")),
            session_class=session_class,
        )
        line.add(InLine(Ticket(number), turn))
    for number in gone & set(range(len(turns) - 1)):
        line.leave(Ticket(number))
    left = [one.ticket for one in line.in_order()]
    places = [LinePlace(at + 1, len(left)) for at in range(len(left))]
    assert [line.place(ticket) for ticket in left] == places
    assert line.places() == dict(zip(left, places, strict=True))
