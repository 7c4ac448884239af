"""A gateway before a directory that takes every request and never answers: no turn waits for it."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest
import uvloop
import zmq

from ownerserve.directory.rpc.client import DirectoryClient
from ownerserve.gateway.admin import admin_app
from ownerserve.gateway.config import Config
from ownerserve.gateway.http.access import Address
from ownerserve.gateway.service import Gateway
from tests.support.metric_lines import summed

pytestmark = pytest.mark.slow

WAIT_S = 60.0


@contextmanager
def silent(kind: str) -> Iterator[str]:
    """The address of what accepts and is never heard of again: before a word of the protocol, or
    after it has read what it is asked."""
    with ExitStack() as stack:
        if kind == "tcp":
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            port = listener.getsockname()[1]
        else:
            router = stack.enter_context(zmq.Context.instance().socket(zmq.ROUTER))
            router.linger = 0
            port = router.bind_to_random_port("tcp://127.0.0.1")
        yield f"tcp://127.0.0.1:{port}"


async def answers(gateway: Gateway, answer: str) -> float:
    """How often the gateway counted that the directory said (or did) so."""
    transport = httpx.ASGITransport(admin_app(gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        text = (await client.get("/metrics")).text
    start = f'ownerserve_gateway_directory_answers_total{{answer="{answer}"}}'
    return summed(text, start)


async def counted(gateway: Gateway, answer: str) -> None:
    while not await answers(gateway, answer):
        await asyncio.sleep(0.02)


async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A worker that answers each request, whatever it is, and hangs up."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        await reader.readexactly(int(length[1]) if length else 0)
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}")
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


@pytest.mark.parametrize("kind", ["tcp", "zmq"])
def test_a_silent_directory_delays_no_turn_and_is_told_of(kind: str) -> None:
    async def scenario(url: str) -> None:
        engine = await asyncio.start_server(answered, "127.0.0.1", 0)
        config = Config(workers=(Address("127.0.0.1", engine.sockets[0].getsockname()[1]),))
        gateway = Gateway(config, DirectoryClient(url))
        await gateway.start()

        async def turn(session: str) -> None:
            told = await client.post(
                "/v1/completions", json={"prompt": "hi"}, headers={"x-session-id": session}
            )
            assert told.status_code == 200

        data_port = f"http://127.0.0.1:{gateway.port}"
        try:
            async with httpx.AsyncClient(base_url=data_port, timeout=WAIT_S) as client:
                for session in ("a", "b", "a"):  # unknown, unknown, known
                    await turn(session)
                assert await answers(gateway, "too_slow"), "the look-up was given up"
                async with asyncio.timeout(WAIT_S):
                    await counted(gateway, "unreachable")  # by the client's own deadline
                await turn("c")
        finally:
            await gateway.stop()
            engine.close()
            await engine.wait_closed()
            await asyncio.sleep(0.01)  # for the transports' ends

    with silent(kind) as url:
        uvloop.run(scenario(url))
