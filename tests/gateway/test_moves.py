"""A gateway orders idle sessions away from a drained worker: over sockets. Real workers:
engines/hf/test_moves.py."""

from __future__ import annotations

import asyncio
from math import inf

import msgspec
import pytest
import zmq
import zmq.asyncio

from ownerserve.gateway import moves
from ownerserve.gateway.workers import rpc
from ownerserve.kv.ids import Incarnation, WorkerId
from ownerserve.kv.messages import Epoch, RoutingUnit, Term
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    Reject,
    Released,
    ReleaseSession,
    RpcAnswer,
    SessionTaken,
    Take,
    decode_request,
    encode,
)
from ownerserve.kv.wire.status import (
    LoadStatement,
    ProfileStatement,
    WorkerStatus,
    unit_statement,
)
from ownerserve.router.gap_moves import GapMove
from tests.support.gateway.world import Play, World
from tests.support.router.answer_lines import LIFE, said
from tests.support.waits import WAIT_S, until_async

LOOKS = 40
"""So often all sessions are looked at again, where once would do."""


class Port:
    """A worker's RPC port, which answers each Take with `says`, and lets a session go once it may:
    `lets_go`."""

    def __init__(self, says: RpcAnswer) -> None:
        self.says = says
        self.takes: list[Take] = []
        self.lets_go = asyncio.Event()
        self.is_asked_to_let_go = asyncio.Event()
        self._releasing: list[asyncio.Task[None]] = []
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        while True:
            *envelope, data = await self._socket.recv_multipart()
            request, _ = decode_request(data)
            answer: RpcAnswer = Reject(WorkerRefusal.UNKNOWN_RESERVATION)
            if isinstance(request, Take):
                self.takes.append(request)
                answer = self.says
            if isinstance(request, ReleaseSession) and request.epoch is not None:
                self._releasing.append(asyncio.ensure_future(self._let_go(envelope)))
                continue
            await self._socket.send_multipart([*envelope, encode(answer)])

    async def _let_go(self, envelope: list[bytes]) -> None:
        self.is_asked_to_let_go.set()
        await self.lets_go.wait()
        await self._socket.send_multipart([*envelope, encode(Released())])

    def close(self) -> None:
        for task in (self._reader, *self._releasing):
            task.cancel()
        self._socket.close()


def record(number: int, port: Port | None) -> bytes:
    """What worker `number`, which lends its device, states."""
    profile = ProfileStatement(
        models=("m",), rpc=None if port is None else port.address, lends=("device",)
    )
    unit = RoutingUnit(WorkerId(f"w{number}"), 0, Incarnation(LIFE + number))
    unit_said, load = unit_statement(unit), LoadStatement(as_of_s=1.0)
    made = WorkerStatus(unit=unit_said, load=load, profile=profile)
    return msgspec.json.encode(made)


