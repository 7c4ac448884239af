"""OwnerState knows which sessions a routing unit owns now, and what it must ask the directory.

Pure: methods take `now` (the unit's own clock) and return the requests to send. Owns the unit's
lease, grants and open asks. Its one promise: `may_serve` says yes only while no one else's can.

    JOINING --Leased--> LIVE --lease over, or refused as lapsed--> JOINING, grants void, asked anew
                        LIVE --unknown_holder--> JOINING, grants wait to be adopted anew
    any     --stale_incarnation--> SUPERSEDED: a later life of this unit is there; serves nothing
    any     --retire--> RETIRED: what was owned is free for others at once

A grant that is being handed over or ended is not served. An answer that never comes is asked for
again; what comes of an attempt that was given up is void: who binds gets a later epoch.

Finished turns are counted here (`version`) and told by Advance, one under way for each session:
what is finished meanwhile goes as one behind it. What others may ask of a session passes its door
first (`doors.GuardedOwner`).
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from ownerserve.directory.messages import (
    Advance,
    Advanced,
    Bind,
    Bound,
    Conflict,
    DirectoryRefusal,
    EndSession,
    HeldSession,
    Leased,
    Outcome,
    Publish,
    Published,
    Refused,
    Register,
    RenewLease,
    Request,
    Retire,
    SessionIs,
    Transfer,
)
from ownerserve.directory.rules import MAIN_KINDS, Kinds, TierCode
from ownerserve.kv.ids import PrefixHash, SessionId
from ownerserve.kv.messages import Epoch, RoutingUnit, Term, later

ASK_AGAIN_S = 0.5
RENEW_AGAIN_S, PART = 1.0, 1000  # PART: sessions in one message of an inventory
WANTED_MAX = 10_000
"""Sessions that wait for the directory; of more, the first is a guest here until its next turn."""
RENEW_AT = 3  # a lease is renewed when 1/3 of it is over: an idle unit's, of 30 s, once in 10 s


class OwnerPhase(StrEnum):
    """An OwnerPhase says where a routing unit stands with the directory."""

    JOINING = "joining"
    LIVE = "live"
    SUPERSEDED = "superseded"
    RETIRED = "retired"


class SessionGrant(msgspec.Struct, frozen=True):
    """A grant is a session that this unit owns, as far as its owners have come in it."""

    epoch: Epoch
    version: int
    prefix_hash: PrefixHash | None = None
    tokens: int = 0


class SessionTip(msgspec.Struct, frozen=True, gc=False):
    """A tip is where a finished turn leaves its session: `kinds` of tokens [0, tokens) are held in
    `tier`. `before`: turns that owners finished before, by the gateway's word: they count even
    where the directory was told of none.
    """

    prefix_hash: PrefixHash
    tokens: int
    tier: TierCode = TierCode.DEVICE
    kinds: Kinds = MAIN_KINDS
    group: str = ""
    before: int = 0


class _Wanted(msgspec.Struct):
    """A wanted session is one that this unit asks for. `turns` have finished here since it was
    asked for; `is_over`: the session's last one is among them.
    """

    parent: SessionId | None = None
    turns: int = 0
    is_over: bool = False


class Ask(msgspec.Struct, frozen=True):
    """An ask is a request that is to be sent. The answer comes back under `number`; without one the
    request goes again at `again_s`, under a new number.
    """

    number: int
    request: Request
    sent_s: float
    again_s: float


Asks: TypeAlias = list[Ask]


class OwnerState:
    """An owner's state is one life of a routing unit as an owner of sessions. `margin_s` covers how
    far its clock may drift over one lease.
    """

    def __init__(self, unit: RoutingUnit, *, margin_s: float = 0.0) -> None:
        self.unit = unit
        self.phase = OwnerPhase.JOINING
        self.seen: Epoch | None = None
        self.grants: dict[SessionId, SessionGrant] = {}
        self.refused: Counter[tuple[str, str]] = Counter()
        """How often a request came to nothing, by verb (VERBS) and reason: metric labels."""
        self._margin_s = margin_s
        self._lease_until_s = float("-inf")
        self._renewed_s = self._renew_at_s = float("-inf")
        self._memory: Term | None = None
        self._number = 0
        self._asks: dict[int, Ask] = {}
        # Waiting to be adopted, each with the end of the lease that covered it.
        self._carried: dict[SessionId, tuple[SessionGrant, float]] = {}
        self._wanted: dict[SessionId, _Wanted] = {}
        """Sessions that are asked for, or will be once this unit is registered."""
        self._tips: dict[SessionId, SessionTip] = {}
        """The newest tip of each session, until the directory has it."""
        self._advancing: set[SessionId] = set()
        self._doubted: set[SessionId] = set()
        """Sessions of which the directory has said once that it does not know them."""

    # ---- what the engine asks

    def may_serve(self, session_id: SessionId, now_s: float) -> SessionGrant | None:
        """Return the grant under which this unit owns the session now; None: a turn of it is a
        guest's.
        """
        return self.grants.get(session_id) if self._lease_covers(now_s) else None

    def leaving(self) -> set[SessionId]:
        """Return the sessions that are being handed over: asked for now, they would stay here."""
        asked = (ask.request for ask in self._asks.values())
        return {one.session_id for one in asked if isinstance(one, Transfer)}

    def want(self, session_id: SessionId, now_s: float, *, parent: SessionId | None = None) -> Asks:
        """Ask for the session of a turn that came, unless it is owned or asked for. `parent`: the
        session that it is a fork of.
        """
        self._void_if_over(now_s)
        if session_id in self._wanted:
            self._wanted[session_id].is_over = False
        is_known = any(session_id in known for known in (self.grants, self._carried, self._wanted))
        if not is_known and self.phase not in _ENDED:
            if len(self._wanted) >= WANTED_MAX:
                del self._wanted[next(iter(self._wanted))]
            self._wanted[session_id] = _Wanted(parent)
            if self.phase is OwnerPhase.LIVE:
                return [self._bind(session_id, now_s)]
        return self.tick(now_s)

    def finished(self, session_id: SessionId, tip: SessionTip, now_s: float) -> Asks:
        """Note that a turn has ended. An owner's is told; a guest's is not, but counts later if the
        session was asked for when it ended.
        """
        self._void_if_over(now_s)
        grant = self.grants.get(session_id)
        if grant is not None:
            self._tips[session_id] = tip
            self.grants[session_id] = _after(grant, tip, turns=1)
            return self._advance(session_id, now_s)
        wanted = self._wanted.get(session_id)
        if wanted is not None:
            self._tips[session_id] = tip
            wanted.turns += 1
        return []

    def hand_over(self, session_id: SessionId, target: RoutingUnit, now_s: float) -> Asks:
        """Hand the session over to the target: from this instant on it is not owned here. Turns
        that the directory may not know of are told before, as `Transfer` names the version.
        """
        grant, tip = self.grants.get(session_id), self._tips.get(session_id)
        if grant is None or not self._lease_covers(now_s):
            return []
        self._stop_serving(session_id)
        asks: Asks = []
        if tip is not None:
            told = _told(session_id, self.unit, grant, tip, seen=self.seen)
            asks.append(self._ask(told, now_s))
        move = Transfer(session_id, self.unit, target, grant.epoch, grant.version, seen=self.seen)
        return [*asks, self._ask(move, now_s)]

    def end(self, session_id: SessionId, now_s: float) -> Asks:
        """End the session. One that is still asked for ends as soon as it is owned; a guest tells
        nothing.
        """
        self._void_if_over(now_s)
        grant, wanted = self.grants.get(session_id), self._wanted.get(session_id)
        if grant is None:
            if wanted is not None:
                wanted.is_over = True
            return []
        self._stop_serving(session_id)
        return [self._ask(EndSession(session_id, self.unit, grant.epoch), now_s)]

    def fenced(self, session_id: SessionId, seen: Epoch) -> None:
        """Void the grant: a later owner was there under `seen`. Binding again gets a later
        epoch.
        """
        self.seen = later(self.seen, seen)
        self._lose(session_id)

    def retire(self, now_s: float) -> Asks:
        """Leave the fleet: from this instant on the unit owns nothing."""
        was_known = self.phase is OwnerPhase.LIVE
        self._wanted.clear()
        self._void("retired")
        self.phase = OwnerPhase.RETIRED
        return [self._ask(Retire(self.unit), now_s)] if was_known else []

    # ---- time and answers

    def renewal(self, now_s: float) -> Asks:
        """Return the renewal that goes along with a frame that is sent anyway, once a second at
        most.
        """
        if self.phase is not OwnerPhase.LIVE or now_s < self._renewed_s + RENEW_AGAIN_S:
            return []
        asking = {type(ask.request) for ask in self._asks.values()}
        if RenewLease in asking or Register in asking or Publish in asking:
            return []
        return [self._ask(RenewLease(self.unit, self.seen, self._memory), now_s)]

    def tick(self, now_s: float) -> Asks:
        """Let time pass: the lease is renewed or found to be over, and what was not answered is
        asked again. To be called several times a lease.
        """
        self._void_if_over(now_s)
        due = [ask for ask in self._asks.values() if now_s >= ask.again_s]
        asks = [self._ask_again(ask, now_s) for ask in due]
        asking = {type(ask.request) for ask in self._asks.values()}
        if self.phase in _ENDED or Register in asking or Publish in asking:
            return asks
        if self.phase is OwnerPhase.JOINING:
            asks.append(self._ask(Register(self.unit, self.seen), now_s))
        elif now_s >= self._renew_at_s and RenewLease not in asking:
            renewal = RenewLease(self.unit, self.seen, self._memory)
            asks.append(self._ask(renewal, now_s))
        return asks

    def answered(self, number: int, outcome: Outcome, now_s: float) -> Asks:
        """Take the directory's answer to an open ask. Late and repeated ones change nothing."""
        self._void_if_over(now_s)
        ask = self._take(number)
        if ask is None:
            return []
        if is_for_later(outcome) or is_ahead(ask.request, outcome):
            self._asks[number] = replace(ask, again_s=ask.sent_s + _wait_s(outcome))
            return []
        if isinstance(outcome, Refused) and outcome.reason in _STANDING:
            return self._lost_standing(outcome.reason, ask, now_s)
        match ask.request:
            case Register() | RenewLease() if isinstance(outcome, Leased):
                return self._leased(ask, outcome, now_s)
            case Publish() if isinstance(outcome, Published):
                return self._adopted(ask.request, outcome, now_s)
            case Bind(session_id):
                return self._bound(session_id, outcome, now_s)
            case Advance() as told:
                return self._advanced(told, outcome, now_s)
            case Transfer() as request:
                return self._transferred(request, outcome, now_s)
        return []

    # ---- the checks that the promise rests on; each alone, so that tests can take one out

    def _lease_covers(self, now_s: float) -> bool:
        """Tell whether the lease still runs: an owner that slept past it finds out before it
        serves.
        """
        return now_s < self._lease_until_s

    def _lease_end(self, ask: Ask, lease_s: float, _now_s: float) -> float:
        """Return the end of a lease by our clock, counted from when it was asked for: the directory
        counts from later, so ours ends first.
        """
        return ask.sent_s + lease_s - self._margin_s

    def _void_if_over(self, now_s: float) -> None:
        """Void a lapsed lease: it takes with it all that it covered, and all answers still to
        come.
        """
        if self.phase is OwnerPhase.LIVE and not self._lease_covers(now_s):
            self._lapse("lease_over")
            self.phase = OwnerPhase.JOINING

    def _stop_serving(self, session_id: SessionId) -> None:
        """Give the session up before its hand-over or end is asked for, not after it was
        answered.
        """
        self._lose(session_id)

    def _take(self, number: int) -> Ask | None:
        """Take out the open request of that number: each is answered once."""
        return self._asks.pop(number, None)

    def _carry(self) -> None:
        """Set aside the grants of a directory that forgot this unit: the new lease does not cover
        them yet.
        """
        until_s = self._lease_until_s
        self._carried.update({name: (one, until_s) for name, one in self.grants.items()})
        self.grants.clear()

    def _is_still_ours(self, until_s: float, now_s: float) -> bool:
        """Tell whether a carried grant may be adopted: until the lease of before ends, no directory
        without memory makes another owner; after it one may have, and have been forgotten too.
        """
        return now_s < until_s

    # ---- transitions

    def _leased(self, ask: Ask, outcome: Leased, now_s: float) -> Asks:
        self._lease_until_s = self._lease_end(ask, outcome.lease_s, now_s)
        self._renewed_s = ask.sent_s
        self._renew_at_s = ask.sent_s + outcome.lease_s / RENEW_AT
        self._memory = outcome.memory
        self.phase = OwnerPhase.LIVE
        held = [
            HeldSession(name, one.version, one.prefix_hash, one.tokens, one.epoch)
            for name, (one, until_s) in self._carried.items()
            if self._is_still_ours(until_s, now_s)
        ]
        self._carried = {one.session_id: self._carried[one.session_id] for one in held}
        parts = [tuple(held[at : at + PART]) for at in range(0, len(held), PART)]
        told = [Publish(self.unit, sessions=part, seen=self.seen) for part in parts]
        asks = [self._ask(one, now_s) for one in told]
        asking = {
            one.request.session_id for one in self._asks.values() if isinstance(one.request, Bind)
        }
        return asks + [self._bind(name, now_s) for name in self._wanted if name not in asking]

    def _bind(self, session_id: SessionId, now_s: float) -> Ask:
        parent = self._wanted[session_id].parent
        return self._ask(Bind(session_id, self.unit, parent, self.seen), now_s)

    def _adopted(self, told: Publish, outcome: Published, now_s: float) -> Asks:
        """Own the sessions again that were reported and adopted. One that may not be is asked for:
        its record may name this unit all the same, and then nobody else could have it.
        """
        asks: Asks = []
        adopted = set(outcome.adopted)
        for one in told.sessions:
            grant, until_s = self._carried.pop(one.session_id, (None, 0.0))
            is_adopted = one.session_id in adopted
            if grant is not None and is_adopted and self._is_still_ours(until_s, now_s):
                self.grants[one.session_id] = grant
            elif grant is not None or is_adopted:
                asks += self.want(one.session_id, now_s)
        return asks

    def _bound(self, session_id: SessionId, outcome: Outcome, now_s: float) -> Asks:
        wanted = self._wanted.pop(session_id, None)
        if isinstance(outcome, Bound):
            self.seen = later(self.seen, outcome.epoch)
            grant = SessionGrant(
                outcome.epoch, outcome.version, outcome.prefix_hash, outcome.tokens
            )
            self.grants[session_id] = grant
            if wanted is not None and wanted.is_over:
                return self.end(session_id, now_s)
            tip = self._tips.get(session_id)
            if tip is None or tip.tokens < grant.tokens:  # an owner has gone further since
                self._tips.pop(session_id, None)
                return []
            self.grants[session_id] = _after(grant, tip, turns=wanted.turns if wanted else 0)
            return self._advance(session_id, now_s)
        self._tips.pop(session_id, None)
        return []

    def _advance(self, session_id: SessionId, now_s: float) -> Asks:
        """Tell the newest tip, unless an earlier one is still under way: then it goes behind
        that."""
        grant, tip = self.grants[session_id], self._tips.get(session_id)
        if tip is None or session_id in self._advancing:
            return []
        self._advancing.add(session_id)
        return [self._ask(_told(session_id, self.unit, grant, tip, seen=self.seen), now_s)]

    def _advanced(self, told: Advance, outcome: Outcome, now_s: float) -> Asks:
        session_id = told.session_id
        self._advancing.discard(session_id)
        grant = self.grants.get(session_id)
        if grant is None:
            return []
        if grant.epoch != told.epoch:  # it was of a former grant; this one's tip has waited for it
            return self._advance(session_id, now_s)
        if isinstance(outcome, Conflict) and not self._is_ours(outcome.current, grant):
            self._lose(session_id)
            is_named = outcome.current.owner == self.unit  # then nobody else could have it
            return self.want(session_id, now_s) if is_named else []
        if isinstance(outcome, Advanced):
            self.seen = later(self.seen, outcome.duty)
        elif isinstance(outcome, Refused) and outcome.reason is DirectoryRefusal.UNKNOWN_SESSION:
            return self._doubt(session_id, told, now_s)
        self._doubted.discard(session_id)
        if grant.version == told.version:
            self._tips.pop(session_id, None)
        return self._advance(session_id, now_s)

    def _doubt(self, session_id: SessionId, told: Advance, now_s: float) -> Asks:
        """Renew the lease before believing that a session is unknown. A directory that does not
        know what it gave us has lost its memory, and says so then; one that renews it has swept the
        session, or ended it.
        """
        if session_id in self._doubted:
            self._doubted.discard(session_id)
            self._lose(session_id)
            return []
        self._doubted.add(session_id)
        self._advancing.add(session_id)
        self._renew_at_s = now_s
        asks = self.tick(now_s)
        self._ask(told, now_s)
        return asks

    def _is_ours(self, current: SessionIs, grant: SessionGrant) -> bool:
        """Tell whether the record is still under our grant: then a later report of ours was there
        first.
        """
        return current.owner == self.unit and current.epoch == grant.epoch

    def _lose(self, session_id: SessionId) -> None:
        """Own the session no more, and tell nothing of it."""
        self.grants.pop(session_id, None)
        self._tips.pop(session_id, None)

    def _transferred(self, request: Transfer, outcome: Outcome, now_s: float) -> Asks:
        """Take the answer to a hand-over: the session is the target's, by this attempt or an
        earlier one; else it is asked for again.
        """
        if isinstance(outcome, Bound):
            return []
        if isinstance(outcome, Conflict) and outcome.current.owner != self.unit:
            return []
        return self.want(request.session_id, now_s)

    def _lost_standing(self, reason: DirectoryRefusal, ask: Ask, now_s: float) -> Asks:
        """Register anew where the directory does not count this life among the living, unless a
        later life has registered.
        """
        if self.phase is not OwnerPhase.LIVE and not isinstance(ask.request, Register | Publish):
            return []
        if reason is DirectoryRefusal.STALE_INCARNATION:
            self._wanted.clear()
            self._void(reason.value)
            self.phase = OwnerPhase.SUPERSEDED
            return []
        if reason is DirectoryRefusal.UNKNOWN_HOLDER:
            self._carry()
            self._forget_asks()
        else:
            self._lapse(reason.value)
        self.phase = OwnerPhase.JOINING
        return [self._ask(Register(self.unit, self.seen), now_s)]

    def _lapse(self, reason: str) -> None:
        """End the lease. What was owned, was being adopted, handed over or ended is bound anew:
        while nobody else took a session, its record still names this unit, and nobody else could
        have it, or end it.
        """
        asked = [ask.request for ask in self._asks.values()]
        left = [one.session_id for one in asked if isinstance(one, Transfer | EndSession)]
        ending = {one.session_id for one in asked if isinstance(one, EndSession)}
        ending.difference_update(self.grants, self._carried)  # those had a turn again
        known = [*left, *self._carried, *self.grants][-WANTED_MAX:]
        self._void(reason)
        self._wanted = {name: _Wanted(is_over=name in ending) for name in known} | self._wanted

    def _void(self, reason: str) -> None:
        verbs = [VERBS.get(type(ask.request)) for ask in self._asks.values()]
        self.refused.update((verb, reason) for verb in verbs if verb is not None)
        self.grants.clear()
        self._carried = {}
        self._forget_asks()

    def _forget_asks(self) -> None:
        """Drop the open requests. Sessions that are wanted stay so: they are asked for under the
        next lease.
        """
        self._asks.clear()
        self._advancing.clear()
        self._doubted.clear()
        self._tips = {name: tip for name, tip in self._tips.items() if name in self._wanted}

    # ---- asks

    def _ask(self, request: Request, now_s: float) -> Ask:
        self._number += 1
        ask = self._asks[self._number] = Ask(self._number, request, now_s, now_s + ASK_AGAIN_S)
        return ask

    def _ask_again(self, ask: Ask, now_s: float) -> Ask:
        """Send the request again under a new number: an answer counts for the attempt that it
        belongs to. A lease is counted from its own attempt, so answers of earlier ones are not
        waited for.
        """
        del self._asks[ask.number]
        return self._ask(self._updated(ask.request), now_s)

    def _updated(self, request: Request) -> Request:
        """Return the request with what is known by now: the newest turn of its session, the highest
        epoch.
        """
        if isinstance(request, Advance):
            grant, tip = self.grants.get(request.session_id), self._tips.get(request.session_id)
            if grant is not None and tip is not None and grant.epoch == request.epoch:
                return _told(request.session_id, self.unit, grant, tip, seen=self.seen)
        if isinstance(request, Register | RenewLease | Publish | Bind | Transfer):
            return replace(request, seen=self.seen)
        return request


