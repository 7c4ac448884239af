"""A turn that moves amid its answer, over its two sides alone: exactly one of them goes on with it,
whatever is lost on the way. Engines are played; real ones: tests/engines/hf/test_turns_move.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import Incarnation, SessionId, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.framed import FramedClient
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    Cancel,
    Cancelled,
    DropTurn,
    MoveTurn,
    Nonce,
    Reject,
    RpcAnswer,
    RpcRequest,
    Said,
    StopTurn,
    Take,
    TurnKept,
    TurnSent,
    decode_answer,
    encode,
)
from ownerserve.node.rpc.server import RpcServer
from ownerserve.node.transfers import turn_moves
from ownerserve.node.transfers.turn_moves import ComingTurns, LeavingTurns, StoppedTurn
from tests.support.waits import WAIT_S, until_async

SOURCE = LenderAddress(RoutingUnit(WorkerId("w0"), 0, Incarnation(1)), "tcp://127.0.0.1:1")
TARGET = LenderAddress(RoutingUnit(WorkerId("w1"), 0, Incarnation(2)), "tcp://127.0.0.1:2")
TURN = "turn"
TAKE = Take(SessionId("s"), SOURCE, TURN, TARGET)
MOVED = MoveTurn(TURN, 7, b"state")


class Engine:
    """It stops one turn, after 7 tokens; `did` is what became of it."""

    def __init__(self, stops: WorkerRefusal | None = None) -> None:
        self.did: list[str] = []
        self._stops = stops

    def stop(self, turn: str) -> StoppedTurn | WorkerRefusal:
        self.did.append("stop")
        return self._stops or StoppedTurn(turn, 7, b"state")

    def go_on(self, stopped: StoppedTurn) -> None:
        self.did.append("go_on")

    def moved(self, stopped: StoppedTurn) -> None:
        self.did.append("moved")


def at_once(work: Callable[[], object]) -> Future[object]:
    done: Future[object] = Future()
    done.set_result(work())
    return done


class States:
    """It brings nothing, and knows what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[SessionId, LenderAddress]] = []
        self.has_ended = False

    async def bring(self, session_id: SessionId, source: LenderAddress, peer: object, /) -> None:
        if self.has_ended:
            raise RuntimeError("the engine has ended")
        self.asked.append((session_id, source))


class Sides:
    """Both sides, and what passes between them; `lost`: what of it does not arrive, or whose answer
    does not."""

    def __init__(self, *, stops: WorkerRefusal | None = None) -> None:
        self.engine = Engine(stops)
        self.leaving = LeavingTurns(self.engine, at_once)
        self.states = States()
        self.coming = ComingTurns(
            lambda state: None if state else WorkerRefusal.MALFORMED, self.states
        )
        self.lost: set[str] = set()
        self.called_off: list[Nonce] = []
        self.meanwhile: Callable[[], object] = lambda: None

    async def ask(
        self, peer: LenderAddress, request: RpcRequest, *, within_s: float, nonce: Nonce
    ) -> Said | None:
        name = type(request).__name__
        assert peer == (SOURCE if isinstance(request, StopTurn) else TARGET)
        if name in self.lost:
            return None
        said: RpcAnswer = (
            await self.leaving.send(request, self)
            if isinstance(request, StopTurn)
            else self.coming.keep(request)  # type: ignore[arg-type]
        )
        self.meanwhile()
        return None if f"{name} answer" in self.lost else said

    def call_off(self, worker: LenderAddress, nonce: Nonce) -> None:
        self.called_off.append(nonce)
        if "Cancel" not in self.lost:
            self.coming.drop(DropTurn(TURN))

    def take(self) -> RpcAnswer:
        return asyncio.run(self.coming.take(TAKE, self))


def test_a_turn_that_was_sent_goes_on_at_its_target_once_its_leg_comes() -> None:
    sides = Sides()
    assert sides.take() == TurnSent()
    assert sides.engine.did == ["stop", "moved"] and not sides.called_off
    assert sides.coming.claim(TURN, 6) is None, "its client has another part of the answer"
    assert sides.coming.claim("other", 7) is None
    kept = sides.coming.claim(TURN, 7)
    assert kept is not None and (kept.state, kept.source) == (b"state", SOURCE)
    assert sides.coming.claim(TURN, 7) is None, "once"
    assert (sides.leaving.counts["moved"], sides.coming.counts["went_on"]) == (1, 1)