@pytest.mark.parametrize("believed_s", [30.0, 0.01], ids=["soon", "late"])
def test_who_does_not_own_a_session_is_not_asked_for_it_again_so_soon(
    play: Play, believed_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another gateway moved it, and this one hears of that with the session's next turn; or it came
    back, and nobody tells."""
    monkeypatch.setattr(moves, "ELSEWHERE_S", believed_s)
    monkeypatch.setattr(moves, "RESCAN_S", 0.01)
    monkeypatch.setattr(moves, "LOOK_S", 0.01)

    async def scenario(world: World) -> None:
        gateway = world.gateway
        ports = [Port(Reject(WorkerRefusal.NOT_OWNER)) for _ in world.engines]
        for number, engine in enumerate(world.engines):
            engine.states, engine.says = record(number, ports[number]), said(LIFE + number)
        names = [WorkerId(f"127.0.0.1:{engine.port}") for engine in world.engines]
        await until_async(lambda: all(gateway.turns.lines.of(name) for name in names))
        client = await world.client()

        async def turn() -> int:
            answer = await client.post("/v1/completions", x__session__id="a")
            return world.engines.index(world.engine_of(answer))

        home = await turn()
        away = ports[1 - home]
        gateway.roster.drain(names[home])
        await until_async(lambda: gateway.moves.counts["not_owner"])
        assert not away.takes[0].with_state, "it can't stay"
        if believed_s < 1.0:
            await until_async(lambda: len(away.takes) >= 3)
            for port in ports:
                port.close()
            return
        looks = gateway.turns.now() + LOOKS * moves.LOOK_S
        await until_async(lambda: gateway.turns.now() > looks)
        # Its first word had that worker ask whose the session is; the second one is believed.
        assert len(away.takes) == 2 and gateway.moves.counts == {"not_owner": 2}

        # A word of a later owner is one of another session's standing: it is asked for again.
        owner, epoch = [f"w{home}", 0, LIFE + home], [[3, 77], 6]
        world.engines[home].says = said(LIFE + home, owner=owner, epoch=epoch)
        await gateway.roster.undrain(names[home])
        assert await turn() == home
        away.says = SessionTaken(2, 0, Epoch(Term(3, 77), 7))
        gateway.roster.drain(names[home])
        await until_async(lambda: gateway.moves.counts["taken"] == 1)
        for port in ports:
            port.close()

    play(
        scenario,
        policy="sticky",
        states=[record(0, None), record(1, None)],
        health_interval_s=0.05,
    )


def test_what_another_hands_over_to_who_is_drained_is_asked_for_at_once(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was that other's when it was asked for, and this gateway has it handed over to where its
    last turn was done: that is news."""
    monkeypatch.setattr(moves, "RESCAN_S", 0.01)
    monkeypatch.setattr(moves, "LOOK_S", 0.01)
    monkeypatch.setattr(moves, "ELSEWHERE_S", inf)
    monkeypatch.setattr(rpc, "RELEASE_S", WAIT_S)

    async def scenario(world: World) -> None:
        gateway, client = world.gateway, await world.client()
        ports = [Port(Reject(WorkerRefusal.NOT_OWNER)) for _ in world.engines]
        for number, engine in enumerate(world.engines):
            engine.states, engine.says = record(number, ports[number]), said(LIFE + number)
        names = [WorkerId(f"127.0.0.1:{engine.port}") for engine in world.engines]
        await until_async(lambda: all(gateway.turns.lines.of(name) for name in names))

        async def turn() -> int:
            answer = await client.post("/v1/chat/completions", x__session__id="a")
            assert answer.status == 200
            return world.engines.index(world.engine_of(answer))

        owner = await turn()
        unit, epoch = [f"w{owner}", 0, LIFE + owner], [[3, 77], 6]
        for number, engine in enumerate(world.engines):
            engine.says = said(LIFE + number, owner=unit, epoch=epoch)
        assert await turn() == owner
        world.engines[owner].refuses = (503, "no_room")
        guest = await turn()
        assert guest == 1 - owner
        await ports[owner].is_asked_to_let_go.wait()
        gateway.roster.drain(names[guest])
        await until_async(lambda: gateway.moves.counts["not_owner"] == 2)
        looks = gateway.turns.now() + LOOKS * moves.LOOK_S
        await until_async(lambda: gateway.turns.now() > looks)
        assert gateway.moves.counts == {"not_owner": 2}, "and is not asked for so soon"
        ports[owner].says = SessionTaken(2, 0, Epoch(Term(3, 77), 7))
        ports[owner].lets_go.set()
        await until_async(lambda: gateway.moves.counts["taken"] == 1)
        for port in ports:
            port.close()

    play(
        scenario,
        policy="sticky",
        states=[record(0, None), record(1, None)],
        health_interval_s=0.05,
    )


def test_who_is_busy_is_relieved_of_a_session_with_its_state_alone(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "LOOK_S", 0.01)

    async def scenario(world: World) -> None:
        gateway, client = world.gateway, await world.client()
        ports = [Port(Reject(WorkerRefusal.NOT_BROUGHT)) for _ in world.engines]
        for number, engine in enumerate(world.engines):
            engine.states, engine.says = record(number, ports[number]), said(LIFE + number)
        names = [WorkerId(f"127.0.0.1:{engine.port}") for engine in world.engines]
        await until_async(lambda: all(gateway.turns.lines.of(name) for name in names))
        answer = await client.post("/v1/completions", x__session__id="a")
        home = world.engines.index(world.engine_of(answer))
        workers = {worker.id: worker for worker in gateway.state.fleet}
        [(name, _)] = gateway.state.sessions.newest()
        granted = [GapMove(name, workers[names[home]], workers[names[1 - home]])]
        gap_moves = gateway.turns.gap_moves
        monkeypatch.setattr(gap_moves, "look", lambda now: [granted.pop()] if granted else [])
        await until_async(lambda: gap_moves.counts["not_brought"])
        [take] = ports[1 - home].takes
        assert take.session_id == name and take.with_state
        for port in ports:
            port.close()

    play(
        scenario,
        policy="sticky",
        states=[record(0, None), record(1, None)],
        health_interval_s=0.05,
    )
