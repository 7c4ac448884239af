"""The gateway asks the directory who owns a session that is new to it, and nothing else."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
import zmq

from ownerserve.directory.embedded import EmbeddedDirectory
from ownerserve.directory.messages import (
    Bind,
    DirectoryRefusal,
    FindSession,
    Miss,
    Outcome,
    Refused,
    Register,
    Request,
)
from ownerserve.directory.rpc.client import DirectoryClient
from ownerserve.directory.terms import TermFile
from ownerserve.gateway import asking
from ownerserve.gateway.admin import admin_app
from ownerserve.gateway.asking import FRAME_MAX
from ownerserve.gateway.config import Config
from ownerserve.gateway.http.access import Address
from ownerserve.gateway.receipts import ReceiptForm
from ownerserve.gateway.service import Gateway
from ownerserve.kv.clock import ManualClock
from ownerserve.kv.ids import Incarnation, SessionId, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.wire.headers import TURN_HEADER, decode_turn_line
from tests.support.gateway.world import Client, Play, World
from tests.support.router.answer_lines import LIFE, said
from tests.support.waits import WAIT_S


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns wait for a directory that answers, however busy the machine is."""
    monkeypatch.setattr(asking, "LOOK_UP_S", WAIT_S)


async def admin(world: World, path: str) -> httpx.Response:
    transport = httpx.ASGITransport(admin_app(world.gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        return await client.get(path)


def name_of(head: bytes) -> SessionId:
    """The session's name, as a worker reads it."""
    lines = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:] if line)
    return SessionId(decode_turn_line(lines[TURN_HEADER]).name or "")


class Asked(EmbeddedDirectory):
    """A directory in memory that notes what it is asked."""

    def __init__(self) -> None:
        super().__init__(ManualClock(), TermFile(), opens_in_s=0.0)
        self.requests: list[Request] = []

    def execute(self, requests: Sequence[Request]) -> list[Outcome]:
        self.requests += requests
        return super().execute(requests)


class Unreachable:
    """A directory that is lost."""

    asked = 0

    def execute(self, requests: Sequence[Request]) -> list[Outcome]:
        self.asked += len(requests)
        return [Refused(DirectoryRefusal.UNREACHABLE) for _ in requests]

    def close(self) -> None: ...


@asynccontextmanager
async def another(world: World, directory: Any) -> AsyncIterator[tuple[Gateway, Any]]:
    """A further gateway over the same engines, at a directory, and a client of it."""
    addresses = tuple(Address("127.0.0.1", engine.port) for engine in world.engines)
    gateway = Gateway(Config(workers=addresses, receipts=ReceiptForm.OPEN), directory)
    try:
        await gateway.start()
        streams = await asyncio.open_connection("127.0.0.1", gateway.port)
        client = type(await world.client())(*streams)
        yield gateway, client
        gateway.state.check()
        client.hang_up()
    finally:
        await gateway.stop()


@asynccontextmanager
async def further(world: World, directory: Any, *, gateways: int) -> AsyncIterator[list[Any]]:
    """Clients of further gateways over the same engines, at one directory."""
    async with AsyncExitStack() as stack:
        made = [await stack.enter_async_context(another(world, directory)) for _ in range(gateways)]
        yield [client for _, client in made]


@pytest.mark.usefixtures("patient")
def test_a_session_that_is_new_to_a_gateway_is_found_where_its_owner_is(play: Play) -> None:
    """Workers own, under names of their own; the gateway asks, and asks nothing else."""

    async def scenario(world: World) -> None:
        for number, engine in enumerate(world.engines):
            engine.says = said(LIFE + number)
        directory = Asked()
        units = [RoutingUnit(WorkerId(f"w{n}"), 0, Incarnation(LIFE + n)) for n in range(3)]
        directory.execute([Register(unit) for unit in units])
        async with further(world, directory, gateways=2) as (one, two):
            names = {}
            for number, name in enumerate("abcdef"):
                answer = await one.post("/v1/chat/completions", x__session__id=name)
                (head, _) = world.engine_of(answer).seen[-1]
                names[name] = name_of(head), units[number % 3]
                directory.execute([Bind(*names[name])])
            asked = len(directory.requests)
            for name, (_, owner) in reversed(names.items()):
                answer = await two.post("/v1/chat/completions", x__session__id=name)
                port = world.engines[units.index(owner)].port
                assert answer["x-ownerserve-worker"] == f"127.0.0.1:{port}"
                assert answer["x-ownerserve-reason"] != "new_session"
            assert {type(one) for one in directory.requests[asked:]} == {FindSession}
            assert len(directory.requests[asked:]) == len(names)

    play(scenario, engines=3)