def is_for_later(outcome: Outcome) -> bool:
    """Tell whether nothing was decided, so that the same is asked again."""
    return isinstance(outcome, Refused) and outcome.reason in _LATER


def _wait_s(outcome: Outcome) -> float:
    """Return for how long after it was sent what was not decided waits to be asked again: a
    directory that is being rebuilt says how long that takes, and hears nothing of it meanwhile. Its
    answer was on its way for a while, so counted from the request this is never too late.
    """
    said_s = outcome.retry_after_s if isinstance(outcome, Refused) else 0.0
    return said_s or ASK_AGAIN_S


def is_ahead(request: Request, outcome: Outcome) -> bool:
    """Tell whether a hand-over overtook the report of the turns before it, which is on its way."""
    if not isinstance(request, Transfer) or not isinstance(outcome, Conflict):
        return False
    current = outcome.current
    return current.epoch == request.epoch and current.version < request.version


def _after(grant: SessionGrant, tip: SessionTip, *, turns: int) -> SessionGrant:
    before = max(grant.version, tip.before)
    return SessionGrant(grant.epoch, before + turns, tip.prefix_hash, tip.tokens)


def _told(
    session_id: SessionId,
    unit: RoutingUnit,
    grant: SessionGrant,
    tip: SessionTip,
    *,
    seen: Epoch | None,
) -> Advance:
    return Advance(
        session_id, unit, grant.epoch, grant.version, tip.prefix_hash, tip.tokens, tip.tier,
        tip.kinds, tip.group, seen,
    )  # fmt: skip


VERBS: dict[type[Request], str] = {Advance: "advance", Transfer: "hand_over", EndSession: "end"}
"""Requests that only an owner may make, under its epoch, and their names in metrics."""

_ENDED = (OwnerPhase.SUPERSEDED, OwnerPhase.RETIRED)
_STANDING = (
    DirectoryRefusal.UNKNOWN_HOLDER,
    DirectoryRefusal.STALE_INCARNATION,
    DirectoryRefusal.LEASE_LAPSED,
)
_LATER = (
    DirectoryRefusal.REBUILDING,
    DirectoryRefusal.UNREACHABLE,
    DirectoryRefusal.CONTENDED,
    DirectoryRefusal.NOT_REPLICATED,
)