def test_its_state_is_brought_before_it_is_stopped() -> None:
    sides = Sides()
    before: list[str] = []

    class Noting(States):
        async def bring(self, session_id: SessionId, source: LenderAddress, peer: object) -> None:
            before.extend(sides.engine.did)
            await super().bring(session_id, source, peer)

    sides.coming = ComingTurns(lambda _: None, states := Noting())
    assert sides.take() == TurnSent()
    assert states.asked == [(SessionId("s"), SOURCE)] and not before
    assert sides.engine.did == ["stop", "moved"]


def test_a_turn_without_a_name_is_sent_at_once() -> None:
    """Nobody can ask for state that has none."""
    sides = Sides()
    unnamed = Take(SessionId(""), SOURCE, TURN, TARGET)
    assert asyncio.run(sides.coming.take(unnamed, sides)) == TurnSent()
    assert not sides.states.asked


def test_a_target_whose_engine_has_ended_stops_no_turn() -> None:
    sides = Sides()
    sides.states.has_ended = True
    assert sides.take() == Reject(WorkerRefusal.ENGINE_DEAD)
    assert not sides.engine.did
    assert sides.coming.keep(MOVED) == Reject(WorkerRefusal.UNKNOWN_TURN)


@pytest.mark.parametrize(
    "reason", [WorkerRefusal.UNKNOWN_TURN, WorkerRefusal.NOT_DECODING, WorkerRefusal.NOT_MOVABLE]
)
def test_a_turn_that_can_not_be_stopped_stays(reason: WorkerRefusal) -> None:
    sides = Sides(stops=reason)
    assert sides.take() == Reject(reason)
    assert sides.engine.did == ["stop"] and not len(sides.coming)


def test_a_turn_that_its_target_can_not_read_goes_on() -> None:
    sides = Sides()
    sides.coming = ComingTurns(lambda _: WorkerRefusal.TOO_LONG, States())
    assert sides.take() == Reject(WorkerRefusal.TOO_LONG)
    assert sides.engine.did == ["stop", "go_on"] and not len(sides.coming)


def test_a_turn_that_is_too_long_for_a_frame_goes_on() -> None:
    sides = Sides()

    async def too_long(*_: Any, **__: Any) -> Said | None:
        raise InvalidInput("rpc", "too long", "less")

    sides.ask = too_long  # type: ignore[method-assign]
    said = asyncio.run(sides.leaving.send(StopTurn(TURN, TARGET), sides))
    assert said == Reject(WorkerRefusal.TOO_LONG)
    assert sides.engine.did == ["stop", "go_on"]


@pytest.mark.parametrize("lost", ["MoveTurn", "MoveTurn answer"])
@pytest.mark.parametrize("cancel", ["arrives", "is lost too"])
def test_who_hears_nothing_calls_it_off_and_goes_on(lost: str, cancel: str) -> None:
    """Also where the target has it, and is silent: it starts for nobody but the turn's leg, which
    only the source's last word brings."""
    sides = Sides()
    sides.lost = {lost, *(["Cancel"] if cancel == "is lost too" else [])}
    said = asyncio.run(ask_past(sides))
    assert said == Reject(WorkerRefusal.NO_ANSWER)
    assert sides.engine.did == ["stop", "go_on"] and len(sides.called_off) == 1
    is_kept = lost == "MoveTurn answer" and cancel == "is lost too"
    assert len(sides.coming) == is_kept


async def ask_past(sides: Sides) -> RpcAnswer:
    """What the source says to a StopTurn of a target that expects the turn."""
    held: asyncio.Future[Said | None] = asyncio.get_running_loop().create_future()

    class Silent(Sides):
        async def ask(self, *_: Any, **__: Any) -> Said | None:
            return await held

    silent = Silent()
    taking = asyncio.create_task(sides.coming.take(TAKE, silent))
    await asyncio.sleep(0)
    said = await sides.leaving.send(StopTurn(TURN, TARGET), sides)
    held.set_result(said)
    await taking
    return said


def test_a_target_that_has_the_turn_says_so_though_it_hears_no_more_of_its_source() -> None:
    sides = Sides()
    sides.lost = {"StopTurn answer"}
    assert sides.take() == TurnSent()
    assert sides.engine.did == ["stop", "moved"]
    assert sides.coming.claim(TURN, 7) is not None


