"""This module shows vLLM's blocks to a node as its Device, and holds those that are still to be
copied.

Owns references that were taken from the block pool, and nothing else of it. What a request has is
told by the scheduler's hooks; before that every question is answered `Later`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count
from typing import Any

import msgspec

from ownerserve.cache.effects import MoveBorder
from ownerserve.cache.layout import Layout
from ownerserve.cache.outcomes import (
    Arrival,
    CacheRefusal,
    CacheRefused,
    Inserted,
    Match,
    NoRoom,
    RestorablePoint,
    SlotsReserved,
    Verified,
)
from ownerserve.engines.vllm.worker_commands import BlockPlace
from ownerserve.kv.ids import TurnId
from ownerserve.kv.prefix import TOKEN_BYTES, Packed
from ownerserve.node.restore.sources import Later
from ownerserve.node.vocabulary.events import OperationId

STUCK_S = 1.0
"""Holds older than this are no reason to wait for before a preemption."""


class EngineDevice:
    """An `EngineDevice` is a Device whose answers come from the engine's scheduler."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._hits: dict[TurnId, tuple[int, int]] = {}
        self._taken: dict[TurnId, int] = {}
        self._open: dict[int, Arrival] = {}
        self._held: set[int] = set()
        self._tickets = count(1)

    @property
    def layout(self) -> Layout:
        """Return the layout of the state in vLLM's blocks."""
        return self._layout

    def heard(self, turn_id: TurnId, hit: int, resident: int = 0) -> None:
        """Note that the engine goes on from token `hit` by itself, and has range state up to
        `resident` where that is more: `DeviceAsked` may follow."""
        self._hits[turn_id] = hit, max(hit, resident)

    def took(self, turn_id: TurnId, hit: int) -> None:
        """Note that the engine gave the turn blocks for what was offered beyond `hit`:
        `DevicePlaced` may follow."""
        self._taken[turn_id] = hit

    def forget(self, turn_id: TurnId) -> None:
        """Forget the turn, which has nothing here any more."""
        self._hits.pop(turn_id, None)
        self._taken.pop(turn_id, None)

    def match(self, turn_id: TurnId, tokens: Packed) -> Match | Later:
        """Return the engine's own hit, down to a boundary, as a whole point, and what range state
        it has beyond that. `Later` before the engine told."""
        told = self._hits.get(turn_id)
        if told is None:
            return Later()
        depth, resident = map(self._layout.boundary_at_or_before, told)
        points = (RestorablePoint(depth),) if depth else ()
        if resident > depth:
            points = (RestorablePoint(resident, self._layout.point_names), *points)
        return Match(resident, points)

    def shortage(self, blocks: int) -> None:
        """Return None: vLLM's pool has an order of its own, and does not say what the blocks that
        go next are worth."""

    def reserve(self, turn_id: TurnId, arrival: Arrival, now: float) -> SlotsReserved | Later:
        """Return slots for the arrival: a slot is a unit's place in the prefix, a point's its
        position; `BlockPlace`s follow. `Later` before the engine gave blocks."""
        if turn_id not in self._taken:
            return Later()
        ticket, block = next(self._tickets), self._layout.block_tokens
        start = self._layout.boundary_at_or_before(self._taken.pop(turn_id))
        self._hits.pop(turn_id, None)
        end = len(arrival.tokens) // TOKEN_BYTES
        self._open[ticket] = arrival
        names = self._layout.point_names
        points = {at: dict.fromkeys(names, at) for at in arrival.points}
        return SlotsReserved(ticket, start, tuple(range(start // block, end // block)), points)

    def give_way(self, short: NoRoom) -> tuple[MoveBorder, ...]:
        """Return nothing: all of vLLM's state lies in blocks of one pool."""
        return ()

    def commit(self, ticket: int, parts: Sequence[Verified], now: float) -> Inserted | CacheRefused:
        """End the reservation: the request goes on with what was written, and the engine's cache
        takes it from there."""
        arrival = self._open.pop(ticket)
        if not parts or not all(part.is_as_stated for part in parts):
            return CacheRefused(CacheRefusal.DIGEST_MISMATCH)
        return Inserted(len(arrival.tokens) // TOKEN_BYTES, 0)

    def abort(self, ticket: int, now: float) -> None:
        """Give a reservation up. Its blocks are vLLM's, which does not use them again before the
        workers have said that the load is over."""
        del self._open[ticket]
        self._held.add(ticket)

    def quiet(self, ticket: int) -> None:
        """Forget a reservation that was given up, whose load is over."""
        self._held.remove(ticket)


class Pinned(msgspec.Struct):
    """A `Pinned` is a point that a running turn may end at, with a reference on every block of
    it."""

    position: int
    places: dict[str, BlockPlace]
    blocks: list[Any]


class Holds:
    """`Holds` owns references on blocks whose bytes are still to be copied."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._held: dict[OperationId, tuple[float, list[Any]]] = {}
        self._pinned: dict[TurnId, Pinned] = {}

    def bind(self, pool: Any) -> None:
        """Use this pool, on which the references are."""
        self._pool = pool

    def hold(self, operation_id: OperationId, places: Sequence[BlockPlace]) -> None:
        """Keep the blocks of `places` until `release`."""
        self._held[operation_id] = (time.monotonic(), self._touch(places))

    def release(self, operation_id: OperationId) -> None:
        """Give the operation's blocks back, since the copy is made; no error where there are
        none."""
        held = self._held.pop(operation_id, None)
        if held is not None:
            self._free(held[1])

    def pin(self, turn_id: TurnId, position: int, places: dict[str, BlockPlace]) -> None:
        """Keep a point's blocks until the turn ends, or a later point is pinned."""
        blocks = self._touch(list(places.values()))
        self.unpin(turn_id)
        self._pinned[turn_id] = Pinned(position, places, blocks)

    def pinned(self, turn_id: TurnId, position: int) -> dict[str, BlockPlace]:
        """Return the places of the turn's pinned point at `position`; none when it was given up."""
        pinned = self._pinned.get(turn_id)
        return pinned.places if pinned is not None and pinned.position == position else {}

    def unpin(self, turn_id: TurnId) -> None:
        """Give the turn's pinned point back: it is copied (and held for that), or nobody wants
        it."""
        pinned = self._pinned.pop(turn_id, None)
        if pinned is not None:
            self._free(pinned.blocks)

    def unpin_all(self) -> int:
        """Give all pinned points back, since the pool is short: points that turns may end at go
        first. Return how many there were."""
        turns = list(self._pinned)
        for turn_id in turns:
            self.unpin(turn_id)
        return len(turns)

    def release_all(self) -> None:
        """Give everything back, since the engine stops."""
        self.unpin_all()
        for operation_id in list(self._held):
            self.release(operation_id)

    def is_releasing(self) -> bool:
        """Return whether copies are about to give blocks back: blocks that nobody else refers
        to."""
        now = time.monotonic()
        return any(
            now - since_s < STUCK_S and any(block.ref_cnt == 1 for block in blocks)
            for since_s, blocks in self._held.values()
        )

    def __len__(self) -> int:
        return len(self._held)

    def _touch(self, places: Sequence[BlockPlace]) -> list[Any]:
        ids = [block for place in places for group in place.blocks for block in group]
        blocks = [self._pool.blocks[block] for block in ids]
        self._pool.touch(blocks)
        return blocks

    def _free(self, blocks: list[Any]) -> None:
        self._pool.free_blocks(reversed(blocks))
