"""Streams whose worker dies in their middle end with an error event in their client's dialect, and
look short to who counts frames alone. With OWNERSERVE_BROKEN_STREAMS=1000 so many at once."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable, Sequence

import pytest

from ownerserve.gateway.config import Config
from ownerserve.gateway.http.access import Address
from ownerserve.gateway.http.events import error_event, unframed, whole_events, whole_frames
from ownerserve.gateway.service import Gateway
from ownerserve.router.messages import Failure
from tests.support.gateway.process import WorkerProcess, worker_process
from tests.support.gateway.world import Client, FakeEngine, World, header
from tests.support.waits import WAIT_S

STREAMS = int(os.environ.get("OWNERSERVE_BROKEN_STREAMS", "60"))
DIALECTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
ASKS = b"POST /v1/chat/completions?stream HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n\r\n{}"


class Teller:
    """A worker that sends what it is told of one stream, then dies (RST) or hangs."""

    def __init__(self, *parts: bytes) -> None:
        self.parts = parts
        self.sent = asyncio.Event()
        self.die = asyncio.Event()
        self.writers: list[asyncio.StreamWriter] = []

    async def start(self) -> int:
        self._server = server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = server.sockets[0].getsockname()[1]
        return port

    def close(self) -> None:
        self._server.close()
        for writer in self.writers:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        head = await reader.readuntil(b"\r\n\r\n")
        if b"\r\nx-request-id:" not in head:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            return
        await reader.readexactly(int(header(head, b"content-length") or 0))
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        for part in self.parts:
            await asyncio.sleep(0.001)
            writer.write(part)
        self.sent.set()
        await self.die.wait()
        writer.transport.abort()


def chunked(text: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(text), text)


def errors_in(text: bytes, path: str) -> Sequence[dict[str, object]]:
    """What a client of the API at `path` reads as errors, event by event; each must be JSON."""
    errors = []
    for event in re.split(rb"\r?\n\r?\n", text):
        fields = [line.partition(b": ") for line in event.splitlines()]
        data = b"\n".join(value for name, _, value in fields if name == b"data")
        if not data or data == b"[DONE]":
            continue
        said = json.loads(data)
        if not isinstance(said, dict):
            continue
        names = [value for name, _, value in fields if name == b"event"]
        if path == "/v1/messages" and names[-1:] == [b"error"]:
            assert said["type"] == "error"
            errors.append(said["error"])
        elif path == "/v1/responses" and names[-1:] == [b"error"]:
            assert said["type"] == "error"
            errors.append(said)
        elif path.endswith("completions") and "error" in said:
            errors.append(said["error"])
    return errors


async def rest_of(client: Client) -> bytes:
    """All that is left to be read."""
    try:
        return await client.reader.read()
    except ConnectionError:
        return b""


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_a_stream_whose_worker_dies_tells_its_client(
    play: Callable[..., None], path: str, version: bytes
) -> None:
    """Also through a proxy that asks in HTTP/1.0, as nginx does where nobody tells it otherwise."""

    async def scenario(world: World) -> None:
        client = await world.client()
        client.writer.write(
            b"POST %b?stream HTTP/%b\r\nHost: t\r\nContent-Length: 2\r\n\r\n{}"
            % (path.encode(), version)
        )
        before = await client.reader.readuntil(b"data: 0\n\n")
        await world.engines[0].kill()
        told = before.partition(b"\r\n\r\n")[2] + await rest_of(client)
        assert not told.endswith(b"0\r\n\r\n"), "it must not look whole"
        (error,) = errors_in(unframed(told) if version == b"1.1" else told, path)
        assert "worker" in str(error["message"])
        assert world.gateway.state.account.broken == 1

    play(scenario, engines=1, health_interval_s=10.0)


@pytest.mark.parametrize(
    "parts",
    [
        (chunked(b'data: {"a":1}\n\n') + b'10\r\ndata: {"a', b'":'),  # amid an event and a chunk
        (chunked(b'data: {"a":1}\n\ndata: {"b') + b"1",),  # amid a line, at a chunk's end
        (chunked(b'data: {"a":1}\n'),),  # amid an event, at a line's end
        (chunked(b'data: {"a":1}\n\nevent: x\n'),),
        (b'40\r\ndata: {"a":1}\n\ndata: {"b":2}\n\n: half a comm',),
        (b'e\r\ndata: {"a":1}\n\r', b"\n" + chunked(b"\n") + b'10\r\ndata: {"'),
        (chunked(b'data: {"a":1}\n\n') + b"1",),  # amid a frame
    ],
)
def test_an_error_stands_alone_wherever_the_stream_stopped(parts: tuple[bytes, ...]) -> None:
    async def main() -> None:
        teller = Teller(*parts)
        world = World([], Gateway(Config(workers=(Address("127.0.0.1", await teller.start()),))))
        try:
            await world.gateway.start()
            client = await world.client()
            async with asyncio.timeout(WAIT_S):
                client.writer.write(ASKS)
                await teller.sent.wait()
                await asyncio.sleep(0.02)
                teller.die.set()
                body = (await rest_of(client)).partition(b"\r\n\r\n")[2]
            text = unframed(body)
            assert b'data: {"a":1}\n' in text
            assert len(errors_in(text, "/v1/chat/completions")) == 1
            await world.settled()
        finally:
            teller.close()
            await world.close()

    asyncio.run(main())


def test_a_stream_that_has_said_its_last_word_is_told_no_error() -> None:
    for last in (b"data: [DONE]", b'event: message_stop\ndata: {"type":"message_stop"}'):
        assert error_event(b"/v1/messages", last + b"\n\n", code="c", message="m") == b""


def test_an_answer_that_speaks_of_a_stream_s_end_has_not_come_to_it() -> None:
    """Agents write code that reads such streams."""
    for text in ("data: [DONE]", "\ndata: [DONE]\n", '"message_stop"', '{"type": "message_stop"}'):
        event = b"data: %b\n\n" % json.dumps({"choices": [{"delta": {"content": text}}]}).encode()
        assert b"error" in error_event(b"/v1/chat/completions", event, code="c", message="m")


@pytest.mark.parametrize("last", [b"data: [DONE]\n\n", b"data: {}\n\n"])
def test_who_has_read_the_last_event_may_hang_up(last: bytes) -> None:
    """GuideLLM does: the turn is done and its usage counts, the body's end may come or not."""

    async def main() -> None:
        usage = b'data: {"usage": {"prompt_tokens": 70, "completion_tokens": 3}}\n\n'
        teller = Teller(chunked(usage) + chunked(last))
        world = World([], Gateway(Config(workers=(Address("127.0.0.1", await teller.start()),))))
        try:
            await world.gateway.start()
            client = await world.client()
            async with asyncio.timeout(30):
                client.writer.write(ASKS)
                await client.reader.readuntil(last)
                client.hang_up()
                await world.settled()
            account = world.gateway.state.account
            is_done = b"DONE" in last
            assert (account.finished, account.aborted) == ((1, 0) if is_done else (0, 1))
            assert world.gateway.turns.observer.prompt_tokens == (70 if is_done else 0)
        finally:
            teller.close()
            await world.close()

    asyncio.run(main())


