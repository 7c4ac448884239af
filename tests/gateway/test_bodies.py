"""Request bodies: one budget over all clients, and nothing of a body is kept when it is over."""

from __future__ import annotations

import asyncio
import gc
import json

import pytest

from ownerserve.gateway.http.client import HttpRequest
from tests.support.gateway.world import Play, World
from tests.support.waits import WAIT_S

PATH = "/v1/chat/completions"
SIZE = 1 << 20


def upload(size: int, *, sent: int) -> bytes:
    """A request with a body of `size` bytes, of which `sent` are sent."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Type: text/plain\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % size + b"x" * sent


async def until_held(world: World, size: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while world.gateway.bodies.held_bytes != size:
            await asyncio.sleep(0.001)


def test_a_body_that_does_not_fit_is_refused_before_it_is_read(play: Play) -> None:
    async def scenario(world: World) -> None:
        slow, other, third = await world.client(), await world.client(), await world.client()
        slow.writer.write(upload(2 * SIZE, sent=100))
        await until_held(world, 2 * SIZE)
        other.writer.write(upload(2 * SIZE, sent=0))
        told = await other.read()
        assert (told.status, told["retry-after"]) == (503, "1")
        assert json.loads(told.body)["error"]["code"] == "bodies_full"
        assert (await third.post(PATH, b"{}")).status == 200  # a small one fits beside them
        slow.hang_up()
        await until_held(world, 0)
        again = await world.client()
        assert (await again.post(PATH, b'"%b"' % (b"x" * 2 * SIZE))).status == 200

    play(scenario, bodies_max_bytes=3 * SIZE)


def test_a_body_in_chunks_counts_as_it_comes(play: Play) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        client.writer.write(head + b"%x\r\n" % SIZE + b"x" * SIZE + b"\r\n")
        await until_held(world, SIZE)
        client.writer.write(b"%x\r\n" % SIZE + b"x" * SIZE + b"\r\n")
        assert (await client.read()).status == 503
        await until_held(world, 0)

    play(scenario, bodies_max_bytes=2 * SIZE - 1)


@pytest.mark.slow
def test_a_body_is_kept_until_the_answer_begins_and_no_longer(play: Play) -> None:
    async def scenario(world: World) -> None:
        client, (engine,) = await world.client(), world.engines
        body = b'{"model": "m", "user": "u", "prompt": "%b"}' % (b"x" * SIZE)
        await client.begin("/v1/completions?stream", body)
        assert world.gateway.bodies.held_bytes == 0
        gc.collect()
        held = [
            one for one in gc.get_objects() if type(one) is HttpRequest and len(one.body) >= SIZE
        ]
        assert not held
        engine.go_on.set()
        await client.chunks()
        assert world.gateway.state.live == 0

    play(scenario, engines=1)


def test_a_client_that_waits_behind_its_own_requests_gives_all_back(play: Play) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        for engine in world.engines:
            engine.is_mute = True
        client.writer.write(3 * upload(SIZE, sent=SIZE))
        await until_held(world, 3 * SIZE)
        client.hang_up()
        await until_held(world, 0)

    play(scenario)


def test_failed_and_refused_requests_give_their_bodies_back(play: Play) -> None:
    async def scenario(world: World) -> None:
        for engine in world.engines:
            engine.refuses = (429, "")
        client = await world.client()
        assert (await client.post(PATH, b'{"prompt": "%b"}' % (b"x" * SIZE))).status == 429
        assert (await client.post(PATH, b'{"user": "\xff"}')).status == 400
        assert world.gateway.bodies.held_bytes == 0

    play(scenario)
