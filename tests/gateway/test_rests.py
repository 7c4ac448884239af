"""What a guest added to a session is brought to who goes on with it, as the guest is drained: over
sockets. Real workers: engines/hf/test_leaving_guests.py."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import zmq
import zmq.asyncio

from ownerserve.directory.embedded import EmbeddedDirectory
from ownerserve.directory.messages import Bind, Register
from ownerserve.directory.terms import TermFile
from ownerserve.gateway import moves
from ownerserve.gateway.config import Config
from ownerserve.gateway.http.access import Address
from ownerserve.gateway.receipts import ReceiptForm
from ownerserve.gateway.service import Gateway
from ownerserve.kv.clock import ManualClock
from ownerserve.kv.ids import Incarnation, SessionId, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    Cancel,
    PrefixTaken,
    Reject,
    Released,
    ReleaseSession,
    RpcAnswer,
    RpcRequest,
    Take,
    TakePrefix,
    decode_request,
    encode,
)
from ownerserve.kv.wire.status import (
    LoadStatement,
    ProfileStatement,
    WorkerStatus,
    unit_statement,
)
from tests.support.gateway.world import Client, Play, World
from tests.support.router.answer_lines import LIFE, said
from tests.support.waits import until_async

REST = PrefixTaken(512, 4096)
NOT_OWNER = Reject(WorkerRefusal.NOT_OWNER)
LOOKS = 40
"""So often all sessions are looked at again, where none is to be asked for."""


class Node:
    """A worker's RPC port: `says` by the request's type, None: not yet; a session stays at its
    owner."""

    def __init__(self) -> None:
        self.says: dict[type, RpcAnswer | None] = {
            Take: NOT_OWNER,
            TakePrefix: REST,
            ReleaseSession: Reject(WorkerRefusal.SESSION_IS_RUNNING),
        }
        self.asked: list[RpcRequest | Cancel] = []
        self._unanswered: list[bytes] = []
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._reader = asyncio.get_running_loop().create_task(self._read())

    @property
    def brings(self) -> list[TakePrefix]:
        return [one for one in self.asked if isinstance(one, TakePrefix)]

    @property
    def let_go(self) -> list[SessionId]:
        """The sessions whose cached state it is to let go first."""
        releases = [one for one in self.asked if isinstance(one, ReleaseSession)]
        return [one.session_id for one in releases if one.epoch is None]

    async def _read(self) -> None:
        while True:
            *envelope, data = await self._socket.recv_multipart()
            request, _ = decode_request(data)
            self.asked.append(request)
            answer = self.says.get(type(request), Reject(WorkerRefusal.UNKNOWN_RESERVATION))
            if isinstance(request, ReleaseSession) and request.epoch is None:
                answer = Released()
            if answer is None:
                self._unanswered = envelope
            else:
                await self._socket.send_multipart([*envelope, encode(answer)])

    async def answer(self, answer: RpcAnswer) -> None:
        """Answer what was asked last and not answered."""
        await self._socket.send_multipart([*self._unanswered, encode(answer)])

    def close(self) -> None:
        self._reader.cancel()
        self._socket.close()


def unit_of(number: int) -> RoutingUnit:
    return RoutingUnit(WorkerId(f"w{number}"), 0, Incarnation(LIFE + number))


def record(number: int, node: Node | None) -> bytes:
    """What worker `number`, which lends its device, states."""
    profile = ProfileStatement(
        models=("m",), rpc=None if node is None else node.address, lends=("device",)
    )
    load = LoadStatement(as_of_s=1.0)
    made = WorkerStatus(unit=unit_statement(unit_of(number)), load=load, profile=profile)
    return msgspec.json.encode(made)


class Guested:
    """A session that worker 0 owns, by all workers' word, and of which another had the last turn:
    a guest."""

    def __init__(self, world: World, gateway: Gateway) -> None:
        self.gateway, self.nodes = gateway, [Node() for _ in world.engines]
        self.guest = -1
        self._world = world
        for number, (engine, node) in enumerate(zip(world.engines, self.nodes, strict=True)):
            engine.states = record(number, node)

    async def begin(self, **owned: object) -> None:
        engines = self._world.engines
        for number, engine in enumerate(engines):
            engine.says = said(LIFE + number, **owned)
            engine.refuses = (503, "no_room") if number else None
        await until_async(lambda: all(self.gateway.turns.lines.of(name) for name in self.names))
        client = Client(*await asyncio.open_connection("127.0.0.1", self.gateway.port))
        self._world.keep(client)
        self._client = client
        assert await self.turn() == 0
        for number, engine in enumerate(engines):
            engine.refuses = None if number else (503, "no_room")
        self.guest = await self.turn()
        engines[0].refuses = None
        assert self.guest > 0
        await until_async(lambda: self.gateway.state.live == 0)

    async def turn(self) -> int:
        answer = await self._client.post("/v1/chat/completions", x__session__id="a")
        assert answer.status == 200
        return self._world.engines.index(self._world.engine_of(answer))

    @property
    def names(self) -> list[WorkerId]:
        return [WorkerId(f"127.0.0.1:{engine.port}") for engine in self._world.engines]

    @property
    def brought_by(self) -> list[int]:
        """Who was asked to bring what the guest added."""
        guest = LenderAddress(unit_of(self.guest), self.nodes[self.guest].address)
        asked = [(number, one) for number, node in enumerate(self.nodes) for one in node.brings]
        assert all(one.source == guest and one.tokens > 0 for _, one in asked)
        return [number for number, _ in asked]

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.gateway.moves.rests.counts)

    def close(self) -> None:
        for node in self.nodes:
            node.close()


OWNED = {"owner": ["w0", 0, LIFE], "epoch": [[3, 77], 6]}
THREE = [record(number, None) for number in range(3)]


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "RESCAN_S", 0.01)
    monkeypatch.setattr(moves, "LOOK_S", 0.01)


def test_its_owner_brings_what_a_guest_added_before_that_one_leaves(play: Play) -> None:
    async def scenario(world: World) -> None:
        one = Guested(world, world.gateway)
        await one.begin(**OWNED)
        world.gateway.roster.drain(one.names[one.guest])
        await until_async(lambda: one.counts)
        assert one.brought_by == [0] and one.counts == {"brought": 1}
        assert world.gateway.moves.rests.moved_bytes == REST.moved_bytes
        await until_async(lambda: one.nodes[one.guest].let_go)
        ((_, session),) = world.gateway.state.sessions.items()
        assert session.prefix is not None
        held = [(copy.worker and copy.worker.id, copy.tokens) for copy in session.prefix.copies]
        assert (one.names[0], REST.tokens) in held
        assert await one.turn() == 0
        assert one.counts == {"brought": 1}, "once"
        one.close()

    play(scenario, engines=3, states=THREE, policy="sticky", health_interval_s=0.05)


def test_who_does_not_bring_it_is_asked_once_more_and_the_guest_keeps_it(play: Play) -> None:
    async def scenario(world: World) -> None:
        one = Guested(world, world.gateway)
        one.nodes[0].says[TakePrefix] = Reject(WorkerRefusal.NOT_BROUGHT)
        await one.begin(**OWNED)
        world.gateway.roster.drain(one.names[one.guest])
        await until_async(lambda: one.counts == {"not_brought": 2})
        looks = world.gateway.now() + LOOKS * moves.LOOK_S
        await until_async(lambda: world.gateway.now() > looks)
        assert one.counts == {"not_brought": 2} and one.brought_by == [0, 0]
        assert not one.nodes[one.guest].let_go
        one.close()

    play(scenario, engines=3, states=THREE, policy="sticky", health_interval_s=0.05)


def test_where_its_owner_takes_no_turns_it_comes_where_the_next_one_goes(play: Play) -> None:
    async def scenario(world: World) -> None:
        one = Guested(world, world.gateway)
        await one.begin(**OWNED)
        (other,) = {1, 2} - {one.guest}
        world.gateway.roster.drain(one.names[0])
        world.gateway.roster.drain(one.names[one.guest])
        await until_async(lambda: one.counts)
        assert one.brought_by == [other] and one.counts == {"brought": 1}
        assert await one.turn() == other
        one.close()

    play(scenario, engines=3, states=THREE, policy="sticky", health_interval_s=0.05)


def test_a_session_that_goes_on_meanwhile_is_where_it_went_on(play: Play) -> None:
    """The guest takes turns again, and has one: what was brought is not the newest."""

    async def scenario(world: World) -> None:
        one = Guested(world, world.gateway)
        one.nodes[0].says[TakePrefix] = None
        await one.begin(**OWNED)
        world.gateway.roster.drain(one.names[one.guest])
        await until_async(lambda: one.brought_by == [0])
        await world.gateway.roster.undrain(one.names[one.guest])
        assert await one.turn() == one.guest
        await one.nodes[0].answer(REST)
        await until_async(lambda: one.counts)
        assert one.counts == {"went_on": 1} and not one.nodes[one.guest].let_go
        assert await one.turn() == one.guest
        assert world.gateway.moves.rests.moved_bytes == REST.moved_bytes
        one.close()

    play(scenario, engines=3, states=THREE, policy="sticky", health_interval_s=0.05)


def test_an_owner_that_is_gone_meanwhile_is_not_waited_for(play: Play) -> None:
    """Others wait for the place: who would have the next turn brings it."""

    async def scenario(world: World) -> None:
        one = Guested(world, world.gateway)
        one.nodes[0].says[TakePrefix] = None
        await one.begin(**OWNED)
        world.gateway.roster.drain(one.names[one.guest])
        await until_async(lambda: one.brought_by == [0])
        (other,) = {1, 2} - {one.guest}
        world.gateway.roster.drain(one.names[0])
        await until_async(lambda: one.counts.get("brought"), within_s=moves.TAKE_S / 3)
        assert one.counts == {"no_answer": 1, "brought": 1} and one.brought_by == [0, other]
        assert any(isinstance(said, Cancel) for said in one.nodes[0].asked)
        one.close()

    play(scenario, engines=3, states=THREE, policy="sticky", health_interval_s=0.05)


@pytest.mark.parametrize("owner", [0, None], ids=["the_former", "the_guest"])
def test_the_directory_says_who_the_owner_is_where_no_answer_did(
    play: Play, owner: int | None
) -> None:
    """Where it is the guest itself nothing is brought: the session is taken over, state and all."""

    async def scenario(world: World) -> None:
        directory = EmbeddedDirectory(ManualClock(), TermFile(), opens_in_s=0.0)
        directory.execute([Register(unit_of(number)) for number in range(3)])
        addresses = tuple(Address("127.0.0.1", engine.port) for engine in world.engines)
        config = Config(
            workers=addresses, receipts=ReceiptForm.OPEN, policy="sticky", health_interval_s=0.05
        )
        gateway = Gateway(config, directory)
        await gateway.start()
        try:
            one = Guested(world, gateway)
            await one.begin()
            ((name, _),) = gateway.state.sessions.items()
            directory.execute([Bind(name, unit_of(one.guest if owner is None else owner))])
            gateway.roster.drain(one.names[one.guest])
            await until_async(lambda: one.counts)
            if owner is None:
                assert not one.brought_by and set(one.counts) == {"its_own"}
            else:
                assert one.brought_by == [owner] and one.counts == {"brought": 1}
            one.close()
        finally:
            await gateway.stop()

    play(scenario, engines=3, states=THREE, policy="sticky", health_interval_s=0.05)
