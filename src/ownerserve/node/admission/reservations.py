"""Worker admission: the worker's word on whether a turn may come, and its keeping. Pure.

    probe ── Admit | Reject            nothing is held: a quote, off the engine's thread
    reserve ── Reserved | Reject       a place in the queue and its room, until its deadline
    commit ── Committed | Reject       the turn is on its way; the place waits for it
    release ── Released | Reject       the place, or a session, is given up

    reservation   OPEN ── commit ──> COMMITTED ── the turn arrives ──> gone
                   `── deadline, release, revoked ──> gone <── deadline ──'

What is promised can be kept: whoever is here counts with all the tokens it may ever need.

    capacity  =  in use, locked | growth of running turns | turns that wait | places | room
                                  `── to the length that they were let in for ──┘

A place has an order among arrivals: the turn that comes for it stands where the
place was asked for, so younger turns give way to it and older ones were counted. Only when nothing
else is left to take is a place revoked, the youngest first.

There is no optimistic yes that ends in a timeout: a refusal has a reason.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from ownerserve.cache.sessions import Sessions
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    Admit,
    Committed,
    Reject,
    Released,
    Reserved,
    Seed,
)

RESERVED_FOR_S = 10.0
"""How long a place is held. Longer than a prompt takes to cross a data centre, many times over."""


class Levels(msgspec.Struct, frozen=True):
    """The worker's load now; queue places are requests.

    `room_tokens` are free or evictable, less what running turns may still grow by and what those
    that wait (`queued_tokens` in all) will take. `block_tokens`: room is given in such pieces.
    """

    waiting: int
    max_waiting: int
    pending_prefill_tokens: int
    room_tokens: int
    sequence_tokens: int
    queued_tokens: int = 0
    capacity_tokens: int = 0
    block_tokens: int = 1
    is_draining: bool = False


class PlaceTaken(msgspec.Struct, frozen=True):
    """The turn that the place was held for: its `order` among arrivals, and the `tokens` that it
    was promised room for."""

    turn_id: TurnId
    order: int = 0
    tokens: int = 0


class Standing(msgspec.Struct, frozen=True):
    """Levels with the open places: what a new seed is judged by. A dated copy; any thread's."""

    levels: Levels
    places: int = 0
    promised_tokens: int = 0

    @property
    def spare_tokens(self) -> int:
        """Room that is promised to nobody."""
        return self.levels.room_tokens - self.promised_tokens

    def judge(self, wanted: Seed) -> WorkerRefusal | None:
        """Why a turn may not come."""
        levels, block = self.levels, self.levels.block_tokens
        tokens = wanted.tokens + wanted.output_tokens
        if levels.is_draining:
            return WorkerRefusal.DRAINING
        if tokens > levels.sequence_tokens:
            return WorkerRefusal.TOO_LONG
        if levels.waiting + self.places >= levels.max_waiting:
            return WorkerRefusal.QUEUE_FULL
        if -(-tokens // block) * block > self.spare_tokens:
            return WorkerRefusal.NO_ROOM
        return None

    def judge_append(self, tokens: int) -> WorkerRefusal | None:
        """Why an append that is here unasked may not stay.

        It may wait for turns that run, since its state is here, but not behind so many others that
        they and it would not fit an empty device.
        """
        ahead = self.levels.queued_tokens + self.promised_tokens
        if (ahead and ahead + tokens > self.levels.capacity_tokens) or self.levels.is_draining:
            return WorkerRefusal.DRAINING if self.levels.is_draining else WorkerRefusal.NO_ROOM
        return None


def probe_seed(wanted: Seed, standing: Standing) -> Admit | Reject:
    """Would it be let in, by a dated copy? Touches nothing, so any thread may ask."""
    refusal = standing.judge(wanted)
    if refusal is not None:
        return Reject(refusal)
    return Admit(standing.levels.pending_prefill_tokens)


class _Place(msgspec.Struct):
    turn_id: TurnId
    order: int
    tokens: int
    until_s: float
    is_committed: bool = False

    def room_tokens(self, block_tokens: int) -> int:
        """Room that it needs, in whole blocks."""
        return -(-self.tokens // block_tokens) * block_tokens


class Admission:
    """Open reservations of one worker. Owns its places."""

    def __init__(self, sessions: Sessions) -> None:
        self.counts: Counter[str] = Counter()
        """`reserved`, `revoked`, `expired`, and refusals by reason."""
        self._sessions = sessions
        self._places: dict[int, _Place] = {}
        self._numbers = 0

    # ---- asked by others

    def reserve(
        self, turn_id: TurnId, wanted: Seed, *, levels: Levels, now: float, order: int = 0
    ) -> Reserved | Reject:
        """Hold a place and its room. `order`: where it stands among arrivals."""
        refusal = self.standing(levels, now).judge(wanted)
        if refusal is not None:
            return self._refuse(refusal)
        self._numbers += 1
        tokens = wanted.tokens + wanted.output_tokens
        self._places[self._numbers] = _Place(turn_id, order, tokens, now + RESERVED_FOR_S)
        self.counts["reserved"] += 1
        return Reserved(self._numbers)

    def commit(self, reservation: int, now: float) -> Committed | Reject:
        """The turn will come. Saying so twice is harmless."""
        self._expire(now)
        place = self._places.get(reservation)
        if place is None:
            return self._refuse(WorkerRefusal.UNKNOWN_RESERVATION)
        if not place.is_committed:
            place.is_committed, place.until_s = True, now + RESERVED_FOR_S
        return Committed()

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

    # ---- told by the engine

    def arrived(self, reservation: int, now: float) -> PlaceTaken | Reject:
        """The turn of this reservation is here, committed or not: its place is used up."""
        self._expire(now)
        place = self._places.pop(reservation, None)
        if place is None:
            return self._refuse(WorkerRefusal.UNKNOWN_RESERVATION)
        return PlaceTaken(place.turn_id, place.order, place.tokens)

    def standing(self, levels: Levels, now: float) -> Standing:
        """What a turn is judged by now. One that waits is in `levels` with all its tokens."""
        self._expire(now)
        promised = sum(place.room_tokens(levels.block_tokens) for place in self._places.values())
        return Standing(levels, len(self._places), promised)

    def withheld_tokens(self, order: int, block_tokens: int) -> int:
        """Room that open places which stand before `order` still need."""
        if not self._places:
            return 0
        before = (place for place in self._places.values() if place.order < order)
        return sum(place.room_tokens(block_tokens) for place in before)

    def revoke(self) -> bool:
        """Nothing else is left to take: give up the youngest place; False: there is none."""
        if not self._places:
            return False
        youngest = max(self._places, key=lambda number: self._places[number].order)
        del self._places[youngest]
        self.counts["revoked"] += 1
        return True

    def held(self, now: float) -> int:
        """Places that are held now."""
        self._expire(now)
        return len(self._places)

    def next_expiry_s(self) -> float | None:
        """When the next place ends by itself."""
        return min((place.until_s for place in self._places.values()), default=None)

    # ---- parts

    def _expire(self, now: float) -> None:
        for number in [n for n, place in self._places.items() if place.until_s <= now]:
            del self._places[number]
            self.counts["expired"] += 1

    def _refuse(self, reason: WorkerRefusal) -> Reject:
        self.counts[reason.value] += 1
        return Reject(reason)
