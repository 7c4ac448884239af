"""A node takes a session over from a peer, without engines between them: scenarios. Real workers:
engines/hf/test_moves.py; seeded schedules: test_move_schedules.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

from ownerserve.cache.hetero import HeteroCache
from ownerserve.kv.ids import Incarnation, SessionId, WorkerId
from ownerserve.kv.messages import Epoch, RoutingUnit, Term
from ownerserve.kv.prefix import HashedPrefix, pack
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.rpc import (
    AskSession,
    Moved,
    RpcRequest,
    Said,
    SessionStands,
    SessionTaken,
    Take,
)
from ownerserve.node.ownership.ownership import Unowned
from ownerserve.node.transfers.moves import MovingEngine, Takes
from ownerserve.node.vocabulary.events import CameIn, RestoreOutcome, SessionComing
from tests.support.node.lending_nodes import AGENT, LAYOUT, B

HERE, THERE = (RoutingUnit(WorkerId(name), 0, Incarnation(1)) for name in ("t", "s"))
EPOCH = Epoch(Term(1, 1), 3)


class Target:
    """What `Takes` needs of a node that has all of the session: nothing has to come."""

    ownership = Unowned()

    def met(self, session_id: SessionId, hashed: HashedPrefix) -> None: ...
    def bring(self, coming: SessionComing, told: Callable[[CameIn], None]) -> None:
        told(CameIn(coming.turn_id, RestoreOutcome.RESIDENT))

    def came(self, event: object) -> None: ...


class Source:
    """A peer that owns the session, of which its version counts `version` turns."""

    def __init__(self, version: int) -> None:
        hashed = HashedPrefix(B)
        hashed.grow(pack(range(2 * B)))
        self._stands = SessionStands(version, 2 * B, hashed.tokens, hashed.digests[-1], EPOCH)

    async def ask(self, peer: LenderAddress, request: RpcRequest, **_: Any) -> Said | None:
        return self._stands if isinstance(request, AskSession) else Moved(EPOCH)


def at_once(work: Callable[[], object]) -> Future[object]:
    done: Future[object] = Future()
    done.set_result(work())
    return done


def test_a_session_of_which_only_guests_turns_were_served_is_installed_too() -> None:
    """Its owner counts none of them: the record has version 0, and the state is there."""
    cache, target = HeteroCache(LAYOUT, {"dense": 8, "swa": 8}, 2), Target()
    engine = cast(MovingEngine, target)
    takes = Takes(HERE, cache, engine, node=cast(Any, target), on_engine=at_once)
    wish = Take(AGENT, LenderAddress(THERE, "tcp://s:1"))
    taken = asyncio.run(takes.take(wish, Source(version=0)))
    assert isinstance(taken, SessionTaken) and taken.version == 0
    session = cache.sessions.get(AGENT)
    assert session is not None and (session.version, session.sealed) == (1, 2)
