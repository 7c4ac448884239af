"""Only the inference routes are a client's, and only what a client may say goes to a worker."""

from __future__ import annotations

import json

import pytest

from tests.support.gateway.world import Play, World

PATH = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("line", "status", "code"),
    [
        (b"POST /v1/load_lora_adapter HTTP/1.1", 404, "unknown_path"),
        (b"POST /v1/unload_lora_adapter HTTP/1.1", 404, "unknown_path"),
        (b"POST /v1/chat/completions/x HTTP/1.1", 404, "unknown_path"),
        (b"POST /reset_prefix_cache HTTP/1.1", 404, "unknown_path"),
        (b"TRACE /v1/chat/completions HTTP/1.1", 405, "method"),
        (b"DELETE /v1/chat/completions HTTP/1.1", 405, "method"),
        (b"POST /v1/models HTTP/1.1", 405, "method"),
        (b"POST /v1/chat/completions HTTP/2.0", 505, "version"),
    ],
)
def test_what_is_no_clients_route_reaches_no_worker(
    play: Play, line: bytes, status: int, code: str
) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        client.writer.write(line + b"\r\nHost: t\r\nContent-Length: 2\r\n\r\n{}")
        told = await client.read()
        assert told.status == status
        assert json.loads(told.body)["error"]["code"] == code
        assert not any(engine.seen for engine in world.engines)

    play(scenario)


@pytest.mark.parametrize("session", [{}, {"x__session__id": "a"}], ids=["unnamed", "named"])
@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "a", "model": "b"}',
        b'{"kv_transfer_params": {"do_remote_prefill": true}}',
        b'{"bootstrap_host": "10.0.0.1", "bootstrap_room": 7}',
        b'{"kv_transfer\\u005fparams": {}}',
        b'{"model": "a"',
        b'{"prompt": "cut: \\ud83d", "kv_transfer_params": {}}',
        b'{"prompt": "cut: \\ud83d", "model": "a", "model": "b"}',
    ],
)
def test_every_body_is_looked_at(play: Play, body: bytes, session: dict[str, str]) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        told = await client.post(PATH, body, **session)
        assert (told.status, json.loads(told.body)["error"]["code"]) == (400, "invalid_body")
        assert not any(engine.seen for engine in world.engines)

    play(scenario)


def test_our_own_headers_are_no_clients(play: Play) -> None:
    async def scenario(world: World) -> None:
        client, (engine,) = await world.client(), world.engines
        says = {"x__ownerserve__new": "1", "x__ownerserve__turn": "{}", "x__other": "2"}
        assert (await client.post(PATH, b"{}", **says)).status == 200
        head, _ = engine.seen[0]
        assert b"x-ownerserve-new" not in head and b"x-other: 2" in head

    play(scenario, engines=1)
