"""What of a token sequence is on the device: questions by tokens, answered in blocks and slots.

Reads the tree, and keeps in it what somebody who is here will go on from. Whoever asks never sees
an interval: a place that a prompt is known to reach is handed back as it came (`behind`), and the
comparison begins there.
"""

from __future__ import annotations

from ownerserve.cache.sessions import Sessions
from ownerserve.cache.tree import paths
from ownerserve.cache.tree.node import Node, ResumeDepth
from ownerserve.cache.tree.prefix_tree import PrefixTree
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.prefix import HashedPrefix, Packed


class ResidentPrefix:
    """Blocks that are all resident, for who copies them out. Valid until the cache changes."""

    __slots__ = ("_depth", "_names", "_node")

    def __init__(self, node: Node, depth: int, *, names: tuple[str, ...]) -> None:
        self._node, self._depth, self._names = node, depth, names

    def range_slots(self, first: int) -> tuple[int, ...]:
        """Slots of the blocks from `first` on, the same in every range pool."""
        return tuple(paths.row(self._node, self._depth)[first:])

    def point_slots(self) -> dict[str, int] | None:
        """Slots of the point state behind the last block, by component; None when it lacks any."""
        stop = paths.complete_stop(self._node, self._depth)
        if stop is None or stop.depth != self._depth:
            return None
        return stop.point_slots(self._names)


class Residents:
    """Answers from the tree of one cache."""

    def __init__(self, tree: PrefixTree, sessions: Sessions, *, names: tuple[str, ...]) -> None:
        self._tree = tree
        self._sessions = sessions
        self._names = names

    # -- a prompt ------------------------------------------------------------------------------

    def behind(
        self, session_id: SessionId, hashed: HashedPrefix, blocks: int
    ) -> ResumeDepth | None:
        """The place where the session stands, if a prompt of so many whole blocks, of which
        `hashed` are the digests, is known to reach it without a comparison."""
        session = self._sessions.get(session_id)
        if session is None or session.stop is None or session.tip is None:
            return None
        sealed = session.sealed
        if sealed > blocks or hashed.digests[sealed - 1] != session.tip:
            return None
        return session.stop

    def blocks(self, tokens: Packed) -> int:
        """How many leading blocks of `tokens` are resident."""
        return self._walk(tokens, None)[1]

    def missing_blocks(
        self, tokens: Packed, *, behind: ResumeDepth | None = None, held: int = 0
    ) -> int:
        """Blocks of a prompt, its last unfinished one included, that are neither among the first
        `held` nor kept for a running turn; resident or not, they may have to be had again."""
        node, depth = self._walk(tokens, behind)
        kept = max(held, paths.locked_depth(node, depth))
        return -(-len(tokens) // self._tree.block_bytes) - kept

    def retain(
        self, turn_id: TurnId, tokens: Packed, now: float, *, behind: ResumeDepth | None = None
    ) -> None:
        """A turn that is here and has not begun will go on from what of `tokens` is resident: a
        soft reference stands there, in place of the turn's former one, until `release`."""
        node, depth = self._walk(tokens, behind)
        if depth:
            self._sessions.expect(turn_id, self._tree.stop_at(node, depth, now), now)

    def release(self, turn_id: TurnId) -> None:
        """The turn has ended or is gone; one that retained nothing is no error."""
        self._sessions.met(turn_id)

    # -- slots to copy out ---------------------------------------------------------------------

    def tokens_of(self, session_id: SessionId) -> Packed:
        """The resident part of what the session committed; empty for one that is unknown."""
        session = self._sessions.get(session_id)
        if session is None or session.node is None:
            return b""
        size = self._tree.block_bytes
        return paths.tokens(session.node, 0, session.depth, block_bytes=size)

    def prefix(self, tokens: Packed, blocks: int) -> ResidentPrefix | None:
        """The first so many blocks of `tokens`; None when some of them are not resident."""
        node, depth = self._tree.walk(tokens, blocks)
        return ResidentPrefix(node, blocks, names=self._names) if depth == blocks else None

    # -- what went -----------------------------------------------------------------------------

    def watch(self) -> None:
        """From now on, keep of whom something was evicted until `take_lost` asks."""
        self._tree.slid = set()

    @property
    def has_lost(self) -> bool:
        """Whether `take_lost` has anybody to name."""
        return bool(self._tree.slid)

    def take_lost(self) -> list[SessionId]:
        """Sessions that lost blocks or point state since the last call, in no order."""
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