@pytest.mark.usefixtures("patient")
def test_the_owner_is_asked_for_again_when_the_worker_is_lost(play: Play) -> None:
    async def scenario(world: World) -> None:
        for number, engine in enumerate(world.engines):
            engine.says = said(LIFE + number)
        directory = Asked()
        async with further(world, directory, gateways=1) as (client,):
            for _ in range(3):
                answer = await client.post("/v1/chat/completions", x__session__id="a")
            assert len(directory.requests) == 1
            lost = world.engine_of(answer)
            await lost.kill()
            (other,) = [engine for engine in world.engines if engine is not lost]
            async with asyncio.timeout(WAIT_S):
                while json.loads((await client.get("/health")).body)["workers_up"] > 1:
                    await asyncio.sleep(0.05)
            for _ in range(2):
                answer = await client.post("/v1/chat/completions", x__session__id="a")
                assert world.engine_of(answer) is other
            assert len(directory.requests) == 2

    play(scenario, engines=2)


def test_a_gateway_without_a_directory_has_none(play: Play) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        for _ in range(2):
            answer = await client.post("/v1/chat/completions", x__session__id="a")
        assert answer["x-ownerserve-reason"] == "owner"
        assert (await admin(world, "/status")).json()["directory"] is None
        assert "ownerserve_directory" not in (await admin(world, "/metrics")).text

    play(scenario, engines=1)


class Hanging:
    """A directory that answers when it is let go."""

    def __init__(self) -> None:
        self.asked = 0
        self.go_on = threading.Event()

    def execute(self, requests: Sequence[Request]) -> list[Outcome]:
        self.asked += len(requests)
        self.go_on.wait()
        return [Miss() for _ in requests]

    def close(self) -> None:
        self.go_on.set()


def test_a_directory_that_hangs_delays_the_turns_that_asked_it_first_and_no_others(
    play: Play,
) -> None:
    async def scenario(world: World) -> None:
        hanging = Hanging()
        async with another(world, hanging) as (gateway, client):
            for name in "abcde":
                answer = await client.post("/v1/chat/completions", x__session__id=name)
                assert answer.status == 200
            assert gateway.turns.finder is not None
            assert gateway.turns.finder.answers == {"too_slow": 1, "not_asked": 4}
            assert hanging.asked == 1
            hanging.go_on.set()

    play(scenario, engines=1)


class Slow(Asked):
    """A directory that takes a while for each frame, however much is in it."""

    FRAME_S = 0.005

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[int] = []

    def execute(self, requests: Sequence[Request]) -> list[Outcome]:
        self.frames.append(len(requests))
        threading.Event().wait(self.FRAME_S)
        return super().execute(requests)


@pytest.mark.usefixtures("patient")
def test_sessions_that_come_at_once_share_frames(play: Play) -> None:
    """200 new ones: one after another they would wait for 200 frames."""

    async def scenario(world: World) -> None:
        slow = Slow()
        async with another(world, slow) as (gateway, _):
            assert gateway.turns.finder is not None

            async def turn(number: int) -> None:
                client = Client(*await asyncio.open_connection("127.0.0.1", gateway.port))
                answer = await client.post("/v1/chat/completions", x__session__id=str(number))
                assert answer.status == 200
                client.hang_up()

            await asyncio.gather(*map(turn, range(200)))
            assert sum(slow.frames) == 200 and max(slow.frames) <= FRAME_MAX
            assert len(slow.frames) <= 20  # two, where nothing else runs
            assert gateway.turns.finder.answers["miss"] == 200

    play(scenario, engines=1)


class Silent(Asked):
    """A directory that is silent while it is told to be: each frame comes to nothing, late."""

    def __init__(self) -> None:
        super().__init__()
        self.is_silent = True
        self.frame_ends = threading.Semaphore(0)
        self.frames = 0

    def execute(self, requests: Sequence[Request]) -> list[Outcome]:
        self.frames += 1
        if not self.is_silent:
            return super().execute(requests)
        self.frame_ends.acquire()
        return [Refused(DirectoryRefusal.UNREACHABLE) for _ in requests]

    def close(self) -> None:
        self.frame_ends.release()


