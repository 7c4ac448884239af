"""GuardedOwner is the one way in to what a unit owns: its doors, and when to ask for a session or
end one. Pure.

    turn line, ReleaseSession, the directory's answers ── hear ──> session -> highest epoch
    a word under a lower one                  ── refused: stale_epoch, counted by its verb
    the own grant, once a higher one is heard ── void: nothing is told under it any more

A turn has no door: under whatever epoch it comes, it is served, as a guest's if need be. The map is
bounded, the session heard of longest ago is forgotten first. That is safe: the directory's
compare-and-set refuses what a door would have refused, only later.

*Recent sessions*: a gateway asks the owner to hand a session over to where its turns are done, and
the directory tells nobody of what it is given. So a unit that had a turn asks again while it does
not own the session, along with frames that go anyway: at first after AGAIN_S, then after twice as
long, until ASKED_FOR_S have passed since the turn. An owner's turn counts as well: the gateway's
word of it may come when the session is another's.

*Idle sessions*: few clients say that a session ends. The sweep takes the records of those whose
owner is gone; an owner that lives ends them itself, or its grants, its records and what stands on
them would grow for as long as it lives. A turn that comes after all binds the session anew, from
version 0; what is cached of it stays what it was.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from typing import TypeAlias

import msgspec

from ownerserve.directory.messages import (
    Advance,
    Bind,
    Bound,
    Conflict,
    HeldBy,
    Outcome,
    Published,
    Refused,
    Request,
    Transfer,
)
from ownerserve.directory.owner.state import VERBS, Ask, Asks, OwnerState, SessionTip, is_for_later
from ownerserve.directory.port import SWEEP_IDLE_S
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import Epoch, RoutingUnit
from ownerserve.kv.wire.refusals import WorkerRefusal

SESSIONS_MAX = 100_000
"""Doors that are remembered, some 30 MB. An owned session has its epoch in its grant too."""

AGAIN_S = 1.0
ASKED_FOR_S = 60.0
"""For how long a session is asked for: two leases, in which its owner may ask for the hand-over."""
RECENT_MAX = 1000

AT_ONCE = 1000
"""Idle sessions that are ended with one frame, at most."""

STALE_EPOCH = "stale_epoch"
STALE_VERSION = "stale_version"


class Heard(msgspec.Struct, frozen=True, gc=False):
    """Heard is the highest epoch that was heard of one session, and whose it is, where that was
    said.
    """

    epoch: Epoch
    owner: RoutingUnit | None = None


class Doors:
    """Doors hold the highest epoch heard of each session, and whose it is. Owns that map and
    nothing else.
    """

    def __init__(self, sessions_max: int = SESSIONS_MAX) -> None:
        self._sessions_max = sessions_max
        self._heard: dict[SessionId, Heard] = {}

    def __len__(self) -> int:
        return len(self._heard)

    def hear(self, session_id: SessionId, epoch: Epoch, owner: RoutingUnit | None = None) -> None:
        """Note that somebody was granted the session under `epoch`: `owner`, where that was
        said.
        """
        known = self._heard.pop(session_id, None)
        if known is None or epoch > known.epoch or (epoch == known.epoch and owner is not None):
            known = Heard(epoch, owner)
        self._heard[session_id] = known
        if len(self._heard) > self._sessions_max:
            del self._heard[next(iter(self._heard))]

    def above(self, session_id: SessionId, epoch: Epoch) -> Epoch | None:
        """Return the epoch that makes a word under `epoch` history; None: it still counts."""
        heard = self._heard.get(session_id)
        return heard.epoch if heard is not None and epoch < heard.epoch else None

    def last(self, session_id: SessionId) -> Heard | None:
        """Return the highest epoch that was heard of the session; None: nothing was."""
        return self._heard.get(session_id)


class _Recent(msgspec.Struct):
    due_s: float
    wait_s: float
    until_s: float


class RecentSessions:
    """Recent sessions are those that had a turn here in the last minute, with when each is asked
    for again while it is not ours. Beyond RECENT_MAX the oldest is forgotten: its next turn asks
    for it.
    """

    def __init__(self) -> None:
        self._sessions: dict[SessionId, _Recent] = {}

    def add(self, session_id: SessionId, now_s: float) -> None:
        """Note that a turn of the session has ended here."""
        self._ask_at(now_s + AGAIN_S, session_id, now_s)

    def named(self, session_id: SessionId, now_s: float) -> None:
        """Note that somebody takes the session for ours. Whoever says so more often than each
        AGAIN_S does not put off when it is asked for.
        """
        known = self._sessions.get(session_id)
        due_s = now_s + AGAIN_S
        self._ask_at(due_s if known is None else min(known.due_s, due_s), session_id, now_s)

    def _ask_at(self, due_s: float, session_id: SessionId, now_s: float) -> None:
        self._sessions.pop(session_id, None)
        self._sessions[session_id] = _Recent(due_s, AGAIN_S, now_s + ASKED_FOR_S)
        if len(self._sessions) > RECENT_MAX:
            del self._sessions[next(iter(self._sessions))]

    def discard(self, session_id: SessionId) -> None:
        """Forget the session, which is over: it is not asked for."""
        self._sessions.pop(session_id, None)

    def due(
        self, now_s: float, *, owned: Container[SessionId], leaving: Container[SessionId]
    ) -> list[SessionId]:
        """List the sessions that are to be asked for with the frame that goes now; each waits twice
        as long for its next time. One that is owned or leaving is not asked for, but may be soon.
        """
        due: list[SessionId] = []
        for name, one in list(self._sessions.items()):
            if now_s < one.due_s:
                continue
            if name not in owned and name not in leaving:
                due.append(name)
                one.wait_s *= 2
            one.due_s = now_s + one.wait_s
            if now_s >= one.until_s:
                del self._sessions[name]
        return due


class IdleSessions:
    """Idle sessions are kept by when each last had a turn here, the longest ago first. Owns those
    times and nothing else.
    """

    def __init__(self) -> None:
        self._used_s: OrderedDict[SessionId, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used_s)

    def used(self, session_id: SessionId, now_s: float) -> None:
        """Note that a turn of the session is here, or has ended."""
        self._used_s[session_id] = now_s
        self._used_s.move_to_end(session_id)

    def discard(self, session_id: SessionId) -> None:
        """Forget the session, which is over, or another's: it is not idle here."""
        self._used_s.pop(session_id, None)

    def due(self, now_s: float) -> list[SessionId]:
        """Take out the sessions without a turn for SWEEP_IDLE_S, AT_ONCE at most; they are not
        named again.
        """
        due: list[SessionId] = []
        for session_id, used_s in self._used_s.items():
            if used_s + SWEEP_IDLE_S > now_s or len(due) == AT_ONCE:
                break
            due.append(session_id)
        for session_id in due:
            del self._used_s[session_id]
        return due


