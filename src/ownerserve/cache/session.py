"""A session's record: metadata only, it owns no slot.

Owns the version and where the last finished turn ended. What of that is resident is the tree's
word: the session's stop slides back when its blocks are trimmed (tree.PrefixTree.trim).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ownerserve.kv.ids import PrefixHash, SessionId

if TYPE_CHECKING:
    from ownerserve.cache.node import Node, Receipt, Stop


class Session(msgspec.Struct, eq=False):
    """One agent's run on this worker.

    tokens   committed by the last turn that moved the frontier, unsealed tail included
    sealed   its depth in the tree at that time, in blocks
    tip      the chain digest of those blocks, where who finished the turn told it
    node, depth   the resident part of it: the frontier in the tree
    row      slots of blocks 0..depth, None while a turn has them or nobody asked
    frontier_order     the begin order of that turn: an earlier one that ends later is late
    next_check_s, queued_s   when the table looks at it next; the instant it waits under, no later
    """

    session_id: SessionId
    generation: int
    version: int = 0
    tokens: int = 0
    sealed: int = 0
    tail: bytes = b""
    tip: PrefixHash | None = None
    stop: Stop | None = None
    row: list[int] | None = None
    frontier_order: int = -1
    running: int = 0
    last_s: float = 0.0
    expires_s: float = 0.0
    next_check_s: float = 0.0
    queued_s: float = -1.0
    is_referenced: bool = False
    pin: Receipt | None = None

    @property
    def node(self) -> Node | None:
        """The interval of the frontier."""
        return self.stop.node if self.stop is not None else None

    @property
    def depth(self) -> int:
        """Resident blocks of what the session committed."""
        return self.stop.depth if self.stop is not None else 0
