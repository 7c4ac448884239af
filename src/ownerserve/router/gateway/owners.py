"""The gateway's side of the ownership directory: who owns which session, told and heard. Pure.

The gateway speaks for its workers: it registers each life it sees, renews their leases while they
answer, binds a session where its first turn runs, moves it by compare-and-set when a turn runs
elsewhere, and says which prefix the session stands on. Owns the grants it was given, as a dated
copy. What another gateway decided comes back as `Claimed`; RouterState then follows.

    wish ── requests ──> directory ── outcomes ──> Claimed events, grants

Wishes wait until the answers to the last batch are in, the newest of each session alone: a request
is made from what is known when it is sent. A directory that does not answer changes nothing: turns
go by the last view, and what was wished is wished again by the next turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

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

_SHARED = Kind.DENSE | Kind.COMPRESSED


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

    def __init__(self) -> None:
        self.answers: Counter[str] = Counter()
        """Outcomes by name, refusals by reason: metric labels."""
        self.grants: dict[SessionId, Grant] = {}
        self._seen: Epoch | None = None
        self._lives: dict[tuple[str, int], RoutingUnit] = {}
        self._registered: set[RoutingUnit] = set()
        self._register_at_s: dict[RoutingUnit, float] = {}
        self._wishes: dict[SessionId, _Wish] = {}
        self._renew_at_s = 0.0

    # ---- what the gateway sees

    def lives(self, unit: RoutingUnit) -> None:
        """A worker answers, in this life."""
        known = self._lives.get((unit.worker, unit.dp_rank))
        if known is None or unit.incarnation > known.incarnation:
            if known is not None:
                self._registered.discard(known)
                self._register_at_s.pop(known, None)
            self._lives[unit.worker, unit.dp_rank] = unit

    def silent(self, worker: str) -> None:
        """A worker is down: its leases are not renewed any more."""
        for place in [place for place in self._lives if place[0] == worker]:
            unit = self._lives.pop(place)
            self._registered.discard(unit)
            self._register_at_s.pop(unit, None)

    def runs_at(
        self, session: SessionId, unit: RoutingUnit, *, parent: SessionId | None = None
    ) -> None:
        """A turn of the session was sent to `unit`."""
        grant = self.grants.get(session)
        if grant is None or grant.unit != unit:
            self._wishes[session] = _Wish(unit, parent)

    def stands_on(self, session: SessionId, unit: RoutingUnit, extent: Extent) -> None:
        """The turn leaves the session there, on this prefix."""
        wish = self._wishes.setdefault(session, _Wish(unit))
        wish.unit, wish.extent = unit, extent

    def ends(self, session: SessionId) -> None:
        """The session is over."""
        grant = self.grants.get(session)
        if grant is not None:
            self._wishes[session] = _Wish(grant.unit, ends=True)

    # ---- to the directory and back

    def due(self, now_s: float) -> list[ask.Request]:
        """What to ask now."""
        units = list(self._lives.values())
        requests: list[ask.Request] = []
        for unit in units:
            if unit not in self._registered and now_s >= self._register_at_s.get(unit, 0.0):
                self._register_at_s[unit] = now_s + RENEW_S
                requests.append(ask.Register(unit, self._seen))
        if now_s >= self._renew_at_s:
            self._renew_at_s = now_s + RENEW_S
            requests += [
                ask.RenewLease(unit, self._seen) for unit in units if unit in self._registered
            ]
        wishes, self._wishes = self._wishes, {}
        for session, wish in wishes.items():
            requests += self._requests(session, wish)
        return requests

    def answered(
        self, requests: Sequence[ask.Request], outcomes: Sequence[ask.Outcome]
    ) -> list[Claimed]:
        """Take in the answers; what the router must hear of them."""
        news: list[Claimed] = []
        for request, outcome in zip(requests, outcomes, strict=True):
            told = outcome.reason if isinstance(outcome, ask.Refused) else type(outcome).__name__
            self.answers[str(told).lower()] += 1
            claimed = self._take(request, outcome)
            if claimed is not None:
                news.append(claimed)
        return news

    def _requests(self, session: SessionId, wish: _Wish) -> list[ask.Request]:
        grant, unit = self.grants.get(session), wish.unit
        if wish.ends:
            self.grants.pop(session, None)
            return [] if grant is None else [ask.EndSession(session, grant.unit, grant.epoch)]
        if grant is None:
            return [ask.Bind(session, unit, wish.parent, self._seen)]
        if grant.unit != unit:
            move = ask.Transfer(
                session, grant.unit, unit, grant.epoch, grant.version, seen=self._seen
            )
            return [move]
        extent = wish.extent
        if extent is None:
            return []
        return [
            ask.ClaimOwner(
                extent.prefix_hash, extent.tokens, unit, Tier.DEVICE, _SHARED, seen=self._seen
            ),
            ask.Advance(
                session, unit, grant.epoch, grant.version, extent.prefix_hash, extent.tokens
            ),
        ]

    def _take(self, request: ask.Request, outcome: ask.Outcome) -> Claimed | None:
        match request, outcome:
            case ask.Register(unit), ask.Leased():
                self._registered.add(unit)
            case _, ask.Refused(ask.Refusal.UNKNOWN_HOLDER | ask.Refusal.LEASE_LAPSED):
                self._registered.clear()  # it has forgotten us, or we slept: all anew
                self._register_at_s.clear()
                self.grants.clear()
            case ask.Bind(session, unit), ask.Bound(epoch, version):
                return self._granted(session, Grant(unit, epoch, version))
            case ask.Transfer(session, _, unit), ask.Bound(epoch, version):
                return self._granted(session, Grant(unit, epoch, version))
            case ask.Bind(session), ask.HeldBy(owner, epoch):
                return Claimed(session, owner, epoch)
            case ask.FindSession(session), ask.SessionIs() as found if found.owner_live:
                return self._granted(session, Grant(found.owner, found.epoch, found.version))
            case ask.Transfer(session) | ask.Advance(session), ask.Conflict(current):
                return self._granted(session, Grant(current.owner, current.epoch, current.version))
            case ask.Transfer(session) | ask.Advance(session), ask.Refused(
                ask.Refusal.UNKNOWN_SESSION
            ):
                self.grants.pop(session, None)
            case ask.Advance(session, unit, epoch), ask.Advanced(version):
                self._keep(session, Grant(unit, epoch, version))
            case ask.ClaimOwner(), ask.Granted(epoch):
                self._seen = later(self._seen, epoch)
        return None

    def _granted(self, session: SessionId, grant: Grant) -> Claimed:
        self._seen = later(self._seen, grant.epoch)
        self._keep(session, grant)
        return Claimed(session, grant.unit, grant.epoch)

    def _keep(self, session: SessionId, grant: Grant) -> None:
        self.grants.pop(session, None)
        while len(self.grants) >= SESSIONS_MAX:
            del self.grants[next(iter(self.grants))]
        self.grants[session] = grant
