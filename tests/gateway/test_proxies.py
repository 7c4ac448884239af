"""A gateway behind nginx and HAProxy, as `examples/proxies` sets them up, and in front of workers
that stand behind such proxies: real ones, in processes of their own."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from ownerserve.gateway.http.access import Address
from ownerserve.router.entry.queue import QueueSettings
from ownerserve.router.messages import Failure
from tests.support.children import ROOT
from tests.support.gateway.proxies import haproxy, nginx
from tests.support.gateway.world import EVENTS, Client, Play, World
from tests.support.net import free_port
from tests.support.waits import until_async

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
EXAMPLES = ROOT / "examples" / "proxies"
Proxied = Callable[[Path, int, int], AbstractContextManager[None]]
"""Starts a proxy: its folder, its port, and the port of what stands behind it."""


def ours_nginx(folder: Path, port: int, behind: int) -> AbstractContextManager[None]:
    said = (EXAMPLES / "nginx.conf").read_text()
    return nginx(folder, said.replace(":8080", f":{port}").replace(":8000", f":{behind}"), port)


def ours_haproxy(folder: Path, port: int, behind: int) -> AbstractContextManager[None]:
    said = (EXAMPLES / "haproxy.cfg").read_text()
    return haproxy(folder, said.replace(":8080", f":{port}").replace(":8000", f":{behind}"), port)


def bare_nginx(*lines: str) -> Proxied:
    """As its defaults are: HTTP/1.0 and one request a connection to what stands behind it."""

    def start(folder: Path, port: int, behind: int) -> AbstractContextManager[None]:
        to = f"proxy_pass http://127.0.0.1:{behind}; client_max_body_size 32m;"
        http = f"server {{ listen 127.0.0.1:{port}; location / {{ {to} {' '.join(lines)} }} }}"
        return nginx(folder, http, port)

    return start


def bare_haproxy(*lines: str) -> Proxied:
    def start(folder: Path, port: int, behind: int) -> AbstractContextManager[None]:
        said = "\n ".join((
            "defaults", "mode http", "timeout connect 3s", "timeout client 60s",
            "timeout server 60s", *lines, f"listen all\n bind 127.0.0.1:{port}",
            f"server one 127.0.0.1:{behind}",
        ))  # fmt: skip
        return haproxy(folder, said + "\n", port)

    return start


FRONTS = {
    "nginx": ours_nginx,
    "haproxy": ours_haproxy,
    "nginx-1.0": bare_nginx("proxy_buffering off;"),
    "haproxy-close": bare_haproxy("option http-server-close", "option httpclose"),
}
BEHINDS = {
    "nginx": bare_nginx("proxy_http_version 1.1;", "proxy_buffering off;"),
    "nginx-1.0": bare_nginx("proxy_buffering off;"),
    "nginx-close": bare_nginx("proxy_buffering off;", "keepalive_timeout 0;"),
    "haproxy": bare_haproxy(),
    "haproxy-close": bare_haproxy("option httpclose"),
}


@contextmanager
def front_of(world: World, folder: Path, proxied: Proxied) -> Iterator[int]:
    """A proxy in front of the world's gateway: its port."""
    port = free_port()
    with proxied(folder / "proxy", port, world.gateway.port):
        yield port


async def client_at(world: World, port: int) -> Client:
    client = Client(*await asyncio.open_connection("127.0.0.1", port))
    world.keep(client)
    return client


async def begun(client: Client, path: str) -> bytes:
    """Ask for a stream; its head and what came with its first event."""
    client.writer.write(
        b"POST %b HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n\r\n{}" % path.encode()
    )
    return await client.reader.readuntil(b"data: 0\n\n")


async def rest(client: Client) -> bytes:
    try:
        return await client.reader.read()
    except ConnectionError:
        return b""


# ---- proxies in front


@pytest.mark.parametrize("name", FRONTS)
def test_clients_come_through_a_proxy(play: Play, tmp_path: Path, name: str) -> None:
    async def scenario(world: World) -> None:
        with front_of(world, tmp_path, FRONTS[name]) as port:
            answers = []
            for _ in range(3):
                client = await client_at(world, port)
                answers.append(await client.post(CHAT, x__session__id="a"))
            assert [answer.status for answer in answers] == [200] * 3
            assert len({answer["x-ownerserve-worker"] for answer in answers}) == 1
            # A long session's body, and the word that it is welcome before it is sent.
            body = b'{"prompt": "%b"}' % (b"x" * (3 << 20))
            head = f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\n"
            client = await client_at(world, port)
            client.writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
            assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
            client.writer.write(body)
            assert (await client.read()).status == 200
            client = await client_at(world, port)
            chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            head = f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n"
            client.writer.write(head.encode() + chunks)
            assert (await client.read()).status == 200
            assert [len(said) for _, said in _longest(world)] == [len(body)] * 2
            client = await client_at(world, port)
            told = await client.post("/v1/nothing")
            assert (told.status, json.loads(told.body)["error"]["code"]) == (404, "unknown_path")

    play(scenario)


