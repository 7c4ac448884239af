"""The gateway beside its workers' word: stamps, refusals, receipts, sessions without a key."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from ownerserve.gateway.admin import admin_app
from ownerserve.kv.ids import INCARNATION_MAX
from tests.support.gateway.world import Play, World
from tests.support.router.answer_lines import LIFE, said
from tests.support.waits import WAIT_S, until_async

HASH = "ab" * 32


def conversation(task: str, *, turns: int = 1) -> bytes:
    messages = [{"role": "system", "content": "You are an agent. " * 200}]
    messages += [{"role": "user", "content": f"{task} {turn} " * 80} for turn in range(turns)]
    return json.dumps({"model": "m", "messages": messages}).encode()


async def admin(world: World, path: str) -> httpx.Response:
    transport = httpx.ASGITransport(admin_app(world.gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        return await client.get(path)


def test_agents_without_a_key_stay_where_they_are(play: Play) -> None:
    """sgl-project/sglang#34513: they share a system prompt and must not share a worker for it."""

    async def scenario(world: World) -> None:
        client = await world.client()
        homes = {}
        for turns in (1, 2, 3):
            for task in ("fix", "test", "read", "plan"):
                answer = await client.post("/v1/chat/completions", conversation(task, turns=turns))
                homes.setdefault(task, set()).add(answer["x-ownerserve-worker"])
                if turns > 1:
                    assert answer["x-ownerserve-reason"] == "owner"
        assert all(len(workers) == 1 for workers in homes.values())
        status = (await admin(world, "/status")).json()
        assert (status["sessions"], status["content_sessions"]) == (4, 4)
        decided = (await admin(world, "/ownerserve/decisions?last=1")).json()["decisions"][0]
        assert decided["named_by"] == "content"

    play(scenario, policy="sticky")


def test_a_session_can_say_that_it_ends(play: Play) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        for name in ("x-ownerserve-session-final", "x-dynamo-session-final"):
            await client.post("/v1/chat/completions", conversation("a"))
            await client.post("/v1/chat/completions", conversation("a", turns=2), **{name: "true"})
            assert len(world.gateway.state.sessions) == 0
            assert len(world.gateway.turns.asking.chain) == 0

    play(scenario, engines=1)


def test_a_refusal_leads_to_the_next_worker_and_takes_nothing_from_the_first(play: Play) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        first = await client.post("/v1/chat/completions", x__session__id="a")
        owner = world.engine_of(first)
        owner.refuses = (503, "no_room")
        second = await client.post("/v1/chat/completions", x__session__id="a")
        assert second.status == 200
        assert second["x-ownerserve-worker"] != first["x-ownerserve-worker"]
        assert second["x-ownerserve-reason"] == "retry_other_worker"
        assert len(world.gateway.state.fleet.up) == 2
        metrics = (await admin(world, "/metrics")).text
        assert 'ownerserve_gateway_pressure_total{kind="refused",reason="no_room"} 1.0' in metrics

    play(scenario)


@pytest.mark.parametrize(
    ("answer", "code"),
    [((429, ""), "queue_full"), ((409, "wrong_target"), "wrong_target"), ((429, "new"), "other")],
)
def test_when_all_refuse_the_client_hears_429_why_and_when(
    play: Play, answer: tuple[int, str], code: str
) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        for engine in world.engines:
            engine.refuses = answer
        told = await client.post("/v1/chat/completions", x__session__id="a")
        assert told.status == 429
        assert told["retry-after"] == "1"
        assert json.loads(told.body)["error"]["code"] == code
        for engine in world.engines:
            engine.refuses = None
        assert (await client.post("/v1/chat/completions", x__session__id="a")).status == 200
        metrics = (await admin(world, "/metrics")).text
        assert f'ownerserve_gateway_pressure_total{{kind="refused",reason="{code}"}} 2.0' in metrics
        assert f'ownerserve_gateway_pressure_total{{kind="error",reason="{code}"}} 1.0' in metrics

    play(scenario)


