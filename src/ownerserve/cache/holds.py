"""Holds: what open reservations go on from, locked until their turns have begun.

Owns the locks of sessions that have no running turn for them yet; the session table owns who they
are. A hold orders nothing and frees nothing: it keeps blocks that are resident where they are.
"""

from __future__ import annotations

from ownerserve.cache import paths
from ownerserve.cache.node import Receipt
from ownerserve.cache.sessions import Sessions
from ownerserve.cache.tree import PrefixTree
from ownerserve.kv.ids import SessionId


class Holds:
    """Locks by number."""

    def __init__(self, tree: PrefixTree, sessions: Sessions, *, block_tokens: int) -> None:
        self.sessions = sessions
        self._tree = tree
        self._block = block_tokens
        self._receipts: dict[int, Receipt] = {}
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._receipts)

    def hold(self, session_id: SessionId, tokens: int) -> int:
        """Lock the first `tokens` resident tokens of a known session, until `let_go` of the
        number."""
        session, depth = self.sessions.get(session_id), tokens // self._block
        assert session is not None, "a hold is for a session that was just judged"
        self._numbers += 1
        if session.node is not None and depth:
            node = paths.locate(session.node, depth)
            self._receipts[self._numbers] = self._tree.lock(node, depth)
        return self._numbers

    def let_go(self, number: int) -> None:
        """Give a hold up. One of a session that had nothing is no error."""
        receipt = self._receipts.pop(number, None)
        if receipt is not None:
            self._tree.unlock(receipt)

    def locked_tokens(self, session_id: SessionId) -> int:
        """How much of a session's path is under a lock, whoever's."""
        session = self.sessions.get(session_id)
        if session is None or session.node is None:
            return 0
        return paths.locked_depth(session.node, session.depth) * self._block

    def locks(self) -> list[Receipt]:
        """All of them."""
        return list(self._receipts.values())
