"""What a turn waited for before the fleet is in its receipt, in the decisions, in metrics and in
/status, over a gateway on real sockets."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx

from ownerserve.gateway.admin import admin_app
from ownerserve.gateway.metrics import GatewayCollector
from ownerserve.router.admission import SeatSettings
from ownerserve.router.entry.queue import QueueSettings
from tests.gateway.test_held_clients import (
    CHAT,
    COMPLETIONS,
    EVERY_S,
    LAST,
    ONE_EACH,
    STREAM,
    WHOLE,
    running,
    sent,
)
from tests.support.gateway.world import Answer, Play, World
from tests.support.waits import until_async

ROOMY = {
    "version": 1,
    "unit": {"worker": "w", "rank": 0, "incarnation": 5},
    "load": {"as_of_s": 1.0, "kv_bytes_free": 0, "kv_bytes_total": 1 << 20},
    "profile": {"models": ["m"], "kv_bytes_per_token": 1024.0},
}
"""A worker with room for 1,024 tokens."""


def waits_in(line: str | None) -> list[tuple[str, int, int, int]]:
    """The header line: for what, ms, place, of."""
    found = re.findall(r"(\w+);ms=(\d+);place=(\d+);of=(\d+)", line or "")
    assert line is None or line.count(",") == len(found) - 1
    return [(reason, int(ms), int(place), int(of)) for reason, ms, place, of in found]


def samples(world: World, name: str) -> dict[tuple[str, ...], float]:
    """A family's samples by name and labels."""
    families = {one.name: one for one in GatewayCollector(world.gateway).collect()}
    return {
        (one.name.removeprefix(f"ownerserve_gateway_{name}"), *one.labels.values()): one.value
        for one in families[f"ownerserve_gateway_{name}"].samples
    }


