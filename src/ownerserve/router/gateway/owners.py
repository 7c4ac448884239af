"""The gateway's side of the ownership directory: who owns which session, told and heard. Pure.

The gateway speaks for its workers: it keeps their leases (leases.py), binds a session where its
first turn runs, moves it by compare-and-set once a turn is answered elsewhere, and says which
prefix the session stands on. Owns the grants it was given, as a dated copy. What another gateway
decided comes back as `Claimed`; RouterState then follows.

    wish ── requests ──> directory ── outcomes ──> Claimed events, grants

Wishes wait until the answers to the last batch are in, the newest of each session alone: a request
is made from what is known when it is sent. A wish stays until an answer settles it:

| what came of it | then |
|---|---|
| done; or another gateway was first, with a worker that is there | settled; the router follows |
| the owner was only seen in an older version, or is not there | asked again at once |
| not now (rebuilding, contended, not reached, not registered yet) | asked with a next renewal |
| the session is not known (any more) | a turn binds it anew, a report does not |
| its worker's life is over | dropped: there will be another turn |

A turn where the session is known to be asks nothing; when no report of it confirms that until the
next renewal, the directory is asked, for another gateway may have moved the session meanwhile.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, get_args

import msgspec

from ownerserve.directory import messages as ask
from ownerserve.kv.epoch import Epoch, later
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.router.gateway.leases import Leases
from ownerserve.router.gateway.stamps import Extent
from ownerserve.router.messages import Claimed

SESSIONS_MAX = 100_000
RENEW_S = 1.0
"""A fifth of the directory's default lease."""

ASKED_AGAIN_MAX = 4_000
"""Wishes with each renewal: while the directory is away for long, they become many."""

_OUTDONE = -1
"""Memory of a grant whose session the directory gave away under an earlier epoch."""


class Grant(msgspec.Struct, frozen=True, gc=False):
    """The directory's word on a session when it was last asked.

    `memory`: how often the directory had forgotten us by then. An older grant may be void: it is
    the best that is known of who owned the session, and nothing of an earlier epoch is followed.
    """

    unit: RoutingUnit
    epoch: Epoch
    version: int
    memory: int = 0


class _Aim(enum.Enum):
    """What a wish is for."""

    RUN = enum.auto()
    """The unit began to answer a turn: it is to own the session."""
    STAND = enum.auto()
    """The session is to stand on the extent, if the unit owns it."""
    LOOK = enum.auto()
    """Who owns it?"""
    END = enum.auto()


class _Wish(msgspec.Struct, frozen=True, gc=False):
    """What should become of a session. One is told from another by identity."""

    aim: _Aim
    unit: RoutingUnit | None = None
    parent: SessionId | None = None
    extent: Extent | None = None


_RUN, _STAND = _Aim.RUN, _Aim.STAND
_LOOK, _END = _Wish(_Aim.LOOK), _Wish(_Aim.END)


