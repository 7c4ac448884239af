"""The gateway prices each worker by what the worker says of itself, now and after every change."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from ownerserve.gateway.admin import admin_app
from ownerserve.gateway.workers.health import profile_of
from ownerserve.kv.ids import Incarnation, WorkerId
from ownerserve.kv.messages import PlacementAction, RoutingUnit, Tier
from ownerserve.kv.wire.status import (
    LoadStatement,
    ProfileStatement,
    RefillShare,
    SpeedStatement,
    TierStatement,
    WorkerStatus,
    read_status,
    unit_statement,
)
from ownerserve.router.admission import SeatSettings
from ownerserve.router.messages import Down
from ownerserve.router.worker import DEFAULT_SPEED, WorkerRole
from tests.support.gateway.world import Play, World
from tests.support.waits import until_async

LIFE = 1_700_000_000_000_000_000


def stated(
    model: str, token_ms: float, step_ms: float, *, as_of_s: float = 1.0, **profile: Any
) -> WorkerStatus:
    """A worker's record."""
    speed = SpeedStatement(
        prefill_pass_ms=1.0,
        prefill_token_ms=token_ms,
        prefill_attention_ms=0.0,
        step_ms=step_ms,
        step_ms_per_sequence=0.5,
        replay_tokens=48,
        prefill_measured_s=1.8e9,
        step_measured_s=1.8e9,
    )
    return WorkerStatus(
        unit=unit_statement(RoutingUnit(WorkerId("own-name"), 0, Incarnation(LIFE))),
        load=LoadStatement(
            as_of_s=as_of_s,
            pending_prefill_tokens=40,
            running_sequences=2,
            kv_bytes_free=10,
            kv_bytes_evictable=80,
            kv_bytes_total=100,
            refill_shares=(RefillShare(100, 0.25), RefillShare(400, 4.0)),
            busy_share=0.75,
        ),
        profile=ProfileStatement(models=(model,), speed=speed, **profile),
    )


