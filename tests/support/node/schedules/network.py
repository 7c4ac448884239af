"""The network between nodes: frames are lost, doubled, late and in another order until it heals.

SimLine   in place of `AsyncFramedClient`: the same calls, over this network; a node's or gateway's
SimPort   in place of `RpcServer`'s thread: its flights, deadlines and what it gives back
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    Accepted,
    AskLender,
    AskPrefix,
    AskSession,
    Cancel,
    Cancelled,
    DropTurn,
    EndPrefill,
    Prefill,
    Reject,
    RpcAnswer,
    RpcRequest,
    Said,
    TurnKept,
    decode_request,
    encode,
)
from ownerserve.node.rpc.server import ANSWER_S, NEVER_S, Flight, Flights, Joined

if TYPE_CHECKING:
    from tests.support.node.schedules.node import SimNode
    from tests.support.node.schedules.schedule import Schedule

FASTEST_S, HEALTHY_S = 0.0005, 0.002


class Network:
    """See the module. One of the schedule's."""

    def __init__(self, world: Schedule) -> None:
        self._world = world
        draw = world.draw
        self.loss = draw.choice((0.0, 0.0, 0.05, 0.2))
        self.doubling = draw.choice((0.0, 0.0, 0.2))
        self.slowest_s = draw.choice((0.002, 0.02, 0.4))

    def send(self, action: Callable[[], None]) -> None:
        """Deliver perhaps once, perhaps twice, perhaps never."""
        world, draw = self._world, self._world.draw
        if world.is_well:
            world.loop.call_later(HEALTHY_S, action)
            return
        if draw.random() < self.loss:
            world.counts["frames lost"] += 1
            return
        for _ in range(1 + (draw.random() < self.doubling)):
            world.loop.call_later(FASTEST_S + self.slowest_s * draw.random(), action)


class Asker(Protocol):
    """A process that asks."""

    is_dead: bool

    @property
    def world(self) -> Schedule: ...


class SimLine:
    """A line from a process to the port at an address. `key` is who asks."""

    def __init__(self, address: str, *, key: Asker, **_: Any) -> None:
        self._near, self._address = key, address
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[bytes | None]] = {}
        self._is_closed = False

    async def ask(self, data: bytes, *, within_s: float, repeat_s: float) -> bytes | None:
        answered: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        number, left_s = next(self._numbers), within_s
        self._waiting[number] = answered
        try:
            while left_s > 0 and not answered.done():
                self._send(number, data)
                await asyncio.wait((answered,), timeout=min(left_s, repeat_s))
                left_s -= repeat_s
        finally:
            self._waiting.pop(number, None)
        return answered.result() if answered.done() else None

    def tell(self, data: bytes) -> None:
        self._send(next(self._numbers), data)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        self._is_closed = True
        for answered in self._waiting.values():
            if not answered.done():
                answered.set_result(None)

    def _send(self, number: int, data: bytes) -> None:
        world = self._near.world
        if self._is_closed or self._near.is_dead:
            return

        def answer(said: bytes) -> None:
            world.network.send(lambda: self._answered(number, said))

        world.network.send(lambda: world.arrives(self._address, data, answer))

    def _answered(self, number: int, said: bytes) -> None:
        answered = self._waiting.pop(number, None)
        if answered is not None and not answered.done() and not self._near.is_dead:
            answered.set_result(said)


class SimPort:
    """A node's RPC port."""

    def __init__(self, node: SimNode) -> None:
        self._node = node
        self.flights = Flights()

    def arrives(self, data: bytes, answer: Callable[[bytes], None]) -> None:
        """Take a frame; it says what it answers, now or later."""
        envelope: list[Any] = [answer]
        request, nonce = decode_request(data)
        if isinstance(request, Cancel):
            self._cancel(request)
            self._send(envelope, Cancelled())
            return
        before = self.flights.again(nonce, envelope)
        if before is not None:
            if not isinstance(before, Joined):
                self._send(envelope, before)
            return
        future = self._asked(request)
        offers = isinstance(request, Prefill | AskPrefix | AskLender | AskSession)
        now_s = self._node.world.loop.time()
        until_s = now_s + ANSWER_S if offers else NEVER_S
        self.flights.begin(Flight(envelope, nonce, future, until_s))
        future.add_done_callback(lambda done: self._node.soon(lambda: self._finish(done)))
        if offers:
            self._node.world.loop.call_at(until_s + FASTEST_S, self._give_up)

    def _asked(self, request: RpcRequest) -> Future[RpcAnswer]:
        node = self._node
        match request:
            case AskLender():
                return node.service.ask(request)
            case AskPrefix():
                return node.between(lambda: node.lending.prefix(request))
            case Prefill():
                return node.between(lambda: node.prefills.accept(request, node.world.loop.time()))
            case EndPrefill():
                return node.between(lambda: node.prefills.answer(request))
            case _:
                return node.answer(request)

    def _cancel(self, asked: Cancel) -> None:
        match self.flights.call_off(asked.nonce):
            case Flight(future=future):
                future.cancel()
            case Accepted() | TurnKept() as given:
                self._give_back(given)

    def _give_back(self, given: Accepted | TurnKept) -> None:
        match given:
            case Accepted():
                self._asked(EndPrefill(given.turn_id))
            case TurnKept():
                self._asked(DropTurn(given.turn))

    def _finish(self, future: Future[RpcAnswer]) -> None:
        flight = self.flights.end(future)
        try:
            answer: Said = future.result(0)
        except (CancelledError, RuntimeError):
            answer = Reject(WorkerRefusal.ENGINE_BUSY)
        if flight is not None:
            self.flights.tell(flight.nonce, answer)
            self._send(flight.envelope, answer)
        elif not future.cancelled() and isinstance(answer, Accepted | TurnKept):
            self._give_back(answer)

    def _give_up(self) -> None:
        for flight in self.flights.overdue(self._node.world.loop.time()):
            flight.future.cancel()
            refused = Reject(WorkerRefusal.ENGINE_BUSY)
            self.flights.tell(flight.nonce, refused)
            self._send(flight.envelope, refused)

    def _send(self, envelope: list[Any], answer: Said) -> None:
        with suppress(InvalidInput):
            envelope[0](encode(answer))
