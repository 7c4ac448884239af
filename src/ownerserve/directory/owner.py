"""The owner's side: what a routing unit may serve now, and what it must ask the directory.

Pure: methods take `now` (the unit's own clock) and return the requests to send. Owns the unit's
lease, its grants and its open asks. Its one promise: `may_serve` says yes only while no one else's
can. The resource's fence is the second line, for writes that were under way when the lease ended.

    JOINING --Leased--> LIVE --lease over, or refused as lapsed--> JOINING, all grants void
                        LIVE --unknown_holder--> JOINING, grants wait until the directory, which
                                                 lost its memory, has adopted them
    any     --stale_incarnation--> SUPERSEDED: a later life of this unit is there; serves nothing

A grant that is being handed over or ended is not served, whatever the answer will be. An answer
that never comes is asked for again; what comes of an attempt that was given up is void, because
whoever binds gets an epoch above all that it has seen.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from ownerserve.directory.messages import (
    Bind,
    Bound,
    Conflict,
    EndSession,
    HeldBy,
    HeldSession,
    Leased,
    Outcome,
    Publish,
    Published,
    Refusal,
    Refused,
    Register,
    RenewLease,
    Request,
    Transfer,
)
from ownerserve.kv.epoch import Epoch, Stale, Term, later
from ownerserve.kv.ids import PrefixHash, SessionId
from ownerserve.kv.messages import RoutingUnit

ASK_AGAIN_S = 0.5
RENEW_AT = 3  # a lease is renewed when 1/3 of it is over


class Phase(StrEnum):
    """Where the unit stands with the directory."""

    JOINING = "joining"
    LIVE = "live"
    SUPERSEDED = "superseded"


class Grant(msgspec.Struct, frozen=True):
    """A session that is ours."""

    epoch: Epoch
    version: int
    prefix_hash: PrefixHash | None = None
    tokens: int = 0


class NotMine(msgspec.Struct, frozen=True):
    """Don't serve it. `holder`: who was said to own it when we last asked."""

    holder: RoutingUnit | None = None


class Ask(msgspec.Struct, frozen=True):
    """To be sent; the answer comes back under `number`, or it is asked again at `again_s`."""

    number: int
    request: Request
    sent_s: float
    again_s: float


Asks: TypeAlias = list[Ask]


