"""What a gateway decides by follows the turns that end at its workers, and can be seen."""

from __future__ import annotations

import json

from prometheus_client import CollectorRegistry

from ownerserve.gateway.admin import status
from ownerserve.gateway.metrics import GatewayCollector
from ownerserve.router.learning import LEARNT_FROM
from ownerserve.router.settings import DEFAULTS, DERIVED, by_hand
from tests.support.gateway.world import Play, World

SESSIONS = 8
PROMPT, ANSWER = 40_000, 100


def told(world: World) -> dict[str, float]:
    """The constants as the metrics have them."""
    registry = CollectorRegistry()
    registry.register(GatewayCollector(world.gateway))
    name = "ownerserve_gateway_routing_constant"
    found = {one: registry.get_sample_value(name, {"constant": one}) for one in DERIVED}
    return {one: value for one, value in found.items() if value is not None}


async def turns(world: World, count: int) -> None:
    client = await world.client()
    for engine in world.engines:
        engine.usage = json.dumps(
            {"prompt_tokens": PROMPT, "completion_tokens": ANSWER, "total_tokens": PROMPT + ANSWER}
        ).encode()
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "go"}]}).encode()
    for number in range(count):
        session = {"x-session-id": f"s{number % SESSIONS}"}
        await client.post("/v1/chat/completions", body, **session)


def test_constants_are_learnt_from_turns_and_shown(play: Play) -> None:
    async def scenario(world: World) -> None:
        began = status(world.gateway).constants
        assert (began.turns, began.learnt_from, began.hot_ms) == (0, None, DEFAULTS.hot_ms)
        assert told(world) == {name: getattr(DEFAULTS, name) for name in DERIVED}
        await turns(world, LEARNT_FROM)
        now = status(world.gateway).constants
        assert now.turns == LEARNT_FROM and now.learnt_from is not None
        assert now.learnt_from.context_tokens_p50 == PROMPT + ANSWER
        assert now.hot_ms != DEFAULTS.hot_ms and now.cool_s != DEFAULTS.cool_s
        assert round(told(world)["hot_ms"], 4) == now.hot_ms

    play(scenario, engines=2)


def test_a_constant_given_by_hand_stays_as_it_is(play: Play) -> None:
    async def scenario(world: World) -> None:
        await turns(world, LEARNT_FROM)
        now = status(world.gateway).constants
        assert (now.hot_ms, now.by_hand) == (77.0, ("hot_ms",))
        assert now.learnt_from is not None and now.cool_s != DEFAULTS.cool_s

    play(scenario, engines=1, settings=by_hand(DEFAULTS, hot_ms=77.0))
