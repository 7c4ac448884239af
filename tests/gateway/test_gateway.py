"""The gateway on real sockets, in front of fake engines that stream, stall and die."""

from __future__ import annotations

import asyncio
import gzip
import json

import httpx
import pytest

from ownerserve.gateway.admin import admin_app
from ownerserve.gateway.config import Config
from ownerserve.gateway.http.access import Address, parse_worker
from ownerserve.gateway.service import Gateway
from ownerserve.kv.errors import InvalidInput
from tests.support.gateway.world import Play, World


def test_a_session_stays_and_answers_say_where_and_why(play: Play) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        first = await client.post("/v1/chat/completions", x__session__id="a")
        assert first["x-ownerserve-reason"] == "new_session"
        other = await client.post("/v1/chat/completions", x__session__id="b")
        assert other["x-ownerserve-worker"] != first["x-ownerserve-worker"]
        again = await client.post("/v1/chat/completions", x__session__id="a")
        assert again["x-ownerserve-worker"] == first["x-ownerserve-worker"]
        assert again["x-ownerserve-reason"] == "owner"
        client.writer.write(b"GET /v1/responses/r HTTP/1.1\r\nHost: t\r\nx-session-id: a\r\n\r\n")
        assert (await client.read())["x-ownerserve-reason"] == "no_session"

    play(scenario)


def test_bodies_go_through_unchanged_and_hop_by_hop_headers_do_not(play: Play) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        body = b'{ "model":"m",  "user": "\\u00e9", "n":1.0 }'
        answer = await client.post(
            "/v1/chat/completions?x=1",
            body,
            Connection="keep-alive, X-Secret",
            X__Secret="s",
            X__Kept="k",
            TE="trailers",
            X__OwnerServe__Worker="forged",
            X__Request__Id="mine",
        )
        ((head, seen),) = world.engine_of(answer).seen
        assert seen == body
        assert head.startswith(b"POST /v1/chat/completions?x=1 HTTP/1.1\r\n")
        assert b"X-Kept: k\r\n" in head
        assert b"x-request-id: mine\r\n" in head
        for gone in (b"secret", b"te:", b"ownerserve-worker", b"forged", b"connection"):
            assert gone not in head.lower()
        assert answer["x-request-id"] == "mine"
        assert answer.head.count(b"x-request-id") == 1
        assert answer["connection"] is None

    play(scenario, engines=1)


def test_connections_are_kept_on_both_sides(play: Play) -> None:
    async def scenario(world: World) -> None:
        client, (engine,) = await world.client(), world.engines
        before = engine.connections  # the probes'
        for number in range(20):
            answer = await client.post("/v1/chat/completions", x__session__id="a")
            assert answer.status == 200, number
        assert engine.connections == before + 1
        (pool,) = world.gateway.turns.pools.values()
        assert (pool.opened, pool.reused, pool.idle) == (1, 19, 1)

    play(scenario, engines=1)


def test_a_stream_arrives_event_by_event(play: Play) -> None:
    async def scenario(world: World) -> None:
        client, (engine,) = await world.client(), world.engines
        client.writer.write(b"GET /v1/responses/stream HTTP/1.1\r\nHost: t\r\n\r\n")
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head
        assert await client.reader.readuntil(b"data: 0\n\n\r\n")
        assert not engine.go_on.is_set()  # the first event came while the engine still works
        (worker,) = world.gateway.state.fleet
        assert (worker.requests, worker.pending_prefill_tokens) == (1, 0)
        engine.go_on.set()
        rest = await client.reader.readuntil(b"0\r\n\r\n")
        assert b"data: 4\n\n" in rest

    play(scenario, engines=1)


def test_hang_ups_reach_the_engine_before_and_in_the_stream(play: Play) -> None:
    async def scenario(world: World) -> None:
        (engine,) = world.engines
        early, late = await world.client(), await world.client()
        late.writer.write(b"GET /v1/responses/stream HTTP/1.1\r\nHost: t\r\n\r\n")
        await late.reader.readuntil(b"data: 0\n\n")
        late.hang_up()
        await engine.hung_up.wait()
        engine.hung_up.clear()
        early.writer.write(b"GET /v1/responses/stream HTTP/1.1\r\nHost: t\r\n\r\n")
        while len(engine.seen) < 2:
            await asyncio.sleep(0.001)
        early.hang_up()
        await engine.hung_up.wait()
        await world.settled()
        assert world.gateway.state.account.aborted == 2

    play(scenario, engines=1)