def test_a_clients_own_mistake_is_no_refusal(play: Play) -> None:
    async def scenario(world: World) -> None:
        client, (engine,) = await world.client(), world.engines
        engine.refuses = (400, "")
        assert (await client.post("/v1/chat/completions")).status == 400
        assert not world.gateway.turns.observer.pressure

    play(scenario, engines=1)


def test_the_worker_is_told_for_whom_a_turn_is_meant(play: Play) -> None:
    """Seed 003, v2: two that counted on their own sent a session to where it was not."""

    async def scenario(world: World) -> None:
        client, (engine,) = await world.client(), world.engines
        engine.says = said()
        forged = '{"target":["forged",0,1]}'
        await client.post("/v1/chat/completions", x__ownerserve__session=forged)
        await client.post("/v1/chat/completions", x__ownerserve__session=forged)
        heads = [head for head, _ in engine.seen]
        assert b"x-ownerserve-session" not in heads[0]  # nothing is known of its lives yet
        target = f'x-ownerserve-session: {{"target":["127.0.0.1:{engine.port}",0,{LIFE}]}}\r\n'
        assert target.encode() in heads[1]
        assert b"forged" not in heads[1]

    play(scenario, engines=1, health_interval_s=10.0)


def test_stamps_are_the_workers_load_also_when_it_idles(play: Play) -> None:
    async def scenario(world: World) -> None:
        (engine,), (worker,) = world.engines, world.gateway.state.fleet
        busy = {"pending_prefill_tokens": 5000, "running_sequences": 3, "waiting_sequences": 4}
        busy |= {"kv_bytes_free": 25, "kv_bytes_total": 100}
        engine.says = said(as_of=2.0, load=busy) | {"x-ownerserve-model": "tiny"}
        async with asyncio.timeout(WAIT_S):
            while worker.incarnation is None:
                await asyncio.sleep(0.01)
        assert (worker.pending_tokens, worker.batch) == (5000, 7)
        assert worker.occupancy == pytest.approx(0.75)
        assert worker.profile.model == "tiny"
        for as_of, tokens in ((3.0, 6000), (1.0, 9000), (4.0, 7000)):  # the second is an older one
            engine.says = said(as_of=as_of, load=busy | {"pending_prefill_tokens": tokens})
            if as_of > 2.0:
                await until_async(lambda tokens=tokens: worker.pending_tokens == tokens)  # type: ignore[misc]
            else:
                await asyncio.sleep(0.2)
                assert worker.pending_tokens == 6000

    play(scenario, engines=1, health_interval_s=0.05)


def test_what_a_worker_says_of_its_prompt_is_expected_there(play: Play) -> None:
    """Where nobody counts tokens: the worker's word alone says what its device holds."""

    async def scenario(world: World) -> None:
        client, (engine,) = await world.client(), world.engines
        engine.says, engine.usage = said(tip=HASH, tokens=64), b"null"
        for expected in ("0", "64"):
            answer = await client.post(
                "/v1/chat/completions", conversation("a"), x__session__id="a"
            )
            assert answer["x-ownerserve-expected-cached-tokens"] == expected

    play(scenario, engines=1, health_interval_s=10.0)


def test_a_restart_is_seen_on_the_first_answer_and_what_was_held_is_gone(play: Play) -> None:
    """llm-d-router#2853, aibrix#2287: an index that credits a cache which a restart has emptied."""

    async def scenario(world: World) -> None:
        client, (engine,) = await world.client(), world.engines
        engine.says = said(tip=HASH, tokens=64)
        body = conversation("a")
        for _ in range(2):
            answer = await client.post("/v1/chat/completions", body, x__session__id="a")
        assert int(answer["x-ownerserve-expected-cached-tokens"] or 0) > 0
        engine.says = said(LIFE + 1, as_of=9.0)
        await client.post("/v1/chat/completions", body, x__session__id="b")
        lost = await client.post("/v1/chat/completions", body, x__session__id="a")
        assert lost["x-ownerserve-expected-cached-tokens"] == "0"
        assert lost["x-ownerserve-reason"] == "owner_lost"

    play(scenario, engines=1, health_interval_s=10.0)


