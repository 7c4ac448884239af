"""Leftovers are what turns that ran for somebody else added to a cache, and nobody here will come
back to.

    found before     | added by the turn |
    =================|-------------------|  end of its tokens
                     |  goes before all else, but what a session stands on, or branches off from
"""

from __future__ import annotations

from ownerserve.cache.pools.slot_pools import SlotPools
from ownerserve.cache.tree import prefix_tree
from ownerserve.cache.tree.prefix_tree import PrefixTree
from ownerserve.kv.prefix import Packed


class Leftovers:
    """Leftovers belong to nobody: the tree and the pools own what they are."""

    def __init__(self, tree: PrefixTree, pools: SlotPools) -> None:
        self._tree = tree
        self._pools = pools

    def let_go(self, tokens: Packed, *, behind: int) -> int:
        """Have what leads to the end of `tokens` alone, behind its first `behind` blocks, go before
        all else. Returns how many blocks could go now: those that nobody holds."""
        node, depth = self._tree.walk(tokens, len(tokens) // self._tree.block_bytes)
        if depth <= behind:
            return 0
        node = prefix_tree.locate(node, depth)
        stop = next((one for one in reversed(node.stops) if one.depth == depth), None)
        if stop is None or stop.anchors:
            return 0
        top = prefix_tree.let_go(self._tree, stop, behind=behind)
        return max(0, depth - max(top, node.floor))

    def free(self, blocks: int) -> None:
        """Free so many blocks of what goes first, as many as `let_go` said."""
        self._pools.evict_blocks(blocks)