class Owners:
    """Grants and wishes of one gateway."""

    def __init__(self, *, renew_s: float = RENEW_S) -> None:
        """`renew_s` between renewals: a fifth of the directory's lease."""
        self._renew_s = renew_s
        self.answers: Counter[str] = Counter()
        """Outcomes by name, refusals by reason: metric labels."""
        self.grants: dict[SessionId, Grant] = {}
        self._memory = 0
        self._seen: Epoch | None = None
        self._leases = Leases()
        self._wishes: dict[SessionId, _Wish] = {}
        """The newest of each session, until an answer settles it. Asked with the renewals."""
        self._fresh: dict[SessionId, None] = {}
        """Those that are asked at once, in their order."""
        self._asked: dict[SessionId, _Wish] = {}
        """Those of the batch under way."""
        self._renew_at_s = 0.0

    # ---- what the gateway sees

    def lives(self, unit: RoutingUnit) -> None:
        """A worker answers, in this life."""
        self._leases.lives(unit)

    def silent(self, worker: str) -> None:
        """A worker is down: its leases are not renewed any more."""
        self._leases.silent(worker)

    def runs_at(
        self, session: SessionId, unit: RoutingUnit, *, parent: SessionId | None = None
    ) -> None:
        """`unit` began to answer a turn of the session."""
        self.lives(unit)  # the router may have heard of a new life by a worker's stamp
        wish, grant = self._wishes.get(session), self.grants.get(session)
        is_home = grant is not None and grant.unit == unit and grant.memory == self._memory
        if wish is not None and wish.aim is _RUN:
            if wish.unit == unit:
                if not is_home:
                    self._fresh[session] = None  # it may have been put off
                return
            parent = parent or wish.parent
        self._wish(session, _Wish(_RUN, unit, parent))
        if wish is None and is_home:
            del self._fresh[session]

    @property
    def has_wishes(self) -> bool:
        """Whether anything of a session waits to be said."""
        return bool(self._fresh)

    def stands_on(self, session: SessionId, unit: RoutingUnit, extent: Extent) -> None:
        """The turn leaves the session there, on this prefix.

        A report is no decision: it neither moves a session that runs elsewhere by now, nor brings
        back one that has ended.
        """
        wish, grant = self._wishes.get(session), self.grants.get(session)
        if wish is None:
            if grant is not None and grant.unit == unit:
                self._wish(session, _Wish(_STAND, unit, None, extent))
        elif wish.unit == unit:
            self._wish(session, _Wish(wish.aim, unit, wish.parent, extent))

    def ends(self, session: SessionId) -> None:
        """The session is over."""
        if session in self._wishes:
            self.grants.pop(session, None)  # whose it is now will be asked first
            self._wish(session, _END)
        elif session in self.grants:
            self._wish(session, _END)

    # ---- to the directory and back

    def question(self, session: SessionId) -> ask.FindSession:
        """Who owns it? With what the directory may have forgotten."""
        return ask.FindSession(session, self._seen)

    def due(self, now_s: float) -> list[ask.Request]:
        """What to ask now. Not before the last batch is answered, or given up."""
        requests: list[ask.Request] = [*self._leases.registrations(self._seen, now_s)]
        sessions = list(self._fresh)
        if now_s >= self._renew_at_s:
            self._renew_at_s = now_s + self._renew_s
            requests += self._leases.renewals(self._seen)
            sessions += self._put_off()
        self._fresh, self._asked = {}, {}
        for session in sessions:
            self._put(session, self._wishes[session], requests)
        return requests

    def answered(
        self, requests: Sequence[ask.Request], outcomes: Sequence[ask.Outcome]
    ) -> list[Claimed]:
        """Take in the answers; what the router must hear of them."""
        news: list[Claimed] = []
        counts = self.answers
        for request, outcome in zip(requests, outcomes, strict=True):
            if isinstance(outcome, ask.Refused):
                counts[outcome.reason.lower()] += 1
                self._refused(request, outcome.reason)
                continue
            kind = type(outcome)
            counts[_NAMES[kind]] += 1
            take = _TAKES[type(request)].get(kind)
            claimed = None if take is None else take(self, request, outcome)
            if claimed is not None and self._is_news(claimed):
                news.append(claimed)
        return news

    # ---- wishes

    def _wish(self, session: SessionId, wish: _Wish) -> None:
        """Ask it with the next batch."""
        wishes = self._wishes
        if session not in wishes and len(wishes) >= SESSIONS_MAX:
            oldest = next(iter(wishes))
            del wishes[oldest]
            self._fresh.pop(oldest, None)
        wishes[session] = wish
        self._fresh[session] = None

    def _put_off(self) -> list[SessionId]:
        """Those that wait longest and are not asked anyway; behind all others from now on."""
        wishes = self._wishes
        waiting = [one for one in islice(wishes, ASKED_AGAIN_MAX) if one not in self._fresh]
        for session in waiting:
            wishes[session] = wishes.pop(session)
        return waiting

    def _put(self, session: SessionId, wish: _Wish, requests: list[ask.Request]) -> None:
        """What to ask for a wish, behind `requests`."""
        unit, grant, extent = wish.unit, self.grants.get(session), wish.extent
        if self._is_void(wish, grant):
            del self._wishes[session]
            return
        if unit is None:
            if wish is _END and grant is not None:
                requests.append(ask.EndSession(session, grant.unit, grant.epoch))
            else:
                requests.append(self.question(session))
        elif grant is None or grant.memory == _OUTDONE:
            requests.append(ask.Bind(session, unit, wish.parent, self._seen))
        elif grant.unit != unit:
            requests.append(
                ask.Transfer(session, grant.unit, unit, grant.epoch, grant.version, self._seen)
            )
        elif extent is not None:
            tip, tokens = extent.prefix_hash, extent.tokens
            version = grant.version + 1
            requests.append(
                ask.Advance(session, unit, grant.epoch, version, tip, tokens, seen=self._seen)
            )
        else:
            requests.append(self.question(session))
        self._asked[session] = wish

    def _is_void(self, wish: _Wish, grant: Grant | None) -> bool:
        """Its worker's life is over, or the session that it reports of is another's."""
        if wish.unit is None:
            return False
        is_anothers = grant is None or grant.unit != wish.unit
        return not self._leases.sees(wish.unit) or (wish.aim is _STAND and is_anothers)

    def _settle(self, session: SessionId) -> None:
        """What was asked is answered. A newer wish stays."""
        wish = self._asked.get(session)
        if wish is not None and self._wishes.get(session) is wish:
            del self._wishes[session]
            self._fresh.pop(session, None)

    def _again(self, session: SessionId) -> None:
        """Ask once more, from what is known by now."""
        if session in self._wishes:
            self._fresh[session] = None

    def _is_news(self, claimed: Claimed) -> bool:
        """The router knows better where the session runs elsewhere by now, or has ended."""
        newest = self._wishes.get(claimed.session)
        return newest is None or newest.unit == claimed.unit

    # ---- refusals

    def _refused(self, request: ask.Request, reason: ask.Refusal) -> None:
        by_a_life = isinstance(request, _BY_A_LIFE) and self._leases.is_known(request.unit)
        if by_a_life and reason in _FORGOT_US:
            self._forgotten()
        if not isinstance(request, _ON_SESSIONS):
            return
        session = request.session_id
        if reason is ask.Refusal.UNKNOWN_SESSION:
            self.grants.pop(session, None)
            self._unknown(session)
        elif reason not in _NOT_YET:
            if isinstance(request, ask.EndSession):
                self.grants.pop(session, None)  # another has it since
            self._settle(session)

    def _forgotten(self) -> None:
        """The directory has forgotten us, or we slept: all anew."""
        self._leases.forgotten()
        self._memory += 1

    def _unknown(self, session: SessionId) -> None:
        """The directory does not know the session."""
        wish = self._asked.get(session)
        if wish is not None and wish.aim is _RUN:
            self._again(session)
        else:
            self._settle(session)

    # One for each pair of a request and its answer that changes what is known.

    def _leased(self, request: ask.Register, outcome: ask.Leased) -> None:
        self._leases.leased(request.unit, outcome.memory)

    def _bound(self, request: ask.Bind, outcome: ask.Bound) -> Claimed | None:
        return self._given(request.session_id, request.unit, outcome)

    def _moved(self, request: ask.Transfer, outcome: ask.Bound) -> Claimed | None:
        return self._given(request.session_id, request.target, outcome)

    def _given(self, session: SessionId, unit: RoutingUnit, outcome: ask.Bound) -> Claimed | None:
        """What was asked for, is; its report comes behind."""
        self._settle(session)
        wish = self._asked.get(session)
        if wish is not None and wish.extent is not None and session not in self._wishes:
            self._wish(session, _Wish(_STAND, unit, None, wish.extent))
        return self._told(session, unit, outcome.epoch, version=outcome.version)

    def _held(self, request: ask.Bind, outcome: ask.HeldBy) -> None:
        """Another came first. In which version is asked, so that a later turn can move it.

        Of an owner that is not there the lease runs out soon: then the wish is granted.
        """
        session = request.session_id
        self._seen = later(self._seen, outcome.epoch)
        if self._leases.sees(outcome.owner):
            self._settle(session)
            if session not in self._wishes:
                self._wish(session, _LOOK)

    def _found(self, request: ask.FindSession, found: ask.SessionIs) -> Claimed | None:
        session, wish = request.session_id, self._asked.get(request.session_id)
        if wish is _END:
            self._keep(session, found.owner, found.epoch, version=found.version)
            self._again(session)
            return None
        if wish is None or wish.aim is not _RUN:
            self._settle(session)
            if not found.owner_live:
                return None
        elif not self._is_there(found):
            self._told(session, found.owner, found.epoch, version=found.version)
            if found.owner != wish.unit:
                self._again(session)
            return None
        else:
            self._settle(session)
            known = self.grants.get(session)
            if known is not None and known.epoch == found.epoch:  # as it was seen
                self._keep(session, found.owner, found.epoch, version=found.version)
                return None
        return self._told(session, found.owner, found.epoch, version=found.version)

    def _missed(self, request: ask.FindSession, _outcome: ask.Miss) -> None:
        self.grants.pop(request.session_id, None)
        self._unknown(request.session_id)

    def _conflict(
        self, request: ask.Transfer | ask.Advance, outcome: ask.Conflict
    ) -> Claimed | None:
        """The session is not as it was seen. Who decided on the same owner decides again."""
        session, now = request.session_id, outcome.current
        wish = self._asked.get(session)
        claimed = self._told(session, now.owner, now.epoch, version=now.version)
        is_ours = wish is not None and wish.unit == now.owner
        if isinstance(request, ask.Transfer):
            is_undone = not is_ours and (now.owner == request.source or not self._is_there(now))
        else:
            is_undone = is_ours or not self._is_there(now)
        if is_undone:
            self._again(session)
            return claimed if is_ours else None
        self._settle(session)
        return claimed

    def _advanced(self, request: ask.Advance, outcome: ask.Advanced) -> None:
        self._settle(request.session_id)
        self._seen = later(self._seen, outcome.duty)
        self._keep(request.session_id, request.unit, request.epoch, version=outcome.version)

    def _ended(self, request: ask.EndSession, _outcome: ask.Ended) -> None:
        self.grants.pop(request.session_id, None)
        self._settle(request.session_id)

    # ---- grants

    def _is_there(self, found: ask.SessionIs) -> bool:
        return found.owner_live and self._leases.sees(found.owner)

    def _told(
        self, session: SessionId, unit: RoutingUnit, epoch: Epoch, *, version: int
    ) -> Claimed | None:
        """The directory's word; None where it is not to be followed.

        An earlier epoch than was heard before: a directory that lost its memory gave the session
        away before anyone told it. Its owner is bound anew, above all that was seen.
        """
        self._seen = later(self._seen, epoch)
        known = self.grants.get(session)
        if known is not None and epoch < known.epoch:
            self.grants[session] = Grant(known.unit, known.epoch, known.version, _OUTDONE)
            if session not in self._wishes or self._wishes[session] is self._asked.get(session):
                self._wish(session, _Wish(_RUN, unit))
            return None
        self._keep(session, unit, epoch, version=version)
        return Claimed(session, unit, epoch)

    def _keep(self, session: SessionId, unit: RoutingUnit, epoch: Epoch, *, version: int) -> None:
        grants = self.grants
        if session in grants:
            del grants[session]  # it stands last again
        while len(grants) >= SESSIONS_MAX:
            del grants[next(iter(grants))]
        grants[session] = Grant(unit, epoch, version, self._memory)


