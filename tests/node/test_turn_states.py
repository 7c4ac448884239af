"""The state of a turn that is to come is brought while the turn runs on: once, and what it sealed
meanwhile once more. Peer and node are played; real ones: tests/engines/hf/test_turns_move.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from ownerserve.kv.ids import Incarnation, SessionId, TurnId, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.prefix import pack
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import AskTokens, Nonce, Reject, RpcRequest, Said, TokensAre
from ownerserve.node.transfers import turn_states
from ownerserve.node.transfers.turn_states import TurnStates
from ownerserve.node.vocabulary.events import (
    CameIn,
    PrefixCame,
    RestoreOutcome,
    SessionCame,
    SessionComing,
)
from tests.support.cache.cache_driver import DENSE, B, Driver

NAME = SessionId("s")
SOURCE = LenderAddress(RoutingUnit(WorkerId("w0"), 0, Incarnation(1)), "tcp://127.0.0.1:1")
BLOCK_BYTES = 100


class Peer:
    """It runs a turn of NAME, of which it has sealed so many blocks at each question; the last
    word it says again. 0: it knows of none; less: it is silent."""

    def __init__(self, *sealed: int) -> None:
        self.asked = 0
        self._sealed = sealed

    async def ask(
        self, peer: LenderAddress, request: RpcRequest, *, within_s: float, nonce: Nonce
    ) -> Said | None:
        assert peer == SOURCE and isinstance(request, AskTokens)
        at = min(self.asked, len(self._sealed) - 1)
        self.asked += 1
        if not self._sealed or self._sealed[at] < 0:
            return None
        blocks = self._sealed[at]
        if not blocks:
            return Reject(WorkerRefusal.UNKNOWN_SESSION)
        return TokensAre(pack(range(blocks * B)))


class Node:
    """It brings what it is told to, and says that it came; or `ends` so, or never."""

    def __init__(self, ends: RestoreOutcome | None) -> None:
        self.brought: list[int] = []
        self.given_up: list[TurnId] = []
        self._ends = ends

    def bring(self, coming: SessionComing, told: Callable[[CameIn], None]) -> None:
        assert coming.session_id == NAME and coming.lender == SOURCE
        blocks = len(coming.hashed.digests)
        before = self.brought[-1] if self.brought else 0
        self.brought.append(blocks)
        if self._ends is not None:
            told(CameIn(coming.turn_id, self._ends, (blocks - before) * BLOCK_BYTES))

    def give_up(self, turn_id: TurnId) -> None:
        self.given_up.append(turn_id)

    def came(self, event: SessionCame | PrefixCame) -> None:
        raise AssertionError("what comes ahead is nobody's")


def at_once(work: Callable[[], object]) -> Future[object]:
    done: Future[object] = Future()
    done.set_result(work())
    return done


class Ahead:
    """What a node brings of a turn of which its peer has sealed so many blocks at each question."""

    def __init__(self, *sealed: int, ends: RestoreOutcome | None = RestoreOutcome.LOADED) -> None:
        self.peer, self.node = Peer(*sealed), Node(ends)
        cache = Driver(DENSE, blocks=4).cache
        self.states = TurnStates(cache, node=self.node, on_engine=at_once)
        asyncio.run(self.states.bring(NAME, SOURCE, self.peer))

    @property
    def ended(self) -> str:
        (end,) = self.states.counts
        return end


def test_what_a_turn_seals_meanwhile_is_brought_once_more() -> None:
    ahead = Ahead(20, 23, 24)
    assert ahead.node.brought == [20, 23] and ahead.ended == "brought"
    assert ahead.states.moved_bytes == 23 * BLOCK_BYTES


def test_nothing_more_is_brought_of_a_turn_that_sealed_nothing_meanwhile() -> None:
    ahead = Ahead(20)
    assert ahead.node.brought == [20] and ahead.ended == "brought"


@pytest.mark.parametrize("grown", [20, 50])
def test_a_turn_that_grows_as_fast_as_it_is_copied_is_followed_no_further(grown: int) -> None:
    ahead = Ahead(20, 20 + grown)
    assert ahead.node.brought == [20] and ahead.ended == "outgrown"
    assert ahead.states.moved_bytes == 20 * BLOCK_BYTES


@pytest.mark.parametrize("then", [0, -1])
def test_what_had_come_was_brought_though_its_worker_says_no_more(then: int) -> None:
    """The turn may have ended meanwhile, or its worker is silent."""
    ahead = Ahead(20, then)
    assert ahead.node.brought == [20] and ahead.ended == "brought"


@pytest.mark.parametrize("sealed, end", [((), "no_answer"), ((0,), "unknown_session")])
def test_of_who_says_nothing_or_no_nothing_is_brought(sealed: tuple[int, ...], end: str) -> None:
    ahead = Ahead(*sealed)
    assert not ahead.node.brought and ahead.ended == end and ahead.peer.asked == 1


@pytest.mark.parametrize("end", [RestoreOutcome.NO_ROOM, RestoreOutcome.NOT_WORTH_IT])
def test_what_does_not_come_is_not_asked_for_again(end: RestoreOutcome) -> None:
    ahead = Ahead(20, 23, ends=end)
    assert ahead.node.brought == [20] and ahead.ended == end


def test_what_comes_too_late_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn is then stopped without it."""
    monkeypatch.setattr(turn_states, "AHEAD_S", 0.01)
    ahead = Ahead(20, ends=None)
    assert ahead.ended == RestoreOutcome.LATE and len(ahead.node.given_up) == 1