def _longest(world: World) -> list[tuple[bytes, bytes]]:
    return [one for engine in world.engines for one in engine.seen if len(one[1]) > 100]


@pytest.mark.parametrize("name", FRONTS)
def test_events_come_through_a_proxy_as_they_are_sent(
    play: Play, tmp_path: Path, name: str
) -> None:
    async def scenario(world: World) -> None:
        (engine,) = world.engines
        with front_of(world, tmp_path, FRONTS[name]) as port:
            client = await client_at(world, port)
            assert b"text/event-stream" in await begun(client, "/v1/completions?stream")
            assert world.gateway.state.live == 1  # and the first event is here
            engine.go_on.set()
            told = await client.reader.readuntil(b"data: %d\n\n" % (EVENTS - 1))
            assert told.count(b"data:") == EVENTS - 1

    play(scenario, engines=1)


@pytest.mark.parametrize("name", ["nginx", "haproxy", "nginx-1.0"])
def test_who_hangs_up_behind_a_proxy_ends_its_turn(play: Play, tmp_path: Path, name: str) -> None:
    """HAProxy sees it with `option abortonclose`."""

    async def scenario(world: World) -> None:
        (engine,) = world.engines
        with front_of(world, tmp_path, FRONTS[name]) as port:
            client = await client_at(world, port)
            await begun(client, "/v1/completions?stream")
            client.hang_up()
            async with asyncio.timeout(30):
                await engine.hung_up.wait()
            await until_async(lambda: world.gateway.state.account.aborted == 1)

    play(scenario, engines=1)


@pytest.mark.parametrize("name", FRONTS)
def test_a_broken_stream_is_told_and_short_behind_a_proxy(
    play: Play, tmp_path: Path, name: str
) -> None:
    async def scenario(world: World) -> None:
        with front_of(world, tmp_path, FRONTS[name]) as port:
            client = await client_at(world, port)
            before = await begun(client, f"{CHAT}?stream")
            await world.engines[0].kill()
            if name == "nginx-1.0":  # there only the connection's end ends a body: none is short
                told = await client.reader.readuntil(b"0\r\n\r\n")
                assert told.count(b'"code":"worker_lost"') == 1
                return
            told = before.partition(b"\r\n\r\n")[2] + await rest(client)
            assert told.count(b'"code":"worker_lost"') == 1
            assert not told.endswith(b"0\r\n\r\n")

    play(scenario, engines=1, health_interval_s=60.0)


IMPATIENT = {
    "nginx": bare_nginx("proxy_http_version 1.1;", "proxy_read_timeout 2s;"),
    "nginx-1.0": bare_nginx("proxy_read_timeout 2s;"),
    "haproxy": bare_haproxy("timeout server 2s"),
}
"""They give up on a server that is silent for 2 s, and nginx buffers, as it does by default."""
HELD = b'{"messages": "a", "stream": true}'
ONE_EACH = QueueSettings(running_max=1)


async def asked(world: World, port: int) -> tuple[Client, Client]:
    """A client whose stream has the fleet's one place, and one behind the proxy whose turn waits
    for it."""
    first = await world.client()
    await first.begin("/v1/completions?stream", b"{}")
    client = await client_at(world, port)
    head = f"POST /v1/completions?stream HTTP/1.1\r\nHost: t\r\nContent-Length: {len(HELD)}\r\n\r\n"
    client.writer.write(head.encode() + HELD)
    return first, client


@pytest.mark.parametrize("name", IMPATIENT)
def test_who_is_held_stays_connected_through_an_impatient_proxy(
    play: Play, tmp_path: Path, name: str
) -> None:
    async def scenario(world: World) -> None:
        with front_of(world, tmp_path, IMPATIENT[name]) as port:
            first, client = await asked(world, port)
            head = await client.reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200") and b"text/event-stream" in head
            await client.reader.readuntil(b"place 1 of 1, 3 s\n\n")
            world.engines[0].go_on.set()
            told = await client.reader.readuntil(b"data: %d\n\n" % (EVENTS - 1))
            assert told.count(b"data:") == EVENTS
            await first.reader.readuntil(b"0\r\n\r\n")

    play(scenario, engines=1, queue=ONE_EACH, wait_comments_s=0.5, health_interval_s=60.0)


