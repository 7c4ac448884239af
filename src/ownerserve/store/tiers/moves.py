"""Moves are copies that wait to be made between tiers; dirty records on top wait for their copy
below.

Owns no artifact, does no I/O. A queued demotion may be the last copy of its bytes, a queued
promotion never is: so a full queue gives up promotions first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from threading import Lock

import msgspec

from ownerserve.kv.units import MIB
from ownerserve.store.format.model import Listed

MAX_QUEUED_BYTES = 256 * MIB


class TierMove(msgspec.Struct, frozen=True):
    """A move is a copy to make: verified bytes, what the catalogue said of them, where they go."""

    record: Listed
    payload: memoryview
    level: int

    @property
    def goes_up(self) -> bool:
        """Tell whether this is a promotion to the top tier."""
        return self.level == 0


class MoveQueue:
    """A move queue holds moves by artifact and level, oldest first, and the ids that are dirty on
    top.
    """

    def __init__(self, limit_bytes: int = MAX_QUEUED_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._moves: OrderedDict[tuple[bytes, int], TierMove] = OrderedDict()
        self._dirty: OrderedDict[bytes, bytes] = OrderedDict()  # id -> tenant
        self._lock = Lock()
        self.queued_bytes = 0
        self.removals = 0
        self.counters: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._moves)

    @property
    def dirty(self) -> tuple[bytes, ...]:
        """Return the ids acknowledged on top whose copy below is owed, oldest first."""
        with self._lock:
            return tuple(self._dirty)

    @property
    def moving(self) -> frozenset[bytes]:
        """Return the ids of which a copy is on its way, up or down."""
        with self._lock:
            return frozenset(id_ for id_, _ in self._moves)

    def owe(self, id_: bytes, tenant: bytes) -> None:
        """Note that a record is on top only and that `settle` is to make its copy."""
        with self._lock:
            self._dirty[id_] = tenant

    def settled(self, id_: bytes) -> None:
        """Note that a record's copy was made, or that the record is not worth one."""
        with self._lock:
            self._dirty.pop(id_, None)

    def add(self, move: TierMove, removals: int | None = None) -> None:
        """Queue a move; when the queue is full, promotions go first, then this one.

        `removals`: what it was before the bytes were read. When something was removed since, the
        move is not made: it might be that.
        """
        key = (move.record.meta.id, move.level)
        with self._lock:
            if key in self._moves or removals not in (None, self.removals):
                return
            if not move.goes_up:
                self._dirty.pop(move.record.meta.id, None)
                self._shed_promotions(len(move.payload))
            if self.queued_bytes + len(move.payload) > self._limit_bytes:
                self.counters["promotions_shed" if move.goes_up else "demotions_shed"] += 1
                return
            self._moves[key] = move
            self.queued_bytes += len(move.payload)

    def _shed_promotions(self, room_bytes: int) -> None:
        for key in [key for key, move in self._moves.items() if move.goes_up]:
            if self.queued_bytes + room_bytes <= self._limit_bytes:
                return
            self.queued_bytes -= len(self._moves.pop(key).payload)
            self.counters["promotions_shed"] += 1

    def take(self) -> TierMove | None:
        """Take out the oldest move, the caller's to make; None when there is none."""
        with self._lock:
            if not self._moves:
                return None
            _, move = self._moves.popitem(last=False)
            self.queued_bytes -= len(move.payload)
            return move

    def forget(self, ids: Iterable[bytes]) -> None:
        """Drop moves of artifacts that were removed: a waiting copy must not bring them back."""
        gone = frozenset(ids)
        with self._lock:
            self.removals += 1
            self._drop([key for key in self._moves if key[0] in gone])
            for id_ in gone:
                self._dirty.pop(id_, None)

    def forget_tenant(self, tenant: bytes) -> None:
        """Drop the moves and the owed copies of a tenant that was purged."""
        with self._lock:
            self.removals += 1
            self._drop([k for k, move in self._moves.items() if move.record.meta.tenant == tenant])
            for id_ in [id_ for id_, owner in self._dirty.items() if owner == tenant]:
                del self._dirty[id_]

    def _drop(self, keys: Iterable[tuple[bytes, int]]) -> None:
        for key in keys:
            self.queued_bytes -= len(self._moves.pop(key).payload)

    def check(self) -> None:
        """Raise AssertionError when the accounts do not agree."""
        with self._lock:
            assert self.queued_bytes == sum(len(move.payload) for move in self._moves.values())
            assert self.queued_bytes <= self._limit_bytes
            queued_down = {id_ for id_, level in self._moves if level}
            assert not queued_down & set(self._dirty), "a copy is owed and on its way"
