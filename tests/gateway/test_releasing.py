"""A gateway asks an owner to hand a session over where its turn was done: over sockets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from ownerserve.gateway.workers import rpc
from ownerserve.kv.ids import Incarnation, SessionId, WorkerId
from ownerserve.kv.messages import Epoch, RoutingUnit, Term
from ownerserve.kv.wire.headers import TURN_HEADER, TurnLine, decode_turn_line
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    Cancel,
    Cancelled,
    Reject,
    Released,
    ReleaseSession,
    RpcAnswer,
    RpcRequest,
    decode_request,
    encode,
)
from ownerserve.kv.wire.status import (
    LoadStatement,
    ProfileStatement,
    WorkerStatus,
    unit_statement,
)
from tests.support.gateway.world import Play, World
from tests.support.router.answer_lines import LIFE, said
from tests.support.waits import until_async

EPOCH = Epoch(Term(3, 77), 5)


class Node:
    """A worker's RPC port. `says`: its answer to a ReleaseSession; None: silence."""

    def __init__(self, says: RpcAnswer | None) -> None:
        self.asked: list[RpcRequest] = []
        """To hand a session over, or to end it."""
        self.let_go: list[SessionId] = []
        self.says = says
        self._nonces: set[int] = set()
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        while True:
            *envelope, data = await self._socket.recv_multipart()
            request, nonce = decode_request(data)
            if isinstance(request, Cancel):
                await self._socket.send_multipart([*envelope, encode(Cancelled())])
            elif isinstance(request, ReleaseSession):
                if request.epoch is None:
                    self.let_go.append(request.session_id)
                elif nonce not in self._nonces:  # else it is said again
                    self.asked.append(request)
                self._nonces.add(nonce)
                if self.says is not None:
                    await self._socket.send_multipart([*envelope, encode(self.says)])
            else:  # it holds no places
                no_places = encode(Reject(WorkerRefusal.UNKNOWN_RESERVATION))
                await self._socket.send_multipart([*envelope, no_places])

    def close(self) -> None:
        self._reader.cancel()
        self._socket.close()


def record(number: int, rpc: str | None) -> bytes:
    """What worker `number` states."""
    said = WorkerStatus(
        unit=unit_statement(own_unit(number)),
        load=LoadStatement(as_of_s=1.0),
        profile=ProfileStatement(models=("m",), rpc=rpc, owns_sessions=True),
    )
    return msgspec.json.encode(said)


def own_unit(number: int) -> RoutingUnit:
    """Worker `number` as the directory and its peers know it."""
    return RoutingUnit(WorkerId(f"w{number}"), 0, Incarnation(LIFE + number))


def stamp(number: int, **more: object) -> dict[str, str]:
    """What worker `number` says beside its answer."""
    return said(LIFE + number, **more)


OWNED = {"owner": ["w0", 0, LIFE], "epoch": [[3, 77], 5]}
"""The session is worker 0's."""


def line_of(head: bytes) -> TurnLine:
    lines = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:] if line)
    return decode_turn_line(lines[TURN_HEADER])


