"""Walks: where prompts part from what is resident. Pure.

    session   |===== resident =====|-- gone --|          tip: the digest of all of it
    prompt    |===============================|++++++|   its digest there is the tip: what of the
                                                         session is resident need not be compared

A prompt whose digests say that it goes on from its session is followed from there on: what that
costs does not grow with the session. Any other one is compared from the root.

Owns the digests of turns that are here; the cache owns what is resident.
"""

from __future__ import annotations

import msgspec

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.node import Node, Stop
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.prefix import HashedPrefix, Packed
from ownerserve.node.vocabulary.events import Arrived


class _Prompt(msgspec.Struct, frozen=True):
    session_id: SessionId
    hashed: HashedPrefix
    blocks: int


class Walks:
    """Along the tree of one cache, for turns by id."""

    def __init__(self, cache: HeteroCache) -> None:
        self._cache = cache
        self._prompts: dict[TurnId, _Prompt] = {}

    def arrived(self, event: Arrived) -> None:
        """A turn is here. One whose prompt comes without digests of its own is compared."""
        session_id, hashed = event.session_id, event.hashed
        if session_id is not None and hashed is not None and hashed.is_of(event.tokens):
            blocks = len(event.tokens) // self._cache.tree.block_bytes
            self._prompts[event.turn_id] = _Prompt(session_id, hashed, blocks)

    def over(self, turn_id: TurnId) -> None:
        """The turn has ended or is gone; one that never came is no error."""
        self._prompts.pop(turn_id, None)

    def behind(self, turn_id: TurnId) -> Stop | None:
        """A place of the tree that the turn's prompt is known to reach; None: not beyond doubt."""
        prompt = self._prompts.get(turn_id)
        session = None if prompt is None else self._cache.sessions.get(prompt.session_id)
        if prompt is None or session is None or session.stop is None or session.tip is None:
            return None
        sealed = session.sealed
        if sealed > prompt.blocks or prompt.hashed.digests[sealed - 1] != session.tip:
            return None
        return session.stop

    def walk(self, turn_id: TurnId, tokens: Packed) -> tuple[Node, int]:
        """The place in the tree where the turn's `tokens` part from what is resident."""
        tree, stop = self._cache.tree, self.behind(turn_id)
        limit = len(tokens) // tree.block_bytes
        if stop is None:
            return tree.walk(tokens, limit)
        return tree.walk(tokens, limit, node=stop.node, depth=stop.depth)
