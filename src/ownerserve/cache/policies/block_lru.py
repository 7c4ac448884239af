"""BlockLru is vLLM's eviction order on our tree: blocks by when the last turn that read them ended.

HeteroCache's "lru" goes by restorable points: a turn that goes on from one makes that one young,
and those before it on the path age on their own. vLLM frees all blocks of a turn at its end, the
deepest first, so all of a path is as young as the last turn on it. For baselines and validation.
"""

from __future__ import annotations

from typing import ClassVar

from ownerserve.cache.policies.base import Candidate, EvictionPolicy, Key, UseHeat
from ownerserve.cache.tree import prefix_tree
from ownerserve.cache.tree.prefix_tree import ResumeDepth


class BlockLru(EvictionPolicy):
    """BlockLru owns the count of touches, which orders turns that end at one instant. A touch is
    O(stops of the path)."""

    name: ClassVar[str] = "block-lru"

    def __init__(self) -> None:
        self._touches = 0.0

    def key(self, candidate: Candidate) -> Key:
        """Return the candidate's place in the order; the lowest goes first."""
        return (candidate.heat.inflation,)

    def touched(self, heat: UseHeat) -> None:
        """Note that a turn came back to this place."""
        assert isinstance(heat, ResumeDepth), "the tree's own"
        self._touches += 1.0
        for stop in prefix_tree.stops_above(heat.node, heat.depth):
            stop.inflation = self._touches