OUTCOMES = {
    "released": (Released(), 1),
    "session_is_running": (Reject(WorkerRefusal.SESSION_IS_RUNNING), 2),
    "not_owner": (Reject(WorkerRefusal.NOT_OWNER), 1),
    "no_answer": (None, 2),
}


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_the_owner_is_asked_and_its_word_is_followed(
    play: Play, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    says, times = OUTCOMES[outcome]
    monkeypatch.setattr(rpc, "RELEASE_S", 0.3)

    async def scenario(world: World) -> None:
        gateway, (owner, guest) = world.gateway, world.engines
        node = Node(says)
        owner.states, guest.states = record(0, node.address), record(1, None)
        name_here = WorkerId(f"127.0.0.1:{owner.port}")
        await until_async(lambda: gateway.turns.lines.of(name_here))
        owner.says = stamp(0, **OWNED, version=4)
        guest.says = stamp(1)
        client = await world.client()

        async def turn() -> Any:
            return world.engine_of(await client.post("/v1/completions", x__session__id="a"))

        assert await turn() is owner
        told = line_of(owner.seen[-1][0])
        assert (told.epoch, told.version) == (None, None)
        for number in range(2):
            assert await turn() is guest  # round robin
            told = line_of(guest.seen[-1][0])
            assert (told.epoch, told.version) == (
                (EPOCH, 4) if number == 0 or times == 2 else (EPOCH, None)
            )
            assert isinstance(told.name, str)
            wanted = ReleaseSession(SessionId(told.name), EPOCH, own_unit(1))
            heard = min(number + 1, times)
            await until_async(lambda heard=heard: gateway.turns.releasing.counts[outcome] >= heard)
            owner.says = stamp(0)  # from now on it serves as a guest
            if number == 0:
                assert node.asked == [wanted]
                assert await turn() is owner
        assert node.asked == [wanted] * times
        assert set(node.let_go) == {wanted.session_id}, "when the guest began to answer"
        counts = dict(gateway.turns.releasing.counts)
        counts.pop("let_go", None)
        assert counts == {outcome: times}
        node.close()

    play(
        scenario,
        policy="round_robin",
        states=[record(0, None), record(1, None)],
        health_interval_s=0.05,
    )


def test_a_guest_says_who_owns_and_the_session_goes_back_there(play: Play) -> None:
    """Another gateway moved it. Nobody is asked to release what the gateway just did not know."""

    async def scenario(world: World) -> None:
        gateway = world.gateway
        first, second = world.engines
        first.says, second.says = stamp(0), stamp(1)
        client = await world.client()

        async def turn() -> Any:
            return world.engine_of(await client.post("/v1/completions", x__session__id="a"))

        here = await turn()
        assert await turn() is here
        there = second if here is first else first
        number = world.engines.index(there)
        owner = {"owner": list(msgspec.structs.astuple(own_unit(number))), "epoch": [[3, 77], 6]}
        here.says = stamp(world.engines.index(here), **owner)
        assert await turn() is here
        assert await turn() is there
        assert line_of(there.seen[-1][0]).epoch == Epoch(Term(3, 77), 6)
        assert not gateway.turns.releasing.counts

    play(
        scenario,
        policy="sticky",
        states=[record(0, None), record(1, None)],
        health_interval_s=0.05,
    )


def test_a_guest_that_names_who_had_the_session_keeps_it(play: Play) -> None:
    """The gateway sent it there itself, and hears only now under which epoch it left: no news."""

    async def scenario(world: World) -> None:
        gateway, engines = world.gateway, world.engines
        node = Node(Released())
        for number, engine in enumerate(engines):
            engine.states, engine.says = record(number, node.address), stamp(number)
        names = [WorkerId(f"127.0.0.1:{engine.port}") for engine in engines]
        await until_async(lambda: all(gateway.turns.lines.of(name) for name in names))
        client = await world.client()

        async def turn() -> Any:
            answer = await client.post("/v1/chat/completions", x__session__id="a")
            return world.engine_of(answer)

        owner = await turn()
        (guest,) = [engine for engine in engines if engine is not owner]
        here, there = engines.index(owner), engines.index(guest)
        owner.refuses = 503, "no_room"
        owned = {"owner": list(msgspec.structs.astuple(own_unit(here))), "epoch": OWNED["epoch"]}
        guest.says = stamp(there, **owned, version=4)
        assert await turn() is guest
        owner.refuses = None
        await until_async(lambda: gateway.turns.releasing.counts["released"])
        told = line_of(guest.seen[-1][0]).name
        assert told is not None
        assert node.asked == [ReleaseSession(SessionId(told), EPOCH, own_unit(there))]
        assert await turn() is guest, "its newest turn was answered there"
        assert gateway.turns.observer.owner_changes.counts == {"answered": 1}
        node.close()

    play(
        scenario,
        policy="sticky",
        states=[record(0, None), record(1, None)],
        health_interval_s=0.05,
    )


def test_an_owner_that_cannot_be_asked_costs_nobody_a_turn(play: Play) -> None:
    async def scenario(world: World) -> None:
        owner, guest = world.engines
        owner.says, guest.says = stamp(0, **OWNED, version=4), stamp(1)
        client = await world.client()
        for _ in range(4):
            answer = await client.post("/v1/completions", x__session__id="a")
            assert answer.status == 200
        await until_async(lambda: world.gateway.turns.releasing.counts["unreachable"] == 2)
        assert json.loads(answer.body)

    play(
        scenario,
        policy="round_robin",
        states=[record(0, None), record(1, None)],
        health_interval_s=0.05,
    )


def test_the_owner_is_told_that_the_last_turn_was_done_elsewhere(play: Play) -> None:
    async def scenario(world: World) -> None:
        gateway, (owner, guest) = world.gateway, world.engines
        node = Node(Released())
        owner.states, guest.states = record(0, node.address), record(1, None)
        name_here = WorkerId(f"127.0.0.1:{owner.port}")
        await until_async(lambda: gateway.turns.lines.of(name_here))
        owner.says, guest.says = stamp(0, **OWNED, version=4), stamp(1)
        client = await world.client()
        await client.post("/v1/completions", x__session__id="a")
        final = {"x__session__id": "a", "x__ownerserve__session__final": "true"}
        answer = await client.post("/v1/completions", **final)
        assert world.engine_of(answer) is guest
        await until_async(lambda: gateway.turns.releasing.counts["released"])
        await until_async(lambda: node.let_go)
        name = line_of(guest.seen[-1][0]).name
        assert name is not None
        assert node.asked == [ReleaseSession(SessionId(name), EPOCH)]
        node.close()

    play(
        scenario,
        policy="round_robin",
        states=[record(0, None), record(1, None)],
        health_interval_s=0.05,
    )


def test_a_session_that_moved_is_let_go_at_its_former_worker_without_a_directory(
    play: Play,
) -> None:
    """As soon as the new worker begins to answer; nobody is asked again while it stays there."""

    async def scenario(world: World) -> None:
        gateway, engines = world.gateway, world.engines
        nodes = [Node(Released()) for _ in engines]
        for number, (engine, node) in enumerate(zip(engines, nodes, strict=True)):
            engine.states, engine.says = record(number, node.address), stamp(number)
        names = [WorkerId(f"127.0.0.1:{engine.port}") for engine in engines]
        await until_async(lambda: all(gateway.turns.lines.of(name) for name in names))
        client = await world.client()

        async def turn() -> Any:
            return world.engine_of(await client.post("/v1/completions", x__session__id="a"))

        before = engines.index(await turn())
        now = engines.index(await turn())
        assert now != before, "round robin"
        await until_async(lambda: gateway.turns.releasing.counts["let_go"] == 1)
        name = line_of(engines[now].seen[-1][0]).name
        assert (nodes[before].let_go, nodes[now].let_go) == ([name], [])
        assert not any(node.asked for node in nodes)
        for node in nodes:
            node.close()

    play(
        scenario,
        policy="round_robin",
        states=[record(0, None), record(1, None)],
        health_interval_s=0.05,
    )
