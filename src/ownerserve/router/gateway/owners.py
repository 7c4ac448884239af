"""The gateway's side of the ownership directory: who owns which session, told and heard. Pure.

The gateway speaks for its workers: it registers each life it sees, renews their leases while they
answer, binds a session where its first turn runs, moves it by compare-and-set when a turn runs
elsewhere, and says which prefix the session stands on. Owns the grants it was given, as a dated
copy. What another gateway decided comes back as `Claimed`; RouterState then follows.

    wish ── requests ──> directory ── outcomes ──> Claimed events, grants

Wishes wait until the answers to the last batch are in, the newest of each session alone: a request
is made from what is known when it is sent. A directory that says "not yet" (it is rebuilding, or
others changed the same record) is asked again with the next renewal. One that does not answer
changes nothing: turns go by the last view, and what was wished is wished again by the next turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, get_args

import msgspec

from ownerserve.directory import messages as ask
from ownerserve.directory.rules import Kind, Tier
from ownerserve.kv.epoch import Epoch, later
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.router.gateway.stamps import Extent
from ownerserve.router.messages import Claimed

SESSIONS_MAX = 100_000
RENEW_S = 1.0
"""A fifth of the directory's default lease."""

_SHARED = int(Kind.DENSE | Kind.COMPRESSED)
_DEVICE = Tier.DEVICE


class Grant(msgspec.Struct, frozen=True, gc=False):
    """The directory's word on a session when it was last asked."""

    unit: RoutingUnit
    epoch: Epoch
    version: int


class _Wish(msgspec.Struct, gc=False):
    """What should become of a session: run at `unit`, stand on `extent`, or end."""

    unit: RoutingUnit
    parent: SessionId | None = None
    extent: Extent | None = None
    ends: bool = False