def test_one_turn_waits_for_a_silent_directory_and_none_until_it_answers_again(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what is counted, not by a clock: each later turn asks, and goes on before it is heard."""

    async def scenario(world: World) -> None:
        silent = Silent()
        async with another(world, silent) as (gateway, client):
            finder = gateway.turns.finder
            assert finder is not None

            async def turn(name: str) -> None:
                answer = await client.post("/v1/chat/completions", x__session__id=name)
                assert answer.status == 200

            async def until(holds: Callable[[], bool]) -> None:
                async with asyncio.timeout(30):
                    while not holds():
                        await asyncio.sleep(0.01)

            await turn("a")
            assert finder.answers == {"too_slow": 1}
            await asyncio.sleep(asking.LOOK_UP_S)  # since its frame was sent, which is later
            for number, name in enumerate("bcd", 1):
                silent.frame_ends.release()
                await until(lambda told=number: finder.answers["unreachable"] == told)
                await turn(name)
                assert (finder.answers["too_slow"], finder.answers["not_awaited"]) == (1, number)
            await until(lambda: silent.frames == 4)  # in another thread, and a turn waits for none
            monkeypatch.setattr(asking, "LOOK_UP_S", WAIT_S)  # in time, however busy the machine is
            silent.is_silent = False
            silent.frame_ends.release()
            await until(lambda: finder.answers["unreachable"] == 4)
            await turn("e")
            await until(lambda: finder.answers["miss"] == 1)
            await turn("f")
            assert (finder.answers["not_awaited"], finder.answers["miss"]) == (4, 2)
            assert silent.frames == 6

    play(scenario, engines=1)


def test_a_lost_directory_costs_nobody_a_turn(play: Play) -> None:
    async def scenario(world: World) -> None:
        (engine,) = world.engines
        engine.says = said(LIFE)
        lost = Unreachable()
        async with further(world, lost, gateways=1) as (client,):
            for reason in ("new_session", "owner", "owner"):
                answer = await client.post("/v1/chat/completions", x__session__id="a")
                assert (answer.status, answer["x-ownerserve-reason"]) == (200, reason)
        assert lost.asked > 0

    play(scenario, engines=1)


class Raising(Unreachable):
    """A directory whose backend has a fault."""

    def execute(self, requests: Sequence[Request]) -> list[Outcome]:
        self.asked += len(requests)
        raise RuntimeError("boom")


class Short(Unreachable):
    """A directory that leaves requests without an answer."""

    def execute(self, requests: Sequence[Request]) -> list[Outcome]:
        self.asked += len(requests)
        return []


@pytest.mark.parametrize("lost", [Raising(), Short()])
def test_a_faulty_directory_costs_nobody_a_turn_and_is_told_once(
    play: Play, lost: Unreachable, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(world: World) -> None:
        (engine,) = world.engines
        engine.says = said(LIFE)
        async with further(world, lost, gateways=1) as (client,):
            for name in "abc":
                answer = await client.post("/v1/chat/completions", x__session__id=name)
                assert (answer.status, answer["x-ownerserve-reason"]) == (200, "new_session")

    play(scenario, engines=1)
    assert lost.asked == 3
    assert [one.getMessage() for one in caplog.records if "directory" in one.getMessage()] == [
        "the directory fails: asked again until it answers"
    ]


def test_a_directory_that_speaks_another_tongue_costs_nobody_a_turn(play: Play) -> None:
    """Over a socket: the worst that a later version, or another service, may answer."""
    port = zmq.Context.instance().socket(zmq.ROUTER)
    number = port.bind_to_random_port("tcp://127.0.0.1")
    stop = threading.Event()

    def babble() -> None:
        while not stop.is_set():
            if port.poll(20):
                peer, asked, _ = port.recv_multipart()
                port.send_multipart([peer, asked, b"\xc1 a later version"])
        port.close(linger=0)

    async def scenario(world: World) -> None:
        directory = DirectoryClient(f"tcp://127.0.0.1:{number}")
        async with further(world, directory, gateways=1) as (client,):
            for name in "ab":
                answer = await client.post("/v1/chat/completions", x__session__id=name)
                assert answer.status == 200

    thread = threading.Thread(target=babble)
    thread.start()
    try:
        play(scenario, engines=1)
    finally:
        stop.set()
        thread.join()
