"""The turnover of a cache is what would go next if it took more, and how long that was idle.

A look at the front of the evictor's order, LOOK_INTERVALS entries at most however large the cache
is. Changes nothing that anybody can see. Knows tokens and times; what they cost its caller knows.

    |== kept, idle for 900 s ==|~~ nobody's ~~|== kept, 400 s ==| ...     what goes next, in order
    |<----------- displaced by so many blocks ---------->|
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ownerserve.cache.pools.evictor import Evictor
from ownerserve.cache.pools.slot_pools import SlotPools
from ownerserve.cache.pressure import Pressure
from ownerserve.cache.tree.prefix_tree import Node
from ownerserve.kv.ids import SessionId

LOOK_INTERVALS = 64
"""Intervals that one look takes from the evictor's order; what follows is drawn on from them."""


class Leaving(msgspec.Struct, frozen=True, gc=False):
    """A leaving stretch is tokens [start, end) of a sequence that would go, last used at `last_s`;
    `sessions` stand on it, none: nobody will come back for it."""

    start: int
    end: int
    last_s: float
    sessions: tuple[SessionId, ...]

    @property
    def tokens(self) -> int:
        """`tokens` are how many would go."""
        return self.end - self.start


class TurnoverLook(msgspec.Struct, frozen=True, gc=False):
    """A look says what a cache would lose next.

    `held_tokens` are on the device, `held_positions` the sum of their positions. `spare_tokens` are
    free beyond what the cache keeps free by evicting; below 0: it is about to evict so much.
    `evictable_tokens` could go. `leaving` are the first of them, in order.
    """

    held_tokens: int
    held_positions: float
    spare_tokens: int
    evictable_tokens: int
    leaving: tuple[Leaving, ...]

    def idle_s(self, tokens: int, now: float) -> float:
        """Return how long the state was idle that would go for so many tokens, of several the least
        long; infinite where what is free or nobody's is enough, 0 where there is not so much.

        Beyond what was looked at, idle ages are taken to fall evenly to 0 at the last that could
        go.
        """
        missing = tokens - self.spare_tokens
        if missing > self.evictable_tokens:
            return 0.0
        idle_s, gone = float("inf"), 0
        for one in self.leaving:
            if gone >= missing:
                return idle_s
            gone += one.tokens
            if one.sessions:
                idle_s = min(idle_s, max(now - one.last_s, 0.0))
        if gone >= missing or idle_s == float("inf"):
            return idle_s
        return idle_s * (self.evictable_tokens - missing) / (self.evictable_tokens - gone)


class Turnover:
    """The turnover of one cache; it owns nothing."""

    def __init__(self, pools: SlotPools, evictor: Evictor, pressure: Pressure) -> None:
        self._pools = pools
        self._evictor = evictor
        self._pressure = pressure
        self._block = pools.layout.block_tokens

    def look(self, tokens: int) -> TurnoverLook:
        """Look at what would go if the cache took so many tokens more."""
        pools, tree, block = self._pools, self._evictor.tree, self._block
        blocks, marks = pools.blocks, self._pressure.watermarks
        kept_free = int(marks.high * blocks.capacity) if marks.low else 0
        spare = blocks.free - kept_free
        missing = -(-tokens // block) - spare
        intervals: Sequence[tuple[Node, int]] = ()
        if missing > 0:
            intervals = self._evictor.next_intervals(missing, most=LOOK_INTERVALS)
        return TurnoverLook(
            held_tokens=tree.blocks * block,
            held_positions=block * block * (tree.depths + tree.blocks / 2),
            spare_tokens=spare * block,
            evictable_tokens=pools.evictable_blocks() * block,
            leaving=tuple(self._leaving(node, depth) for node, depth in intervals),
        )

    def _leaving(self, node: Node, depth: int) -> Leaving:
        block, last = self._block, node.stops[-1]
        going = [stop.anchors for stop in node.stops if stop.depth > depth and stop.anchors]
        sessions = tuple([SessionId(name) for anchors in going for name in anchors])
        return Leaving(depth * block, node.end * block, last.last_s, sessions)