def test_an_error_of_the_responses_api_is_the_next_in_number() -> None:
    tail = b'event: a\ndata: {"type":"a","sequence_number":41}\n\n'
    said = error_event(b"/v1/responses", tail, code="worker_lost", message="m")
    assert json.loads(said.partition(b"data: ")[2])["sequence_number"] == 42


def test_what_is_whole_in_chunks_that_stop_anywhere() -> None:
    text = b"data: 1\n\ndata: 2\n\n"
    chunks = chunked(text[:12]) + chunked(text[12:])
    for end in range(len(chunks) + 1):
        assert text.startswith(unframed(chunks[:end]))
        assert whole_events(unframed(chunks[:end])) in (b"", text[:9], text)
    assert unframed(chunks) == text


def test_whole_lines_are_passed_on_though_the_next_has_begun() -> None:
    """Else a fast worker's stream is held, a MiB of it for each client."""
    first, second = chunked(b"data: 1\n\n"), chunked(b"data: a\r\n\r\ndata: 2\n\n")
    third = b"9\r\ndata: 3"
    assert whole_frames(first + second + third) == len(first + second)
    torn = chunked(b"data: 4")
    assert whole_frames(first + torn) == len(first)
    assert whole_frames(first + torn + second) == len(first + torn + second)
    assert whole_frames(b"0\r\n\r\n") == whole_frames(b"1") == whole_frames(b"x\r\n") == 0


