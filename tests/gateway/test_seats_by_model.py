"""A gateway before workers of two models, on real sockets: each model's sessions wait for its own
workers' memory alone."""

from __future__ import annotations

import asyncio
import json

from ownerserve.router.admission import SeatSettings
from tests.support.gateway.world import Play, World
from tests.support.waits import WAIT_S, until_async

CHAT = "/v1/chat/completions"
SEATS = SeatSettings(share=1.0, growth_tokens=0, idle_s=60.0, patience_s=60.0)
TOKENS = 1000
"""So many does each worker hold; a body is 750."""


def says(model: str) -> bytes:
    """A worker's own word."""
    total = TOKENS * 1024
    return json.dumps(
        {
            "version": 1,
            "unit": {"worker": model, "rank": 0, "incarnation": 5},
            "load": {"as_of_s": 1.0, "kv_bytes_free": total, "kv_bytes_total": total},
            "profile": {"models": [model], "kv_bytes_per_token": 1024.0},
        }
    ).encode()


def body(model: str, letter: str) -> bytes:
    return json.dumps({"model": model, "messages": letter * 3000}).encode()


async def asked(
    world: World, model: str, letter: str, *, last: bool = False
) -> asyncio.Future[int]:
    """Send a turn of the session `letter`, and return its answer's status to come."""
    client = await world.client()
    final = {"x__ownerserve__session__final": "1"} if last else {}

    async def sent() -> int:
        answer = await client.post(CHAT, body(model, letter), x__session__id=letter, **final)
        return answer.status

    return asyncio.ensure_future(sent())


async def answered(turn: asyncio.Future[int]) -> int:
    async with asyncio.timeout(WAIT_S):
        return await turn


def test_each_model_has_seats_of_its_own(play: Play) -> None:
    async def scenario(world: World) -> None:
        turns = world.gateway.turns
        await until_async(lambda: turns.asking.serves_many)
        assert await answered(await asked(world, "tiny-a", "p")) == 200
        late_a = await asked(world, "tiny-a", "q")
        await until_async(lambda: len(turns.admission) == 1)
        assert await answered(await asked(world, "tiny-b", "r")) == 200, "b's worker has room"
        late_b = await asked(world, "tiny-b", "s")
        await until_async(lambda: len(turns.admission) == 2)
        assert [turns.admission.place(held).place for held in turns.admission.waiting()] == [1, 1]
        assert await answered(await asked(world, "gpt-9", "t")) == 404, "nobody waits in vain"
        assert await answered(await asked(world, "tiny-b", "r", last=True)) == 200
        assert await answered(late_b) == 200
        assert not late_a.done()
        assert await answered(await asked(world, "tiny-a", "p", last=True)) == 200
        assert await answered(late_a) == 200
        assert turns.admission.seats is not None
        turns.admission.seats.check()

    play(
        scenario, engines=2, states=[says("tiny-a"), says("tiny-b")], seats=SEATS,
        health_interval_s=0.05,
    )  # fmt: skip