@pytest.mark.parametrize("phase", ["connecting", "refused"])
def test_hang_ups_before_an_answer_give_the_receipt_back(
    play: Play, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a connection is made, and while a worker's refusal is read."""

    async def scenario(world: World) -> None:
        (engine,), gateway, client = world.engines, world.gateway, await world.client()
        (pool,) = gateway.turns.pools.values()
        begun, is_cancelled = asyncio.Event(), asyncio.Event()

        async def never() -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                is_cancelled.set()

        if phase == "connecting":
            monkeypatch.setattr(pool, "connect", never)
        client.writer.write(
            b"GET /v1/responses/refusal HTTP/1.1\r\nHost: t\r\nx-session-id: a\r\n\r\n"
        )
        if phase == "connecting":
            await begun.wait()
        else:
            while not any(engine.seen):
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)  # its head is here
        assert gateway.state.live == 1
        client.hang_up()
        await (is_cancelled if phase == "connecting" else engine.hung_up).wait()
        await world.settled()
        assert gateway.state.account.aborted == 1
        assert pool.idle == 0

    play(scenario, engines=1)


def test_a_worker_killed_in_mid_stream_is_seen_by_the_client(play: Play) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        client.writer.write(
            b"GET /v1/responses/stream HTTP/1.1\r\nHost: t\r\nx-session-id: a\r\n\r\n"
        )
        head = await client.reader.readuntil(b"data: 0\n\n")
        port = int(head.split(b"x-ownerserve-worker: 127.0.0.1:")[1].split(b"\r\n")[0])
        (engine,) = [engine for engine in world.engines if engine.port == port]
        await engine.kill()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await client.reader.readuntil(b"0\r\n\r\n")
        await world.settled()
        assert world.gateway.state.account.broken == 1
        moved = await (await world.client()).post("/v1/chat/completions", x__session__id="a")
        assert moved.status == 200
        assert not moved["x-ownerserve-worker"].endswith(str(port))

    play(scenario, health_interval_s=10.0)


def test_a_dead_workers_kept_connections_and_port_are_retried_elsewhere(play: Play) -> None:
    """Kept connection closed -> new one refused -> the other worker; the client sees 200."""

    async def scenario(world: World) -> None:
        client = await world.client()
        first = await client.post("/v1/chat/completions", x__session__id="a")
        await world.engine_of(first).kill()
        second = await client.post("/v1/chat/completions", x__session__id="a")
        assert second.status == 200
        assert second["x-ownerserve-worker"] != first["x-ownerserve-worker"]
        third = await client.post("/v1/chat/completions", x__session__id="a")
        assert third["x-ownerserve-reason"] == "owner"

    play(scenario, health_interval_s=10.0)


def test_a_worker_that_drops_requests_costs_a_502_after_all_were_tried(play: Play) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        answer = await client.post("/v1/completions?drop", x__request__id="r1")
        assert answer.status == 502
        error = json.loads(answer.body)["error"]
        assert (error["type"], error["code"]) == ("server_error", "all_tried")
        assert answer["x-request-id"] == "r1"
        assert [len(engine.seen) for engine in world.engines] == [1, 1]
        assert (await client.post("/v1/chat/completions")).status == 200  # same connection

    play(scenario)


def test_no_worker_is_503_with_retry_after_and_recovery_is_noticed(play: Play) -> None:
    async def scenario(world: World) -> None:
        client, (engine,) = await world.client(), world.engines
        await engine.kill()
        refused = await client.post("/v1/chat/completions")
        assert refused.status in (502, 503)
        refused = await client.post("/v1/chat/completions")
        assert (refused.status, refused["retry-after"]) == (503, "1")
        assert (await client.get("/health")).status == 503
        await engine.start(engine.port)
        while (await client.get("/health")).status != 200:
            await asyncio.sleep(0.01)
        assert (await client.post("/v1/chat/completions")).status == 200

    play(scenario, engines=1, health_interval_s=0.03)


def test_a_slow_client_slows_its_worker(play: Play) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        client.writer.write(b"GET /v1/responses/big HTTP/1.1\r\nHost: t\r\n\r\n")
        await client.reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.1)
        (gateway_client,) = world.gateway.clients
        transport = gateway_client._transport  # noqa: SLF001 - what the gateway holds in memory
        held = transport.get_write_buffer_size()
        assert held < 1 << 20  # of 64 MiB: the rest waits at the engine
        left = 64 << 20
        while left:
            left -= len(await client.reader.read(1 << 20))
        assert (await client.post("/v1/chat/completions")).status == 200

    play(scenario, engines=1)