def test_a_restart_under_a_clock_that_was_set_back_is_a_new_life(play: Play) -> None:
    """So is one after an answer whose lines were garbled to the latest life that there can be."""

    async def scenario(world: World) -> None:
        (engine,), (worker,) = world.engines, world.gateway.state.fleet
        client = await world.client()
        engine.says = said(10**19 - 1)
        await client.post("/v1/chat/completions", b'{"a":1}')
        assert worker.incarnation == LIFE, "no life is as late as that"
        engine.says = said(INCARNATION_MAX)
        await client.post("/v1/chat/completions", b'{"a":1}')
        assert worker.incarnation == INCARNATION_MAX
        port = engine.port
        await engine.kill()
        async with asyncio.timeout(WAIT_S):
            while worker.up:
                await asyncio.sleep(0.01)
        engine.says = said(LIFE - 1)
        await engine.start(port)
        async with asyncio.timeout(WAIT_S):
            while not worker.up:
                await asyncio.sleep(0.01)
        assert worker.incarnation == LIFE - 1
        assert (await client.post("/v1/chat/completions", b'{"a":1}')).status == 200

    def prepare(engines: Sequence[Any]) -> None:
        engines[0].says = said()

    play(scenario, engines=1, prepare=prepare, health_interval_s=0.05)


def test_receipts_are_compared_with_what_the_engine_found(play: Play) -> None:
    async def scenario(world: World) -> None:
        client, (engine,) = await world.client(), world.engines
        body = conversation("a")
        engine.cached_tokens = 0
        first = await client.post("/v1/chat/completions", body, x__session__id="a")
        assert first["x-ownerserve-turn"] == "small_increment"
        assert first["x-ownerserve-action"] == "colocated_prefill"
        second = await client.post("/v1/chat/completions", body, x__session__id="a")
        expected = int(second["x-ownerserve-expected-cached-tokens"] or 0)
        observer = world.gateway.turns.observer
        assert expected > 1000
        assert (observer.zero_hits, observer.receipt_error_tokens.sum) == (1, expected)
        engine.cached_tokens = expected - 7
        await client.post("/v1/chat/completions", body, x__session__id="a")
        metrics = (await admin(world, "/metrics")).text
        assert "ownerserve_gateway_zero_hits_total 1.0" in metrics
        assert 'ownerserve_gateway_receipt_error_tokens_bucket{le="16.0"} 2.0' in metrics
        engine.cached_tokens = None  # an engine that does not count says nothing
        await client.post("/v1/chat/completions", body, x__session__id="a")
        assert observer.zero_hits == 1

    play(scenario, engines=1)


def test_a_price_is_told_for_each_way(play: Play) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        answer = await client.post("/v1/chat/completions", conversation("a"), x__session__id="a")
        priced = (answer["x-ownerserve-priced"] or "").split(", ")
        assert len(priced) == 2
        assert all(one.startswith("colocated_prefill@127.0.0.1:") for one in priced)
        decided = (await admin(world, "/decisions?last=1")).json()["decisions"][0]
        assert decided["action"] == "colocated_prefill"
        for way in decided["priced"]:
            assert way["total_ms"] == pytest.approx(sum(way["terms_ms"].values()), abs=0.01)
            assert way["terms_ms"]["compute"] > 0

    play(scenario, policy="ownerserve")