async def admin(world: World, path: str) -> httpx.Response:
    transport = httpx.ASGITransport(admin_app(world.gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        return await client.get(path)


def test_two_unlike_workers_are_priced_by_their_own_figures(play: Play) -> None:
    small = stated(
        "small", 0.5, 4.0, kv_bytes_per_token=1024.0, role="decode",
        actions=("colocated_prefill", "tail_recompute", "a_later_word"), spec_digest="d1",
        tiers=(
            TierStatement(
                name="disk", bytes_total=1 << 30, latency_ms=2.0, bytes_per_ms=5e5, measured_s=1.7e9
            ),
        ),
    )  # fmt: skip
    large = stated("large", 3.0, 40.0, kv_bytes_per_token=5511.0, kv_bytes_per_sequence=7e5)

    async def scenario(world: World) -> None:
        client, fleet = await world.client(), world.gateway.state.fleet
        first, second = fleet
        assert (first.speed.prefill.b_ms, second.speed.prefill.b_ms) == (0.5, 3.0)
        assert (first.speed.step_ms, second.speed.step_ms) == (4.0, 40.0)
        assert first.speed.sequence_bytes(10) == 10_240
        assert second.speed.sequence_bytes(10) == 755_110
        assert first.speed.media[Tier.DISK].ms(1e6) == 4.0
        assert first.speed.replay_tokens == 48
        shown = (await admin(world, "/status")).json()["workers"][0]["profile"]["stated"]
        (disk,) = shown["tiers"]
        assert (disk["bytes_total"], disk["measured_s"]) == (1 << 30, 1.7e9), "for people"
        assert first.speed.media[Tier.HOST] == DEFAULT_SPEED.media[Tier.HOST], "not stated"
        profile = first.profile
        assert (profile.role, profile.spec_digest) == (WorkerRole.DECODE, "d1")
        assert profile.actions == {
            PlacementAction.COLOCATED_PREFILL, PlacementAction.TAIL_RECOMPUTE,
        }  # fmt: skip
        for model, token_ms, step_ms in (("small", 0.5, 4.0), ("large", 3.0, 40.0)):
            prompt = "word " * 400
            body = json.dumps({"model": model, "prompt": prompt}).encode()
            await client.post("/v1/completions", body, x__session__id=f"s-{model}")
            decided = (await admin(world, "/decisions?last=1")).json()["decisions"][0]
            (priced,) = decided["priced"]
            own_ms = 1.0 + decided["prefill_tokens"] * token_ms + 256 * (step_ms + 0.5 * 3)
            assert priced["terms_ms"]["compute"] == pytest.approx(own_ms, rel=0.1)

    play(scenario, states=[msgspec.json.encode(small), msgspec.json.encode(large)])


def test_a_stated_load_is_heard_and_evictable_state_fills_memory_and_makes_room(play: Play) -> None:
    async def scenario(world: World) -> None:
        (worker,) = world.gateway.state.fleet
        assert (worker.pending_tokens, worker.batch) == (40, 2)
        assert worker.incarnation == LIFE
        assert worker.occupancy == pytest.approx(0.9)
        assert worker.load.kv_bytes_free == 90

    play(scenario, engines=1, states=[msgspec.json.encode(stated("m", 1.0, 1.0))])


def test_what_refilling_it_costs_and_how_busy_it_is_are_heard_with_its_load(play: Play) -> None:
    """40 tokens of others' prefill wait there: what they take comes before."""

    async def scenario(world: World) -> None:
        (worker,) = world.gateway.state.fleet
        assert worker.load.busy_share == 0.75
        found = [worker.load.refill_share(tokens) for tokens in (10, 60, 360)]
        assert found == pytest.approx([0.25, 0.25, 4.0])
        metrics = (await admin(world, "/metrics")).text
        place = f'worker="{worker.id}"'
        assert f"ownerserve_gateway_worker_busy_share{{{place}}} 0.75" in metrics
        refill = f'ownerserve_gateway_worker_refill_share{{tokens="400",{place}}} 4.0'
        assert refill in metrics
        (shown,) = (await admin(world, "/status")).json()["workers"]
        assert (shown["busy_share"], shown["refill_shares"]) == (0.75, [[100, 0.25], [400, 4.0]])

    play(scenario, engines=1, states=[msgspec.json.encode(stated("m", 1.0, 1.0))])


def test_a_worker_whose_figures_change_is_priced_anew(play: Play) -> None:
    async def scenario(world: World) -> None:
        (engine,), (worker,) = world.engines, world.gateway.state.fleet
        assert worker.speed.prefill.b_ms == 1.0
        engine.states = msgspec.json.encode(stated("m", 8.0, 1.0, as_of_s=2.0))
        await until_async(lambda: worker.speed.prefill.b_ms == 8.0)
        assert worker.queue_ms == 40 * 8.0
        world.gateway.state.fleet.check()

    states = [msgspec.json.encode(stated("m", 1.0, 1.0))]
    play(scenario, engines=1, states=states, health_interval_s=0.02)


def test_a_worker_that_has_measured_nothing_is_priced_as_its_like_that_has(play: Play) -> None:
    """The dates of a statement decide: without them it would look 20 times as fast as its like."""
    busy = stated("m", 20.0, 200.0, spec_digest="d")
    new = stated("m", 1.0, 10.0, spec_digest="d")
    assert new.profile.speed is not None
    assumed = replace(new.profile.speed, prefill_measured_s=None, step_measured_s=None)
    idle = replace(new, profile=replace(new.profile, speed=assumed))

    async def scenario(world: World) -> None:
        first, second = world.gateway.state.fleet
        assert (first.speed.prefill.b_ms, first.speed.step_ms) == (20.0, 200.0)
        assert (second.speed.prefill.b_ms, second.speed.step_ms) == (20.0, 200.0)
        told = [one["profile"] for one in (await admin(world, "/status")).json()["workers"]]
        assert [one["is_measured"] for one in told] == [True, False]

    play(scenario, states=[msgspec.json.encode(busy), msgspec.json.encode(idle)])


def test_a_bad_field_is_a_warning_a_metric_and_a_line_and_the_worker_serves(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    tree = msgspec.json.decode(msgspec.json.encode(stated("m", 1.0, 1.0, role="wizard")))
    tree["profile"]["speed"]["step_ms"] = -4
    tree["load"]["kv_bytes_total"] = 1 << 60

    async def scenario(world: World) -> None:
        client = await world.client()
        assert (await client.post("/v1/chat/completions", b'{"a":1}')).status == 200
        (worker,) = world.gateway.state.fleet
        assert worker.speed.step_ms == DEFAULT_SPEED.step_ms, "half a speed is none"
        metrics = (await admin(world, "/metrics")).text
        (shown,) = (await admin(world, "/status")).json()["workers"]
        problems = shown["profile"]["problems"]
        for field in ("load.kv_bytes_total", "profile.speed.step_ms", "profile.role"):
            assert f'field="{field}"' in metrics
            assert any(problem.startswith(field) for problem in problems)
            assert field in caplog.text

    with caplog.at_level(logging.WARNING, "ownerserve.gateway"):
        play(scenario, engines=1, states=[msgspec.json.encode(tree)])


@pytest.mark.parametrize(
    ("token_bytes", "sequence_bytes", "priced"),
    [(0.0, 4096.0, 0.0), (0.0, 0.0, DEFAULT_SPEED.kv_bytes_per_token), (7.0, 4096.0, 7.0)],
)
def test_only_a_purely_recurrent_worker_takes_nothing_for_a_token(
    play: Play, token_bytes: float, sequence_bytes: float, priced: float
) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        (worker,) = world.gateway.state.fleet
        assert worker.speed.kv_bytes_per_token == priced
        assert worker.speed.kv_bytes_per_sequence == sequence_bytes
        for name in "abc":
            answer = await client.post("/v1/chat/completions", b'{"a":1}', x__session__id=name)
            assert answer.status == 200
        assert (await admin(world, "/status")).status_code == 200
        assert (await admin(world, "/metrics")).status_code == 200

    profile = {"kv_bytes_per_token": token_bytes, "kv_bytes_per_sequence": sequence_bytes}
    said = stated("m", 1.0, 1.0, **profile)
    said = replace(said, load=replace(said.load, kv_bytes_free=1 << 40, kv_bytes_total=1 << 40))
    play(scenario, engines=1, states=[msgspec.json.encode(said)], seats=SeatSettings())


def test_an_address_whose_process_changes_its_rank_is_one_candidate(play: Play) -> None:
    """An address is one process, which says one rank: what it said before is nobody's."""

    async def scenario(world: World) -> None:
        client, (engine,) = await world.client(), world.engines
        fleet, account = world.gateway.state.fleet, world.gateway.state.account
        await client.post("/v1/chat/completions", b'{"model":"m"}', x__session__id="a")
        later = stated("m2", 1.0, 1.0)
        later = replace(later, unit=replace(later.unit, rank=1, incarnation=LIFE + 1))
        engine.states = msgspec.json.encode(later)
        await until_async(lambda: any(worker.dp_rank == 1 for worker in fleet.up))
        assert [(worker.dp_rank, worker.incarnation) for worker in fleet.up] == [(1, LIFE + 1)]
        assert account.downs[Down.ANOTHER_RANK] == 1
        answer = await client.post("/v1/chat/completions", b'{"model":"m2"}', x__session__id="a")
        assert answer.status == 200
        fleet.check()
        engine.states = b"no json"  # /health says no rank: the last one said stands
        await asyncio.sleep(0.1)
        assert [worker.dp_rank for worker in fleet.up] == [1]
        assert account.downs[Down.ANOTHER_RANK] == 1

    states = [msgspec.json.encode(stated("m", 1.0, 1.0))]
    play(scenario, engines=1, states=states, health_interval_s=0.02)


@pytest.mark.parametrize("said", [b"", b"no json", b'{"as_of_s": 1.0, "model": "m"}', b"[1]"])
def test_a_statement_that_is_none_leaves_health_and_models_to_tell(play: Play, said: bytes) -> None:
    async def scenario(world: World) -> None:
        client, (worker,) = await world.client(), world.gateway.state.fleet
        assert worker.speed == DEFAULT_SPEED
        assert (await client.post("/v1/chat/completions", b'{"a":1}')).status == 200
        (shown,) = (await admin(world, "/status")).json()["workers"]
        assert shown["profile"]["problems"]

    play(scenario, engines=1, states=[said or b" "])


def test_a_usage_beyond_the_stated_length_teaches_nothing(play: Play) -> None:
    async def scenario(world: World) -> None:
        client, (engine,) = await world.client(), world.engines
        account = world.gateway.state.account
        for prompt_tokens, refused in ((4000, 0), (4001, 1)):
            engine.usage = b'{"prompt_tokens": %d, "completion_tokens": 96}' % prompt_tokens
            await client.post("/v1/chat/completions", x__session__id="a")
            assert account.usages_refused == refused
        told = (await admin(world, "/metrics")).text
        assert "ownerserve_gateway_usages_refused_total 1.0" in told

    record = stated("m", 1.0, 1.0, sequence_tokens=4096)
    play(scenario, states=[msgspec.json.encode(record)], engines=1)


@pytest.mark.parametrize(
    ("said", "lent"),
    [(("device",), {Tier.DEVICE}), ((), set()), (None, {Tier.DEVICE, Tier.HOST})],
)
def test_state_is_brought_from_what_its_holder_lends_alone(
    said: tuple[str, ...] | None, lent: set[Tier]
) -> None:
    """A word of a later version names no tier; who says nothing is taken as any engine is."""
    status = stated("m", 1.0, 1.0, lends=said)
    profile, problems = profile_of(status, default=DEFAULT_SPEED)
    assert profile.lends == lent and not problems
    read = read_status(msgspec.json.encode(status))
    assert read.status is not None and read.status.profile.lends == said
    later = replace(status, profile=replace(status.profile, lends=("cxl", "device")))
    assert profile_of(later, default=DEFAULT_SPEED)[0].lends == {Tier.DEVICE}
