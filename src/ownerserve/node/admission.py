"""Worker admission: the worker's word on whether a turn may come. Pure.

    probe ── Admit | Reject            nothing is held: a quote
    reserve ── Reserved | Reject       a place in the queue, until its deadline
    commit ── Committed | Reject       the turn is on its way; the place waits for it
    release ── Released | Reject       the place, or a session, is given up

    reservation   OPEN ── commit ──> COMMITTED ── the turn arrives ──> gone
                   `── deadline, release ──> gone <── deadline ──'

`append` asks for the session's state at `version`, as the last turn's end told it; `seed` brings
the whole prompt. A refusal has a reason; there is no optimistic yes that ends in a timeout.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from ownerserve.cache.sessions import Sessions
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    Admit,
    Append,
    Committed,
    Reject,
    Released,
    Reserved,
    Seed,
    Wanted,
)

RESERVED_FOR_S = 10.0
"""How long a place is held. Longer than a prompt takes to cross a data centre, many times over."""


class Levels(msgspec.Struct, frozen=True):
    """The worker's load now. `room_tokens` are free or evictable; queue places are requests."""

    waiting: int
    max_waiting: int
    pending_prefill_tokens: int
    room_tokens: int
    sequence_tokens: int
    is_draining: bool = False


class Arrived(msgspec.Struct, frozen=True):
    """The turn that the place was held for."""

    turn_id: TurnId


class _Place(msgspec.Struct):
    turn_id: TurnId
    tokens: int
    until_s: float
    is_committed: bool = False


class Admission:
    """Open reservations of one worker. Owns nothing of the cache; asks the session table."""

    def __init__(self, sessions: Sessions) -> None:
        self.refused: Counter[WorkerRefusal] = Counter()
        self._sessions = sessions
        self._places: dict[int, _Place] = {}
        self._numbers = 0

    def probe(self, wanted: Wanted, levels: Levels, now: float) -> Admit | Reject:
        """Would it be let in now?"""
        answer = self._judge(wanted, levels, now)
        if isinstance(answer, WorkerRefusal):
            return self._refuse(answer)
        return Admit(answer, levels.pending_prefill_tokens)

    def reserve(
        self, turn_id: TurnId, wanted: Wanted, *, levels: Levels, now: float
    ) -> Reserved | Reject:
        """Hold a place for it."""
        answer = self._judge(wanted, levels, now)
        if isinstance(answer, WorkerRefusal):
            return self._refuse(answer)
        self._numbers += 1
        tokens = self._tokens(wanted) - answer
        self._places[self._numbers] = _Place(turn_id, tokens, now + RESERVED_FOR_S)
        return Reserved(self._numbers, RESERVED_FOR_S, answer)

    def commit(self, reservation: int, now: float) -> Committed | Reject:
        """The turn will come. Saying so twice is harmless."""
        self._expire(now)
        place = self._places.get(reservation)
        if place is None:
            return self._refuse(WorkerRefusal.UNKNOWN_RESERVATION)
        if not place.is_committed:
            place.is_committed, place.until_s = True, now + RESERVED_FOR_S
        return Committed(place.until_s - now)

    def release(self, reservation: int) -> Released | Reject:
        """The turn won't come."""
        if self._places.pop(reservation, None) is None:
            return self._refuse(WorkerRefusal.UNKNOWN_RESERVATION)
        return Released()

    def release_session(self, session_id: SessionId) -> Released | Reject:
        """The session has gone elsewhere: what it has here is ordinary cached state from now on."""
        session = self._sessions.get(session_id)
        if session is None:
            return self._refuse(WorkerRefusal.UNKNOWN_SESSION)
        if session.running:
            return self._refuse(WorkerRefusal.SESSION_IS_RUNNING)
        self._sessions.release(session_id)
        return Released()

    def arrived(self, reservation: int, now: float) -> Arrived | Reject:
        """The turn of this reservation is here, committed or not: its place is used up."""
        self._expire(now)
        place = self._places.pop(reservation, None)
        if place is None:
            return self._refuse(WorkerRefusal.UNKNOWN_RESERVATION)
        return Arrived(place.turn_id)

    def held(self, now: float) -> int:
        """Places that are held now."""
        self._expire(now)
        return len(self._places)

    def _judge(self, wanted: Wanted, levels: Levels, now: float) -> int | WorkerRefusal:
        """Tokens of it that are resident, or why it may not come."""
        self._expire(now)
        resident = 0
        if isinstance(wanted, Append):
            status = self._sessions.status(wanted.session_id)
            if status is None or not status.version:
                return WorkerRefusal.UNKNOWN_SESSION
            if status.version != wanted.version:
                return WorkerRefusal.STALE_VERSION
            if status.running_turns:
                return WorkerRefusal.SESSION_IS_RUNNING
            if not status.restorable_tokens:
                return WorkerRefusal.STATE_GONE
            resident = status.restorable_tokens
        if levels.is_draining:
            return WorkerRefusal.DRAINING
        if self._tokens(wanted) > levels.sequence_tokens:
            return WorkerRefusal.TOO_LONG
        if levels.waiting + len(self._places) >= levels.max_waiting:
            return WorkerRefusal.QUEUE_FULL
        held = sum(place.tokens for place in self._places.values())
        if self._tokens(wanted) - resident + held > levels.room_tokens:
            return WorkerRefusal.NO_ROOM
        return resident

    def _tokens(self, wanted: Wanted) -> int:
        match wanted:
            case Append(session_id, _, new_tokens):
                session = self._sessions.get(session_id)
                return new_tokens + (session.tokens if session is not None else 0)
            case Seed(tokens):
                return tokens

    def _expire(self, now: float) -> None:
        for number in [n for n, place in self._places.items() if place.until_s <= now]:
            del self._places[number]

    def _refuse(self, reason: WorkerRefusal) -> Reject:
        self.refused[reason] += 1
        return Reject(reason)
