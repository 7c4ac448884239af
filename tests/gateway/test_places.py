"""The gateway and workers' admission on real sockets: a place is asked for, kept and given back."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from ownerserve.directory.embedded import EmbeddedDirectory
from ownerserve.directory.terms import TermFile
from ownerserve.gateway.asking import SessionFinder
from ownerserve.gateway.turns import Correction
from ownerserve.gateway.workers.rpc import Places
from ownerserve.kv.clock import ManualClock
from ownerserve.kv.ids import Incarnation, WorkerId
from ownerserve.kv.messages import RoutingUnit, Tier
from ownerserve.kv.wire.refusals import WorkerRefusal
from ownerserve.kv.wire.rpc import (
    Admit,
    Commit,
    Probe,
    Reject,
    Release,
)
from ownerserve.kv.wire.status import (
    LoadStatement,
    ProfileStatement,
    TierStatement,
    WorkerStatus,
    unit_statement,
)
from ownerserve.router.decision import DispatchReason
from ownerserve.router.messages import Gone, Refuse, Reported
from ownerserve.router.settings import DEFAULTS
from tests.support.gateway.admission import Admission
from tests.support.gateway.world import Play, World
from tests.support.router.answer_lines import said
from tests.support.waits import WAIT_S, until_async

BODY = b'{"prompt": "' + b"some words of a task, " * 20 + b'"}'
LONGER = b'{"prompt": "' + b"some words of a task, " * 41 + b'"}'


def record(rpc: object, **profile: Any) -> bytes:
    """What a worker states that answers at `rpc`."""
    said = WorkerStatus(
        unit=unit_statement(RoutingUnit(WorkerId("own-name"), 0, Incarnation(7))),
        load=LoadStatement(as_of_s=1.0),
        profile=ProfileStatement(models=("m",), **profile),
    )
    document = json.loads(msgspec.json.encode(said))
    document["profile"]["rpc"] = rpc
    return json.dumps(document).encode()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway waits for places however busy this machine is."""
    assert Places.__init__.__kwdefaults__ is not None
    monkeypatch.setitem(Places.__init__.__kwdefaults__, "ask_s", WAIT_S)


async def introduced(world: World, *rpcs: str | None, **profile: Any) -> None:
    """Each engine states its address, and the gateway has heard it."""
    for engine, rpc in zip(world.engines, rpcs, strict=True):
        engine.states = record(rpc, **profile)
    worker = WorkerId(f"127.0.0.1:{world.engines[0].port}")
    await until_async(lambda: world.gateway.turns.places.can_ask(worker) == (rpcs[0] is not None))


def test_a_worker_that_dies_while_it_is_asked_costs_nobody_a_turn(play: Play) -> None:
    async def scenario(world: World) -> None:
        admission = Admission()
        admission.is_silent = True
        await introduced(world, admission.address, None)
        client = await world.client()
        answer = asyncio.create_task(client.post("/v1/completions", x__session__id="a"))
        await until_async(lambda: admission.reserves)
        await world.engines[0].kill()
        told = await answer
        assert told.status == 200
        assert world.engine_of(told) is world.engines[1]
        admission.close()

    play(scenario, policy="round_robin", states=[record(None)] * 2, health_interval_s=0.05)


def test_a_worker_that_moves_its_port_while_it_is_asked_costs_nobody_a_turn(play: Play) -> None:
    async def scenario(world: World) -> None:
        first, second = Admission(), Admission()
        first.is_silent = True
        await introduced(world, first.address)
        client = await world.client()
        answer = asyncio.create_task(client.post("/v1/completions", x__session__id="a"))
        await until_async(lambda: first.reserves)
        world.engines[0].states = record(second.address)
        assert (await answer).status == 200
        assert world.gateway.turns.observer.pressure["unasked", "no_word"] == 1
        first.close()
        second.close()

    play(scenario, engines=1, states=[record(None)], health_interval_s=0.05)


