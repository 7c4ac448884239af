"""A client whose streamed turn waits before the fleet hears so in its stream, on real sockets: its
head and its place in line, then what the worker says, or one error event."""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Awaitable, Callable

import pytest

from ownerserve.gateway.exchange.holding import said_by_worker
from ownerserve.gateway.http.access import Address
from ownerserve.router.admission import SeatSettings
from ownerserve.router.entry.queue import QueueSettings
from tests.support.gateway.world import EVENTS, Client, Play, World
from tests.support.waits import until_async

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
STREAM = b'{"messages": "a", "stream": true}'
WHOLE = b'{"messages": "a", "stream": false}'
EVERY_S = 0.05
ONE_EACH = QueueSettings(running_max=1)
BRIEFLY = QueueSettings(running_max=1, wait_s=0.5)
LAST = b"0\r\n\r\n"
ALL_EVENTS = [b"data: %d" % number for number in range(EVENTS)]


async def running(world: World) -> Client:
    """A client whose turn has the one place: its stream goes on when the engine's `go_on` is
    set."""
    client = await world.client()
    await client.begin(f"{COMPLETIONS}?stream", WHOLE)
    return client


def sent(path: str, body: bytes = STREAM, version: str = "1.1") -> bytes:
    head = f"POST {path} HTTP/{version}\r\nHost: t\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def held(world: World, path: str, version: str = "1.1") -> tuple[Client, bytes]:
    """A client whose turn waits, once it has heard so: with its head."""
    client = await world.client()
    client.writer.write(sent(path, version=version))
    head = await client.reader.readuntil(b"\r\n\r\n")
    await client.reader.readuntil(b"\n\n" if version == "1.0" else b"\n\n\r\n")
    return client, head


def said_in(text: bytes) -> list[bytes]:
    """The lines of a body that are no comment, no frame and not empty."""
    lines = text.replace(b"\r\n", b"\n").split(b"\n")
    return [line for line in lines if line.startswith((b"data:", b"event:"))]


async def rest(client: Client) -> bytes:
    try:
        return await client.reader.read()
    except ConnectionError:
        return b""


def test_who_is_held_hears_its_place_and_then_the_worker(play: Play) -> None:
    async def scenario(world: World) -> None:
        first = await running(world)
        one, head = await held(world, f"{COMPLETIONS}?stream")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        for line in (b"content-type: text/event-stream", b"transfer-encoding: chunked",
                     b"x-accel-buffering: no", b"x-request-id: os-"):  # fmt: skip
            assert b"\r\n" + line in head
        two = await world.client()
        two.writer.write(sent(f"{COMPLETIONS}?stream"))
        comment = await two.reader.readuntil(b" s\n\n")
        told = re.search(rb"\r\n: waiting for (.*), place (\d) of (\d), \d+ s\n\n$", comment)
        assert told is not None and told.groups() == (b"a running turn's place", b"2", b"2")
        await one.reader.readuntil(b"place 1 of 2, ")
        await one.reader.readuntil(b"place 1 of 2, ")
        world.engines[0].go_on.set()
        for client in (one, two):
            body = await client.reader.readuntil(LAST)
            assert said_in(body) == ALL_EVENTS
            assert body.count(b"\n: x-ownerserve-worker: 127.0.0.1:") == 1, "its receipt"
            assert (await client.post(COMPLETIONS, WHOLE)).status == 200, "it is kept"
        assert said_in(await first.reader.readuntil(LAST)) == ALL_EVENTS
        assert not world.gateway.turns.observer.rejections

    play(scenario, engines=1, queue=ONE_EACH, wait_comments_s=EVERY_S, health_interval_s=60.0)


def test_a_client_too_old_for_chunks_is_held_too(play: Play) -> None:
    async def scenario(world: World) -> None:
        await running(world)
        client, head = await held(world, f"{COMPLETIONS}?stream", "1.0")
        assert b"transfer-encoding" not in head and b"\r\nconnection: close\r\n" in head
        world.engines[0].go_on.set()
        body = await client.reader.read()
        assert said_in(body) == ALL_EVENTS and b"\r\n" not in body

    play(scenario, engines=1, queue=ONE_EACH, wait_comments_s=EVERY_S, health_interval_s=60.0)


def test_it_hears_on_while_its_worker_computes_the_prompt(play: Play) -> None:
    async def scenario(world: World) -> None:
        engine = world.engines[0]
        first = await running(world)
        client, _ = await held(world, f"{COMPLETIONS}?stream")
        engine.is_mute = True
        first.hang_up()
        for _ in range(2):
            await client.reader.readuntil(b": let in, awaiting the answer's first token, ")
        assert len(world.gateway.turns.admission) == 0
        await client.reader.readuntil(b"\r\n")
        engine.go_on.set()
        assert said_in(await client.chunks()) == ALL_EVENTS

    play(scenario, engines=1, queue=ONE_EACH, wait_comments_s=EVERY_S, health_interval_s=60.0)