def test_what_was_not_asked_for_or_not_any_more_is_refused() -> None:
    sides = Sides()
    assert sides.coming.keep(MOVED) == Reject(WorkerRefusal.UNKNOWN_TURN)
    sides.lost = {"StopTurn"}
    assert sides.take() == Reject(WorkerRefusal.NO_ANSWER)
    assert sides.coming.keep(MOVED) == Reject(WorkerRefusal.UNKNOWN_TURN)


def test_an_order_that_is_called_off_leaves_the_turn_where_it_is() -> None:
    """Its gateway has gone: what is sent from then on is refused, and goes on."""
    sides = Sides()

    async def play() -> RpcAnswer:
        answered = asyncio.Event()

        class Late(Sides):
            async def ask(self, *_: Any, **__: Any) -> Said | None:
                await answered.wait()
                return None

        taking = asyncio.create_task(sides.coming.take(TAKE, Late()))
        await asyncio.sleep(0)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        return await sides.leaving.send(StopTurn(TURN, TARGET), sides)

    assert asyncio.run(play()) == Reject(WorkerRefusal.UNKNOWN_TURN)
    assert sides.engine.did == ["stop", "go_on"] and not len(sides.coming)


def test_a_turn_that_is_being_sent_is_sent_though_nobody_waits_for_it() -> None:
    sides = Sides()

    async def play() -> None:
        sending = asyncio.create_task(sides.leaving.send(StopTurn(TURN, TARGET), sides))
        await asyncio.sleep(0)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await asyncio.sleep(0.01)

    asyncio.run(play())
    assert sides.engine.did == ["stop", "go_on"], "the target does not expect it"


def test_a_turn_is_taken_by_one_order_at_a_time() -> None:
    sides = Sides()
    assert sides.take() == TurnSent()
    assert sides.take() == Reject(WorkerRefusal.SESSION_IS_MOVING)


def test_a_turn_whose_leg_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = Sides()
    assert sides.take() == TurnSent()
    sides.coming.poll()
    assert len(sides.coming) == 1
    now = turn_moves.time.monotonic()
    later_s = now + turn_moves.UNCLAIMED_S + 1.0
    monkeypatch.setattr(turn_moves.time, "monotonic", lambda: later_s)
    sides.coming.poll()
    assert len(sides.coming) == 0 and sides.coming.counts["unclaimed"] == 1


def test_a_target_keeps_so_many_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_moves, "KEPT_MAX", 0)
    assert Sides().take() == Reject(WorkerRefusal.QUEUE_FULL)


def test_what_is_kept_goes_with_the_wish_that_brought_it() -> None:
    """Over the RPC port: a Cancel is answered at once, and undoes what was answered before it."""
    coming = ComingTurns(lambda _: None, States())
    held = asyncio.Event()

    class Waiting(Sides):
        async def ask(self, *_: Any, **__: Any) -> Said | None:
            await held.wait()
            return None

    def answer(request: RpcRequest) -> Future[RpcAnswer]:
        if isinstance(request, MoveTurn):
            return at_once(lambda: coming.keep(request))  # type: ignore[return-value]
        assert request == DropTurn(TURN)
        return at_once(lambda: coming.drop(request))  # type: ignore[return-value]

    async def play() -> None:
        taking = asyncio.create_task(coming.take(TAKE, Waiting()))
        await asyncio.sleep(0)
        server = RpcServer()
        server.start(answer)
        client = FramedClient(server.address, timeout_s=WAIT_S, key=None, read_bytes_max=1 << 20)
        try:
            nonce = Nonce(77)
            asked = (encode(MOVED, nonce), encode(MOVED, nonce), encode(Cancel(nonce)))
            said = [decode_answer(await asyncio.to_thread(client.ask, one)) for one in asked]
            assert said == [TurnKept(TURN), TurnKept(TURN), Cancelled()]
            await until_async(lambda: not len(coming))
            late = decode_answer(await asyncio.to_thread(client.ask, encode(MOVED, nonce)))
            assert late == Cancelled()
        finally:
            client.close()
            server.stop()
        held.set()
        assert await taking == Reject(WorkerRefusal.NO_ANSWER)

    asyncio.run(play())
    assert coming.counts["called_off"] == 1


def test_a_take_without_a_way_back_is_refused() -> None:
    sides = Sides()
    asked = Take(SessionId("s"), SOURCE, TURN)
    assert asyncio.run(sides.coming.take(asked, sides)) == Reject(WorkerRefusal.MALFORMED)
