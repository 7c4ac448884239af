"""Line: turns that are here and for whose prompts the device has no room yet. Pure.

    arrival ── in line ── the first, and there is room for its whole prompt ── its restore ── Start
               |  what of its prompt is resident goes last: it is the next to be read
               `─ ROOM_WAIT_S: on it goes all the same

State that is brought for a turn which can't begin is evicted for those that run, and computed after
all. So nothing is brought before there is room for the turn to begin, in order of arrival; and
nobody passes a turn that waits, or a long prompt would wait for ever. Room is what is free or can
be evicted, less what turns that were let on and have not begun will take.

Owns who waits. The cache owns the room; a promise made here is a number and holds no slot, so that
a decode that grows may take it and nothing deadlocks (invariant 7).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import msgspec

from ownerserve.cache.hetero import HeteroCache
from ownerserve.kv.ids import TurnId
from ownerserve.kv.prefix import Packed
from ownerserve.node.restore.sources import Walks
from ownerserve.node.vocabulary.events import TurnArrived


class WaitingTurn(msgspec.Struct, frozen=True):
    """A turn in line."""

    event: TurnArrived
    until_s: float


class RoomQueue:
    """Who waits for room, and who was let on. `held_blocks(turn)` are those that its restore has
    reserved or locked."""

    def __init__(
        self,
        cache: HeteroCache,
        walks: Walks,
        held_blocks: Callable[[TurnId], int],
        *,
        room_wait_s: float,
    ) -> None:
        self._cache = cache
        self._walks = walks
        self._held_blocks = held_blocks
        self._room_wait_s = room_wait_s
        self._waiting: OrderedDict[TurnId, WaitingTurn] = OrderedDict()
        self._let_on: dict[TurnId, Packed] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def arrived(self, event: TurnArrived, now: float) -> None:
        """A turn is here. What of its prompt is resident is to stay."""
        self._waiting[event.turn_id] = WaitingTurn(event, now + self._room_wait_s)
        self._walks.retain(event.turn_id, event.tokens, now)

    def let_on(self, now: float) -> list[TurnArrived]:
        """Turns that may go on now, in order of arrival."""
        going: list[TurnArrived] = []
        while self._waiting:
            first = next(iter(self._waiting.values()))
            turn_id = first.event.turn_id
            if now < first.until_s and not self._has_room(turn_id, first.event.tokens):
                break
            del self._waiting[turn_id]
            self._let_on[turn_id] = first.event.tokens
            going.append(first.event)
        return going

    def loaded(self, turn_id: TurnId, now: float) -> None:
        """State was brought for a turn: it is to stay until the turn has begun."""
        self._walks.retain(turn_id, self._let_on[turn_id], now)

    def over(self, turn_id: TurnId) -> None:
        """The turn has ended, or was given up wherever it was."""
        self._waiting.pop(turn_id, None)
        self._let_on.pop(turn_id, None)
        self._cache.residents.release(turn_id)

    def next_due(self) -> float | None:
        """When `let_on` has something to do; 0: now."""
        if not self._waiting:
            return None
        first = next(iter(self._waiting.values()))
        event = first.event
        return 0.0 if self._has_room(event.turn_id, event.tokens) else first.until_s

    # -- parts ---------------------------------------------------------------------------------

    def _has_room(self, turn_id: TurnId, tokens: Packed) -> bool:
        """For a whole prompt behind all that were let on. One longer than the device never has
        any: the engine says so."""
        occupancy, running = self._cache.occupancy, self._cache.running
        if -(-len(tokens) // self._cache.layout.packed_block_bytes) > occupancy.blocks.capacity:
            return True
        spare = occupancy.obtainable_blocks() - self._walks.missing_blocks(turn_id, tokens)
        for other, others in self._let_on.items():
            if spare < 0:
                return False
            if other not in running:
                spare -= self._walks.missing_blocks(other, others, held=self._held_blocks(other))
        return spare >= 0