async def asked(world: World, path: str) -> Any:
    """What the admin port answers."""
    transport = httpx.ASGITransport(admin_app(world.gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        return (await client.get(path)).json()


async def two_held(world: World) -> list[asyncio.Future[Answer]]:
    """Two turns that wait, one after the other, in the order in which they came."""
    held = []
    for number in (1, 2):
        client = await world.client()
        held.append(asyncio.ensure_future(client.post(CHAT, WHOLE, x__session__id=f"s{number}")))
        await until_async(lambda: len(world.gateway.turns.admission) == len(held))
    return held


def test_a_turn_that_waited_to_run_says_so_everywhere(play: Play) -> None:
    async def scenario(world: World) -> None:
        first = await running(world)
        held = await two_held(world)
        told = (await asked(world, "/status"))["queue"]
        (kind,) = told["waiting"]
        assert (kind["reason"], kind["class"], kind["turns"]) == ("running", "new", 2)
        rows = told["first"]
        assert [(row["reason"], row["place"], row["of"], row["came_at"]) for row in rows] == [
            ("running", 1, 2, 1), ("running", 2, 2, 2)
        ]  # fmt: skip
        assert samples(world, "turns_waiting") == {
            ("", "seat"): 0, ("", "running"): 2, ("", "state"): 0
        }  # fmt: skip
        world.engines[0].go_on.set()
        answers = await asyncio.gather(*held)
        waits = [waits_in(answer["x-ownerserve-wait"]) for answer in answers]
        assert [[one[0], *one[2:]] for (one,) in waits] == [["running", 1, 1], ["running", 2, 2]]
        rows = (await asked(world, "/decisions"))["decisions"]
        kept = {str(row["request_id"]): row["waits"] for row in rows}
        for answer, (wait,) in zip(answers, waits, strict=True):
            (row,) = kept[answer["x-request-id"] or ""]
            assert (row["reason"], row["place"], row["of"]) == (wait[0], *wait[2:])
            assert round(row["waited_s"] * 1000) == wait[1]
        assert [] in kept.values(), "the first did not wait"
        assert samples(world, "turn_wait_seconds")["_count", "running"] == 2
        places = samples(world, "turn_wait_place_turns")
        assert [places["_bucket", "running", at] for at in ("1.0", "2.0", "+Inf")] == [1, 2, 2]
        assert (places["_sum", "running"], places["_count", "seat"]) == (1 + 2, 0)
        await first.reader.readuntil(LAST)
        straight = await (await world.client()).post(CHAT, WHOLE)
        assert straight["x-ownerserve-wait"] is None

    play(scenario, engines=1, queue=ONE_EACH, health_interval_s=60.0)


def test_a_held_stream_hears_what_it_waited_for_in_a_comment(play: Play) -> None:
    async def scenario(world: World) -> None:
        first = await running(world)
        client = await world.client()
        client.writer.write(sent(f"{COMPLETIONS}?stream", STREAM))
        await client.reader.readuntil(b" s\n\n")
        world.engines[0].go_on.set()
        body = await client.reader.readuntil(LAST)
        (line,) = re.findall(rb"\n: x-ownerserve-wait: (.*)\n", body)
        ((reason, waited_ms, *place),) = waits_in(line.decode())
        assert (reason, place) == ("running", [1, 1]) and waited_ms >= EVERY_S * 1000
        await first.reader.readuntil(LAST)

    play(scenario, engines=1, queue=ONE_EACH, wait_comments_s=EVERY_S, health_interval_s=60.0)


def test_who_is_turned_away_after_a_wait_hears_how_long_it_was(play: Play) -> None:
    async def scenario(world: World) -> None:
        first = await running(world)
        client = await world.client()
        late = await client.post(CHAT, WHOLE, x__ownerserve__deadline__ms="60")
        ((reason, waited_ms, *place),) = waits_in(late["x-ownerserve-wait"])
        assert late.status == 429 and (reason, place) == ("running", [1, 1]) and waited_ms >= 50
        for family in ("turn_wait_seconds", "turn_wait_place_turns"):
            assert samples(world, family)["_count", "running"] == 0, "it did not go on"
        world.engines[0].go_on.set()
        await first.reader.readuntil(LAST)

    play(scenario, engines=1, queue=ONE_EACH, health_interval_s=60.0)


def test_a_session_that_waits_for_a_seat_in_vain_is_let_in_and_counted(play: Play) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        assert (await client.post(CHAT, b'{"prompt": "%b"}' % (b"x" * 3000))).status == 200
        late = asyncio.ensure_future(client.post(CHAT, b'{"prompt": "%b"}' % (b"y" * 3000)))
        await until_async(lambda: len(world.gateway.turns.admission) == 1)
        assert samples(world, "turns_waiting")["", "seat"] == 1
        assert samples(world, "sessions_waiting") == {("",): 1}
        (row,) = (await asked(world, "/status"))["queue"]["first"]
        assert row["reason"] == "seat"
        answer = await late
        ((reason, waited_ms, *place),) = waits_in(answer["x-ownerserve-wait"])
        assert (reason, place) == ("seat", [1, 1]) and waited_ms >= 490
        assert samples(world, "let_in_without_room") == {("_total",): 1}
        assert samples(world, "turn_wait_seconds")["_count", "seat"] == 1
        assert samples(world, "turn_wait_place_turns")["_bucket", "seat", "1.0"] == 1
        told = (await asked(world, "/status"))["queue"]
        assert (told["without_room"], told["first"]) == (1, [])

    seats = SeatSettings(share=1.0, growth_tokens=0, patience_s=0.5)
    play(scenario, engines=1, states=[json.dumps(ROOMY).encode()], seats=seats)


def test_a_client_can_t_say_what_it_waited_for(play: Play) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        assert (await client.post(CHAT, WHOLE, x__ownerserve__wait="seat;ms=1")).status == 200
        assert b"x-ownerserve-wait" not in world.engines[0].seen[-1][0].lower()

    play(scenario, engines=1, queue=QueueSettings(running_max=4))
