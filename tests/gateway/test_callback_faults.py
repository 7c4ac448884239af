"""Nothing raises out of a protocol callback: bytes of a client are answered, faults of ours too."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from ownerserve.gateway.turns import Turns
from tests.support.gateway.world import Play, World

PATH = "/v1/chat/completions"
NOT_UTF_8 = b"\xff\xfe"


@pytest.fixture(autouse=True)
def nothing_raises(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the event loop heard of: nothing may come that far."""
    heard: list[str] = []
    real = asyncio.BaseEventLoop.call_exception_handler

    def hear(loop: asyncio.BaseEventLoop, context: dict[str, Any]) -> None:
        heard.append(context["message"])
        real(loop, context)

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_exception_handler", hear)
    return heard


@pytest.mark.parametrize("field", ["user", "prompt_cache_key", "session_id", "model"])
def test_a_field_that_is_no_text_is_the_clients_mistake(play: Play, field: str) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        told = await client.post(PATH, b'{"%b": "%b"}' % (field.encode(), NOT_UTF_8))
        if field == "model" and told.status == 200:
            return  # one model is served: nobody reads which one a body names
        error = json.loads(told.body)["error"]
        assert (told.status, error["code"]) == (400, "invalid_body")
        assert error["message"].startswith(field) and "UTF-8" in error["message"]
        assert (await client.post(PATH)).status == 200

    play(scenario)


def break_step(name: str, left: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a step of a turn fail as often as `left` says."""
    real = getattr(Turns, name)

    def step(self: Turns, *args: Any, **named: Any) -> Any:
        if left["faults"] > 0:
            left["faults"] -= 1
            raise KeyError("a fault of ours")
        return real(self, *args, **named)

    monkeypatch.setattr(Turns, name, step)


@pytest.mark.parametrize("step", ["read", "enter", "decide", "began"])
def test_a_fault_of_ours_before_an_answer_is_a_typed_500(
    play: Play, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    left = {"faults": 0}
    break_step(step, left, monkeypatch)

    async def scenario(world: World) -> None:
        client = await world.client()
        left["faults"] = 1
        told = await client.post(PATH, x__session__id="a")
        assert (told.status, json.loads(told.body)["error"]["code"]) == (500, "gateway_fault")
        assert "a fault of the gateway's" in caplog.text
        assert (await client.post(PATH, x__session__id="a")).status == 200
        world.gateway.state.check()
        assert not world.gateway.state.live

    with caplog.at_level(logging.ERROR):
        play(scenario)


def test_a_fault_of_ours_after_an_answer_costs_nothing_but_its_books(
    play: Play, monkeypatch: pytest.MonkeyPatch, nothing_raises: Sequence[str]
) -> None:
    left = {"faults": 0}
    break_step("finished", left, monkeypatch)

    async def scenario(world: World) -> None:
        client = await world.client()
        left["faults"] = 1
        assert (await client.post(PATH, x__session__id="a")).status == 200
        assert (await client.post(PATH, x__session__id="a")).status == 200
        assert not nothing_raises

    play(scenario)