def test_a_new_session_that_waits_for_a_seat_is_told(play: Play) -> None:
    """It is let in without room, as its patience ends."""

    async def scenario(world: World) -> None:
        first = await world.client()
        assert (await first.post(CHAT, b'{"prompt": "%b"}' % (b"x" * 3000))).status == 200
        client = await world.client()
        body = b'{"prompt": "%b", "stream": true}' % (b"y" * 3000)
        client.writer.write(sent(f"{COMPLETIONS}?stream", body))
        await client.reader.readuntil(b": waiting for a seat, place 1 of 1, 0 s\n\n")
        world.engines[0].go_on.set()
        assert said_in(await client.reader.readuntil(LAST)) == ALL_EVENTS

    state = {
        "version": 1,
        "unit": {"worker": "w", "rank": 0, "incarnation": 5},
        "load": {"as_of_s": 1.0, "kv_bytes_free": 0, "kv_bytes_total": 1 << 20},
        "profile": {"models": ["m"], "kv_bytes_per_token": 1024.0},
    }
    seats = SeatSettings(share=1.0, growth_tokens=0, patience_s=1.0)
    states = [json.dumps(state).encode()]
    play(scenario, engines=1, states=states, seats=seats, wait_comments_s=EVERY_S)


def error_event(body: bytes, path: str) -> dict[str, object]:
    """The error of a body that says that alone, in the form of the API."""
    lines = said_in(body)
    if path.startswith((CHAT, COMPLETIONS)):
        (data,) = lines
        error: dict[str, object] = json.loads(data[6:])["error"]
        assert set(error) == {"message", "type", "code", "param"}
        return error
    name, data = lines
    assert name == b"event: error"
    told: dict[str, object] = json.loads(data[6:])
    assert told["type"] == "error"
    if path.startswith(RESPONSES):
        assert (told["sequence_number"], told["param"]) == (0, None)
    assert isinstance(told["error"], dict)
    return told["error"]


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])
def test_who_is_turned_away_after_its_head_hears_one_error_event(
    play: Play, path: str, version: str
) -> None:
    async def scenario(world: World) -> None:
        first = await running(world)
        client, _ = await held(world, path, version)
        body = await rest(client)
        error = error_event(body, path)
        kind = "overloaded_error" if path == MESSAGES else "rate_limit_error"
        assert (error["code"], error["type"]) == ("deadline_past", kind)
        assert re.search(r"retry in \d+ s$", str(error["message"]))
        assert not body.endswith(LAST), "the stream ends short"
        observer, admission = world.gateway.turns.observer, world.gateway.turns.admission
        assert observer.rejections == {"deadline_past": 1} and len(admission) == 0
        assert len(world.engines[0].seen) == 1
        world.engines[0].go_on.set()
        await first.reader.readuntil(LAST)

    play(scenario, engines=1, queue=BRIEFLY, wait_comments_s=EVERY_S, health_interval_s=60.0)


async def _refused(world: World) -> None:
    world.engines[0].refuses = (429, "queue_full")


async def _wrong(world: World) -> None:
    world.engines[0].refuses = (400, "")


async def _whole(world: World) -> None:
    """The worker answers JSON."""


@pytest.mark.parametrize(
    ("prepare", "code", "kind"),
    [
        (_refused, "queue_full", "rate_limit_error"),
        (_wrong, "worker_error", "invalid_request_error"),
        (_whole, "no_stream", "server_error"),
    ],
)
def test_a_worker_that_sends_no_stream_ends_it_with_one_error_event(
    play: Play, prepare: Callable[[World], Awaitable[None]], code: str, kind: str
) -> None:
    async def scenario(world: World) -> None:
        first = await running(world)
        client, _ = await held(world, CHAT)
        await prepare(world)
        world.engines[0].go_on.set()
        body = await rest(client)
        error = error_event(body, CHAT)
        assert (error["code"], error["type"]) == (code, kind)
        assert not body.endswith(LAST)
        await first.reader.readuntil(LAST)

    play(scenario, engines=1, queue=ONE_EACH, wait_comments_s=EVERY_S, health_interval_s=60.0)


