"""A hot prefix gets a read-only replica: a node brings the beginning of a session from a peer
before a turn asks for it, and nobody's ownership changes.

    gateway ── TakePrefix ──> T ── AskTokens ──> S      which they are; whoever owns the session
                              T <══ lends, reads ══ S   landed on T's device, verified; S serves on
    gateway <── PrefixTaken   T                         told as resident, by the session's name

What came is soft state: it goes before all else, is put away nowhere and is no last copy of
anybody's. T has a record of the session, as of one that went elsewhere, while any of it is there:
by its name T lends it on, and tells what of it went. Where turns of the session were served here
its record stays as they left it.

| T | leaves by | holds |
|---|---|---|
| asking | which tokens they are; none, silence | nothing |
| bringing | as much is here; it did not come, or computing it is as good; called off | slots |
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import cast

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.outcomes import Install
from ownerserve.cache.sessions import restorable_tokens
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.prefix import HashedPrefix
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    NO_NONCE,
    AskTokens,
    PrefixTaken,
    Reject,
    RpcAnswer,
    TakePrefix,
    TokensAre,
)
from ownerserve.node.restore.coming import ANY_TOKEN
from ownerserve.node.transfers.lenders import OnEngine
from ownerserve.node.transfers.lending import tokens_to_lend
from ownerserve.node.transfers.state_brings import (
    ANSWER_S,
    TOKENS_MAX_BYTES,
    AskedPeer,
    BringingNode,
    StateBrings,
)
from ownerserve.node.vocabulary.events import PrefixCame, RestoreOutcome

BROUGHT = frozenset({RestoreOutcome.LOADED, RestoreOutcome.RESIDENT})
"""What a replica is made of: all that was asked for is here."""


class PrefixTakes:
    """`PrefixTakes` bring replicas for one node, and tell peers which tokens are here; `take` is
    called on the service's thread. `counts` says what came of them: metric labels."""

    def __init__(
        self, unit: RoutingUnit, cache: HeteroCache, *, node: BringingNode, on_engine: OnEngine
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.moved_bytes = 0
        """Bytes of what came."""
        self._unit = unit
        self._cache = cache
        self._node = node
        self._on_engine = on_engine
        self._brings = StateBrings(node, on_engine, kind="replica")
        self._under_way: set[SessionId] = set()

    def tokens_here(self, asked: AskTokens) -> TokensAre | Reject:
        """Tell which of the session's first tokens are on the device, in whole blocks; on the
        engine's thread."""
        layout = self._cache.layout
        most = asked.tokens // layout.block_tokens * layout.packed_block_bytes
        tokens = tokens_to_lend(self._cache, asked.session_id)[:most]
        if not tokens:
            return Reject(WorkerRefusal.UNKNOWN_SESSION)
        if len(tokens) > TOKENS_MAX_BYTES:
            return Reject(WorkerRefusal.TOO_LONG)
        return TokensAre(tokens)

    async def take(self, asked: TakePrefix, peer: AskedPeer) -> RpcAnswer:
        """Bring the replica, or say why there is none."""
        if asked.source.unit == self._unit:
            return self._over(Reject(WorkerRefusal.WRONG_TARGET))
        if asked.session_id in self._under_way:
            return self._over(Reject(WorkerRefusal.SESSION_IS_MOVING))
        self._under_way.add(asked.session_id)
        try:
            return self._over(await self._taken(asked, peer))
        except RuntimeError:  # the engine has ended
            return Reject(WorkerRefusal.ENGINE_DEAD)
        finally:
            self._under_way.discard(asked.session_id)

    def _over(self, said: PrefixTaken | Reject) -> RpcAnswer:
        if isinstance(said, PrefixTaken):
            self.moved_bytes += said.moved_bytes
        self.counts["taken" if isinstance(said, PrefixTaken) else said.reason.value] += 1
        return said

    async def _taken(self, asked: TakePrefix, peer: AskedPeer) -> PrefixTaken | Reject:
        question = AskTokens(asked.session_id, asked.tokens)
        said = await peer.ask(asked.source, question, within_s=ANSWER_S, nonce=NO_NONCE)
        if isinstance(said, Reject):
            return said
        if not isinstance(said, TokensAre):
            return Reject(WorkerRefusal.NO_ANSWER)
        hashed = HashedPrefix(self._cache.layout.block_tokens)
        hashed.grow(said.tokens)
        if not hashed.digests:
            return Reject(WorkerRefusal.NOT_BROUGHT)
        came = await self._brings.bring(asked.session_id, hashed, asked.source)
        if came.outcome not in BROUGHT:
            return Reject(WorkerRefusal.NOT_BROUGHT)
        told = self._on_engine(lambda: self._tell(asked.session_id, hashed))
        tokens = cast("int", await asyncio.wrap_future(told))
        if not tokens:
            return Reject(WorkerRefusal.NOT_BROUGHT)
        return PrefixTaken(tokens, came.loaded_bytes)

    def _tell(self, session_id: SessionId, hashed: HashedPrefix) -> int:
        """Have the replica told of, on the engine's thread, unless turns of the session were served
        here: then its record stays as they left it, and what came is cached state alone. Return how
        many of the session's tokens a turn could go on from."""
        sessions, layout = self._cache.sessions, self._cache.layout
        known = sessions.get(session_id)
        is_served_here = known is not None and (known.version > 0 or known.running > 0)
        is_further = known is not None and known.depth >= len(hashed.digests)
        if not is_served_here and not is_further:
            there = Install(session_id, 1, hashed.tokens, b"", hashed.digests[-1])
            if self._cache.install(there, time.monotonic()) is None:
                sessions.let_go(session_id)  # it goes on elsewhere
                self._node.came(PrefixCame(session_id, hashed))
        points = self._cache.match(hashed.tokens + ANY_TOKEN).points
        here = max((point.position for point in points if not point.lacks), default=0)
        return max(here, restorable_tokens(sessions.get(session_id), layout))
