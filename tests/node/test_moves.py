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
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    AskSession,
    Moved,
    Reject,
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
    """What `Takes` needs of a node; it has all of the session: nothing has to come."""

    ownership = Unowned()

    def __init__(self, outcome: RestoreOutcome = RestoreOutcome.RESIDENT) -> None:
        self._outcome = outcome

    def met(self, session_id: SessionId, hashed: HashedPrefix) -> None: ...
    def bring(self, coming: SessionComing, told: Callable[[CameIn], None]) -> None:
        told(CameIn(coming.turn_id, self._outcome))

    def came(self, event: object) -> None: ...


class Source:
    """A peer that owns the session, of which its version counts `version` turns."""

    def __init__(self, version: int) -> None:
        hashed = HashedPrefix(B)
        hashed.grow(pack(range(2 * B)))
        tokens, tip = hashed.tokens, hashed.digests[-1]
        self._stands = SessionStands(version, 2 * B, tokens, tip, EPOCH, 2 * B)

    async def ask(self, peer: LenderAddress, request: RpcRequest, **_: Any) -> Said | None:
        return self._stands if isinstance(request, AskSession) else Moved(EPOCH)


def at_once(work: Callable[[], object]) -> Future[object]:
    done: Future[object] = Future()
    done.set_result(work())
    return done


def empty() -> HeteroCache:
    return HeteroCache(LAYOUT, {"dense": 8, "swa": 8}, 2)


def take(cache: HeteroCache, target: Target, source: Source, **asked: bool) -> object:
    engine = cast(MovingEngine, target)
    takes = Takes(HERE, cache, engine, node=cast(Any, target), on_engine=at_once)
    return asyncio.run(takes.take(Take(AGENT, LenderAddress(THERE, "tcp://s:1"), **asked), source))


def test_a_session_of_which_only_guests_turns_were_served_is_installed_too() -> None:
    """Its owner counts none of them: the record has version 0, and the state is there."""
    cache = empty()
    taken = take(cache, Target(), Source(version=0))
    assert isinstance(taken, SessionTaken) and taken.version == 0
    session = cache.sessions.get(AGENT)
    assert session is not None and (session.version, session.sealed) == (1, 2)


def test_a_session_that_need_not_go_stays_where_its_state_would_not_come() -> None:
    """One that was to relieve a busy worker went without its state, and was computed anew."""
    dear = Target(RestoreOutcome.NOT_WORTH_IT)
    stays = take(empty(), dear, Source(version=3), with_state=True)
    assert stays == Reject(WorkerRefusal.NOT_BROUGHT)
    taken = take(empty(), dear, Source(version=3))
    assert isinstance(taken, SessionTaken) and taken.version == 3