class OwnerState:
    """One life of a routing unit. `margin_s` covers the drift of its clock over one lease."""

    def __init__(self, unit: RoutingUnit, *, margin_s: float = 0.0) -> None:
        self.unit = unit
        self.phase = Phase.JOINING
        self.seen: Epoch | None = None
        self.grants: dict[SessionId, Grant] = {}
        self._margin_s = margin_s
        self._lease_until_s = float("-inf")
        self._renew_at_s = float("-inf")
        self._memory: Term | None = None
        self._number = 0
        self._asks: dict[int, Ask] = {}
        # Waiting to be adopted, each with the end of the lease that covered it.
        self._carried: dict[SessionId, tuple[Grant, float]] = {}
        self._holders: dict[SessionId, RoutingUnit] = {}

    # ---- what the engine asks

    def may_serve(self, session_id: SessionId, now_s: float) -> Grant | NotMine:
        """Ask right before serving a turn and before each write for it."""
        grant = self.grants.get(session_id)
        if grant is None or not self._lease_covers(now_s):
            return NotMine(self._holders.get(session_id))
        return grant

    def want(self, session_id: SessionId, now_s: float) -> Asks:
        """A turn came for a session that isn't ours (yet)."""
        if self.phase is not Phase.LIVE or not self._lease_covers(now_s):
            return self.tick(now_s)
        if session_id in self.grants or self._is_binding(session_id):
            return []
        return [self._ask(Bind(session_id, self.unit, seen=self.seen), now_s)]

    def hand_over(self, session_id: SessionId, target: RoutingUnit, now_s: float) -> Asks:
        """The state is at the target, verified: from this instant on we don't serve it."""
        grant = self.grants.get(session_id)
        if grant is None or not self._lease_covers(now_s):
            return []
        self._stop_serving(session_id)
        move = Transfer(session_id, self.unit, target, grant.epoch, grant.version, seen=self.seen)
        return [self._ask(move, now_s)]

    def end(self, session_id: SessionId, now_s: float) -> Asks:
        """The session is over."""
        grant = self.grants.get(session_id)
        if grant is None:
            return []
        self._stop_serving(session_id)
        return [self._ask(EndSession(session_id, self.unit, grant.epoch), now_s)]

    def fenced(self, session_id: SessionId, stale: Stale) -> None:
        """A resource refused our epoch: what we hold is history. Binding again gets a later one."""
        self.seen = later(self.seen, stale.seen)
        self.grants.pop(session_id, None)

    # ---- time and answers

    def tick(self, now_s: float) -> Asks:
        """Call often: renews, notices the end of the lease, asks again what was not answered."""
        self._void_if_over(now_s)
        due = [ask for ask in self._asks.values() if now_s >= ask.again_s]
        asks = [self._ask_again(ask, now_s) for ask in due]
        asking = {type(ask.request) for ask in self._asks.values()}
        if self.phase is Phase.SUPERSEDED or Register in asking or Publish in asking:
            return asks
        if self.phase is Phase.JOINING:
            asks.append(self._ask(Register(self.unit, self.seen), now_s))
        elif now_s >= self._renew_at_s and RenewLease not in asking:
            renewal = RenewLease(self.unit, self.seen, self._memory)
            asks.append(self._ask(renewal, now_s))
        return asks

    def answered(self, number: int, outcome: Outcome, now_s: float) -> Asks:
        """The directory's answer to an open ask. Late and repeated ones change nothing."""
        self._void_if_over(now_s)
        ask = self._take(number)
        if ask is None:
            return []
        if isinstance(outcome, Refused) and outcome.reason in _LATER:
            again_s = now_s + (outcome.retry_after_s or ASK_AGAIN_S)
            self._asks[number] = replace(ask, again_s=min(ask.again_s, again_s))
            return []
        if isinstance(outcome, Refused) and outcome.reason in _STANDING:
            return self._lost_standing(outcome.reason, ask, now_s)
        match ask.request:
            case Register() | RenewLease() if isinstance(outcome, Leased):
                return self._leased(ask, outcome, now_s)
            case Publish() if isinstance(outcome, Published):
                self._adopted(outcome, now_s)
            case Bind(session_id):
                self._bound(session_id, outcome)
            case Transfer() as request:
                return self._transferred(request, outcome, now_s)
        return []

    # ---- the checks that the promise rests on; each alone, so that tests can take one out

    def _lease_covers(self, now_s: float) -> bool:
        """An owner that slept past its lease finds out before it serves."""
        return now_s < self._lease_until_s

    def _lease_end(self, ask: Ask, lease_s: float, _now_s: float) -> float:
        """From when it was sent: the directory counts from later, so ours ends first."""
        return ask.sent_s + lease_s - self._margin_s

    def _void_if_over(self, now_s: float) -> None:
        """What a lapsed lease covered is gone for good, and so are answers still to come."""
        if self.phase is Phase.LIVE and not self._lease_covers(now_s):
            self._void()
            self.phase = Phase.JOINING

    def _stop_serving(self, session_id: SessionId) -> None:
        """Before the hand-over is asked for, not after it was answered."""
        del self.grants[session_id]

    def _take(self, number: int) -> Ask | None:
        """Each ask is answered once."""
        return self._asks.pop(number, None)

    def _carry(self) -> None:
        """Grants of a directory that forgot us wait: the new lease does not cover them yet."""
        until_s = self._lease_until_s
        self._carried.update({name: (one, until_s) for name, one in self.grants.items()})
        self.grants.clear()

    def _is_still_ours(self, until_s: float, now_s: float) -> bool:
        """Until the lease of before ends, no directory without memory makes another owner; after
        it one may have, and have been forgotten too."""
        return now_s < until_s

    # ---- transitions

    def _leased(self, ask: Ask, outcome: Leased, now_s: float) -> Asks:
        self._lease_until_s = self._lease_end(ask, outcome.lease_s, now_s)
        self._renew_at_s = ask.sent_s + outcome.lease_s / RENEW_AT
        self._memory = outcome.memory
        self.phase = Phase.LIVE
        held = tuple(
            HeldSession(name, one.version, one.prefix_hash, one.tokens, one.epoch)
            for name, (one, until_s) in self._carried.items()
            if self._is_still_ours(until_s, now_s)
        )
        if not held:
            self._carried.clear()
            return []
        return [self._ask(Publish(self.unit, sessions=held, seen=self.seen), now_s)]

    def _adopted(self, outcome: Published, now_s: float) -> None:
        carried, self._carried = self._carried, {}
        for session_id in outcome.adopted:
            grant, until_s = carried.get(session_id, (None, 0.0))
            if grant is not None and self._is_still_ours(until_s, now_s):
                self.grants[session_id] = grant

    def _bound(self, session_id: SessionId, outcome: Outcome) -> None:
        if isinstance(outcome, HeldBy):
            self._holders[session_id] = outcome.owner
        if isinstance(outcome, Bound):
            self.seen = later(self.seen, outcome.epoch)
            self.grants[session_id] = Grant(
                outcome.epoch, outcome.version, outcome.prefix_hash, outcome.tokens
            )

    def _transferred(self, request: Transfer, outcome: Outcome, now_s: float) -> Asks:
        """It is the target's, or by an earlier attempt already was; else we take it again."""
        if isinstance(outcome, Bound):
            self._holders[request.session_id] = request.target
            return []
        if isinstance(outcome, Conflict) and outcome.current.owner != self.unit:
            self._holders[request.session_id] = outcome.current.owner
            return []
        return self.want(request.session_id, now_s)

    def _lost_standing(self, reason: Refusal, ask: Ask, now_s: float) -> Asks:
        """The directory does not count us among the living."""
        if self.phase is not Phase.LIVE and not isinstance(ask.request, Register | Publish):
            return []
        if reason is Refusal.STALE_INCARNATION:
            self._void()
            self.phase = Phase.SUPERSEDED
            return []
        if reason is Refusal.UNKNOWN_HOLDER:
            self._carry()
            self._asks.clear()
        else:
            self._void()
        self.phase = Phase.JOINING
        return [self._ask(Register(self.unit, self.seen), now_s)]

    def _void(self) -> None:
        self.grants.clear()
        self._carried = {}
        self._asks.clear()

    # ---- asks

    def _ask(self, request: Request, now_s: float) -> Ask:
        self._number += 1
        ask = self._asks[self._number] = Ask(self._number, request, now_s, now_s + ASK_AGAIN_S)
        return ask

    def _ask_again(self, ask: Ask, now_s: float) -> Ask:
        """Under a new number: an answer counts for the attempt that it belongs to. A lease is
        counted from its own attempt, so answers of earlier attempts are not waited for."""
        del self._asks[ask.number]
        return self._ask(_updated(ask.request, self.seen), now_s)

    def _is_binding(self, session_id: SessionId) -> bool:
        return any(
            isinstance(ask.request, Bind) and ask.request.session_id == session_id
            for ask in self._asks.values()
        )


_STANDING = (Refusal.UNKNOWN_HOLDER, Refusal.STALE_INCARNATION, Refusal.LEASE_LAPSED)
_LATER = (
    Refusal.REBUILDING,
    Refusal.UNREACHABLE,
    Refusal.CONTENDED,
    Refusal.NOT_REPLICATED,
)


def _updated(request: Request, seen: Epoch | None) -> Request:
    if isinstance(request, Register | RenewLease | Publish | Bind | Transfer):
        return replace(request, seen=seen)
    return request
