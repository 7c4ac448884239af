"""What a decision rests on besides what it writes: were that changed meanwhile, it must not stand.

A backend reads records, decides, and writes only if all guards are still as they were read: here
the former owner renews its lease between the two.
"""

from __future__ import annotations

from ownerserve.directory import messages as ask
from ownerserve.directory.decisions.decide import decide
from ownerserve.directory.decisions.records import unit_key
from ownerserve.directory.decisions.state import DirectoryState
from ownerserve.directory.decisions.transaction import Moment, Transaction
from ownerserve.kv.messages import Epoch, Term
from tests.support.directory.contract import P1, S1, S2, A, B

LEASE_S = 30.0
LATE_S = LEASE_S + 1.0


def lapsed() -> DirectoryState:
    """A owns S1 and has the duty for P1; its lease is over. B is there."""
    state = DirectoryState(Term(1, 0), lease_s=LEASE_S, open_at_s=0.0)
    state.handle(ask.Register(A), 0.0)
    mine = state.handle(ask.Bind(S1, A), 0.0)
    assert isinstance(mine, ask.Bound)
    state.handle(ask.Advance(S1, A, mine.epoch, 1, P1, 512), 0.0)
    state.handle(ask.Register(B), LATE_S)
    return state


def decided(state: DirectoryState, request: ask.Request) -> Transaction:
    at = Moment(LATE_S, LEASE_S, 0.0, Epoch(Term(1, 0), 99))
    return decide(state.records, request, at)


def test_a_session_is_taken_only_if_its_owner_has_not_renewed_meanwhile() -> None:
    taken = decided(lapsed(), ask.Bind(S1, B))
    assert isinstance(taken.outcome, ask.Bound)
    assert unit_key(A) in taken.guards


def test_a_duty_is_taken_only_if_who_had_it_has_not_renewed_meanwhile() -> None:
    state = lapsed()
    mine = state.handle(ask.Bind(S2, B), LATE_S)
    assert isinstance(mine, ask.Bound)
    taken = decided(state, ask.Advance(S2, B, mine.epoch, 1, P1, 512))
    assert taken.minted and unit_key(A) in taken.guards