class Owners:
    """Grants and wishes of one gateway."""

    def __init__(self, *, renew_s: float = RENEW_S) -> None:
        """`renew_s` between renewals: a fifth of the directory's lease."""
        self._renew_s = renew_s
        self.answers: Counter[str] = Counter()
        """Outcomes by name, refusals by reason: metric labels."""
        self.grants: dict[SessionId, Grant] = {}
        self._seen: Epoch | None = None
        self._lives: dict[tuple[str, int], RoutingUnit] = {}
        self._to_register: dict[RoutingUnit, float] = {}
        """Lives whose lease the directory has not confirmed, and when each is asked for next."""
        self._wishes: dict[SessionId, _Wish] = {}
        self._not_yet: dict[SessionId, _Wish] = {}
        """Wishes that the directory put off, until the next renewal."""
        self._renew_at_s = 0.0

    # ---- what the gateway sees

    def lives(self, unit: RoutingUnit) -> None:
        """A worker answers, in this life."""
        known = self._lives.get((unit.worker, unit.dp_rank))
        if known is None or unit.incarnation > known.incarnation:
            if known is not None:
                self._to_register.pop(known, None)
            self._lives[unit.worker, unit.dp_rank] = unit
            self._to_register[unit] = 0.0

    def silent(self, worker: str) -> None:
        """A worker is down: its leases are not renewed any more."""
        for place in [place for place in self._lives if place[0] == worker]:
            self._to_register.pop(self._lives.pop(place), None)

    def runs_at(
        self, session: SessionId, unit: RoutingUnit, *, parent: SessionId | None = None
    ) -> None:
        """A turn of the session was sent to `unit`."""
        grant = self.grants.get(session)
        if grant is None or grant.unit != unit:
            self._wishes[session] = _Wish(unit, parent)

    @property
    def has_wishes(self) -> bool:
        """Whether anything of a session waits to be said."""
        return bool(self._wishes)

    def stands_on(self, session: SessionId, unit: RoutingUnit, extent: Extent) -> None:
        """The turn leaves the session there, on this prefix."""
        wish = self._wishes.get(session)
        if wish is None:
            self._wishes[session] = _Wish(unit, None, extent)
        else:
            wish.unit, wish.extent = unit, extent

    def ends(self, session: SessionId) -> None:
        """The session is over."""
        grant = self.grants.get(session)
        if grant is not None:
            self._wishes[session] = _Wish(grant.unit, ends=True)

    # ---- to the directory and back

    def question(self, session: SessionId) -> ask.FindSession:
        """Who owns it? With what the directory may have forgotten."""
        return ask.FindSession(session, self._seen)

    def due(self, now_s: float) -> list[ask.Request]:
        """What to ask now."""
        requests: list[ask.Request] = []
        if self._to_register:
            for unit, at_s in self._to_register.items():
                if now_s >= at_s:
                    self._to_register[unit] = now_s + RENEW_S
                    requests.append(ask.Register(unit, self._seen))
        if now_s >= self._renew_at_s:
            self._renew_at_s = now_s + self._renew_s
            requests += [
                ask.RenewLease(unit, self._seen)
                for unit in self._lives.values()
                if unit not in self._to_register
            ]
            self._wishes, self._not_yet = self._not_yet | self._wishes, {}
        wishes, self._wishes = self._wishes, {}
        for session, wish in wishes.items():
            self._put(session, wish, requests)
        return requests

    def answered(
        self, requests: Sequence[ask.Request], outcomes: Sequence[ask.Outcome]
    ) -> list[Claimed]:
        """Take in the answers; what the router must hear of them."""
        news: list[Claimed] = []
        counts, is_forgotten = self.answers, False
        for request, outcome in zip(requests, outcomes, strict=True):
            if isinstance(outcome, ask.Refused):
                counts[outcome.reason.lower()] += 1
                if outcome.reason in _FORGOT_US and not is_forgotten:
                    self._forgotten()  # once: a thousand leases lapse together
                    is_forgotten = True
                self._refused(request, outcome)
                continue
            kind = type(outcome)
            counts[_NAMES[kind]] += 1
            take = _TAKES[type(request)].get(kind)
            claimed = None if take is None else take(self, request, outcome)
            if claimed is not None:
                news.append(claimed)
        return news

    def _put(self, session: SessionId, wish: _Wish, requests: list[ask.Request]) -> None:
        """What to ask for a wish, behind `requests`."""
        grant, unit = self.grants.get(session), wish.unit
        if wish.ends:
            if grant is not None:
                del self.grants[session]
                requests.append(ask.EndSession(session, grant.unit, grant.epoch))
        elif grant is None:
            requests.append(ask.Bind(session, unit, wish.parent, self._seen))
        elif grant.unit != unit:
            requests.append(
                ask.Transfer(session, grant.unit, unit, grant.epoch, grant.version, self._seen)
            )
        elif wish.extent is not None:
            tip, tokens = wish.extent.prefix_hash, wish.extent.tokens
            requests += (
                ask.ClaimOwner(tip, tokens, unit, _DEVICE, _SHARED, "", self._seen),
                ask.Advance(session, unit, grant.epoch, grant.version, tip, tokens),
            )

    # One for each pair of a request and its answer that changes what is known.

    def _leased(self, request: ask.Register, _outcome: ask.Leased) -> None:
        self._to_register.pop(request.unit, None)

    def _forgotten(self) -> None:
        """The directory has forgotten us, or we slept: all anew."""
        self._to_register = dict.fromkeys(self._lives.values(), 0.0)
        self.grants.clear()

    def _refused(self, request: ask.Request, outcome: ask.Refused) -> None:
        if outcome.reason in _FORGOT_US or outcome.reason in _NOT_YET:
            self._put_off(request)
        elif isinstance(request, ask.Transfer | ask.Advance) and (
            outcome.reason is ask.Refusal.UNKNOWN_SESSION
        ):
            self.grants.pop(request.session_id, None)

    def _put_off(self, request: ask.Request) -> None:
        """Keep what was wished, if the worker that it names still answers."""
        if isinstance(request, ask.Bind):
            wish = _Wish(request.unit, request.parent)
        elif isinstance(request, ask.Transfer):
            wish = _Wish(request.target)
        else:
            return
        if self._lives.get((wish.unit.worker, wish.unit.dp_rank)) == wish.unit:
            self._not_yet[request.session_id] = wish

    def _bound(self, request: ask.Bind, outcome: ask.Bound) -> Claimed:
        return self._granted(
            request.session_id, Grant(request.unit, outcome.epoch, outcome.version)
        )

    def _moved(self, request: ask.Transfer, outcome: ask.Bound) -> Claimed:
        return self._granted(
            request.session_id, Grant(request.target, outcome.epoch, outcome.version)
        )

    def _held(self, request: ask.Bind, outcome: ask.HeldBy) -> Claimed:
        return Claimed(request.session_id, outcome.owner, outcome.epoch)

    def _found(self, request: ask.FindSession, found: ask.SessionIs) -> Claimed | None:
        if not found.owner_live:
            return None
        return self._granted(request.session_id, Grant(found.owner, found.epoch, found.version))

    def _conflict(self, request: ask.Transfer | ask.Advance, outcome: ask.Conflict) -> Claimed:
        now = outcome.current
        return self._granted(request.session_id, Grant(now.owner, now.epoch, now.version))

    def _advanced(self, request: ask.Advance, outcome: ask.Advanced) -> None:
        self._keep(request.session_id, Grant(request.unit, request.epoch, outcome.version))

    def _has_duty(self, _request: ask.ClaimOwner, outcome: ask.Granted) -> None:
        if self._seen is None or outcome.epoch > self._seen:
            self._seen = outcome.epoch

    def _granted(self, session: SessionId, grant: Grant) -> Claimed:
        self._seen = later(self._seen, grant.epoch)
        self._keep(session, grant)
        return Claimed(session, grant.unit, grant.epoch)

    def _keep(self, session: SessionId, grant: Grant) -> None:
        grants = self.grants
        if session in grants:
            del grants[session]  # it stands last again
        while len(grants) >= SESSIONS_MAX:
            del grants[next(iter(grants))]
        grants[session] = grant


_FORGOT_US = (ask.Refusal.UNKNOWN_HOLDER, ask.Refusal.LEASE_LAPSED)
_NOT_YET = (ask.Refusal.REBUILDING, ask.Refusal.CONTENDED, ask.Refusal.NOT_REPLICATED)

_TAKES: dict[type, dict[type, Callable[[Owners, Any, Any], Claimed | None]]] = {
    **{kind: {} for kind in get_args(ask.Request)},
    ask.Register: {ask.Leased: Owners._leased},
    ask.Bind: {ask.Bound: Owners._bound, ask.HeldBy: Owners._held},
    ask.Transfer: {ask.Bound: Owners._moved, ask.Conflict: Owners._conflict},
    ask.Advance: {ask.Advanced: Owners._advanced, ask.Conflict: Owners._conflict},
    ask.ClaimOwner: {ask.Granted: Owners._has_duty},
    ask.FindSession: {ask.SessionIs: Owners._found},
}
_NAMES: dict[type, str] = {kind: kind.__name__.lower() for kind in get_args(ask.Outcome)}
