"""Occupancy is how full the pools are, as everybody but the cache itself may see it: levels, no
slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ownerserve.cache.outcomes import Shortage


class PoolView(Protocol):
    """A pool view is a pool of equal slots as others see it. The numbers are live."""

    @property
    def name(self) -> str:
        """`name` is the component, or the name of the state blocks."""
        ...

    @property
    def capacity(self) -> int:
        """`capacity` counts all slots of the pool."""
        ...

    @property
    def free(self) -> int:
        """`free` counts the slots that nobody has."""
        ...

    @property
    def used(self) -> int:
        """`used` counts the slots that are taken."""
        ...


class Occupancy(Protocol):
    """Occupancy is all pools of one cache: range blocks (every range component has as many), one
    pool a point component, and the state blocks of running turns."""

    @property
    def blocks(self) -> PoolView:
        """`blocks` are the slots of range blocks, the same number in every range pool."""
        ...

    @property
    def points(self) -> Sequence[PoolView]:
        """`points` are the pools of point components."""
        ...

    @property
    def states(self) -> PoolView:
        """`states` is the pool of live state blocks."""
        ...

    @property
    def most_blocks(self) -> int:
        """`most_blocks` counts the range blocks that there can be, if point slots give way."""
        ...

    def evictable_blocks(self) -> int:
        """Count the range blocks that may be evicted: the tree's, under no lock."""
        ...

    def obtainable_blocks(self) -> int:
        """Count the range blocks that a turn could have while all lends stand: free ones, evictable
        ones, and those for which point slots would give way. `LentRoom.obtainable_blocks` counts
        those of lends too."""
        ...

    def shortage(self, count: int) -> Shortage:
        """Tell what would be evicted for `count` range blocks; nothing is."""
        ...