def test_a_fleet_of_several_models_sends_each_request_to_its_own(play: Play) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        for engine, model in zip(world.engines, ("tiny-a", "tiny-b"), strict=True):
            engine.says = said() | {"x-ownerserve-model": model}
        fleet, models = world.gateway.state.fleet, {"tiny-a", "tiny-b"}
        await until_async(lambda: {worker.profile.model for worker in fleet} == models)
        await until_async(lambda: world.gateway.turns.asking.serves_many)
        for model, engine in (("tiny-a", 0), ("tiny-b", 1)) * 2:
            answer = await client.post(
                "/v1/chat/completions", json.dumps({"model": model}).encode(), x__session__id="a"
            )
            assert world.engine_of(answer) is world.engines[engine]
        unknown = await client.post("/v1/chat/completions", b'{"model": "gpt-9"}')
        assert unknown.status == 404
        assert json.loads(unknown.body)["error"]["code"] == "no_such_model"

    play(scenario, health_interval_s=0.05)


def test_a_keyless_request_that_is_sent_again_is_no_other_session(play: Play) -> None:
    """Its twin has ended: it is a retry. A twin that still runs makes it another sample."""

    async def scenario(world: World) -> None:
        client = await world.client()
        for _ in range(3):
            await client.post("/v1/chat/completions", conversation("a"))
        (engine,) = world.engines
        engine.refuses = (400, "")
        await client.post("/v1/chat/completions", conversation("a"))
        engine.refuses = (429, "no_room")
        await client.post("/v1/chat/completions", conversation("a"))
        engine.refuses = None
        await client.post("/v1/chat/completions", conversation("a"))
        assert len(world.gateway.turns.asking.chain) == 1

    play(scenario, engines=1)


def test_a_turn_that_no_worker_serves_leaves_its_session_where_it_was(play: Play) -> None:
    """An error says nothing of where the session is."""

    async def scenario(world: World) -> None:
        client, (engine,) = await world.client(), world.engines
        engine.says = said()
        await client.post("/v1/chat/completions", x__session__id="other")
        engine.refuses = (500, "")
        failed = await client.post("/v1/chat/completions", x__session__id="a")
        assert failed.status == 500
        engine.refuses = None
        engine.says = said(mode="failed")
        await client.post("/v1/chat/completions", x__session__id="a")
        engine.says = said()
        served = await client.post("/v1/chat/completions", x__session__id="a")
        assert served["x-ownerserve-reason"] in ("new_session", "fork", "replica")
        next_turn = await client.post("/v1/chat/completions", x__session__id="a")
        assert next_turn["x-ownerserve-reason"] == "owner"

    play(scenario, engines=1, health_interval_s=10.0)


def test_a_bad_line_costs_no_turn_and_is_counted_by_field(play: Play) -> None:
    async def scenario(world: World) -> None:
        client, (engine,), (worker,) = (
            await world.client(),
            world.engines,
            world.gateway.state.fleet,
        )
        engine.says = said(epoch="soon", mode="sprint", load={"running_sequences": 3})
        for _ in range(2):
            answer = await client.post("/v1/chat/completions", x__session__id="a")
            assert answer.status == 200
        # Whether the stamp has seen the turn that brought it is told by the clock.
        assert worker.incarnation == LIFE and worker.batch in (2, 3)
        engine.says = {"x-ownerserve-answer": "{"}
        assert (await client.post("/v1/chat/completions", x__session__id="a")).status == 200
        metrics = (await admin(world, "/metrics")).text
        for field, times in (("epoch", 2.0), ("mode", 2.0), ("line", 1.0)):
            told = f'ownerserve_gateway_answer_line_problems_total{{field="{field}"}} {times}'
            assert told in metrics

    play(scenario, engines=1, health_interval_s=10.0)


def test_a_client_sees_what_is_said_to_people_and_not_the_line_for_gateways(play: Play) -> None:
    async def scenario(world: World) -> None:
        client, (engine,) = await world.client(), world.engines
        engine.says = said(mode="seed") | {"x-ownerserve-mode": "seed"}
        answer = await client.post("/v1/chat/completions", x__session__id="a")
        assert answer["x-ownerserve-mode"] == "seed"
        assert answer["x-ownerserve-answer"] is None

    play(scenario, engines=1)