async def _broken(*_: object, **__: object) -> None:
    raise KeyError("a fault of ours")


@pytest.mark.parametrize("task", ["look_up", "ask", "connect"])
def test_a_fault_of_ours_is_told_and_gives_the_receipt_back(
    play: Play, task: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(world: World) -> None:
        gateway, admission = world.gateway, Admission()
        (pool,) = gateway.turns.pools.values()
        await introduced(world, admission.address)
        client = await world.client()
        with monkeypatch.context() as patch:
            if task == "look_up":
                nobody = EmbeddedDirectory(ManualClock(), TermFile())
                finder = SessionFinder(nobody, gateway.turns.worker_names, tell=print)
                patch.setattr(gateway.turns, "finder", finder)
                patch.setattr(finder, "look_up", _broken)
            elif task == "ask":
                patch.setattr(gateway.turns.places, "reserve", _broken)
            else:
                patch.setattr(pool, "connect", _broken)
            async with asyncio.timeout(WAIT_S):
                told = await client.post("/v1/completions", x__session__id="a")
        assert told.status == 500
        assert json.loads(told.body)["error"]["code"] == "gateway_fault"
        await world.settled()
        account = gateway.state.account
        assert (account.received, account.done) == ((0, 0) if task == "look_up" else (1, 1))
        assert gateway.turns.observer.pressure["error", "gateway_fault"] == 1
        (logged,) = [line for line in caplog.records if line.exc_info]
        assert "a fault of ours" in str(logged.exc_info and logged.exc_info[1])
        if task == "connect":
            await until_async(lambda: admission.held == set())
        assert (await client.post("/v1/completions", x__session__id="a")).status == 200
        admission.close()

    with caplog.at_level(logging.ERROR):
        play(scenario, engines=1, states=[record(None)], health_interval_s=0.05)


NO_ADDRESSES = ["tcp://[::1", "garbage", "ipc:///tmp/x", "inproc://x", "tcp://127.0.0.1:99999999",
                "tcp://*:0", "tcp://127.0.0.1", "tcp://h\u00e9:1", 5000]  # fmt: skip


@pytest.mark.parametrize("rpc", NO_ADDRESSES)
def test_a_worker_that_states_no_address_is_served_unasked(play: Play, rpc: object) -> None:
    async def scenario(world: World) -> None:
        (engine,), client = world.engines, await world.client()
        (monitor,) = world.gateway.monitors.values()
        assert monitor.problem_counts["profile.rpc"] >= 1
        assert monitor.problems[0].startswith("profile.rpc: ")
        assert not world.gateway.turns.places.can_ask(monitor.address.worker)
        assert (await client.post("/v1/completions", x__session__id="a")).status == 200
        await engine.kill()
        await until_async(lambda: not world.gateway.state.fleet.up)

    play(scenario, engines=1, states=[record(rpc)], health_interval_s=0.02)


def test_an_address_that_turns_bad_is_given_up_and_the_probes_go_on(play: Play) -> None:
    async def scenario(world: World) -> None:
        (engine,), admission = world.engines, Admission()
        await introduced(world, admission.address)
        engine.states = record("tcp://[::1")
        (monitor,) = world.gateway.monitors.values()
        await until_async(lambda: not world.gateway.turns.places.can_ask(monitor.address.worker))
        await engine.kill()
        await until_async(lambda: not world.gateway.state.fleet.up)
        admission.close()

    play(scenario, engines=1, states=[record(None)], health_interval_s=0.02)


@pytest.mark.parametrize("part", ["answer", "news"])
def test_a_fault_while_a_worker_is_looked_after_is_logged_and_it_is_probed_on(
    play: Play, part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise KeyError("a fault of ours")

    async def scenario(world: World) -> None:
        (engine,) = world.engines
        with monkeypatch.context() as patch:
            if part == "answer":
                patch.setattr("ownerserve.gateway.workers.health.read_status", fails)
            else:
                patch.setattr(world.gateway.turns.lines, "learn", fails)
            await until_async(lambda: any(line.exc_info for line in caplog.records))
        await until_async(lambda: world.gateway.state.fleet.up)
        await engine.kill()
        await until_async(lambda: not world.gateway.state.fleet.up)

    play(scenario, engines=1, states=[record(None)], health_interval_s=0.02)


def test_a_place_at_a_stale_connection_is_given_back(play: Play) -> None:
    async def scenario(world: World) -> None:
        (engine,), admission = world.engines, Admission()
        await introduced(world, admission.address)
        client = await world.client()
        assert (await client.post("/v1/completions", x__session__id="a")).status == 200
        admission.asked.clear()
        engine.drops_next = True
        assert (await client.post("/v1/completions", x__session__id="b")).status == 200
        await until_async(lambda: len(admission.reserves) == 2)
        first, second = 1, 2
        await until_async(
            lambda: Release(first) in admission.asked and Commit(second) in admission.asked
        )
        assert admission.asked.index(Commit(first)) < admission.asked.index(Release(first))
        assert Release(second) not in admission.asked, "it came to its turn"
        admission.close()

    play(scenario, engines=1, states=[record(None)], health_interval_s=0.05)


@pytest.mark.parametrize("stage", ["asked", "sent"])
def test_a_client_that_hangs_up_before_the_first_byte_gives_its_place_back(
    play: Play, stage: str
) -> None:
    async def scenario(world: World) -> None:
        (pool,), admission = world.gateway.turns.pools.values(), Admission()
        await introduced(world, admission.address)
        client, never = await world.client(), asyncio.Event()
        if stage == "asked":  # it has its place, and no connection yet
            pool.connect = never.wait
        else:  # it is sent, and the answer does not begin
            world.engines[0].is_mute = True
        turn = asyncio.create_task(client.post("/v1/completions", x__session__id="a"))
        heard = Commit(1) if stage == "sent" else None
        await until_async(
            lambda: admission.reserves and (heard is None or heard in admission.asked)
        )
        await until_async(lambda: world.gateway.turns.places.counts["reserved"] == 1)
        client.hang_up()
        await until_async(lambda: Release(1) in admission.asked)
        turn.cancel()
        admission.close()

    play(scenario, engines=1, states=[record(None)], health_interval_s=0.05)


def test_a_client_that_hangs_up_while_a_worker_is_asked_calls_that_off(play: Play) -> None:
    """The worker is silent: its engine is in a long step, and must not take the place after it."""

    async def scenario(world: World) -> None:
        admission = Admission()
        admission.is_silent = True
        await introduced(world, admission.address)
        client = await world.client()
        turn = asyncio.create_task(client.post("/v1/completions", x__session__id="a"))
        await until_async(lambda: admission.reserves)
        client.hang_up()
        await until_async(lambda: admission.cancelled)
        assert admission.cancelled == [admission.nonces[0]]
        await until_async(lambda: world.gateway.turns.places.counts["cancelled"] == 1)
        turn.cancel()
        admission.close()

    play(scenario, engines=1, states=[record(None)], health_interval_s=0.05)


def test_a_silent_worker_is_asked_again_and_then_called_off(play: Play) -> None:
    async def scenario(world: World) -> None:
        admission = Admission()
        admission.is_silent = True
        await introduced(world, admission.address)
        client = await world.client()
        assert (await client.post("/v1/completions", x__session__id="a")).status == 200
        await until_async(lambda: admission.cancelled)
        assert len(admission.reserves) == 1, "one wish"
        assert len(admission.nonces) > 1 and set(admission.nonces) == set(admission.cancelled)
        assert world.gateway.turns.places.counts["no_answer"] == 1
        admission.close()

    play(scenario, engines=1, states=[record(None)], health_interval_s=0.05)


@pytest.mark.usefixtures("patient")
def test_a_turn_that_began_keeps_its_place_to_itself(play: Play) -> None:
    """The worker uses a place up as its turn arrives: later words would be of another."""

    async def scenario(world: World) -> None:
        admission = Admission()
        await introduced(world, admission.address)
        client = await world.client()
        assert (await client.post("/v1/completions", x__session__id="a")).status == 200
        client.hang_up()
        other = await world.client()
        assert (await other.post("/v1/completions", x__session__id="b")).status == 200
        await until_async(lambda: Commit(2) in admission.asked)
        assert not [one for one in admission.asked if isinstance(one, Release)]
        admission.close()

    play(scenario, engines=1, states=[record(None)], health_interval_s=0.05)


@pytest.mark.usefixtures("patient")
def test_a_place_that_is_promised_twice_is_not_given_back(play: Play) -> None:
    """A Reserve that may have been lost is said again, and both are answered."""

    async def scenario(world: World) -> None:
        admission = Admission()
        admission.is_slow = True
        await introduced(world, admission.address)
        client = await world.client()
        for number, session in enumerate("abc", 1):
            answer = await client.post("/v1/completions", x__session__id=session)
            assert answer.status == 200
            await until_async(lambda number=number: Commit(number) in admission.asked)
        assert not [one for one in admission.asked if isinstance(one, Release)]
        assert world.gateway.turns.places.counts["late"] == 0
        admission.close()

    play(scenario, engines=1, states=[record(None)], health_interval_s=0.05)


def test_a_turn_that_all_refused_for_room_is_one_request_sent_unasked(play: Play) -> None:
    async def scenario(world: World) -> None:
        admissions = Admission(), Admission()
        for admission in admissions:
            admission.is_full = True
        await introduced(world, *(admission.address for admission in admissions))
        client, gateway = await world.client(), world.gateway
        told = await client.post("/v1/completions", x__session__id="a")
        assert (told.status, told["x-ownerserve-reason"]) == (200, "retry_unasked")
        assert [len(admission.reserves) for admission in admissions] == [1, 1], "then no more"
        await world.settled()
        account = gateway.state.account
        assert (account.received, account.done, account.rejected) == (1, 1, 0)
        assert account.reasons[DispatchReason.RETRY_UNASKED] == 1
        decided = [decision.outcome for decision in gateway.turns.observer.decisions]
        assert not [one for one in decided if isinstance(one, Refuse)]
        assert [one.attempt for one in decided] == [1, 2, 3]
        assert gateway.turns.observer.pressure["unasked", "all_refused"] == 1
        for engine in world.engines:
            engine.refuses = (429, "no_room")
        told = await client.post("/v1/chat/completions", x__session__id="b")
        assert (told.status, json.loads(told.body)["error"]["code"]) == (429, "no_room")
        assert (account.received, account.done, account.rejected) == (2, 1, 1)
        for admission in admissions:
            admission.close()

    play(scenario, states=[record(None)] * 2, health_interval_s=0.05)


def test_a_turn_whose_place_is_gone_when_it_comes_is_sent_without_one(play: Play) -> None:
    """The worker gave it up meanwhile, for want of room or since the turn was long on its way: a
    herd of 500 brings that about. Nothing is wrong with the turn."""

    async def scenario(world: World) -> None:
        admission = Admission()
        await introduced(world, admission.address)
        (engine,) = world.engines
        engine.loses_places = True
        client = await world.client()
        for _ in range(3):
            told = await client.post("/v1/completions")
            assert (told.status, told["x-ownerserve-reason"]) == (200, "retry_unasked")
        assert len(admission.reserves) == 3
        await world.settled()
        account = world.gateway.state.account
        assert (account.received, account.done, account.rejected) == (3, 3, 0)
        admission.close()

    play(scenario, engines=1, states=[record(None)], health_interval_s=0.05)


@pytest.mark.parametrize(
    ("quote", "expected"),
    [
        (Admit(0), 101),
        (Admit(0, resident_tokens=101, restorable_tokens=0), 101),
        (Admit(0, resident_tokens=64, restorable_tokens=0), 64),
        (Admit(0, resident_tokens=0, restorable_tokens=0), 0),
    ],
)
def test_what_a_worker_without_places_says_that_it_holds_is_counted_on(
    play: Play, quote: Admit, expected: int
) -> None:
    """Of a session that was away: what its last turn left may have gone since."""

    async def scenario(world: World) -> None:
        (engine,), admission = world.engines, Admission()
        engine.usage = b'{"prompt_tokens": 100, "completion_tokens": 1}'
        admission.quote = Admit(0)
        await introduced(world, admission.address)
        client, gateway = await world.client(), world.gateway
        assert (await client.post("/v1/completions", BODY, x__session__id="a")).status == 200
        await world.settled()
        admission.quote = quote
        told = await client.post("/v1/completions", LONGER, x__session__id="a")
        assert told.status == 200
        assert int(told["x-ownerserve-expected-cached-tokens"]) == expected
        [(name, _)] = gateway.state.sessions.items()
        probes = [one for one in admission.asked if isinstance(one, Probe)]
        assert {probe.session_id for probe in probes} == {name}
        corrected = gateway.turns.observer.pressure["corrected", "holds_less"]
        assert corrected == (expected < 101)
        assert len(probes) == 2 + corrected
        await world.settled()
        account = gateway.state.account
        assert (account.received, account.done, account.rejected) == (2, 2, 0)
        assert not account.failures
        admission.close()

    settings = replace(DEFAULTS, cold_after_s=-1.0)
    play(scenario, engines=1, states=[record(None)], health_interval_s=0.05, settings=settings)


def test_what_a_worker_without_places_could_bring_back_is_known_from_then_on(play: Play) -> None:
    async def scenario(world: World) -> None:
        (engine,), admission = world.engines, Admission()
        engine.usage = b'{"prompt_tokens": 100, "completion_tokens": 1}'
        admission.quote = Admit(0, resident_tokens=0, restorable_tokens=64)
        await introduced(world, admission.address)
        client = await world.client()
        for body in (BODY, LONGER):
            assert (await client.post("/v1/completions", body, x__session__id="a")).status == 200
            await world.settled()
        [(_, session)] = world.gateway.state.sessions.items()
        assert session.prefix is not None
        copies = {copy.tier: copy.tokens for copy in session.prefix.copies}
        assert copies[Tier.DISK] == 64
        admission.close()

    settings = replace(DEFAULTS, cold_after_s=-1.0)
    play(scenario, engines=1, states=[record(None)], health_interval_s=0.05, settings=settings)


@pytest.mark.parametrize(
    ("loads_ms", "planned", "expected", "corrected"),
    [
        (1e6, 64, 64, "loads"),
        (0.0, 0, 0, "computes"),
        (0.0, 64, 64, None),
        (1e6, 0, 0, None),
        (0.0, None, 64, None),
        (1e6, None, 0, None),
    ],
)
def test_what_a_worker_would_do_by_its_own_prices_is_expected(
    play: Play, loads_ms: float, planned: int | None, expected: int, corrected: str | None
) -> None:
    """Whatever the gateway would do by what the worker states; a worker that does not say follows
    these prices, as far as is known."""

    async def scenario(world: World) -> None:
        (engine,), admission = world.engines, Admission()
        engine.usage = b'{"prompt_tokens": 100, "completion_tokens": 1}'
        admission.quote = Admit(0)
        disk = TierStatement(name="disk", latency_ms=loads_ms, bytes_per_ms=1e9)
        actions = ("colocated_prefill", "tail_recompute")
        await introduced(world, admission.address, actions=actions, tiers=(disk,))
        client, gateway = await world.client(), world.gateway
        assert (await client.post("/v1/completions", BODY, x__session__id="a")).status == 200
        await world.settled()
        [(name, session)] = gateway.state.sessions.items()
        assert session.owner is not None and session.owner.unit is not None
        gateway.turns.told(Gone(session.owner.unit, Tier.DEVICE, session=name))
        gateway.turns.told(Reported(session.owner.unit, Tier.DISK, None, 64, session=name))
        admission.quote = Admit(0, 0, 64, planned)
        told = await client.post("/v1/completions", LONGER, x__session__id="a")
        assert told.status == 200
        assert int(told["x-ownerserve-expected-cached-tokens"]) == expected
        found = {why: n for (kind, why), n in gateway.turns.observer.pressure.items() if n}
        assert {why: n for why, n in found.items() if why in list(Correction)} == (
            {corrected: 1} if corrected else {}
        )
        await world.settled()
        assert (gateway.state.account.received, gateway.state.account.done) == (2, 2)
        admission.close()

    settings = replace(DEFAULTS, cold_after_s=-1.0)
    play(scenario, engines=1, states=[record(None)], health_interval_s=0.05, settings=settings)


def test_more_on_disk_than_on_the_device_is_no_direct_append(play: Play) -> None:
    """The worker may load it: it is asked, and its word is expected."""

    async def scenario(world: World) -> None:
        (engine,), admission = world.engines, Admission()
        engine.usage = b'{"prompt_tokens": 100, "completion_tokens": 1}'
        admission.quote = Admit(0)
        disk = TierStatement(name="disk", latency_ms=1e6, bytes_per_ms=1e9)
        actions = ("colocated_prefill", "tail_recompute")
        await introduced(world, admission.address, actions=actions, tiers=(disk,))
        client, gateway = await world.client(), world.gateway
        assert (await client.post("/v1/completions", BODY, x__session__id="a")).status == 200
        await world.settled()
        [(name, session)] = gateway.state.sessions.items()
        assert session.owner is not None and session.owner.unit is not None
        gateway.turns.told(Reported(session.owner.unit, Tier.DEVICE, None, 32, session=name))
        gateway.turns.told(Reported(session.owner.unit, Tier.DISK, None, 96, session=name))
        admission.quote = Admit(0, 32, 96, 96)
        told = await client.post("/v1/completions", LONGER, x__session__id="a")
        assert int(told["x-ownerserve-expected-cached-tokens"]) == 96
        admission.close()

    play(scenario, engines=1, states=[record(None)], health_interval_s=0.05)


def test_a_worker_without_places_that_says_no_is_not_sent_the_turn(play: Play) -> None:
    async def scenario(world: World) -> None:
        admissions = Admission(), Admission()
        for admission in admissions:
            admission.quote = Reject(WorkerRefusal.QUEUE_FULL)
        await introduced(world, *(admission.address for admission in admissions))
        client, pressure = await world.client(), world.gateway.turns.observer.pressure
        told = await client.post("/v1/completions", x__session__id="a")
        assert (told.status, json.loads(told.body)["error"]["code"]) == (429, "queue_full")
        assert pressure["refused", "queue_full"] == 2
        admissions[1].quote = Admit(0)
        for session in "bc":
            told = await client.post("/v1/completions", x__session__id=session)
            assert world.engine_of(told) is world.engines[1]
        assert not [key for key in pressure if key[0] == "unasked"]
        for admission in admissions:
            admission.close()

    play(scenario, states=[record(None)] * 2, health_interval_s=0.05)


def test_no_more_tokens_are_lost_than_the_prompt_has(play: Play) -> None:
    async def scenario(world: World) -> None:
        (engine,), client = world.engines, await world.client()
        engine.says = said(mode="reseed", lost_tokens=1 << 50)
        engine.usage = b'{"prompt_tokens": 30, "completion_tokens": 1}'
        await client.post("/v1/completions", x__session__id="a")
        await world.settled()
        assert world.gateway.turns.observer.lost_tokens == 30

    play(scenario, engines=1)