def test_answers_that_end_by_close_and_clients_of_http_1_0(play: Play) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        answer = await client.get("/v1/responses/old")
        assert (answer.body, answer["connection"]) == (b"until the end", "close")
        old = await world.client()
        world.engines[0].go_on.set()
        old.writer.write(b"GET /v1/responses/stream HTTP/1.0\r\n\r\n")
        answer = await old.read()
        assert answer["transfer-encoding"] is None
        assert answer.body == b"".join(b"data: %d\n\n" % number for number in range(5))

    play(scenario, engines=1)


def test_responses_api_turns_follow_each_other(play: Play) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        first = await client.post("/v1/responses", b'{"input": "hi"}')
        body = json.dumps({"previous_response_id": json.loads(first.body)["id"]}).encode()
        second = await client.post("/v1/responses", body)
        assert second["x-ownerserve-worker"] == first["x-ownerserve-worker"]
        assert second["x-ownerserve-reason"] == "owner"

    play(scenario)


def test_what_must_not_be_forwarded_is_refused_in_openai_form(play: Play) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        for path, body, status, code in (
            ("/v1/chat/completions", b'{"user":"a","user":"b"}', 400, "invalid_body"),
            ("/v1/chat/completions", b'{"us\\u0065r":"a"}', 400, "invalid_body"),
            ("/v1/chat/completions", b'{"user":', 400, "invalid_body"),
        ):
            answer = await client.post(path, body)
            error = json.loads(answer.body)["error"]
            assert (answer.status, error["code"]) == (status, code), body
            assert error["type"] == "invalid_request_error"
        assert not any(engine.seen for engine in world.engines)
        assert (await client.get("/v1/models")).status == 200

    play(scenario)


def test_a_compressed_body_is_refused_whoever_names_its_session(play: Play) -> None:
    """Another reader could find a client's own `session_id` in it."""

    async def scenario(world: World) -> None:
        client = await world.client()
        body = gzip.compress(b'{"session_id": "mine", "messages": []}')
        for named in ({}, {"x__session__id": "a"}):
            told = await client.post(
                "/v1/chat/completions", body, content__encoding="gzip", **named
            )
            assert (told.status, json.loads(told.body)["error"]["code"]) == (
                415,
                "content_encoding",
            )
        assert not any(engine.seen for engine in world.engines)
        plain = await client.post("/v1/chat/completions", content__encoding="identity")
        assert plain.status == 200

    play(scenario)


def test_draining_ends_what_is_live_and_takes_nothing_new(play: Play) -> None:
    async def scenario(world: World) -> None:
        client, (engine,) = await world.client(), world.engines
        port = world.gateway.port
        client.writer.write(b"GET /v1/responses/stream HTTP/1.1\r\nHost: t\r\n\r\n")
        await client.reader.readuntil(b"data: 0\n\n")
        draining = asyncio.ensure_future(world.gateway.drain())
        await asyncio.sleep(0.01)
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", port)
        assert not draining.done()
        engine.go_on.set()
        assert (await client.reader.read()).endswith(b"0\r\n\r\n")
        await draining

    play(scenario, engines=1)


def test_the_admin_port_shows_workers_decisions_and_metrics(play: Play) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        for _ in range(3):
            answer = await client.post("/v1/chat/completions", b'{"a":1}', x__session__id="a")
        transport = httpx.ASGITransport(admin_app(world.gateway))
        async with httpx.AsyncClient(transport=transport, base_url="http://admin") as admin:
            status = (await admin.get("/status")).json()
            assert status["requests"]["finished"] == 3
            assert status["sessions"] == 1
            assert [worker["requests"] for worker in status["workers"]] == [0, 0]
            decisions = (await admin.get("/decisions?last=2")).json()["decisions"]
            assert [one["reason"] for one in decisions] == ["owner", "owner"]
            assert decisions[0]["worker"] == answer["x-ownerserve-worker"]
            assert (await admin.get("/decisions?last=x")).status_code == 400
            metrics = (await admin.get("/metrics")).text
            assert 'ownerserve_gateway_dispatches_total{reason="owner"} 2.0' in metrics
            assert "ownerserve_gateway_first_byte_seconds_count 3.0" in metrics
            assert "ownerserve_gateway_prompt_tokens_total 9.0" in metrics
            assert (await admin.get("/health")).json() == {"workers_up": 2}

    play(scenario)


def test_settings_are_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="worker"):
        parse_worker("ftp://a:1")
    with pytest.raises(InvalidInput, match="worker"):
        parse_worker("http://a")
    assert parse_worker("http://a:1/") == Address("a", 1)

    async def start(policy: str) -> None:
        Gateway(Config(workers=(Address("a", 1),), policy=policy))

    with pytest.raises(InvalidInput, match="policy"):
        asyncio.run(start("best"))
