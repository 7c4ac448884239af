"""An owner's lease ends at the owner first, and what it does not cover is nobody's.

`OwnerState` alone, asked and answered by hand at stated instants.
"""

from __future__ import annotations

from ownerserve.directory import messages as ask
from ownerserve.directory.messages import DirectoryRefusal
from ownerserve.directory.owner.state import Asks, OwnerState, SessionTip
from ownerserve.kv.messages import Epoch, Term
from tests.support.directory.contract import P1, P2, S1, A

LEASE_S, MARGIN_S = 30.0, 0.5
TERM = Term(1, 7)


def answered(owner: OwnerState, asks: Asks, outcome: ask.Outcome, now_s: float) -> Asks:
    (one,) = asks
    return owner.answered(one.number, outcome, now_s)


def owning(answer_s: float) -> OwnerState:
    """Registered by a request of second 0, answered at `answer_s`; S1 is its own."""
    owner = OwnerState(A, margin_s=MARGIN_S)
    assert not answered(owner, owner.tick(0.0), ask.Leased(LEASE_S, TERM), answer_s)
    bound = ask.Bound(Epoch(TERM, 1), 0, None, 0)
    assert not answered(owner, owner.want(S1, answer_s), bound, answer_s)
    assert owner.may_serve(S1, answer_s) is not None
    return owner


def test_a_lease_runs_from_when_it_was_asked_for_less_what_clocks_may_drift() -> None:
    """The directory counts from when it answered, which is later."""
    owner = owning(answer_s=4.0)
    assert owner.may_serve(S1, LEASE_S - MARGIN_S - 0.1) is not None
    assert owner.may_serve(S1, LEASE_S - MARGIN_S + 0.1) is None


def forgotten(owner: OwnerState, now_s: float) -> Asks:
    """The directory has lost its memory: the unit registers again."""
    renewal = owner.renewal(now_s)
    unknown = ask.Refused(DirectoryRefusal.UNKNOWN_HOLDER, 0.0)
    return answered(owner, renewal, unknown, now_s)


def reported(asks: Asks) -> list[object]:
    told = [one.request for one in asks if isinstance(one.request, ask.Publish)]
    return [held.session_id for one in told for held in one.sessions]


def test_what_is_owned_is_reported_to_a_directory_without_memory() -> None:
    owner = owning(answer_s=1.0)
    again = forgotten(owner, 20.0)
    assert reported(answered(owner, again, ask.Leased(LEASE_S, TERM), 21.0)) == [S1]


def test_what_was_owned_under_a_lease_that_is_over_is_not_reported() -> None:
    """Somebody else may have bound it since."""
    owner = owning(answer_s=1.0)
    again = forgotten(owner, 20.0)
    asks = answered(owner, again, ask.Leased(LEASE_S, TERM), LEASE_S + 1.0)
    assert reported(asks) == []
    assert owner.may_serve(S1, LEASE_S + 1.0) is None


def test_a_late_answer_to_a_former_grant_acts_on_nothing_and_lets_the_present_one_tell() -> None:
    owner = owning(answer_s=1.0)
    former = owner.finished(S1, SessionTip(P1, 512), 2.0)
    owner.fenced(S1, Epoch(TERM, 5))
    bound = ask.Bound(Epoch(TERM, 6), 0, None, 0)
    assert not answered(owner, owner.want(S1, 3.0), bound, 3.0)
    assert not owner.finished(S1, SessionTip(P2, 1024), 4.0), "one advance at a time"
    (told,) = answered(owner, former, ask.Advanced(), 5.0)
    assert isinstance(told.request, ask.Advance)
    assert (told.request.epoch.counter, told.request.prefix_hash) == (6, P2)
    assert not owner.answered(told.number, ask.Advanced(), 6.0)