Leaving: TypeAlias = Asks | WorkerRefusal
"""The requests by which a session leaves, or why it stays."""


class GuardedOwner:
    """A guarded owner is one life of a routing unit behind its doors: the one way in to its
    `OwnerState`.

    `owner.refused` counts what was refused, here and by the directory, by verb and reason.
    """

    def __init__(self, owner: OwnerState) -> None:
        self.owner = owner
        self.doors = Doors()
        self._recent = RecentSessions()
        self._idle = IdleSessions()

    def came(
        self,
        session_id: SessionId,
        now_s: float,
        *,
        parent: SessionId | None = None,
        epoch: Epoch | None = None,
    ) -> Asks:
        """Note that a turn of the session is here, and ask for it unless it is ours. `epoch`: the
        highest that its gateway knows of the session.
        """
        if epoch is not None:
            self.hear(session_id, epoch)
        self._idle.used(session_id, now_s)
        return self.owner.want(session_id, now_s, parent=parent)

    def moved_here(
        self, session_id: SessionId, now_s: float, *, epoch: Epoch | None = None
    ) -> Asks:
        """Note that the session's owner was asked to hand it over to us, and has, under `epoch`;
        None: it has not said. It is asked for like one that had a turn here.
        """
        if epoch is not None:
            self.hear(session_id, epoch)
        self._recent.named(session_id, now_s)
        self._idle.used(session_id, now_s)
        return self.owner.want(session_id, now_s)

    def served(self, session_id: SessionId, now_s: float) -> None:
        """Note that a turn of the session has ended here; it may be ours after that, by a word that
        nobody tells us."""
        self._recent.add(session_id, now_s)
        self._idle.used(session_id, now_s)

    def left(self, session_id: SessionId, tip: SessionTip, now_s: float) -> Asks:
        """Note that a turn of the session has ended here, and left it at `tip`."""
        self.served(session_id, now_s)
        return self.owner.finished(session_id, tip, now_s)

    def over(self, session_id: SessionId, now_s: float) -> Asks:
        """Note that the session's last turn has ended."""
        self._recent.discard(session_id)
        self._idle.discard(session_id)
        return self.owner.end(session_id, now_s)

    def along(self, now_s: float) -> Asks:
        """Return the requests that go with a frame that goes anyway: the lease is renewed, sessions
        that had no turn for a day end, and those are asked for that may have become ours since
        their turn here.
        """
        asks = self.owner.renewal(now_s)
        for session_id in self._idle.due(now_s):
            asks += self.owner.end(session_id, now_s)
        recent = self._recent.due(now_s, owned=self.owner.grants, leaving=self.owner.leaving())
        for session_id in recent:
            asks += self.owner.want(session_id, now_s)
        return asks

    def release(
        self, session_id: SessionId, epoch: Epoch, target: RoutingUnit | None, *, now_s: float
    ) -> Leaving:
        """Hand the session over to `target`, as somebody wants who knows it under `epoch`; None: it
        is over. No turn of it may run here. From this instant on it is not ours, unless this is
        refused.
        """
        if self._is_stale(session_id, epoch):
            return self._refuse(WorkerRefusal.STALE_EPOCH)
        self.hear(session_id, epoch)
        if target == self.owner.unit:
            return self._refuse(WorkerRefusal.WRONG_TARGET)
        if self.owner.may_serve(session_id, now_s) is None:
            if target is not None and session_id not in self.owner.grants:
                self._recent.named(session_id, now_s)  # it may be ours, and nobody has told us
            return self._refuse(WorkerRefusal.NOT_OWNER)
        if target is None:
            return self.over(session_id, now_s)
        self._idle.discard(session_id)
        return self.owner.hand_over(session_id, target, now_s)

    def other_owner(self, session_id: SessionId) -> tuple[RoutingUnit, Epoch] | None:
        """Return the other unit that owns the session, as far as was heard, and under which epoch;
        None: not heard of any. Turns of the session are that owner's guests here.
        """
        heard = self.doors.last(session_id)
        if heard is None or heard.owner is None or heard.owner == self.owner.unit:
            return None
        return heard.owner, heard.epoch

    def answered(self, ask: Ask, outcome: Outcome, now_s: float) -> Asks:
        """Take the directory's answer, which may be late: what it says of epochs counts all the
        same.

        A grant that it makes void is asked for again at once: a directory that lost its memory may
        have given it below what was heard before, and its record names this unit alone.
        """
        self._count(ask.request, outcome)
        voided = [told[0] for told in _told(ask.request, outcome) if self.hear(*told)]
        asks = self.owner.answered(ask.number, outcome, now_s)
        voided += [name for name in _granted(ask.request, outcome) if self._void_below(name)]
        for session_id in voided:
            asks += self.owner.want(session_id, now_s)
        return asks

    def hear(self, session_id: SessionId, epoch: Epoch, owner: RoutingUnit | None = None) -> bool:
        """Note that somebody was granted the session under `epoch`. Returns True when that is after
        us, and ours is over.
        """
        self.doors.hear(session_id, epoch, owner)
        return self._void_below(session_id)

    # ---- the checks

    def _is_stale(self, session_id: SessionId, epoch: Epoch) -> bool:
        """Tell whether somebody was there after `epoch`: by the door, or by the own grant where the
        door was forgotten.
        """
        grant = self.owner.grants.get(session_id)
        is_outdone = grant is not None and epoch < grant.epoch
        return is_outdone or self.doors.above(session_id, epoch) is not None

    def _void_below(self, session_id: SessionId) -> bool:
        """Void a grant that is below its door, whenever it was given. Returns True when there was
        one.
        """
        grant = self.owner.grants.get(session_id)
        later = None if grant is None else self.doors.above(session_id, grant.epoch)
        if later is None:
            return False
        self.owner.fenced(session_id, later)
        self.owner.refused["grant", STALE_EPOCH] += 1
        return True

    # ---- counts

    def _refuse(self, reason: WorkerRefusal) -> WorkerRefusal:
        self.owner.refused["release", reason.value] += 1
        return reason

    def _count(self, request: Request, outcome: Outcome) -> None:
        verb = VERBS.get(type(request))
        if verb is None:
            return
        if isinstance(outcome, Conflict):
            assert isinstance(request, Advance | Transfer)
            is_same = outcome.current.epoch == request.epoch
            self.owner.refused[verb, STALE_VERSION if is_same else STALE_EPOCH] += 1
        elif isinstance(outcome, Refused) and not is_for_later(outcome):
            self.owner.refused[verb, outcome.reason.value] += 1


def _told(request: Request, outcome: Outcome) -> list[tuple[SessionId, Epoch, RoutingUnit]]:
    """List the epoch of its session that an answer tells of, and whose it is; none or one."""
    if not isinstance(request, Bind | Transfer | Advance):
        return []
    match outcome:
        case Bound(epoch):
            owner = request.target if isinstance(request, Transfer) else request.unit
            return [(request.session_id, epoch, owner)]
        case HeldBy(owner, epoch):
            return [(request.session_id, epoch, owner)]
        case Conflict(current):
            return [(request.session_id, current.epoch, current.owner)]
    return []


def _granted(request: Request, outcome: Outcome) -> tuple[SessionId, ...]:
    """Return the sessions that an answer may have made ours."""
    if isinstance(request, Bind):
        return (request.session_id,)
    return outcome.adopted if isinstance(outcome, Published) else ()
