"""Admission decides whether a turn may come to this worker; the room queue holds turns that are
here until the device has room. Pure.

    probe ── Admit | Reject            nothing is held: a quote, off the engine's thread
    reserve ── Reserved | Reject       a place in the queue and its room, until its deadline
    commit ── Committed | Reject       the turn is on its way; the place waits for it
    release ── Released | Reject       the place, or a session, is given up

    reservation   OPEN ── commit ──> COMMITTED ── the turn arrives ──> gone
                   `── deadline, release, revoked ──> gone <── deadline ──'

What is promised can be kept: whoever is here counts with all the tokens it may ever need.

    capacity  =  in use, locked | growth of running turns | turns that wait | places | room
                                  `── to the length that they were let in for ──┘

A place has an order among arrivals: the turn that comes for it stands where the place was asked
for, so younger turns give way to it and older ones were counted. Only when nothing else is left to
take is a place revoked, the youngest first. There is no optimistic yes that ends in a timeout: a
refusal has a reason. A turn that is here then waits in the `RoomQueue` until its prompt has room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.sessions import Awaited, Sessions
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
from ownerserve.node.restore.sources import Walks
from ownerserve.node.retention.holds import CopyHolds
from ownerserve.node.vocabulary.events import TurnArrived
from ownerserve.node.vocabulary.settings import NodeSettings

RESERVED_FOR_S = 10.0
"""How long a place is held. Longer than a prompt takes to cross a data centre, many times over."""


class Levels(msgspec.Struct, frozen=True):
    """`Levels` are the worker's load now; queue places are counted in requests.

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
    """A `PlaceTaken` says that the turn of a reservation has come and used its place up.

    `order` is where the turn stands among arrivals, `tokens` what it was promised room for.
    """

    turn_id: TurnId
    order: int = 0
    tokens: int = 0


class Standing(msgspec.Struct, frozen=True):
    """A `Standing` is the worker's levels with its open places: a dated copy, by which any thread
    may judge a new seed."""

    levels: Levels
    places: int = 0
    promised_tokens: int = 0

    @property
    def spare_tokens(self) -> int:
        """`spare_tokens` is the room, in tokens, that is promised to nobody; below 0 where promises
        exceed the room."""
        return self.levels.room_tokens - self.promised_tokens

    def judge(self, wanted: Seed) -> WorkerRefusal | None:
        """Return the reason why a turn may not come; None: it may."""
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
        """Return the reason why an append that came without a reservation may not stay; None: it
        may.

        It may wait for turns that run, since its state is here, but not behind so many others that
        they and it would not fit an empty device.
        """
        ahead = self.levels.queued_tokens + self.promised_tokens
        if (ahead and ahead + tokens > self.levels.capacity_tokens) or self.levels.is_draining:
            return WorkerRefusal.DRAINING if self.levels.is_draining else WorkerRefusal.NO_ROOM
        return None


