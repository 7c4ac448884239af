"""The admin API: it answers as its own description says, with one form for every error."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from ownerserve.gateway.admin import endpoints_of, keyed_app
from ownerserve.gateway.admin_api.endpoints import Endpoint, app_of
from tests.support.gateway.process import GatewayProcess, gateway_process, worker_process
from tests.support.gateway.world import Play, World

CHAT = "/v1/chat/completions"
CASES = int(os.environ.get("OWNERSERVE_ADMIN_CASES", "300"))
FORM = {"code", "field", "message", "mend"}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[GatewayProcess, list[str]]]:
    """A gateway in front of two workers, and their names."""
    with ExitStack() as stack:
        ports = [stack.enter_context(worker_process()).port for _ in range(2)]
        gateway = stack.enter_context(gateway_process(tmp_path, ports))
        yield gateway, [f"127.0.0.1:{port}" for port in ports]


@pytest.mark.slow
def test_cases_of_the_description_conform_and_none_is_a_fault(
    running: tuple[GatewayProcess, list[str]],
) -> None:
    """OWNERSERVE_ADMIN_CASES=20000 asks so many, here 300."""
    from tests.support.gateway.admin_cases import AdminCases

    gateway, workers = running
    httpx.post(gateway.data_url + CHAT, json={}, headers={"x-session-id": "a"})
    cases = AdminCases(gateway.admin_url, workers, number=1)
    cases.ask(CASES)
    assert cases.seen.total() >= CASES
    by_status: Counter[str] = Counter()
    for what, count in sorted(cases.seen.items()):
        by_status[what[-3:]] += count
        print(count, what)
    print(dict(by_status))
    assert not any(status.startswith("5") for status in by_status)
    assert {"200", "400", "404"} <= set(by_status)
    assert "Traceback" not in gateway.said.read_text()


def schema_of(described: dict[str, Any], path: str, method: str, status: int) -> Any:
    told = described["paths"][path][method]["responses"][str(status)]["content"]
    (content,) = told.values()
    return {**content["schema"], "components": described["components"]}


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin")


def test_the_description_is_well_formed_and_has_every_endpoint(play: Play) -> None:
    async def scenario(world: World) -> None:
        table = endpoints_of(world.gateway)
        async with client_of(app_of(table)) as admin:
            described = (await admin.get("/openapi.json")).json()
        OpenAPIV31SpecValidator(described).validate()
        told = {
            (method.upper(), path) for path, rows in described["paths"].items() for method in rows
        }
        served = {
            (method, re.sub(r":\w+}", "}", route.path))
            for route in app_of(table).routes
            for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
        }
        assert told == served
        names = [
            row["operationId"] for rows in described["paths"].values() for row in rows.values()
        ]
        assert len(set(names)) == len(names)

    play(scenario)


BODIES: dict[tuple[str, str], Any] = {
    ("PUT", "/log-level"): {"level": "warning"},
    ("PUT", "/mode"): {"mode": "shadow"},
    ("PUT", "/shadow"): {"policy": "ear"},
    ("PUT", "/canary"): {"share": 0.5, "policy": "ear"},
    ("PUT", "/workers/{worker:path}/arm"): {"arm": "main"},
}


def test_every_endpoint_answers_as_described_after_turns_and_refusals(play: Play) -> None:
    """Each row of the table is asked, over a gateway that has something to tell of everything."""

    async def ask(
        admin: httpx.AsyncClient, row: Endpoint, worker: str, body: Any
    ) -> httpx.Response:
        path = row.path.replace("{worker:path}", worker)
        return await admin.request(row.method, path, json=body)

    async def scenario(world: World) -> None:
        client = await world.client()
        for name in ("a", "b", "a"):
            await client.post(CHAT, b'{"a":1}', x__session__id=name)
        client.hang_up()
        world.engines[0].drops_next = True
        client = await world.client()
        await client.post(CHAT, b'{"a":1}', x__session__id="a")
        table = endpoints_of(world.gateway)
        by_place = {(row.method, row.path): row for row in table}
        first, second = (f"127.0.0.1:{engine.port}" for engine in world.engines)
        asked = 0
        async with client_of(app_of(table)) as admin:
            described = (await admin.get("/openapi.json")).json()
            for row in sorted(table, key=lambda one: one.method == "DELETE"):
                place = row.method, row.path
                body = BODIES.get(place)
                if place == ("POST", "/workers"):
                    await world.engines[1].kill()
                    body = {"url": "http://127.0.0.1:1"}
                wanted = 400 if row.path == "/reload" else int(row.status)
                answer = await ask(admin, row, first, body)
                assert answer.status_code == wanted, (place, answer.text)
                plain = row.path.replace(":path", "")
                schema = schema_of(described, plain, row.method.lower(), wanted)
                is_json = answer.headers["content-type"] == "application/json"
                jsonschema.Draft202012Validator(schema).validate(
                    answer.json() if is_json else answer.text
                )
                asked += 1
            assert asked == len(by_place)
            decisions = (await admin.get("/decisions")).json()["decisions"]
            assert {"retry_new_connection", "new_session"} & {one["reason"] for one in decisions}
            owners = (await admin.get("/owners?last=1")).json()
            assert (owners["known"], len(owners["sessions"])) == (2, 1)
            assert owners["sessions"][0]["owner"] and owners["sessions"][0]["up"] in (True, False)
            assert second in {one["worker"] for one in owners["workers"]}

    play(scenario, policy="ownerserve", health_interval_s=60.0)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "unknown_path"),
        ("GET", "/health/", 404, "unknown_path"),
        ("DELETE", "/status", 405, "method"),
        ("POST", "/log-level", 405, "method"),
        ("GET", "/decisions?last=x", 400, "invalid"),
        ("GET", "/sessions?last=-1", 400, "invalid"),
        ("GET", "/owners?last=1e3", 400, "invalid"),
        ("PUT", "/log-level", 400, "invalid"),
        ("POST", "/workers", 400, "invalid"),
        ("PUT", "/mode", 400, "invalid"),
        ("DELETE", "/workers/nobody:1", 404, "unknown_worker"),
        ("PUT", "/workers/nobody:1/arm", 400, "invalid"),
        ("POST", "/reload", 400, "invalid"),
    ],
)
def test_every_error_has_one_form(
    play: Play, method: str, path: str, status: int, code: str
) -> None:
    async def scenario(world: World) -> None:
        async with client_of(app_of(endpoints_of(world.gateway))) as admin:
            answer = await admin.request(method, path)
        assert answer.status_code == status
        told = answer.json()
        assert set(told) == {"error"} and set(told["error"]) == FORM
        assert told["error"]["code"] == code
        assert told["error"]["message"] and told["error"]["mend"]
        assert ("allow" in answer.headers) == (status == 405)

    play(scenario, engines=1)


def test_a_fault_of_ours_is_told_in_that_form_too(play: Play) -> None:
    async def scenario(world: World) -> None:
        table = endpoints_of(world.gateway)

        async def fails(asked: Any) -> Any:
            raise RuntimeError("a fault")

        broken = [row for row in table if row.path == "/health"]
        app = app_of([msgspec.structs.replace(broken[0], run=fails)])
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://admin") as admin:
            answer = await admin.get("/health")
        assert answer.status_code == 500 and set(answer.json()["error"]) == FORM
        assert "a fault" not in answer.text.replace("a fault in the gateway", "")

    play(scenario, engines=1)


def test_who_lacks_the_key_hears_it_in_that_form_and_the_description_says_so(play: Play) -> None:
    async def scenario(world: World) -> None:
        app = keyed_app(app_of(endpoints_of(world.gateway)), "a-key")
        async with client_of(app) as admin:
            for path in ("/openapi.json", "/nothing", "/status"):
                answer = await admin.get(path)
                assert answer.status_code == 401 and set(answer.json()["error"]) == FORM
                assert answer.headers["www-authenticate"] == "Bearer"
            assert (await admin.get("/")).status_code == 200
            assert (await admin.post("/")).status_code == 401
            key = {"authorization": "Bearer a-key"}
            described = (await admin.get("/openapi.json", headers=key)).json()
        for path, rows in described["paths"].items():
            for row in rows.values():
                assert ("401" in row["responses"]) == ("security" in row) == (path != "/")

    play(scenario, engines=1, admin_key="a-key")


@pytest.mark.slow
def test_the_log_level_changes_while_it_runs(running: tuple[GatewayProcess, list[str]]) -> None:
    gateway, _ = running
    place = gateway.admin_url + "/log-level"
    told = httpx.get(place).json()
    assert told == {"level": "info", "levels": ["debug", "info", "warning", "error"]}
    assert httpx.put(place, json={"level": "error"}).json()["level"] == "error"
    assert httpx.get(place).json()["level"] == "error"
    assert "log_level least=error former=info" in gateway.said.read_text()
    before = gateway.said.read_text()
    drained = httpx.get(gateway.admin_url + "/workers").json()["workers"][0]["worker"]
    httpx.post(f"{gateway.admin_url}/workers/{drained}/drain")
    assert gateway.said.read_text() == before, "worker_down is a warning"
    for wrong in ({"level": "loud"}, {"level": None}, {}, {"level": "info", "x": 1}):
        answer = httpx.put(place, json=wrong)
        assert answer.status_code == 400 and set(answer.json()["error"]) == FORM
    page = httpx.put(place, json={"level": "info"}, headers={"origin": "http://a"})
    assert page.status_code == 403 and json.loads(page.text)["error"]["code"] == "from_a_page"
