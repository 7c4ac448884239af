"""This module tells what of a token sequence is on the device: questions by tokens, answered in
blocks and slots.

Reads the tree, and keeps in it what somebody who is here will go on from. Whoever asks never sees
an interval: a place that a prompt is known to reach is handed back as it came (`behind`), and the
comparison begins there.
"""

from __future__ import annotations

from ownerserve.cache.sessions import Sessions
from ownerserve.cache.tree import prefix_tree
from ownerserve.cache.tree.prefix_tree import Node, PrefixTree, ResumeDepth
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.prefix import HashedPrefix, Packed


class ResidentPrefix:
    """A resident prefix is one whose blocks are all resident, to copy them out. Valid until the
    cache changes.
    """

    __slots__ = ("_depth", "_names", "_node")

    def __init__(self, node: Node, depth: int, *, names: tuple[str, ...]) -> None:
        self._node, self._depth, self._names = node, depth, names

    def range_slots(self, first: int) -> tuple[int, ...]:
        """List the slots of the blocks from `first` on, the same in every range pool."""
        return tuple(prefix_tree.row(self._node, self._depth)[first:])

    def point_slots(self) -> dict[str, int] | None:
        """Return the point state's slots behind the last block, by component; None if any is
        gone."""
        stop = prefix_tree.complete_stop(self._node, self._depth)
        if stop is None or stop.depth != self._depth:
            return None
        return stop.point_slots(self._names)


class ResidentState:
    """ResidentState answers for one cache what of a prompt or a session is resident, read from its
    tree.
    """

    def __init__(self, tree: PrefixTree, sessions: Sessions, *, names: tuple[str, ...]) -> None:
        self._tree = tree
        self._sessions = sessions
        self._names = names

    # -- a prompt ------------------------------------------------------------------------------

    def behind(
        self, session_id: SessionId, hashed: HashedPrefix, blocks: int
    ) -> ResumeDepth | None:
        """Return the place where the session stands, if a prompt of so many whole blocks, of which
        `hashed` are the digests, is known to reach it without a comparison."""
        session = self._sessions.get(session_id)
        if session is None or session.stop is None or session.tip is None:
            return None
        sealed = session.sealed
        if sealed > blocks or hashed.digests[sealed - 1] != session.tip:
            return None
        return session.stop

    def blocks(self, tokens: Packed) -> int:
        """Count the leading blocks of `tokens` that are resident."""
        return self._walk(tokens, None)[1]

    def missing_blocks(
        self, tokens: Packed, *, behind: ResumeDepth | None = None, held: int = 0
    ) -> int:
        """Count the blocks of a prompt, its last unfinished one included, that are neither among
        the first `held` nor kept for a running turn; resident or not, they may have to be had
        again."""
        node, depth = self._walk(tokens, behind)
        kept = max(held, prefix_tree.locked_depth(node, depth))
        return -(-len(tokens) // self._tree.block_bytes) - kept

    def retain(
        self, turn_id: TurnId, tokens: Packed, now: float, *, behind: ResumeDepth | None = None
    ) -> None:
        """Keep what of `tokens` is resident for a turn that is here and has not begun: a soft
        reference stands there, in place of the turn's former one, until `release`."""
        node, depth = self._walk(tokens, behind)
        if depth:
            self._sessions.expect(turn_id, self._tree.stop_at(node, depth, now), now)

    def release(self, turn_id: TurnId) -> None:
        """Let go what a turn retained: it has ended or is gone. One that retained nothing is no
        error."""
        self._sessions.met(turn_id)

    # -- slots to copy out ---------------------------------------------------------------------

    def tokens_of(self, session_id: SessionId) -> Packed:
        """Return the resident tokens of what the session committed; none for one that is
        unknown."""
        session = self._sessions.get(session_id)
        if session is None or session.node is None:
            return b""
        size = self._tree.block_bytes
        return prefix_tree.tokens(session.node, 0, session.depth, block_bytes=size)

    def prefix(self, tokens: Packed, blocks: int) -> ResidentPrefix | None:
        """Return the first so many blocks of `tokens`; None when some of them are not resident."""
        node, depth = self._tree.walk(tokens, blocks)
        return ResidentPrefix(node, blocks, names=self._names) if depth == blocks else None

    # -- what went -----------------------------------------------------------------------------

    def watch(self) -> None:
        """Note, from now on, of which sessions something was evicted, until `take_lost` asks."""
        self._tree.slid = set()

    @property
    def has_lost(self) -> bool:
        """Tell whether `take_lost` has anybody to name."""
        return bool(self._tree.slid)

    def take_lost(self) -> list[SessionId]:
        """List the sessions that lost blocks or point state since the last call, in no order."""
        slid = self._tree.slid
        if not slid:
            return []
        self._tree.slid = set()
        return [session.session_id for stop in slid for session in (stop.anchors or {}).values()]

    def _walk(self, tokens: Packed, behind: ResumeDepth | None) -> tuple[Node, int]:
        limit = len(tokens) // self._tree.block_bytes
        if behind is None:
            return self._tree.walk(tokens, limit)
        return self._tree.walk(tokens, limit, node=behind.node, depth=behind.depth)