def probe_seed(wanted: Seed, standing: Standing) -> Admit | Reject:
    """Judge a seed by a dated copy and hold nothing for it; any thread may call."""
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
        """Return the room that the place needs, in tokens of whole blocks."""
        return -(-self.tokens // block_tokens) * block_tokens


class Admission:
    """`Admission` owns the open reservations (places) of one worker."""

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
        """Hold a place and its room for RESERVED_FOR_S, or return why not. `order` is where the
        turn stands among arrivals."""
        refusal = self.standing(levels, now).judge(wanted)
        if refusal is not None:
            return self._refuse(refusal)
        self._numbers += 1
        tokens = wanted.tokens + wanted.output_tokens
        self._places[self._numbers] = _Place(turn_id, order, tokens, now + RESERVED_FOR_S)
        self.counts["reserved"] += 1
        return Reserved(self._numbers)

    def commit(self, reservation: int, now: float) -> Committed | Reject:
        """Confirm that the turn will come and hold its place anew for RESERVED_FOR_S. A second
        commit is harmless; a place that has expired is rejected."""
        self._expire(now)
        place = self._places.get(reservation)
        if place is None:
            return self._refuse(WorkerRefusal.UNKNOWN_RESERVATION)
        if not place.is_committed:
            place.is_committed, place.until_s = True, now + RESERVED_FOR_S
        return Committed()

    def release(self, reservation: int) -> Released | Reject:
        """Give the reservation's place up, since its turn won't come."""
        if self._places.pop(reservation, None) is None:
            return self._refuse(WorkerRefusal.UNKNOWN_RESERVATION)
        return Released()

    def release_session(self, session_id: SessionId) -> Released | Reject:
        """Release the session, which has gone elsewhere: what it has here goes before all else.
        Rejected while a turn of it runs."""
        session = self._sessions.get(session_id)
        if session is not None and session.running:
            return self._refuse(WorkerRefusal.SESSION_IS_RUNNING)
        if session is None or not session.version:
            return self._refuse(WorkerRefusal.UNKNOWN_SESSION)
        self._sessions.let_go(session_id)
        return Released()

    # ---- told by the engine

    def arrived(self, reservation: int, now: float) -> PlaceTaken | Reject:
        """Use up the place of this reservation, committed or not, since its turn is here."""
        self._expire(now)
        place = self._places.pop(reservation, None)
        if place is None:
            return self._refuse(WorkerRefusal.UNKNOWN_RESERVATION)
        return PlaceTaken(place.turn_id, place.order, place.tokens)

    def standing(self, levels: Levels, now: float) -> Standing:
        """Return what a turn is judged by now. A turn that waits is in `levels` with all its
        tokens."""
        self._expire(now)
        promised = sum(place.room_tokens(levels.block_tokens) for place in self._places.values())
        return Standing(levels, len(self._places), promised)

    def withheld_tokens(self, order: int, block_tokens: int) -> int:
        """Return the room, in tokens, that open places which stand before `order` still need."""
        if not self._places:
            return 0
        before = (place for place in self._places.values() if place.order < order)
        return sum(place.room_tokens(block_tokens) for place in before)

    def revoke(self) -> bool:
        """Give up the youngest open place, when nothing else is left to take; False: there is
        none."""
        if not self._places:
            return False
        youngest = max(self._places, key=lambda number: self._places[number].order)
        del self._places[youngest]
        self.counts["revoked"] += 1
        return True

    def held(self, now: float) -> int:
        """Return how many places are held now."""
        self._expire(now)
        return len(self._places)

    def next_expiry_s(self) -> float | None:
        """Return the instant at which the next place ends by itself; None: no place is open."""
        return min((place.until_s for place in self._places.values()), default=None)

    # ---- parts

    def _expire(self, now: float) -> None:
        for number in [n for n, place in self._places.items() if place.until_s <= now]:
            del self._places[number]
            self.counts["expired"] += 1

    def _refuse(self, reason: WorkerRefusal) -> Reject:
        self.counts[reason.value] += 1
        return Reject(reason)


# ---- turns that are here


class _LinedTurn(msgspec.Struct, eq=False):
    """A `_LinedTurn` is a turn that waits for room, at most until `until_s`, or was let on."""

    event: TurnArrived
    until_s: float
    is_waiting: bool = True


class RoomQueue:
    """The `RoomQueue` is the line of the turns that are here and have not begun: each waits in it
    for the room of what it is brought next.

        arrival ── in line ── there is room for its next part, and a step ── let on ── Start
                   |  ^  what of its prompt is resident goes last              |
                   |  `──────────────── a part has come ───────────────────────'
                   `─ ROOM_WAIT_S: on it goes all the same

    State that is brought for a turn which can't begin is evicted for those that run, and computed
    after all. So nothing is brought before there is room for it, in order of arrival; and nobody
    passes a turn that waits, or a long prompt would wait for ever. Room is what is free or can be
    evicted, less all that the turns which came before and have not begun will still take. So one
    turn at most is brought on in less room than its whole prompt needs: the first that lacks it.
    Behind it all wait; it needs no more at once than a part beside what it has got. Where only
    lends keep that from it, it is let on and the oldest of them are revoked; but for a moment it
    waits for what is being copied (retention.holds, cache.pressure).

    The class owns who waits. The cache owns the room; a promise made here is a number and holds no
    slot, so that a decode that grows may take it and nothing deadlocks (invariant 7).
    `held_blocks(turn)`: blocks that the turn's restore has reserved or locked. `part_blocks` are
    those of a part and a step; None: a turn's whole prompt is one part.
    """

    def __init__(
        self,
        cache: HeteroCache,
        walks: Walks,
        held_blocks: Callable[[TurnId], int],
        *,
        holds: CopyHolds,
        settings: NodeSettings,
    ) -> None:
        block, part = cache.layout.block_tokens, settings.part_tokens
        part_blocks = max(-(-part // block), settings.record_blocks)
        step_blocks = -(-settings.step_tokens // block)
        self.part_blocks = part_blocks + step_blocks if part else None
        self.step_blocks = max(1, step_blocks)
        self._cache = cache
        self._walks = walks
        self._held_blocks = held_blocks
        self._holds = holds
        self._room_wait_s = settings.room_wait_s
        self._turns: dict[TurnId, _LinedTurn] = {}
        self._waiting: set[TurnId] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def arrived(self, event: TurnArrived, now: float) -> None:
        """Queue the turn, and retain what of its prompt is resident."""
        self._turns[event.turn_id] = _LinedTurn(event, now + self._room_wait_s)
        self._waiting.add(event.turn_id)
        self._walks.retain(event.turn_id, event.tokens, now)

    def let_on(self, now: float) -> list[TurnArrived]:
        """Let the turns on that may be, in order of arrival, and return them."""
        going: list[TurnArrived] = []
        while (first := self._first()) is not None:
            if now < first.until_s and not self._finds_room(first, now):
                break
            self._waiting.remove(first.event.turn_id)
            first.is_waiting = False
            self.loaded(first.event.turn_id, now)
            going.append(first.event)
        return going

    def back(self, turn_id: TurnId, now: float) -> None:
        """Take a turn that was let on back in line, where it stood: a part has come for it, and is
        retained."""
        self._turns[turn_id].is_waiting = True
        self._waiting.add(turn_id)
        self.loaded(turn_id, now)

    def loaded(self, turn_id: TurnId, now: float) -> None:
        """Retain what has come for the turn, which was let on, until the turn has begun."""
        tokens = self._turns[turn_id].event.tokens
        self._walks.retain(turn_id, tokens, now, awaited=Awaited.LET_ON)

    def over(self, turn_id: TurnId) -> None:
        """Forget the turn, which has ended or was given up; `Walks.over` releases what it
        retained."""
        self._turns.pop(turn_id, None)
        self._waiting.discard(turn_id)

    def next_due(self) -> float | None:
        """Return the instant at which `let_on` has something to do; 0: now; None: nobody waits."""
        first = self._first()
        if first is None:
            return None
        has_room = self._short_blocks(first) <= 0 or self._is_kept_by_lends(first)
        return 0.0 if has_room else first.until_s

    # -- parts ---------------------------------------------------------------------------------

    def _first(self) -> _LinedTurn | None:
        """Return the first turn that waits; None: nobody does."""
        if not self._waiting:
            return None
        return next(turn for turn in self._turns.values() if turn.is_waiting)

    def _finds_room(self, turn: _LinedTurn, now: float) -> bool:
        """Return whether there is room for what the turn is brought next, and revoke the oldest
        lends where they alone keep it."""
        short = self._short_blocks(turn)
        if short <= 0:
            return True
        if not self._is_kept_by_lends(turn):
            return False
        occupancy = self._cache.occupancy
        while short > 0:
            yielding = occupancy.most_blocks - occupancy.blocks.capacity  # not short of those
            if not self._cache.lends.room.revoke_for(short + yielding, now):
                return True  # counted otherwise than here: it goes on, and computes what finds none
            short = self._short_blocks(turn)
        return True

    def _is_kept_by_lends(self, turn: _LinedTurn) -> bool:
        """Return whether there would be room for the turn if no lend stood."""
        lends, spills = self._cache.lends, self._cache.pressure.open_spills
        if not len(lends) or self._holds.any_stand or any(map(lends.stands, spills)):
            return False
        with lends.room.set_aside() as withheld:
            return self._short_blocks(turn) <= withheld

    def _short_blocks(self, turn: _LinedTurn) -> int:
        """Count the blocks that lack beside those to be had while all lends stand, for what the
        turn is brought next, behind all that came before it. A prompt longer than the device lacks
        none, since it never has room: the engine says so."""
        occupancy, running, tokens = self._cache.occupancy, self._cache.running, turn.event.tokens
        if -(-len(tokens) // self._cache.layout.packed_block_bytes) > occupancy.most_blocks:
            return 0
        spare = occupancy.obtainable_blocks()
        for other, before in self._turns.items():
            if before is turn or spare < 0:  # short it is, and by no less
                break
            if other not in running:
                held = self._held_blocks(other)
                spare -= self._walks.missing_blocks(other, before.event.tokens, held=held)
        more = self.part_blocks
        missing = self._walks.missing_blocks(turn.event.turn_id, tokens, more=more)
        return max(0, missing) - spare
