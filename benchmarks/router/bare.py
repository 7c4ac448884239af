"""The bare relay: the least that two parsers and four socket calls cost in Python.

    python benchmarks/router/bare.py PORT ENGINE_PORT...

A request goes to the engine that its session hashes to; no decision, error, limit, key or metric.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import cast

import httptools
import uvloop


class BareUpstream(asyncio.Protocol):
    """Passes an answer on; back in the idle list at its end."""

    def __init__(self, idle: list[BareUpstream]) -> None:
        self.idle, self.client, self.whole = idle, cast(asyncio.Transport, None), False
        self.parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def on_message_complete(self) -> None:
        self.whole = True

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)
        if not self.client.is_closing():
            self.client.write(data)
        if self.whole:
            self.whole = False
            self.idle.append(self)


class BareClient(asyncio.Protocol):
    """Passes a request to the engine its session hashes to."""

    def __init__(self, idle: dict[int, list[BareUpstream]]) -> None:
        self.idle, self.parts, self.whole, self.session = idle, list[bytes](), False, b""
        self.parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-session-id":
            self.session = value

    def on_message_complete(self) -> None:
        self.whole = True

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)
        self.parts.append(data)
        if not self.whole:
            return
        request, self.parts, self.whole = b"".join(self.parts), [], False
        port = list(self.idle)[hash(self.session) % len(self.idle)]
        if self.idle[port]:
            upstream = self.idle[port].pop()
            upstream.client = self.transport
            upstream.transport.write(request)
        else:
            asyncio.get_running_loop().create_task(self.connect(port, request))

    async def connect(self, port: int, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        _, upstream = await loop.create_connection(
            lambda: BareUpstream(self.idle[port]), "127.0.0.1", port
        )
        upstream.client = self.transport
        upstream.transport.write(request)


async def serve(port: int, engines: list[int]) -> None:
    idle: dict[int, list[BareUpstream]] = {engine: [] for engine in engines}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: BareClient(idle), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    uvloop.run(serve(int(sys.argv[1]), [int(port) for port in sys.argv[2:]]))
