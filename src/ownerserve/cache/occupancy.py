"""How full the pools are, as everybody but the cache itself may see it: levels, no slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ownerserve.cache.outcomes import Shortage


class PoolView(Protocol):
    """One pool of equal slots. Live: the numbers are those of now."""

    @property
    def name(self) -> str: ...
    @property
    def capacity(self) -> int: ...
    @property
    def free(self) -> int: ...
    @property
    def used(self) -> int: ...


class Occupancy(Protocol):
    """All pools of one cache: range blocks, of which every range component has as many, one pool
    a point component, and the state blocks of running turns."""

    @property
    def blocks(self) -> PoolView: ...
    @property
    def points(self) -> Sequence[PoolView]: ...
    @property
    def states(self) -> PoolView: ...

    def evictable_blocks(self) -> int:
        """Range blocks that may be evicted: the tree's, under no lock."""
        ...

    def obtainable_blocks(self) -> int:
        """Range blocks that a turn could have now: the free ones, and those that may be evicted."""
        ...

    def shortage(self, count: int) -> Shortage:
        """What would be evicted for `count` range blocks; nothing is."""
        ...
