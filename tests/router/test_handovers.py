"""Which owner is asked to hand a session over, when, and how often."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ownerserve.kv.ids import Incarnation, SessionId, WorkerId
from ownerserve.router.knowledge import IN_FLIGHT_MAX
from ownerserve.router.messages import (
    NOTED,
    Aborted,
    Arrive,
    AskRelease,
    Claimed,
    Dispatch,
    Done,
    Down,
    FirstByte,
    ReleaseEnd,
    ReleaseEnded,
    SessionEnd,
    WorkerDown,
    WorkerUp,
)
from ownerserve.router.requests.body import Usage
from ownerserve.router.worker import Receipt
from tests.support.router.fleets import unit
from tests.support.router.homes import Fleet, S, epoch, stamp

OWNED = epoch(5)
ASKED = AskRelease(S, unit("w0"), OWNED, unit("w1"))


@pytest.fixture
def fleet() -> Fleet:
    """Three workers; the session is owned by w0."""
    made = Fleet()
    made.turn("w0")
    made.tell(Claimed(S, unit("w0"), OWNED, 1))
    return made


def done(fleet: Fleet, receipt: Receipt) -> object:
    fleet.tell(FirstByte(receipt))
    return fleet.tell(Done(receipt, Usage(1000, 10, 0)))


def test_the_owner_is_asked_when_a_turn_is_done_elsewhere(fleet: Fleet) -> None:
    assert done(fleet, fleet.send("w0")) == NOTED
    assert done(fleet, fleet.send("w1")) == ASKED


def test_once_at_a_time_and_after_a_refusal_with_the_next_turn(fleet: Fleet) -> None:
    assert done(fleet, fleet.send("w1")) == ASKED
    assert done(fleet, fleet.send("w1")) == NOTED
    fleet.tell(ReleaseEnded(S, OWNED, ReleaseEnd.KEPT))
    assert done(fleet, fleet.send("w1")) == ASKED


@pytest.mark.parametrize("end", [ReleaseEnd.RELEASED, ReleaseEnd.NOT_OWNER])
def test_who_is_no_owner_any_more_is_not_asked_again(fleet: Fleet, end: ReleaseEnd) -> None:
    done(fleet, fleet.send("w1"))
    fleet.tell(ReleaseEnded(S, OWNED, end))
    assert done(fleet, fleet.send("w1")) == NOTED
    fleet.tell(Claimed(S, unit("w0"), OWNED, 1))  # a word that was long on its way
    assert done(fleet, fleet.send("w1")) == NOTED
    fleet.tell(Claimed(S, unit("w1"), epoch(6), 1))
    assert done(fleet, fleet.send("w1")) == NOTED
    assert done(fleet, fleet.send("w2")) == AskRelease(S, unit("w1"), epoch(6), unit("w2"))


def named(fleet: Fleet, by: str, owner: str, counter: int) -> object:
    """What is asked after a turn at `by`, whose answer names the session's owner."""
    receipt = fleet.send(by)
    fleet.tell(FirstByte(receipt, claimed=Claimed(S, unit(owner), epoch(counter))))
    return fleet.tell(Done(receipt, Usage(1000, 10, 0)))


@pytest.mark.parametrize("by", ["w0", "w1"])
def test_who_did_not_know_that_it_owns_is_asked_again_once_an_answer_names_it(
    fleet: Fleet, by: str
) -> None:
    """Nobody tells a worker what the directory gave it: it says no, asks, and says yes."""
    assert named(fleet, "w1", "w0", 5) == ASKED
    fleet.tell(ReleaseEnded(S, OWNED, ReleaseEnd.NOT_OWNER))
    asked = named(fleet, by, "w0", 5)
    assert asked == (ASKED if by == "w1" else NOTED)
    if by == "w0":  # it says so itself: the next turn elsewhere asks it
        assert done(fleet, fleet.send("w1")) == ASKED


def test_what_was_handed_over_is_not_asked_for_by_an_answer_that_has_not_heard_of_it(
    fleet: Fleet,
) -> None:
    assert named(fleet, "w1", "w0", 5) == ASKED
    fleet.tell(ReleaseEnded(S, OWNED, ReleaseEnd.RELEASED))
    assert named(fleet, "w1", "w0", 5) == NOTED
    assert named(fleet, "w0", "w0", 5) == NOTED


