"""The state of a turn that moves amid its answer comes before the turn does: what it has sealed is
brought while its worker writes on, so that its client waits for the rest alone.

    T ── AskTokens ──> S        which tokens the turn has sealed by now: prompt and answer
    T <══ lends, reads ══ S     as of a replica (replicas.py), into room that a turn would take here
    T ── AskTokens ──> S        and what it has sealed meanwhile, once more, unless that is no less
    T <══ lends, reads ══ S     than was brought: it grows as fast as it is copied
    T ── StopTurn ──> S         turn_moves.py; what is missing then comes with the turn's leg

What came is cache without a name: it goes before all else, and a turn of T's that needs the room
has it. Nothing here can keep a turn from moving: where nothing comes, or too late, all of it comes
with the leg, or is computed there, by T's prices.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from ownerserve.cache.hetero import HeteroCache
from ownerserve.kv.ids import SessionId
from ownerserve.kv.prefix import TOKEN_BYTES, HashedPrefix
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.rpc import NO_NONCE, AskTokens, Reject, TokensAre
from ownerserve.node.transfers.lenders import OnEngine
from ownerserve.node.transfers.replicas import BROUGHT
from ownerserve.node.transfers.state_brings import (
    ANSWER_S,
    TOKENS_MAX_BYTES,
    AskedPeer,
    BringingNode,
    StateBrings,
)
from ownerserve.node.vocabulary.events import RestoreOutcome

ROUNDS = 2
"""What is sealed as the move is ordered, and the difference once more."""
AHEAD_S = 10.0
"""So long the turn waits for its state, at most, before it is stopped without the rest."""
ALL_TOKENS = TOKENS_MAX_BYTES // TOKEN_BYTES


class TurnStates:
    """`TurnStates` bring state ahead for one node; `bring` is called on the service's thread.
    `counts` says what came of it: metric labels."""

    def __init__(self, cache: HeteroCache, *, node: BringingNode, on_engine: OnEngine) -> None:
        self.counts: Counter[str] = Counter()
        self.moved_bytes = 0
        """Bytes of what came."""
        self._block = cache.layout.block_tokens
        self._brings = StateBrings(node, on_engine, kind="ahead")

    async def bring(self, session_id: SessionId, source: LenderAddress, peer: AskedPeer) -> None:
        """Bring what turns of the session that run at `source` have sealed, as far as it comes in
        time. Raises RuntimeError once this node's engine has ended."""
        try:
            async with asyncio.timeout(AHEAD_S):
                end = await self._brought(session_id, source, peer)
        except TimeoutError:
            end = RestoreOutcome.LATE
        self.counts[end] += 1

    async def _brought(self, session_id: SessionId, source: LenderAddress, peer: AskedPeer) -> str:
        """Bring it, and return how that ended."""
        question = AskTokens(session_id, ALL_TOKENS)
        here = added = 0
        for _ in range(ROUNDS):
            said = await peer.ask(source, question, within_s=ANSWER_S, nonce=NO_NONCE)
            if not isinstance(said, TokensAre):
                if here:
                    break  # what had come by then is here
                return str(said.reason) if isinstance(said, Reject) else "no_answer"
            hashed = HashedPrefix(self._block)
            hashed.grow(said.tokens)
            grown = len(hashed.digests) - here
            if grown <= 0:
                break
            if here and grown >= added:
                return "outgrown"
            came = await self._brings.bring(session_id, hashed, source)
            self.moved_bytes += came.loaded_bytes
            if came.outcome not in BROUGHT and not here:
                return str(came.outcome)
            here, added = len(hashed.digests), grown
        return "brought"
