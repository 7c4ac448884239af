"""The admin port beside clients that never ask: nobody needs a key for that, so it is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from ownerserve.gateway.admin import admin_server, server_of
from ownerserve.gateway.admin_api import connection
from ownerserve.gateway.http.door import ADMIN_CLIENTS
from tests.support.gateway.world import Play, World

Open = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
ASKED = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def served(play: Play, scenario: Callable[[Open], Awaitable[None]]) -> None:
    async def main(world: World) -> None:
        server, listener = admin_server(world.gateway)
        writers: list[asyncio.StreamWriter] = []

        async def opened() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            writers.append(writer)
            return reader, writer

        listener.listen()
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            await scenario(opened)
        finally:
            for writer in writers:
                writer.transport.abort()
            server.should_exit = True
            await serving

    play(main, engines=1)


async def is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read(1) == b""
    except ConnectionResetError:
        return True


def test_who_stands_there_silently_is_bounded_and_goes(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.5)

    async def scenario(opened: Open) -> None:
        silent = [await opened() for _ in range(ADMIN_CLIENTS)]
        late, _ = await opened()
        assert await is_closed(late)
        begun, blank = silent[0][1], silent[1][1]
        begun.write(ASKED[:-2])
        blank.write(b"\r\n")
        for reader, _ in silent:
            assert await is_closed(reader)
        reader, writer = await opened()
        for _ in range(2):
            writer.write(ASKED)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            await reader.readuntil(b"}")
        writer.write(b"\r\n")  # ends uvicorn's own wait for a next request
        assert await is_closed(reader)

    served(play, scenario)


def test_a_head_without_end_is_not_kept(play: Play) -> None:
    async def scenario(opened: Open) -> None:
        reader, writer = await opened()
        writer.write(ASKED[:-2])
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            for _ in range(1000):
                writer.write(b"x-more: %b\r\n" % (b"a" * 4096))
                await writer.drain()
                await asyncio.sleep(0)
            await asyncio.wait_for(reader.readexactly(1), 60)

    served(play, scenario)


def test_no_connection_becomes_another_protocols(play: Play) -> None:
    async def scenario(world: World) -> None:
        async def nothing(scope: object, receive: object, send: object) -> None:
            """Answer nobody."""

        server = server_of(nothing, world.gateway.config, None)
        assert server.config.ws == "none", "a key is asked for of requests"

    play(scenario, engines=1)