def test_a_worker_that_dies_in_its_stream_is_told_of(play: Play) -> None:
    async def scenario(world: World) -> None:
        engine = world.engines[0]
        first = await running(world)
        client, _ = await held(world, f"{COMPLETIONS}?stream")
        first.hang_up()
        await client.reader.readuntil(b"data: 0\n\n")
        await engine.kill()
        body = await rest(client)
        assert error_event(body, COMPLETIONS)["code"] == "worker_lost"
        assert not body.endswith(LAST)

    play(scenario, engines=1, queue=ONE_EACH, wait_comments_s=EVERY_S, health_interval_s=60.0)


def test_a_worker_that_dies_before_its_stream_is_told_of(play: Play) -> None:
    async def scenario(world: World) -> None:
        engine = world.engines[0]
        first = await running(world)
        client, _ = await held(world, f"{COMPLETIONS}?stream")
        engine.is_mute = True
        first.hang_up()
        await until_async(lambda: len(engine.seen) == 2)
        await engine.kill()
        assert error_event(await rest(client), COMPLETIONS)["code"] == "all_tried"

    play(scenario, engines=1, queue=ONE_EACH, wait_comments_s=EVERY_S, health_interval_s=60.0)


def test_who_hangs_up_while_it_waits_leaves_the_line(play: Play) -> None:
    async def scenario(world: World) -> None:
        first = await running(world)
        client, _ = await held(world, f"{COMPLETIONS}?stream")
        admission = world.gateway.turns.admission
        assert len(admission) == 1
        client.hang_up()
        await until_async(lambda: len(admission) == 0)
        world.engines[0].go_on.set()
        await first.reader.readuntil(LAST)
        assert len(world.engines[0].seen) == 1

    play(scenario, engines=1, queue=ONE_EACH, wait_comments_s=EVERY_S, health_interval_s=60.0)


def test_a_gateway_that_is_stopped_tells_whom_it_holds(play: Play) -> None:
    async def scenario(world: World) -> None:
        await running(world)
        client, _ = await held(world, CHAT)
        await world.gateway.stop()
        assert error_event(await rest(client), CHAT)["code"] == "gateway_stopped"

    play(scenario, engines=1, queue=ONE_EACH, wait_comments_s=EVERY_S, health_interval_s=60.0)


@pytest.mark.parametrize(
    ("body", "every_s"), [(WHOLE, EVERY_S), (STREAM, 0.0)], ids=["whole", "never"]
)
def test_others_wait_in_silence_and_are_refused_by_status(
    play: Play, body: bytes, every_s: float
) -> None:
    async def scenario(world: World) -> None:
        first = await running(world)
        client = await world.client()
        answer = await client.post(CHAT, body)
        assert answer.status == 429 and int(answer["retry-after"] or 0) >= 1
        world.engines[0].go_on.set()
        await first.reader.readuntil(LAST)

    play(scenario, engines=1, queue=BRIEFLY, wait_comments_s=every_s, health_interval_s=60.0)


class _Old(http.server.BaseHTTPRequestHandler):
    """A worker that speaks HTTP/1.0: a stream ends with its connection."""

    go_on = threading.Event()

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for number in range(EVENTS):
            self.wfile.write(b"data: %d\n\n" % number)
            self.wfile.flush()
            self.go_on.wait(30)

    def log_message(self, *_: object) -> None:
        pass


def test_a_stream_that_ends_with_its_workers_connection_ends_as_it_was_told(play: Play) -> None:
    async def scenario(world: World) -> None:
        await running(world)
        client, _ = await held(world, COMPLETIONS)
        _Old.go_on.set()
        assert said_in(await client.chunks()) == ALL_EVENTS
        assert (await client.post(COMPLETIONS, STREAM)).body.count(b"data:") == EVENTS, "kept"

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Old) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            at = Address("127.0.0.1", server.server_port)
            play(
                scenario, engines=1, reach=lambda *_: at, queue=ONE_EACH, wait_comments_s=EVERY_S
            )  # fmt: skip
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (400, b'{"error": {"message": "no", "code": "bad"}}', (400, "bad", "no")),
        (400, b'{"object": "error", "message": "no", "code": 400}', (400, "worker_error", "no")),
        (529, b'{"type": "error", "error": {"message": "no"}}', (500, "worker_error", "no")),
        (422, b'{"detail": []}', (422, "worker_error", "the worker answered 422")),
        (404, b"<html>", (404, "worker_error", "the worker answered 404")),
        (499, b'{"error": "x"}', (400, "worker_error", "the worker answered 499")),
    ],
)
def test_a_workers_own_word_is_told(status: int, body: bytes, told: tuple[int, str, str]) -> None:
    said = said_by_worker(status, body)
    assert (said.status, said.code, said.message) == told
