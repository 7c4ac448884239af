"""State of sessions is brought here from the peer that has it, in the room that a turn would take:
for sessions that move (moves.py), and replicas of prefixes (replicas.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.prefix import HashedPrefix
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.rpc import MAX_FRAME_BYTES, Nonce, RpcRequest, Said
from ownerserve.node.transfers.lenders import OnEngine
from ownerserve.node.vocabulary.events import CameIn, PrefixCame, SessionCame, SessionComing

ANSWER_S = 2.0
"""So long a peer may take to say where a session stands, and to hand it over."""
TOKENS_MAX_BYTES = MAX_FRAME_BYTES - 4096
"""Longer than a frame may be, with what else it says."""


class AskedPeer(Protocol):
    """An `AskedPeer` is asked over its RPC port (target_side.py)."""

    async def ask(
        self, peer: LenderAddress, request: RpcRequest, *, within_s: float, nonce: Nonce
    ) -> Said | None:
        """Return its answer; None: none in time."""
        ...


class BringingNode(Protocol):
    """A `BringingNode` brings state for turns that nobody runs, and takes in whose it is; called on
    the engine's thread."""

    def bring(self, coming: SessionComing, told: Callable[[CameIn], None]) -> None:
        """Begin to bring it; `told` hears once how that ended, unless it is given up."""
        ...

    def give_up(self, turn_id: TurnId) -> None:
        """Bring it no more; one that came is no error."""
        ...

    def came(self, event: SessionCame | PrefixCame) -> None:
        """Take in that the session is idle here, or that a replica of its beginning is."""
        ...


class StateBrings:
    """`StateBrings` bring state for one node; calls are made on the service's thread. `kind` begins
    the ids of the turns that stand for what is brought."""

    def __init__(self, node: BringingNode, on_engine: OnEngine, *, kind: str) -> None:
        self._node = node
        self._on_engine = on_engine
        self._kind = kind
        self._begun = 0

    async def bring(
        self, session_id: SessionId, hashed: HashedPrefix, lender: LenderAddress
    ) -> CameIn:
        """Bring what `hashed` names of the session, and return how that ended. Cancelled, it is
        given up."""
        loop = asyncio.get_running_loop()
        came: asyncio.Future[CameIn] = loop.create_future()
        self._begun += 1
        turn_id = TurnId(f"{self._kind}-{self._begun}")
        coming = SessionComing(turn_id, session_id, hashed.copy(), lender)

        def told(end: CameIn) -> None:
            loop.call_soon_threadsafe(_settle, came, end)

        begun = self._on_engine(lambda: self._node.bring(coming, told))
        try:
            await asyncio.wrap_future(begun)
            return await came
        except asyncio.CancelledError:
            self._on_engine(lambda: self._node.give_up(turn_id))
            raise


def _settle(came: asyncio.Future[CameIn], end: CameIn) -> None:
    if not came.done():
        came.set_result(end)
