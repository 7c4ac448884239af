"""Workers join, leave and are drained while the gateway serves, as processes."""

from __future__ import annotations

import http.client
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from ownerserve.kv.ids import WorkerId
from tests.support.gateway.process import SHORT, gateway_process, worker_process
from tests.support.gateway.world import World
from tests.support.waits import until, until_async

PATH = "/v1/chat/completions"


def asked(url: str, method: str, path: str, body: object = None, **more: str) -> tuple[int, Any]:
    place = urlsplit(url)
    assert place.hostname is not None
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
    try:
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body)
        connection.request(method, path, data, more)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


@contextmanager
def began(url: str, path: str = PATH) -> Iterator[tuple[http.client.HTTPResponse, str]]:
    """An answer that has begun, and the worker that gives it."""
    place = urlsplit(url)
    assert place.hostname is not None
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
    connection.request("POST", path, b"{}", {"content-type": "application/json"})
    try:
        answer = connection.getresponse()
        assert answer.status == 200
        yield answer, answer.headers["x-ownerserve-worker"]
    finally:
        connection.close()


def served(url: str, times: int = 8) -> Counter[str]:
    """Who serves so many turns."""
    count: Counter[str] = Counter()
    for _ in range(times):
        with began(url) as (answer, worker):
            answer.read()
        count[worker] += 1
    return count


@pytest.mark.slow
def test_workers_join_leave_and_are_drained_while_turns_run(tmp_path: Path) -> None:
    with ExitStack() as stack:
        ports = [stack.enter_context(worker_process()).port for _ in range(3)]
        a, b, c = (f"127.0.0.1:{port}" for port in ports)
        gateway = stack.enter_context(gateway_process(tmp_path, ports[:2], "--receipts", "open"))
        data, admin = gateway.data_url, gateway.admin_url

        def stays() -> dict[str, tuple[str, bool]]:
            rows = asked(admin, "GET", "/workers")[1]["workers"]
            return {row["worker"]: (row["stay"], row["up"]) for row in rows}

        assert set(served(data)) == {a, b}

        # a third joins, and gets turns
        status, row = asked(admin, "POST", "/workers", {"url": f"http://{c}"})
        assert (status, row["worker"], row["stay"], row["up"]) == (201, c, "serving", True)
        assert set(served(data, 12)) == {a, b, c}

        # one leaves in mid-stream: no new turn, and its stream ends whole
        stream, leaver = stack.enter_context(began(data, f"{PATH}?short-stream"))
        status, row = asked(admin, "DELETE", f"/workers/{leaver}")
        assert (status, row["stay"], row["up"], row["requests"]) == (202, "leaving", False, 1)
        assert set(served(data, 6)) == {a, b, c} - {leaver}
        for path in ("", "/drain", "/undrain"):
            method = "POST" if path else "DELETE"
            status, said = asked(admin, method, f"/workers/{leaver}{path}")
            assert (status, said["error"]["code"]) == (409, "leaving_worker")
        told = stream.read().decode()
        assert told.count('"word"') == SHORT
        assert told.endswith("data: [DONE]\n\n")
        until(lambda: leaver not in stays(), within_s=60)
        left = asked(admin, "GET", "/status")[1]
        assert leaver not in {row["worker"] for row in left["workers"]} | set(left["probes"])
        assert left["never_up"] == []

        # it comes back under its name, with the models that are assigned to it
        join = {"url": f"http://{leaver}/", "models": ["tiny"]}
        status, row = asked(admin, "POST", "/workers", join)
        assert (status, row["assigned"], row["up"]) == (201, ["tiny"], True)

        # a drained one ends what it has, gets nothing, is probed on, and comes back
        stream, drained = stack.enter_context(began(data, f"{PATH}?short-stream"))
        for _ in range(2):
            status, row = asked(admin, "POST", f"/workers/{drained}/drain")
            assert (status, row["stay"], row["up"]) == (200, "drained", False)
        assert stream.read().decode().endswith("data: [DONE]\n\n")
        assert drained not in served(data, 6)
        assert stays()[drained] == ("drained", False)
        status, row = asked(admin, "POST", f"/workers/{drained}/undrain")
        assert (status, row["stay"], row["up"]) == (200, "serving", True)
        assert drained in served(data, 12)
        said = gateway.said.read_text()
        assert "Traceback" not in said
        for event in ("worker_joined", "worker_left", "worker_undrained", "drained"):
            assert event in said


