"""The border divides one arena between range blocks and point slots, and moves in slabs.

    |- 0  range blocks  R-1 -|- P-1  point slots  0 -|       R blocks from the left, P points from
                           border                            the right: who loses ground moves out
                                                             of it first

Owns where the border stands, and the choice between the two: what would go next there, or here? The
evictor says what each would lose; what costs fewer ms a byte to bring back, by how long nobody came
for it, gives way. Moves only when the engine asks between two steps, and returns the copies that it
then performs; slots that somebody outside writes or reads (arrivals, spills) stay where they are,
and so does the border. State blocks of running turns are no part of the arena.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ownerserve.cache.effects import MoveBorder
from ownerserve.cache.ingest import Ingest
from ownerserve.cache.lends import Lends
from ownerserve.cache.pools.evictor import Evictor
from ownerserve.cache.pools.slot_pools import SlotPools
from ownerserve.cache.sessions import Running, Sessions
from ownerserve.cache.tree import prefix_tree
from ownerserve.cache.tree.prefix_tree import ResumeDepth
from ownerserve.kv.ids import TurnId

SLABS = 64
"""The border moves by one of so many parts of the arena, or one point slot where that is more."""

CLEARLY = 1.25
"""State here is worth so much more than there before any there goes for it: else slabs that are
worth the same would change sides for ever."""

Moves = tuple[tuple[int, int], ...]
"""Slots (from, to) whose bytes are copied, in order: no target is a source."""


class Border:
    """The border of one cache: points have at most what the budget gave them, and at least
    one slab; range blocks have the rest."""

    def __init__(
        self,
        pools: SlotPools,
        evictor: Evictor,
        *,
        running: Mapping[TurnId, Running],
        sessions: Sessions,
        ingest: Ingest,
        lends: Lends,
    ) -> None:
        self._pools, self._evictor, self._counters = pools, evictor, pools.counters
        self._running, self._sessions = running, sessions
        self._ingest, self._lends = ingest, lends
        self._block_bytes = evictor.block_bytes
        self._point_bytes = sum(evictor.point_bytes)
        self._arena = pools.arena
        self._slab = max(1, pools.arena.size_bytes // SLABS // max(1, self._point_bytes))
        self._seen = (0, 0)

    @property
    def is_due(self) -> bool:
        """Tell whether something was evicted since the last call of `move`."""
        arena = self._arena
        return arena.most_points > arena.least_points and self._evicted() != self._seen

    def _evicted(self) -> tuple[int, int]:
        counters = self._counters
        return counters.evicted_bytes, sum(counters.evicted_points.values())

    def move(self, now: float) -> tuple[MoveBorder, ...]:
        """Move the border by a slab, or by the free ones, to where state is worth more; nothing
        when it stands well, or can't be moved now.

        For engines that perform MoveBorder, between two steps: every effect before must have been
        performed, and those returned come before anything else."""
        if not self.is_due:
            return ()
        (blocks_before, points_before), self._seen = self._seen, self._evicted()
        points = self._pools.points[0].capacity
        wanted = 0
        if self._seen[0] > blocks_before and points > self._arena.least_points:
            wanted = -self._for_blocks(now)
        if not wanted and self._seen[1] > points_before and points < self._arena.most_points:
            wanted = self._for_points(now)
        return self._move_to(points + wanted) if wanted else ()

    def give_way(self, blocks: int) -> tuple[MoveBorder, ...]:
        """Have points give way to so many blocks, which a running turn needs and can't have by
        evicting blocks; nothing when they can't."""
        arena, wanted = self._arena, self._pools.blocks.capacity + blocks
        if wanted > arena.most_blocks:
            return ()
        return self._move_to((arena.size_bytes - wanted * self._block_bytes) // self._point_bytes)

    def _for_blocks(self, now: float) -> int:
        """Count the points that give way to blocks: the free ones, or a slab that is worth less."""
        free = min(pool.free for pool in self._pools.points) - 1
        if free >= self._slab:
            return free // self._slab * self._slab
        here, there = self._evictor.front_worth(now)
        return self._slab if there * CLEARLY < here else 0

    def _for_points(self, now: float) -> int:
        """Count the points for which blocks give way."""
        if self._pools.blocks.free * self._block_bytes >= 2 * self._slab * self._point_bytes:
            return self._slab
        there, here = self._evictor.front_worth(now)
        return self._slab if there * CLEARLY < here else 0

    # -- moving --------------------------------------------------------------------------------

    def _move_to(self, points: int) -> tuple[MoveBorder, ...]:
        pools, arena = self._pools, self._arena
        points = max(arena.least_points, min(arena.most_points, points))
        blocks = (arena.size_bytes - points * self._point_bytes) // self._block_bytes
        block_moves: Moves = ()
        point_moves: dict[str, Moves] = {}
        if blocks < pools.blocks.capacity:
            if not self._clear_blocks(blocks):
                return ()
            block_moves = self._move_blocks(blocks)
            pools.blocks.cut(blocks)
            for pool in pools.points:
                pool.grow(points - pool.capacity)
        else:
            if not self._clear_points(points):
                return ()
            for index, pool in enumerate(pools.points):
                point_moves[pool.name] = self._move_points(index, points)
                pool.cut(points)
            pools.blocks.grow(blocks - pools.blocks.capacity)
        return (MoveBorder(blocks, points, block_moves, point_moves),)

    def _clear_blocks(self, limit: int) -> bool:
        """Evict until `limit` blocks hold all that stays; false when it can't, and nothing went."""
        pools = self._pools
        if any(slot >= limit for slot in self._ingest.block_slots()):
            return False
        if self._lends.places.covers_beyond(limit):
            return False
        missing = pools.blocks.used - limit
        if missing > 0:
            if missing > pools.evictable_blocks():
                return False
            pools.evict_blocks(missing)
        return True

    def _clear_points(self, limit: int) -> bool:
        pools = self._pools
        for index in range(len(pools.points)):
            if any(slot >= limit for slot in self._ingest.point_slots(index)):
                return False
        if any(stop.holds and _is_beyond(stop, limit) for stop in self._stops()):
            return False
        for index, pool in enumerate(pools.points):
            missing = pool.used - limit
            if missing > 0 and pools.evict_points(index, missing) < missing:
                return False
        return True

    def _move_blocks(self, limit: int) -> Moves:
        """Bring all blocks into slots below `limit`: in the tree, and in every row of slots."""
        holders = [node.blocks for node in prefix_tree.nodes(self._evictor.tree.root)]
        holders += [run.row for run in self._running.values()]
        beyond = sorted({slot for row in holders for slot in row if slot >= limit})
        to = dict(zip(beyond, self._pools.blocks.take_below(limit, len(beyond)), strict=True))
        holders += [session.row for session in self._sessions if session.row is not None]
        for row in holders if to else ():
            if max(row, default=0) >= limit:
                row[:] = [to.get(slot, slot) for slot in row]
        self._pools.blocks.give(beyond)
        return tuple(to.items())

    def _move_points(self, index: int, limit: int) -> Moves:
        pool = self._pools.points[index]
        moves = []
        for stop in self._stops():
            slot = stop.slots[index] if stop.slots is not None else None
            if stop.slots is not None and slot is not None and slot >= limit:
                [free] = pool.take_below(limit, 1)
                stop.slots[index] = free
                pool.give([slot])
                moves.append((slot, free))
        return tuple(moves)

    def _stops(self) -> Collection[ResumeDepth]:
        nodes = prefix_tree.nodes(self._evictor.tree.root)
        return [stop for node in nodes for stop in node.stops if stop.slots is not None]


def _is_beyond(stop: ResumeDepth, limit: int) -> bool:
    return any(slot is not None and slot >= limit for slot in stop.slots or ())