_FORGOT_US = (ask.Refusal.UNKNOWN_HOLDER, ask.Refusal.LEASE_LAPSED)
_NOT_YET = (
    *_FORGOT_US,
    ask.Refusal.REBUILDING,
    ask.Refusal.CONTENDED,
    ask.Refusal.NOT_REPLICATED,
    ask.Refusal.UNREACHABLE,
    ask.Refusal.TARGET_NOT_LIVE,
)
"""A wish that meets one of these is asked again with the next renewal."""
_BY_A_LIFE = (ask.RenewLease, ask.Bind)
_ON_SESSIONS = (ask.Bind, ask.Transfer, ask.Advance, ask.EndSession, ask.FindSession)

_TAKES: dict[type, dict[type, Callable[[Owners, Any, Any], Claimed | None]]] = {
    **{kind: {} for kind in get_args(ask.Request)},
    ask.Register: {ask.Leased: Owners._leased},
    ask.Bind: {ask.Bound: Owners._bound, ask.HeldBy: Owners._held},
    ask.Transfer: {ask.Bound: Owners._moved, ask.Conflict: Owners._conflict},
    ask.Advance: {ask.Advanced: Owners._advanced, ask.Conflict: Owners._conflict},
    ask.EndSession: {ask.Ended: Owners._ended},
    ask.FindSession: {ask.SessionIs: Owners._found, ask.Miss: Owners._missed},
}
_NAMES: dict[type, str] = {kind: kind.__name__.lower() for kind in get_args(ask.Outcome)}
