"""GapMoves decides which idle sessions move for load's sake: wanted moves in, those to be made now
out; no clock, socket or randomness.

A turn often stays at a busy owner although another worker would be better, since it would have to
wait for its state (`Decision.wanted`). In the gap behind it nobody waits.

    a turn is sent that wants a move   ──> queued ── look: wanted still, room ──> granted ──> ended
    a worker joined, a session idle         │                                       │
        elsewhere would move there     ─────┘                    coming: counts there until a turn
                                            `─ dropped

| what is queued | when |
|---|---|
| waits | a turn of its session runs; the policy, asked again, would not move it now; no room |
| is granted | it spares most for each byte, and more than what is coming there takes |
| is dropped | its session ended, moved or had another turn, its owner is gone, it is too old |

What a policy is asked again is what it would want were a turn to come now: loads are those of now,
and so may the target be another. A session that comes counts at its target for what its last turn
computed, until its next turn is counted there: so a flock that leaves one hot worker does not make
the next one hot. Compare-and-set at the owner settles races with turns and other gateways.

Owns the queue and what is coming; neither sessions nor workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice

import msgspec

from ownerserve.kv.ids import SessionId
from ownerserve.router.decision import Move
from ownerserve.router.fleet import room_tokens
from ownerserve.router.messages import Arm, Dispatch
from ownerserve.router.sessions import RoutedSession
from ownerserve.router.settings import PRIOR
from ownerserve.router.state import RouterState
from ownerserve.router.worker import Worker

QUEUED_MAX = 1024
"""Beyond, the move that gains least for each byte is dropped."""
KEPT_S = 60.0
"""A move is wanted for so long at most after its turn, and what came counts so long without one."""
AT_ONCE = 2
"""Moves under way from one worker, and to one: what is lent and landed costs the turns there."""
ASKED_MAX = 32
"""Moves that the policy is asked about again at one look."""
JOINING_S = 60.0
"""For so long after it came up a worker is looked for sessions for."""
SCAN_S = 1.0
SCANNED_MAX = 256
"""So many of the newest sessions are looked at each SCAN_S for who joined."""


class GapMove(msgspec.Struct, frozen=True, gc=False):
    """Effect: the idle session is to move from `source` to `target` now. `taken` or `stayed` tells
    how that ended."""

    session: SessionId
    source: Worker
    target: Worker


class _Wanted(msgspec.Struct, gc=False):
    """A wanted move is of a session of `source`, in its life `life`, after so many turns, of which
    the last one computed `new_tokens`. `per_byte`: ms gained, when it was last priced."""

    source: Worker
    life: int
    turns: int
    new_tokens: int
    per_byte: float
    at_s: float


class _Coming(msgspec.Struct, gc=False):
    """A coming session is on its way, or there and without a turn since; a turn of it takes
    `turn_ms` there."""

    move: Move
    turn_ms: float
    turns: int
    until_s: float
    has_come: bool = False


class GapMoves:
    """This class holds the wanted moves of one gateway's sessions. `arm_of`: the arm of a session.
    `counts`: how many were wanted and granted, and how each ended; metric labels."""

    def __init__(self, state: RouterState, arm_of: Callable[[SessionId], Arm]) -> None:
        self.counts: Counter[str] = Counter()
        self._state = state
        self._arm_of = arm_of
        self._queued: dict[SessionId, _Wanted] = {}
        self._coming: dict[SessionId, _Coming] = {}
        self._lives: dict[Worker, int] | None = None
        self._joined: dict[Worker, float] = {}
        self._next_scan_s = 0.0

    def __len__(self) -> int:
        return len(self._queued)

    def sent(self, dispatch: Dispatch, now: float) -> None:
        """Take in the move that a turn was sent with, if it wants one, in place of any earlier one
        of its session."""
        move, name = dispatch.decision.wanted, dispatch.session
        if isinstance(move, Move) and name is not None:
            self._add(name, move, dispatch.prefill_tokens, now)

    def look(self, now: float) -> list[GapMove]:
        """Return the moves that are granted now."""
        self._settle(now)
        self._look_at_who_joined(now)
        priced = sorted(self._due(now), key=lambda one: one[0], reverse=True)
        granted = []
        for _, name, move in priced:
            new_tokens = self._queued[name].new_tokens
            turn_ms = move.target.speed.prefill.ms(new_tokens, move.tokens)
            if not self._may(move, new_tokens):
                continue
            del self._queued[name]
            session = self._state.sessions.get(name)
            turns = 0 if session is None else session.turns
            self._coming[name] = _Coming(move, turn_ms, turns, now + KEPT_S)
            self.counts["granted"] += 1
            granted.append(GapMove(name, move.source, move.target))
        return granted

    def taken(self, session: SessionId, now: float) -> None:
        """Hear that a granted move was made."""
        self.counts["taken"] += 1
        coming = self._coming.get(session)
        if coming is not None:
            coming.has_come, coming.until_s = True, now + KEPT_S

    def stayed(self, session: SessionId, reason: str) -> None:
        """Hear that a granted move was not made, and why."""
        self.counts[reason] += 1
        self._coming.pop(session, None)

    def _add(self, name: SessionId, move: Move, new_tokens: int, now: float) -> None:
        session = self._state.sessions.get(name)
        if session is None or name in self._coming:
            return
        self.counts["wanted"] += 1
        wanted = _Wanted(
            move.source, move.source.life, session.turns, new_tokens, _per_byte(move), now
        )
        self._queued[name] = wanted
        if len(self._queued) > QUEUED_MAX:
            least = min(self._queued, key=lambda one: self._queued[one].per_byte)
            self._drop(least, "crowded_out")

    def _drop(self, name: SessionId, why: str) -> None:
        del self._queued[name]
        self.counts[why] += 1

    def _settle(self, now: float) -> None:
        """Forget what is stale, and count no longer what has had a turn where it came."""
        for name, wanted in list(self._queued.items()):
            why = _why_stale(wanted, self._state.sessions.get(name), now)
            if why is not None:
                self._drop(name, why)
        for name, coming in list(self._coming.items()):
            session = self._state.sessions.get(name)
            has_gone_on = session is None or session.turns != coming.turns
            if coming.has_come and (has_gone_on or now > coming.until_s):
                del self._coming[name]

    def _due(self, now: float) -> Iterator[tuple[float, SessionId, Move]]:
        """Price anew what is queued of idle sessions; give what is wanted now."""
        asked = 0
        for name in sorted(self._queued, key=lambda one: -self._queued[one].per_byte):
            wanted, session = self._queued[name], self._state.sessions.get(name)
            if session is None or session.pending or self._under_way(wanted.source) >= AT_ONCE:
                continue
            if asked >= ASKED_MAX:
                return
            asked += 1
            move = self._state.idle.move(name, wanted.new_tokens, self._arm_of(name), now)
            if move is not None and move.gain_ms > 0.0:
                wanted.per_byte = _per_byte(move)
                yield wanted.per_byte, name, move

    def _may(self, move: Move, new_tokens: int) -> bool:
        """Return whether so much may come to the target, and leave the source, beside what is
        coming."""
        source, target = move.source, move.target
        if self._under_way(source) >= AT_ONCE or self._under_way(target) >= AT_ONCE:
            return False
        turns_ms, tokens = 0.0, move.tokens + new_tokens
        for coming in self._coming.values():
            if coming.move.target is target:
                turns_ms += coming.turn_ms
                tokens += 0 if coming.has_come else coming.move.tokens
        return move.gain_ms > turns_ms and room_tokens(target) >= tokens

    def _under_way(self, worker: Worker) -> int:
        return sum(
            not coming.has_come and worker in (coming.move.source, coming.move.target)
            for coming in self._coming.values()
        )

    def _look_at_who_joined(self, now: float) -> None:
        """Queue the idle sessions that the policy would move to who came up lately."""
        up = {one: one.life for one in self._state.fleet if one.up}
        self._joined = {one: until_s for one, until_s in self._joined.items() if until_s > now}
        known = up if self._lives is None else self._lives
        for worker, life in up.items():
            if known.get(worker) != life:
                self._joined[worker] = now + JOINING_S
        self._lives = up
        joined = self._joined.keys() & up.keys()
        if not joined or now < self._next_scan_s:
            return
        self._next_scan_s = now + SCAN_S
        learning = self._state.learning
        facts = PRIOR if learning is None or learning.facts is None else learning.facts
        idle = islice(self._state.sessions.newest(), SCANNED_MAX)
        for name, session in [one for one in idle if _may_join(one[1], joined)]:
            if name in self._queued or name in self._coming:
                continue
            new_tokens = facts.addition_tokens_p50
            move = self._state.idle.move(name, new_tokens, self._arm_of(name), now)
            if move is not None and move.target in joined and move.source is session.owner:
                self._add(name, move, new_tokens, now)


def _may_join(session: RoutedSession, joined: set[Worker]) -> bool:
    """Return whether one of those that joined is less busy than the session's owner."""
    owner = session.live_owner
    if owner is None or session.pending:
        return False
    return any(one.queue_ms < owner.queue_ms or one.batch < owner.batch for one in joined)


def _per_byte(move: Move) -> float:
    return move.gain_ms / max(move.target.speed.sequence_bytes(move.tokens), 1.0)


def _why_stale(wanted: _Wanted, session: RoutedSession | None, now: float) -> str | None:
    """Return why the move is not wanted any more."""
    source = wanted.source
    if session is None:
        return "ended"
    if not source.up or source.life != wanted.life:
        return "owner_gone"
    if session.owner is not source or session.owner_life != wanted.life:
        return "moved"
    if session.turns != wanted.turns:
        return "went_on"
    if not session.pending and now > max(wanted.at_s, session.idle_since_s) + KEPT_S:
        return "too_old"
    return None
