"""When nobody is up, or everybody refuses: who was there is asked all the same, and the client
hears when to come again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import pytest

from ownerserve.gateway.stamps import RETRY_AFTER_MAX_S, retry_after_s
from ownerserve.router.messages import Failure
from tests.support.gateway.world import FakeEngine, World
from tests.support.waits import until_async

Play = Callable[..., None]
CHAT = "/v1/chat/completions"
BODY = b'{"prompt": "%b"}' % (b"a long context, " * 1000)


def test_a_worker_that_listens_again_is_asked_before_the_next_probe(play: Play) -> None:
    async def scenario(world: World) -> None:
        client, (engine,) = await world.client(), world.engines
        assert (await client.post(CHAT)).status == 200
        port = engine.port
        await engine.kill()
        told = await client.post(CHAT)
        assert (told.status, told["retry-after"]) == (503, "1")
        assert json.loads(told.body)["error"]["code"] == "no_worker"
        assert not world.gateway.state.fleet.up
        await engine.start(port)
        answer = await client.post(CHAT, x__session__id="a")
        assert (answer.status, answer["x-ownerserve-reason"]) == (200, "nobody_up")
        assert not world.gateway.state.fleet.up, "no probe was made"

    play(scenario, engines=1, health_interval_s=60.0)


def test_of_two_that_are_down_the_one_that_listens_again_is_found(play: Play) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        ports = [engine.port for engine in world.engines]
        for engine in world.engines:
            await engine.kill()
        assert (await client.post(CHAT)).status == 503
        for engine, port in zip(world.engines, ports, strict=True):
            await engine.start(port)
            answer = await client.post(CHAT)
            assert (answer.status, world.engine_of(answer)) == (200, engine)
            await engine.kill()

    play(scenario, engines=2, health_interval_s=60.0)


def test_who_was_served_by_one_that_was_down_stays_there(play: Play) -> None:
    """Before a probe finds it up, and after: its state is there, and nowhere else."""

    async def scenario(world: World) -> None:
        ports = [engine.port for engine in world.engines]
        client = await world.client()
        for engine in world.engines:
            await engine.kill()
        assert (await client.post(CHAT)).status == 503
        for engine, port in zip(world.engines, ports, strict=True):
            await engine.start(port)
        names = [f"s{number}" for number in range(8)]
        first = {name: await client.post(CHAT, BODY, x__session__id=name) for name in names}
        where = {name: world.engine_of(answer) for name, answer in first.items()}
        assert {answer["x-ownerserve-reason"] for answer in first.values()} == {"nobody_up"}
        assert set(where.values()) == set(world.engines)
        again = {name: await client.post(CHAT, BODY, x__session__id=name) for name in names}
        assert {name: world.engine_of(answer) for name, answer in again.items()} == where
        for monitor in world.gateway.monitors.values():
            for news in await monitor.probe():
                world.gateway.state.handle(news, world.gateway.now())
        assert len(world.gateway.state.fleet.up) == 2
        later = {name: await client.post(CHAT, BODY, x__session__id=name) for name in names}
        assert {name: world.engine_of(answer) for name, answer in later.items()} == where
        assert {answer["x-ownerserve-reason"] for answer in later.values()} == {"owner"}

    play(scenario, engines=2, health_interval_s=60.0)


def test_one_that_answers_with_a_fault_is_as_good_as_nobody(play: Play) -> None:
    async def scenario(world: World) -> None:
        client, (engine,) = await world.client(), world.engines
        port = engine.port
        await engine.kill()
        assert (await client.post(CHAT)).status == 503
        engine.refuses = (500, "")
        await engine.start(port)
        told = await client.post(CHAT)
        assert (told.status, told["retry-after"]) == (503, "1")
        assert world.gateway.state.account.failures[Failure.REFUSED] == 1

    play(scenario, engines=1, health_interval_s=60.0)


def test_a_worker_whose_models_nobody_knows_is_not_asked_even_then(play: Play) -> None:
    async def scenario(world: World) -> None:
        client, (engine,) = await world.client(), world.engines
        assert (await client.post(CHAT)).status == 503
        assert not engine.seen

    def prepare(engines: Sequence[FakeEngine]) -> None:
        engines[0].key = "a key that nobody gave the gateway"

    play(scenario, engines=1, prepare=prepare, health_interval_s=60.0)


def test_a_model_whose_workers_are_down_is_served_again_soon(play: Play) -> None:
    """Another model's worker is up: 404 would tell the client that there is no such model."""

    async def scenario(world: World) -> None:
        client, (first, second) = await world.client(), world.engines
        await until_async(lambda: len(world.gateway.state.fleet.up) == 2)
        await first.kill()
        told = await client.post(CHAT, b'{"model": "one"}')
        assert (told.status, told["retry-after"]) == (503, "1")
        told = await client.post(CHAT, b'{"model": "one"}')
        assert (told.status, told["retry-after"]) == (503, "1")
        assert (await client.post(CHAT, b'{"model": "two"}')).status == 200
        assert (await client.post(CHAT, b'{"model": "three"}')).status == 404
        assert len(second.seen) == 1

    def prepare(engines: Sequence[FakeEngine]) -> None:
        engines[0].lists, engines[1].lists = ["one"], ["two"]

    play(scenario, engines=2, prepare=prepare, health_interval_s=60.0)


@pytest.mark.parametrize(("status", "told_as"), [(429, 429), (503, 503), (529, 503)])
def test_the_longest_wait_that_a_worker_asks_for_is_passed_on(
    play: Play, status: int, told_as: int
) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        for engine, said in zip(world.engines, ("7", "31", "x"), strict=True):
            engine.refuses = (status, "")
            engine.says = {"Retry-After": said}
        told = await client.post(CHAT)
        assert (told.status, told["retry-after"]) == (told_as, "31")
        for engine in world.engines:
            engine.says = {}
        told = await client.post(CHAT)
        assert (told.status, told["retry-after"]) == (told_as, "1")

    play(scenario, engines=3, health_interval_s=60.0)


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("5", 5),
        ("99999999999999", RETRY_AFTER_MAX_S),
        ("Tue, 14 Nov 2023 22:13:30 GMT", 10),
        ("Tue, 14 Nov 2023 22:13:10 GMT", 0),
        ("soon", 0),
        ("-1", 0),
        ("\N{SUPERSCRIPT TWO}", 0),
        ("Tue, 14 Nov 99999 22:13:30 GMT", 0),
    ],
)
def test_a_wait_is_seconds_or_a_date(said: str, seconds: int) -> None:
    now = datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC).timestamp()
    lines = b"a: b\r\nretry-AFTER:  %b \r\nc: d\r\n" % said.encode("latin-1", "replace")
    assert retry_after_s(lines, now) == seconds
