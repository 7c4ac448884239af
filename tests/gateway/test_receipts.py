"""What answers tell clients of the fleet: by default no address and no price."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ownerserve.gateway.admin import decision
from ownerserve.gateway.receipts import ReceiptForm
from ownerserve.gateway.tenants import read_tenants
from tests.gateway.test_cli import gateway
from tests.gateway.test_session_names import CHAT, conversation
from tests.gateway.test_tenants import ACME, FILE, GLOBEX, bearer, written
from tests.support.gateway.world import Answer, Play, World
from tests.support.router import answer_lines

PLAN = "load_global + prefill; ttft 58.3 ms"
NAMES = ("worker", "reason", "action", "turn", "expected-cached-tokens")


def shown(answer: Answer) -> dict[str, str]:
    lines = answer.head.decode().split("\r\n")[1:]
    return dict(line.split(": ", 1) for line in lines if line.startswith("x-ownerserve-"))


def decided(world: World, answer: Answer) -> dict[str, Any]:
    """The admin port's line on an answer, found by its request's id."""
    gateway = world.gateway
    rows = [
        msgspec.to_builtins(decision(one, gateway.now()))
        for one in gateway.turns.observer.decisions
    ]
    return next(row for row in rows if row["request_id"] == answer["x-request-id"])


def test_by_default_no_address_and_no_price(play: Play) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        ids: dict[str, set[str]] = {}
        for engine in world.engines:
            engine.says = answer_lines.said(3) | {"x-ownerserve-plan": PLAN}
        for n in range(12):
            for turns in (1, 2):
                answer = await client.post(CHAT, conversation(str(n), turns))
                told, head = shown(answer), answer.head.decode()
                assert not any(str(engine.port) in head for engine in world.engines)
                assert "127.0.0.1" not in head and "ms" not in str(told)
                assert set(told) == {f"x-ownerserve-{name}" for name in NAMES}
                row = decided(world, answer)
                assert row["priced"] and row["worker"].startswith("127.0.0.1:")
                ids.setdefault(row["worker"], set()).add(told["x-ownerserve-worker"])
        assert sorted(map(len, ids.values())) == [1, 1]
        assert len(set.union(*ids.values())) == 2

    play(scenario, receipts=ReceiptForm.OPAQUE)


def test_two_tenants_know_a_worker_by_two_names(play: Play, tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        names: dict[str, set[str]] = {ACME: set(), GLOBEX: set()}
        for key in (ACME, GLOBEX) * 3:
            answer = await client.post(CHAT, conversation("a", 1), **bearer(key))
            names[key].add(shown(answer)["x-ownerserve-worker"])
        assert [len(found) for found in names.values()] == [1, 1]
        assert names[ACME] != names[GLOBEX]

    tenants = read_tenants(written(tmp_path, FILE))
    play(scenario, engines=1, tenants=tenants, receipts=ReceiptForm.OPAQUE)


def test_open_receipts_tell_all(play: Play) -> None:
    async def scenario(world: World) -> None:
        (engine,) = world.engines
        engine.says = answer_lines.said(3) | {"x-ownerserve-plan": PLAN}
        client = await world.client()
        answer = await client.post(CHAT, conversation("a", 1))
        told = shown(answer)
        assert told["x-ownerserve-worker"] == f"127.0.0.1:{engine.port}"
        assert f"@127.0.0.1:{engine.port}=" in told["x-ownerserve-priced"]
        assert told["x-ownerserve-plan"] == PLAN
        assert answer.head.count(b"x-ownerserve-plan") == 1

    play(scenario, engines=1, receipts=ReceiptForm.OPEN)


@pytest.mark.parametrize("form", list(ReceiptForm))
def test_errors_of_the_gateway_name_no_worker(play: Play, form: ReceiptForm) -> None:
    async def scenario(world: World) -> None:
        (engine,) = world.engines
        client = await world.client()
        engine.refuses = (503, "no_room")
        refused = await client.post(CHAT, conversation("a", 1))
        await engine.kill()
        failed = await client.post(CHAT, conversation("b", 1))
        for answer in (refused, failed):
            assert answer.status >= 429
            assert str(engine.port) not in (answer.head + answer.body).decode()
            assert json.loads(answer.body)["error"]["code"]

    play(scenario, engines=1, receipts=form)


@pytest.mark.slow
@pytest.mark.parametrize("form", list(ReceiptForm))
def test_the_command_takes_each_form(form: ReceiptForm, tmp_path: Path) -> None:
    with gateway(tmp_path / "ready", "--receipts", form.value) as process:
        assert process.poll() is None