def test_a_drain_outlasts_the_workers_good_answers(play: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        (engine,), roster = world.engines, world.gateway.roster
        worker = WorkerId(f"127.0.0.1:{engine.port}")
        roster.drain(worker)
        probed_at = engine.connections
        await until_async(lambda: engine.connections > probed_at + 4)
        assert not world.gateway.state.fleet.up
        await roster.undrain(worker)
        assert [one.id for one in world.gateway.state.fleet.up] == [worker]

    play(scenario, engines=1, health_interval_s=0.02)


@pytest.mark.slow
def test_a_drained_worker_is_asked_by_nobody_and_its_death_is_seen(tmp_path: Path) -> None:
    with worker_process() as worker, gateway_process(tmp_path, [worker.port]) as gateway:
        admin, name = gateway.admin_url, f"127.0.0.1:{worker.port}"
        asked(admin, "POST", f"/workers/{name}/drain")
        for _ in range(2):
            status, said = asked(gateway.data_url, "POST", PATH, {})
            assert (status, said["error"]["code"]) == (503, "no_worker")
        worker.kill()

        def cause() -> str:
            return str(asked(admin, "GET", "/workers")[1]["workers"][0]["cause"])

        until(lambda: "nobody listens" in cause(), within_s=60)
        assert asked(gateway.data_url, "POST", PATH, {})[0] == 503
        status, row = asked(admin, "POST", f"/workers/{name}/undrain")
        assert (status, row["stay"], row["up"]) == (200, "serving", False)


@pytest.mark.slow
def test_what_cannot_be_changed_is_told_as_typed_json(tmp_path: Path) -> None:
    with gateway_process(tmp_path, [1]) as gateway:
        known = {"url": "http://127.0.0.1:1"}
        unknown = "/workers/127.0.0.1:2"
        wrong: list[tuple[str, str, object, dict[str, str], int, str]] = [
            ("POST", "/workers", known, {}, 409, "known_worker"),
            ("DELETE", unknown, None, {}, 404, "unknown_worker"),
            ("POST", f"{unknown}/drain", None, {}, 404, "unknown_worker"),
            ("POST", f"{unknown}/undrain", None, {}, 404, "unknown_worker"),
            ("POST", "/workers", b"{", {}, 400, "invalid"),
            ("POST", "/workers", b"\xff", {}, 400, "invalid"),
            ("POST", "/workers", b"[" * 70_000, {}, 400, "invalid"),
            ("POST", "/workers", {"url": 1}, {}, 400, "invalid"),
            ("POST", "/workers", {"url": "http://a:1", "port": 1}, {}, 400, "invalid"),
            ("POST", "/workers", {"url": "a:1"}, {}, 400, "invalid"),
            ("POST", "/workers", {"url": "http://a:1=m"}, {}, 400, "invalid"),
            ("POST", "/workers", {"url": "http://a:1", "models": [" "]}, {}, 400, "invalid"),
            ("POST", "/workers", known, {"origin": "http://evil.test"}, 403, "from_a_page"),
        ]
        for method, path, body, headers, wanted, code in wrong:
            status, said = asked(gateway.admin_url, method, path, body, **headers)
            assert (status, said["error"]["code"]) == (wanted, code), (method, path, body, said)
            assert said["error"]["message"]
            assert said["error"]["mend"]
        (row,) = asked(gateway.admin_url, "GET", "/workers")[1]["workers"]
        assert (row["worker"], row["up"]) == ("127.0.0.1:1", False)
        assert "Traceback" not in gateway.said.read_text()


@pytest.mark.slow
def test_the_admin_key_is_asked_for_changes_too(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("an-admin-key")
    with gateway_process(tmp_path, [1], "--admin-key-file", str(key)) as gateway:
        path = "/workers/127.0.0.1:1"
        assert asked(gateway.admin_url, "DELETE", path)[0] == 401
        status, _ = asked(gateway.admin_url, "DELETE", path, authorization="Bearer an-admin-key")
        assert status == 202