@pytest.mark.parametrize("name", IMPATIENT)
def test_an_impatient_proxy_gives_up_on_a_silent_gateway(
    play: Play, tmp_path: Path, name: str
) -> None:
    async def scenario(world: World) -> None:
        with front_of(world, tmp_path, IMPATIENT[name]) as port:
            first, client = await asked(world, port)
            assert b" 504 " in await client.reader.readuntil(b"\r\n")
            await until_async(lambda: len(world.gateway.turns.admission) == 0)
            world.engines[0].go_on.set()
            await first.reader.readuntil(b"0\r\n\r\n")

    play(scenario, engines=1, queue=ONE_EACH, wait_comments_s=0.0, health_interval_s=60.0)


# ---- workers behind proxies


def behind(stack: ExitStack, folder: Path, proxied: Proxied) -> Callable[[int, int], Address]:
    """Puts a proxy in front of each engine: what the gateway is to ask."""

    def reach(number: int, port: int) -> Address:
        at = free_port()
        stack.enter_context(proxied(folder / f"proxy{number}", at, port))
        return Address("127.0.0.1", at)

    return reach


@pytest.mark.parametrize("name", BEHINDS)
def test_workers_stand_behind_a_proxy(play: Play, tmp_path: Path, name: str) -> None:
    async def scenario(world: World) -> None:
        (engine,) = world.engines
        client = await world.client()
        body = b'{"prompt": "%b"}' % (b"x" * (3 << 20))
        for _ in range(3):
            assert (await client.post(CHAT)).status == 200
        assert (await client.post(CHAT, body)).status == 200
        assert len(engine.seen[-1][1]) == len(body)
        assert b"text/event-stream" in await begun(client, "/v1/completions?stream")
        assert world.gateway.state.live == 1
        engine.go_on.set()
        await client.reader.readuntil(b"0\r\n\r\n")
        (pool,) = world.gateway.turns.pools.values()
        assert (pool.reused == 0) == name.endswith("close")
        assert not world.gateway.state.account.failures

    with ExitStack() as stack:
        play(scenario, engines=1, reach=behind(stack, tmp_path, BEHINDS[name]))


@pytest.mark.parametrize("name", BEHINDS)
def test_a_stream_ends_short_when_the_worker_behind_a_proxy_dies(
    play: Play, tmp_path: Path, name: str
) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        before = await begun(client, f"{CHAT}?stream")
        await world.engines[0].kill()
        told = before.partition(b"\r\n\r\n")[2] + await rest(client)
        assert told.count(b'"code":"worker_lost"') == 1
        assert not told.endswith(b"0\r\n\r\n")

    with ExitStack() as stack:
        reach = behind(stack, tmp_path, BEHINDS[name])
        play(scenario, engines=1, reach=reach, health_interval_s=60.0)


@pytest.mark.parametrize("name", ["nginx", "haproxy"])
def test_a_turn_whose_proxy_finds_no_worker_goes_to_another(
    play: Play, tmp_path: Path, name: str
) -> None:
    """nginx says 502 of a worker that is gone, HAProxy 503; nothing was computed."""

    async def scenario(world: World) -> None:
        client = await world.client()
        first = await client.post(CHAT, x__session__id="a")
        assert first.status == 200
        (gone,) = [one for one in world.engines if one.seen]
        await gone.kill()
        answer = await client.post(CHAT, x__session__id="a")
        assert (answer.status, answer["x-ownerserve-reason"]) == (200, "retry_other_worker")
        assert world.gateway.state.account.failures[Failure.REFUSED] == 1

    with ExitStack() as stack:
        reach = behind(stack, tmp_path, BEHINDS[name])
        play(scenario, engines=2, reach=reach, health_interval_s=60.0)


class _Old(http.server.BaseHTTPRequestHandler):
    """A worker that speaks HTTP/1.0: a body ends with its connection."""

    def do_GET(self) -> None:
        if self.path == "/health":
            self.send_response(200)
            self.end_headers()
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        is_stream = self.path.endswith("stream")
        kind = "text/event-stream" if is_stream else "application/json"
        self.send_header("content-type", kind)
        self.end_headers()
        if not is_stream:
            self.wfile.write(b'{"id": "one"}')
            return
        for number in range(EVENTS):
            self.wfile.write(b"data: %d\n\n" % number)
            self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


def test_a_worker_that_speaks_http_1_0(play: Play) -> None:
    async def scenario(world: World) -> None:
        for _ in range(3):
            client = await world.client()
            answer = await client.post(CHAT)
            assert (answer.status, answer.body) == (200, b'{"id": "one"}')
        client = await world.client()
        answer = await client.post("/v1/completions?stream")
        assert answer.body == b"".join(b"data: %d\n\n" % number for number in range(EVENTS))
        assert not world.gateway.state.account.failures

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Old) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            at = Address("127.0.0.1", server.server_port)
            play(scenario, engines=1, reach=lambda *_: at)
        finally:
            server.shutdown()
