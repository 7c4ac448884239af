"""A small world on real sockets: fake engines, a gateway in front of them, clients."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from ownerserve.gateway.service import Gateway
from tests.support.waits import WAIT_S

EVENTS = 5


class FakeEngine:
    """Answers by path: /v1/chat whole, /v1/completions?stream in chunks, others see `answer`."""

    def __init__(self) -> None:
        self.seen: list[tuple[bytes, bytes]] = []
        """(head, body) of each request."""
        self.connections = 0
        self.hung_up = asyncio.Event()
        """Set when a client goes away in mid-answer."""
        self.go_on = asyncio.Event()
        """A stream waits for it after its first event."""
        self.says: dict[str, str] = {}
        """Further header lines of every answer."""
        self.refuses: tuple[int, str] | None = None
        """Status and reason of an admission that says no."""
        self.loses_places = False
        """A turn that comes to a place finds it gone."""
        self.cached_tokens: int | None = None
        self.usage: bytes | None = None
        """What its answers say of their size, instead of what is so."""
        self.states: bytes | None = None
        """What it says on /ownerserve/status; None: 404, as engines that know no such path."""
        self.holds: bytes | None = None
        """All that it holds, as its /ownerserve/inventory says it; None: an answer that is none."""
        self.key: str | None = None
        """What it wants as bearer on /v1/..., as vLLM with --api-key; /health is open."""
        self.lists: Sequence[str] | None = None
        """The models on /v1/models; None: an answer in which there are none."""
        self.drops_next = False
        """The next turn's connection is closed without a word."""
        self.is_mute = False
        """A turn gets no answer."""
        self.is_hung = False
        """Nothing gets an answer, as of a process that was stopped (SIGSTOP)."""
        self.opens_and_dies = False
        """A stream's head is sent, then the connection closed."""
        self.never_lists = False
        """/v1/models gets no answer."""
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, ssl=tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """As SIGKILL looks from outside: the port and all connections are gone."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = header(head, b"content-length")
                body = await reader.readexactly(int(length or 0))
                if self.is_hung:
                    await asyncio.Event().wait()
                if b"\r\nx-request-id:" in head:  # else the gateway's own probes
                    self.seen.append((head, body))
                    if self.drops_next:
                        self.drops_next = False
                        raise ConnectionError
                    if self.is_mute:
                        await self.go_on.wait()
                await self._answer(head, body, reader=reader, writer=writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(
        self,
        head: bytes,
        body: bytes,
        *,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        path = head.split(b" ", 2)[1]
        says = "".join(f"{name}: {value}\r\n" for name, value in self.says.items()).encode()
        if (refusal := self._refusal_of(path, head)) is not None:
            status, reason = refusal
            says += b"x-ownerserve-refusal: %b\r\n" % reason.encode() if reason else b""
            writer.write(b"HTTP/1.1 %d No\r\n%bcontent-length: 2\r\n\r\n{}" % (status, says))
            return
        if (said := self._about_itself(path, head)) is not None:
            status, text = said
            writer.write(
                b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(text), text)
            )
            return
        if path == b"/v1/models" and self.never_lists:
            await self.go_on.wait()
        if path.endswith(b"drop"):
            raise ConnectionError
        if path.endswith(b"refusal"):
            await self._refuse_by_half(reader, writer)
        if path.endswith(b"stream"):
            await self._stream(reader, writer)
            return
        if path.endswith(b"slow"):
            writer.write(b"HTTP/1.1 200 OK\r\n%bcontent-length: 100\r\n\r\n" % says)
            async for piece in self._pieces():
                writer.write(piece)
            return
        if path.endswith(b"big"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (64 << 20))
            for _ in range(64):
                writer.write(b"x" * (1 << 20))
                await writer.drain()
            return
        if path.endswith(b"old"):
            writer.write(b"HTTP/1.1 200 OK\r\n\r\nuntil the end")
            raise ConnectionError
        details = b""
        if self.cached_tokens is not None:
            details = b', "prompt_tokens_details": {"cached_tokens": %d}' % self.cached_tokens
        usage = self.usage or b'{"prompt_tokens": %d, "completion_tokens": 1%b}' % (
            max(len(body) // 2, 1),
            details,
        )
        text = b'{"id": "resp_%d", "usage": %b}' % (len(self.seen), usage)
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: keep-alive\r\n"
            b"x-request-id: engine\r\n%bcontent-length: %d\r\n\r\n%b" % (says, len(text), text)
        )
        await writer.drain()

    def _refusal_of(self, path: bytes, head: bytes) -> tuple[int, str] | None:
        if self.loses_places and b'"reservation":' in head:
            return 409, "unknown_reservation"
        return self.refuses if path.startswith(b"/v1/chat") else None

    async def _refuse_by_half(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """A refusal that stops in its middle."""
        no = b"HTTP/1.1 503 No\r\nx-ownerserve-refusal: no_room\r\ncontent-length: 9\r\n\r\n{"
        writer.write(no)
        await reader.read()
        self.hung_up.set()
        raise ConnectionError

    def _about_itself(self, path: bytes, head: bytes) -> tuple[int, bytes] | None:
        """Status and body, where it is asked what it is, or for its key; None: for a turn."""
        if path == b"/ownerserve/status":
            return (404, b"{}") if self.states is None else (200, self.states)
        if path.startswith(b"/ownerserve/inventory") and self.holds is not None:
            words = self.holds if path.endswith(b"?after=0") else b"[]"
            said = b'{"incarnation": 1, "rank": 0, "floor": 0, "last": 1, "words": %b}' % words
            return 200, said
        wanted = None if self.key is None else b"Bearer " + self.key.encode()
        if wanted and path.startswith(b"/v1/") and header(head, b"authorization") != wanted:
            return 401, b"{}"
        if path == b"/v1/models" and self.lists is not None:
            data = [{"id": name, "max_model_len": 4096} for name in self.lists]
            return 200, json.dumps({"object": "list", "data": data}).encode()
        return None

    async def _pieces(self) -> AsyncIterator[bytes]:
        """One byte for each time that `go_on` is set."""
        while True:
            await self.go_on.wait()
            self.go_on.clear()
            yield b"x"

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        if self.opens_and_dies:
            raise ConnectionError
        waiting = asyncio.ensure_future(self.go_on.wait())
        for number in range(EVENTS):
            event = b"data: %d\n\n" % number
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
            while number == 0 and not waiting.done():
                await asyncio.wait((waiting,), timeout=0.01)
                if reader.at_eof() or writer.transport.is_closing():
                    waiting.cancel()
                    self.hung_up.set()
                    raise ConnectionError
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def header(head: bytes, name: bytes) -> bytes | None:
    """The value of a header, or None."""
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.lower() == name:
            return value.strip()
    return None


class Answer:
    """What a client read: status, head, and the body without its frames."""

    def __init__(self, head: bytes, body: bytes) -> None:
        self.status = int(head.split(b" ", 2)[1])
        self.head = head
        self.body = body

    def __getitem__(self, name: str) -> str | None:
        value = header(self.head, name.encode())
        return None if value is None else value.decode()


class Client:
    """One keep-alive connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def post(self, path: str, body: bytes = b"{}", **headers: str) -> Answer:
        lines = "".join(
            f"{name.replace('__', '-')}: {value}\r\n" for name, value in headers.items()
        )
        head = f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(body)}\r\n{lines}\r\n"
        self.writer.write(head.encode() + body)
        return await self.read()

    async def begin(self, path: str, body: bytes) -> bytes:
        """Send a request; the head of its answer, whose body is left to be read (`chunks`)."""
        head = f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)
        return await self.reader.readuntil(b"\r\n\r\n")

    async def get(self, path: str) -> Answer:
        self.writer.write(f"GET {path} HTTP/1.1\r\nHost: t\r\n\r\n".encode())
        return await self.read()

    async def read(self) -> Answer:
        """One whole answer."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        if header(head, b"transfer-encoding") == b"chunked":
            return Answer(head, await self.chunks())
        length = header(head, b"content-length")
        if length is None:
            return Answer(head, await self.reader.read())
        return Answer(head, await self.reader.readexactly(int(length)))

    async def chunks(self) -> bytes:
        body = b""
        while True:
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            body += (await self.reader.readexactly(size + 2))[:-2]
            if size == 0:
                return body

    def hang_up(self) -> None:
        self.writer.close()


class World:
    """Engines, a gateway over them, clients."""

    def __init__(self, engines: list[FakeEngine], gateway: Gateway) -> None:
        self.engines = engines
        self.gateway = gateway
        self._clients: list[Client] = []

    async def client(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.gateway.port))
        self._clients.append(client)
        return client

    def keep(self, client: Client) -> None:
        """Hang up at the end, as on its own clients."""
        self._clients.append(client)

    def engine_of(self, answer: Answer) -> FakeEngine:
        """The engine that an answer says it came from."""
        port = int((answer["x-ownerserve-worker"] or ":0").rpartition(":")[2])
        (engine,) = [engine for engine in self.engines if engine.port == port]
        return engine

    async def settled(self) -> None:
        """Until nothing is live; then the account must be whole."""
        async with asyncio.timeout(WAIT_S):
            while self.gateway.state.live:
                await asyncio.sleep(0.001)
        self.gateway.state.check()

    async def close(self) -> None:
        for client in self._clients:
            client.hang_up()
        await self.gateway.stop()
        for engine in self.engines:
            await engine.kill()
        await asyncio.sleep(0.005)


Scenario = Callable[[World], Awaitable[None]]
Play = Callable[..., None]
"""Runs a scenario in a world: the fixture `play`."""