def test_to_whom_it_was_handed_over_is_asked_for_it_once_that_was_said_twice(fleet: Fleet) -> None:
    """The first word of it may be heard before it knows itself."""
    assert named(fleet, "w1", "w0", 5) == ASKED
    fleet.tell(ReleaseEnded(S, OWNED, ReleaseEnd.RELEASED))
    assert named(fleet, "w0", "w1", 6) == NOTED
    assert fleet.places() == ("w0", "w0")
    assert named(fleet, "w0", "w1", 6) == AskRelease(S, unit("w1"), epoch(6), unit("w0"))


def test_to_whom_it_was_handed_over_is_asked_for_it_once_it_said_so_itself(fleet: Fleet) -> None:
    assert named(fleet, "w1", "w0", 5) == ASKED
    fleet.tell(ReleaseEnded(S, OWNED, ReleaseEnd.RELEASED))
    assert named(fleet, "w1", "w1", 6) == NOTED
    assert done(fleet, fleet.send("w0")) == AskRelease(S, unit("w1"), epoch(6), unit("w0"))


def test_an_end_that_is_heard_late_says_nothing_of_a_later_owner(fleet: Fleet) -> None:
    done(fleet, fleet.send("w1"))
    fleet.tell(Claimed(S, unit("w2"), epoch(6), 3))
    fleet.tell(ReleaseEnded(S, OWNED, ReleaseEnd.RELEASED))
    assert done(fleet, fleet.send("w1")) == AskRelease(S, unit("w2"), epoch(6), unit("w1"))


@pytest.mark.parametrize("why", [Down.DRAINED, Down.REMOVED])
def test_a_drained_owner_is_asked_until_it_is_silent(fleet: Fleet, why: Down) -> None:
    fleet.tell(WorkerDown(WorkerId("w0"), why))
    fleet.tell(WorkerDown(WorkerId("w0"), why))
    assert done(fleet, fleet.send("w1")) == ASKED
    fleet.tell(ReleaseEnded(S, OWNED, ReleaseEnd.KEPT))
    fleet.tell(WorkerDown(WorkerId("w0"), Down.UNREACHABLE))
    assert done(fleet, fleet.send("w1")) == NOTED


NOBODY: dict[str, Callable[[Fleet, Receipt], object]] = {
    "the owner is down": lambda f, r: f.tell(WorkerDown(WorkerId("w0"), Down.UNHEALTHY)),
    "the owner lives anew": lambda f, r: f.tell(WorkerUp(WorkerId("w0"), 0, Incarnation(2))),
    "it has a later owner": lambda f, r: f.tell(Claimed(S, unit("w1"), epoch(6), 2)),
    "the session is over": lambda f, r: f.tell(SessionEnd(S)),
    "its worker lives anew": lambda f, r: f.tell(FirstByte(r, stamp("w1", 2))),
}


@pytest.mark.parametrize("before", NOBODY.values(), ids=NOBODY)
def test_nobody_is_asked_where(fleet: Fleet, before: Callable[[Fleet, Receipt], object]) -> None:
    receipt = fleet.send("w1")
    before(fleet, receipt)
    assert done(fleet, receipt) == NOTED


def test_nobody_is_asked_for_what_was_not_done_or_went_on_elsewhere(fleet: Fleet) -> None:
    aborted = fleet.send("w1")
    fleet.tell(FirstByte(aborted))
    assert fleet.tell(Aborted(aborted)) == NOTED
    early, late = fleet.send("w1"), fleet.send("w2")
    fleet.tell(FirstByte(early))
    assert done(fleet, late) == AskRelease(S, unit("w0"), OWNED, unit("w2"))
    fleet.tell(ReleaseEnded(S, OWNED, ReleaseEnd.KEPT))
    assert fleet.tell(Done(early, Usage(1000, 10, 0))) == NOTED


def test_only_so_many_are_asked_at_once(fleet: Fleet) -> None:
    for number in range(IN_FLIGHT_MAX + 1):
        name = SessionId(f"s{number}")
        fleet.policy.to = "w1"
        dispatch = fleet.state.handle(Arrive(name, 4000), 100.0)
        assert isinstance(dispatch, Dispatch)
        fleet.state.handle(FirstByte(dispatch.receipt), 100.0)
        # Heard while the turn runs, from a gateway that was first.
        fleet.state.handle(Claimed(name, unit("w0"), OWNED), 100.0)
        fleet.state.handle(Done(dispatch.receipt), 100.0)
        second = fleet.state.handle(Arrive(name, 4000), 101.0)
        assert isinstance(second, Dispatch)
        outcome = fleet.state.handle(Done(second.receipt), 102.0)
        assert isinstance(outcome, AskRelease) is (number < IN_FLIGHT_MAX)