@pytest.mark.slow
def test_every_stream_of_a_worker_that_is_killed_hears_it() -> None:
    """SIGKILL of a process with many streams: not one may end in silence, or look whole."""

    async def main(worker: WorkerProcess) -> None:
        world = World([], Gateway(Config(workers=(Address("127.0.0.1", worker.port),))))
        try:
            await world.gateway.start()
            async with asyncio.timeout(100):
                clients = await asyncio.gather(*(world.client() for _ in range(STREAMS)))
                for client in clients:
                    client.writer.write(ASKS)
                await asyncio.gather(*(one.reader.readuntil(b"word") for one in clients))
                worker.kill()
                told = await asyncio.gather(*map(rest_of, clients))
            typed = [text.count(b'"code":"worker_lost"') for text in told]
            assert typed == [1] * STREAMS
            assert not any(text.endswith(b"0\r\n\r\n") for text in told)
            await world.settled()
            assert world.gateway.state.account.broken == STREAMS
        finally:
            await world.close()

    with worker_process() as worker:
        asyncio.run(main(worker))


def test_a_stream_falls_silent_at_a_worker_that_is_well(
    play: Callable[..., None],
) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        body = b'{"stream": true}'
        client.writer.write(
            b"POST /v1/completions?stream HTTP/1.1\r\nHost: t\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        told = await rest_of(client)
        assert b"worker_silent" in told
        assert world.engines[0].hung_up.is_set() or world.gateway.state.account.broken == 1

    play(scenario, engines=1, first_byte_timeout_s=0.1)


@pytest.mark.parametrize("has_other", [True, False])
def test_a_turn_that_no_byte_comes_of_in_time_goes_to_another_worker(
    play: Callable[..., None], has_other: bool
) -> None:
    """The worker answers its probes: its engine may hang all the same."""

    async def scenario(world: World) -> None:
        client = await world.client()
        first = world.engine_of(await client.post("/v1/chat/completions", x__session__id="a"))
        first.is_mute = True
        answer = await client.post("/v1/chat/completions", b'{"stream": true}', x__session__id="a")
        assert world.gateway.state.account.failures[Failure.LATE] == 1
        if has_other:
            assert (answer.status, answer["x-ownerserve-reason"]) == (200, "retry_other_worker")
            assert world.engine_of(answer) is not first
        else:
            assert answer.status == 504
            assert json.loads(answer.body)["error"]["code"] == "first_byte_timeout"
        assert all(worker.up for worker in world.gateway.state.fleet), "slow is not down"

    play(scenario, engines=2 if has_other else 1, first_byte_timeout_s=1.0)


def test_a_stream_of_which_only_the_head_came_goes_to_another_worker(
    play: Callable[..., None],
) -> None:
    """vLLM sends the head of a stream before it computes anything."""

    async def scenario(world: World) -> None:
        client = await world.client()
        first = world.engine_of(await client.post("/v1/chat/completions", x__session__id="a"))
        first.opens_and_dies = True
        answer = await client.post("/v1/completions?stream", x__session__id="a")
        assert (answer.status, answer["x-ownerserve-reason"]) == (200, "retry_other_worker")
        assert answer.body.count(b"data:") == 5
        assert world.engine_of(answer) is not first

    def prepare(engines: Sequence[FakeEngine]) -> None:
        for engine in engines:
            engine.go_on.set()

    play(scenario, engines=2, prepare=prepare)


def test_a_gateway_that_is_stopped_tells_its_streams(play: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        client.writer.write(ASKS)
        await client.reader.readuntil(b"data: 0\n\n")
        await world.gateway.stop()
        assert b"gateway_stopped" in await rest_of(client)

    play(scenario, engines=1)
