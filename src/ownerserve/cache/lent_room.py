"""Lent room is what the standing tickets of a cache keep from its turns, as long as none needs it.

    turn needs room ── revoke_for ──> the oldest ticket ends, `revoked` hears ── room, or again

A lend never keeps room from a turn (invariant 7): not from one that runs, waits in line or asks for
a place. Point slots are another matter: a turn that finds none keeps no point state there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager

from ownerserve.cache.pools.slot_pools import SlotPools
from ownerserve.cache.tickets import Ticket
from ownerserve.cache.tree.prefix_tree import PrefixTree


class LentRoom:
    """`LentRoom` is that of one cache's tickets, which it takes by reference, the oldest first.
    `withheld` are the blocks that wait for a ticket's end before they return to their pool; `end`
    ends a ticket, and `expire` those whose time is over."""

    def __init__(
        self,
        tree: PrefixTree,
        pools: SlotPools,
        standing: Mapping[int, Ticket],
        withheld: Sized,
        *,
        end: Callable[[int], None],
        expire: Callable[[float], None],
    ) -> None:
        self.revoked: Callable[[int], None] = lambda number: None
        """Hears of each ticket that ends since a turn needed the room."""
        self._tree = tree
        self._pools = pools
        self._standing = standing
        self._withheld = withheld
        self._end = end
        self._expire = expire

    def revoke_for(self, blocks: int, now: float) -> bool:
        """End a ticket for a turn that misses so many blocks: those whose time is over, or else the
        oldest. False, and none ends, where all of them would not make the room."""
        standing = len(self._standing)
        self._expire(now)
        if len(self._standing) < standing:
            return True
        yielding = self._pools.most_blocks - self._pools.blocks.capacity
        if not self._standing or blocks > self._kept_blocks() + yielding:
            return False
        oldest = next(iter(self._standing))
        self._end(oldest)
        self.revoked(oldest)
        return True

    def obtainable_blocks(self) -> int:
        """Count the range blocks that a turn could have now: those that the pools give
        (`Occupancy.obtainable_blocks`), and those of lends, which would be revoked for it."""
        return self._pools.obtainable_blocks() + (self._kept_blocks() if self._standing else 0)

    @contextmanager
    def set_aside(self) -> Iterator[int]:
        """Look at the tree as if no ticket locked a path; afterwards all stand as before. Gives how
        many blocks would be free beside. It walks each path twice."""
        tree = self._tree
        locks = [lock for one in self._standing.values() for lock in one.locks]
        places = [(lock, lock.node, lock.depth) for lock in locks]
        for lock in locks:
            tree.relock(lock, tree.root, 0)
        yield len(self._withheld)
        for lock, node, depth in places:
            tree.relock(lock, node, depth)

    def _kept_blocks(self) -> int:
        """Count the blocks that would be free or could be evicted if no ticket stood."""
        before = self._tree.protected
        with self.set_aside() as withheld:
            return before - self._tree.protected + withheld
