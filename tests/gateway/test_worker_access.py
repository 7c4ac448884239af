"""Which models a fleet serves, and how workers are reached that want a key or speak TLS."""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from ownerserve.gateway.admin import admin_app
from ownerserve.gateway.config import Config
from ownerserve.gateway.http.access import Address, open_access, parse_worker, read_key
from ownerserve.gateway.http.upstream import WorkerPool
from ownerserve.gateway.workers.health import HealthMonitor
from ownerserve.kv.errors import InvalidInput
from ownerserve.router.messages import Down, WorkerDown
from tests.support.certificates import Authority
from tests.support.gateway.world import Play, World

Engines = Sequence[Any]

CHAT = "/v1/chat/completions"


async def admin(world: World, path: str) -> httpx.Response:
    transport = httpx.ASGITransport(admin_app(world.gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        return await client.get(path)


def keyed(engines: Engines) -> None:
    """Two vLLMs with --api-key and a model each."""
    for engine, model in zip(engines, ("model-a", "model-b"), strict=True):
        engine.key, engine.lists = "secret", [model]


def body(model: str) -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": "hi"}]}).encode()


def turns(engine: Any) -> list[str]:
    """The models that an engine was asked for."""
    return [json.loads(said)["model"] for _, said in engine.seen if said]


# ---- models


def test_the_list_of_models_is_the_union_over_workers(play: Play) -> None:
    stated = {
        "version": 1,
        "unit": {"worker": "w", "rank": 0, "incarnation": 5},
        "profile": {"models": ["own", "own-lora"], "sequence_tokens": 2048},
    }

    def prepare(engines: Engines) -> None:
        engines[1].lists = ["plain", "own"]

    async def scenario(world: World) -> None:
        client = await world.client()
        said = json.loads((await client.get("/v1/models")).body)
        assert [model["id"] for model in said["data"]] == ["own", "own-lora", "plain"]
        assert [model["max_model_len"] for model in said["data"]] == [2048, 2048, 4096]
        one = await client.get("/v1/models/plain")
        assert (one.status, json.loads(one.body)["id"]) == (200, "plain")
        assert (await client.get("/v1/models/none")).status == 404
        assert not any(engine.seen for engine in world.engines), "no worker was asked"
        await world.engines[1].kill()
        while len(world.gateway.state.fleet.up) > 1:
            await asyncio.sleep(0.01)
        said = json.loads((await client.get("/v1/models")).body)
        assert [model["id"] for model in said["data"]] == ["own", "own-lora"]

    states = [json.dumps(stated).encode()]
    play(scenario, states=states, prepare=prepare, health_interval_s=0.1)


def test_workers_whose_models_cannot_be_learnt_get_nothing(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    """Two keyed vLLMs served each other's models: nobody could read their lists."""

    async def scenario(world: World) -> None:
        client = await world.client()
        assert (await client.post(CHAT, body("model-a"))).status == 503
        assert not any(map(turns, world.engines))
        said = (await admin(world, "/status")).json()
        for name in said["never_up"]:
            assert "401" in said["probes"][name]["models_unknown"]
            assert f"worker {name} gets no turns" in caplog.text
            metric = f'field="models",worker="{name}"'
            assert metric in (await admin(world, "/metrics")).text
        assert len(said["never_up"]) == 2

    with caplog.at_level(logging.WARNING, "ownerserve.gateway"):
        play(scenario, prepare=keyed, health_interval_s=10.0)


def test_a_worker_gets_only_what_its_operator_assigned_it(play: Play) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        for engine, model in zip(world.engines, ("model-a", "model-b"), strict=True):
            for _ in range(3):
                answer = await client.post(CHAT, body(model), authorization="Bearer secret")
                assert (answer.status, world.engine_of(answer)) == (200, engine)
        unknown = await client.post(CHAT, body("model-c"), authorization="Bearer secret")
        assert unknown.status == 404
        assert json.loads(unknown.body)["error"]["code"] == "no_such_model"
        assert [set(turns(engine)) for engine in world.engines] == [{"model-a"}, {"model-b"}]
        said = json.loads((await client.get("/v1/models")).body)
        assert [model["id"] for model in said["data"]] == ["model-a", "model-b"]

    def reach(number: int, port: int) -> Address:
        return parse_worker(f"http://127.0.0.1:{port}={('model-a', 'model-b')[number]}")

    play(scenario, prepare=keyed, reach=reach)


def test_beside_a_worker_that_is_not_learnt_another_ones_model_is_not_asked_of_it(
    play: Play,
) -> None:
    def prepare(engines: Engines) -> None:
        engines[0].lists = ["model-a"]
        engines[1].never_lists = True

    async def scenario(world: World) -> None:
        client = await world.client()
        assert (await client.post(CHAT, body("model-a"))).status == 200
        assert (await client.post(CHAT, body("model-b"))).status == 404
        assert [turns(engine) for engine in world.engines] == [["model-a"], []]
        said = (await admin(world, "/status")).json()
        (unlearnt,) = said["never_up"]
        assert "no answer" in said["probes"][unlearnt]["models_unknown"]
        world.engines[1].go_on.set()

    play(scenario, prepare=prepare, health_timeout_s=2.0, health_interval_s=10.0)


# ---- keys


def test_the_operators_key_goes_to_the_workers_and_the_clients_own_tells_tenants(
    play: Play,
) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        for key in ("alice", "bob"):
            headers = {"authorization": f"Bearer {key}", "x__api__key": key}
            answer = await client.post(CHAT, body("model-a"), x__session__id="s", **headers)
            assert answer.status == 200
        assert len(world.gateway.state.sessions) == 2, "equal ids of two tenants"
        for head, _ in world.engines[0].seen:
            assert head.lower().count(b"authorization:") == 1
            assert b"authorization: Bearer secret\r\n" in head
            assert b"alice" not in head and b"bob" not in head
        said = json.loads((await client.get("/v1/models")).body)
        assert [model["id"] for model in said["data"]] == ["model-a", "model-b"]

    play(scenario, prepare=keyed, worker_key="secret")


def test_a_file_without_a_key_is_named_and_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("  sk-one\n")
    assert read_key(path, field="--worker-key-file") == "sk-one"
    for said in (b"", b"\n", b"two words", b"a\nb", "schlüssel".encode(), b"x" * 5000):
        path.write_bytes(said)
        with pytest.raises(InvalidInput, match="worker-key-file") as caught:
            read_key(path, field="--worker-key-file")
        assert not said.strip() or said.decode("latin-1") not in str(caught.value)
    with pytest.raises(InvalidInput, match="worker-key-file"):
        read_key(tmp_path / "none", field="--worker-key-file")


# ---- TLS


def by_tls(_: int, port: int) -> Address:
    return parse_worker(f"https://127.0.0.1:{port}")


def test_workers_behind_tls_are_probed_and_served(play: Play, tmp_path: Path) -> None:
    ca = Authority(tmp_path)

    async def scenario(world: World) -> None:
        client = await world.client()
        for _ in range(3):
            answer = await client.post(CHAT, b'{"a": 1}', x__session__id="s")
            assert answer.status == 200
        streamed = await client.get("/v1/responses/big")
        assert len(streamed.body) == 64 << 20
        pool = next(iter(world.gateway.turns.pools.values()))
        assert (pool.opened, pool.reused) == (1, 3), "one handshake, not one a turn"

    context = ca.issue("worker", "127.0.0.1").context()
    play(scenario, engines=1, reach=by_tls, tls=context, worker_ca_file=ca.path)


def test_a_certificate_that_nobody_vouches_for_is_refused_and_said(
    play: Play, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = Authority(tmp_path).issue("worker", "127.0.0.1").context()

    async def scenario(world: World) -> None:
        client = await world.client()
        assert (await client.post(CHAT, b'{"a": 1}')).status == 503
        (shown,) = (await admin(world, "/status")).json()["probes"].values()
        assert any("tls" in problem for problem in shown["problems"])
        assert "CERTIFICATE_VERIFY_FAILED" in caplog.text

    with caplog.at_level(logging.WARNING, "ownerserve.gateway"):
        play(scenario, engines=1, reach=by_tls, tls=context, health_interval_s=10.0)


@pytest.mark.parametrize(
    ("host", "ends_in_s", "why"),
    [
        ("127.0.0.2", 3600, "IP address mismatch"),
        ("localhost", 3600, "IP address mismatch"),
        ("127.0.0.1", -60, "certificate has expired"),
    ],
)
def test_a_certificate_of_another_host_or_another_time_is_refused_and_said(
    play: Play,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    *,
    host: str,
    ends_in_s: float,
    why: str,
) -> None:
    """A good one else: whoever holds it is not who was asked for, and gets no turn and no key."""
    ca = Authority(tmp_path)
    ends_in = datetime.timedelta(seconds=ends_in_s)

    async def scenario(world: World) -> None:
        client = await world.client()
        assert (await client.post(CHAT, b'{"a": 1}')).status == 503
        assert not world.engines[0].seen
        (shown,) = (await admin(world, "/status")).json()["probes"].values()
        assert why in shown["cause"]
        assert "CERTIFICATE_VERIFY_FAILED" in caplog.text

    with caplog.at_level(logging.WARNING, "ownerserve.gateway"):
        context = ca.issue("worker", host, ends_in=ends_in).context()
        play(scenario, engines=1, reach=by_tls, tls=context, worker_ca_file=ca.path,
             worker_key="sekret", health_interval_s=10.0)  # fmt: skip


def test_an_address_may_be_certified_by_another_name(play: Play, tmp_path: Path) -> None:
    """A worker that was found by its name is reached by its address, and proves the name."""
    ca = Authority(tmp_path)

    async def scenario(world: World) -> None:
        client = await world.client()
        assert (await client.post(CHAT, b'{"a": 1}')).status == 200

    def reach(_: int, port: int) -> Address:
        return Address("127.0.0.1", port, "https", certified="vllm.internal")

    context = ca.issue("worker", "vllm.internal").context()
    play(scenario, engines=1, reach=reach, tls=context, worker_ca_file=ca.path)


def test_a_bad_file_of_authorities_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    path.write_text("nothing")
    with pytest.raises(InvalidInput, match="worker-ca-file"):
        open_access(None, path)


def test_an_address_says_its_scheme_and_its_models() -> None:
    assert parse_worker("https://a:1=m,org/n") == Address("a", 1, "https", ("m", "org/n"))
    assert parse_worker("http://a:1").models == ()
    for bad in ("http://a:1=", "http://a:1=m,,n", "http://a=m", "http://a:x=m"):
        with pytest.raises(InvalidInput, match="worker"):
            parse_worker(bad)


def test_a_worker_without_a_possible_host_is_refused_in_one_line() -> None:
    long = "http://" + ".".join(["a" * 70, "com"]) + ":80"
    for bad in (long, "http://exa..mple:80", "http://ex ample:80", "http://a\tb:80", "http://.:80",
                "http://a\x7f:80", "http://a%20b:80", "http://h:0"):  # fmt: skip
        with pytest.raises(InvalidInput) as refused:
            parse_worker(bad)
        assert str(refused.value).startswith("worker: ") and "\n" not in str(refused.value)
        assert "host" in str(refused.value).lower() or "port" in str(refused.value)
    for good in (
        "http://[::1]:80",
        "http://a_b.c.:80",
        "http://b\u00fccher.de:80",
        "http://10.0.0.1:80",
    ):
        assert parse_worker(good).port == 80


def test_a_host_that_cannot_be_looked_up_is_a_worker_that_is_down() -> None:
    """However its address was made: neither a probe nor a turn raises anything but OSError."""

    async def drive() -> None:
        access = open_access(None, None)
        address = Address("exa..mple", 80)
        monitor = HealthMonitor(address, Config(workers=(address,)), access=access, tell=print)
        told = [*await monitor.probe(), *await monitor.probe()]
        assert told == [WorkerDown(address.worker, Down.UNHEALTHY)]
        with pytest.raises(OSError, match="mple"):
            await WorkerPool(address, access, connect_timeout_s=1.0).connect()

    asyncio.run(drive())


def test_the_operators_key_is_in_no_representation() -> None:
    config = Config(workers=(Address("a", 1),), worker_key="sekret")
    assert "sekret" not in repr(config) + str(config) + repr(open_access("sekret", None))
    assert "Address" in repr(config)
