"""A policy runs as its name says, or the operator hears that it can't: at start, or each turn."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest
import uvloop
from click.testing import CliRunner

from ownerserve.cli.gateway import command
from ownerserve.gateway.config import Config
from ownerserve.gateway.http.access import Address
from ownerserve.gateway.service import Gateway
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import Incarnation, WorkerId
from ownerserve.kv.messages import PlacementAction, RoutingUnit
from ownerserve.kv.wire.status import (
    LoadStatement,
    ProfileStatement,
    WorkerStatus,
    unit_statement,
)
from ownerserve.router.decision import DispatchReason
from ownerserve.router.messages import Down, WorkerDown, WorkerUp
from ownerserve.router.policies import ROUTING_POLICIES, make_policy
from ownerserve.router.policies.apart import unmet
from ownerserve.router.state import RouterState
from ownerserve.router.worker import EVERY_ACTION, Profile, WorkerRole
from tests.support.gateway.world import Play, World
from tests.support.router.fleets import ABLE, PLAIN, dispatched, fleet_of
from tests.support.waits import WAIT_S

PD = ("round_robin_pd", "static_pd", "static_pd_delta")
PREFILLS = Profile(role=WorkerRole.PREFILL, speed=ABLE.speed, actions=EVERY_ACTION)
DECODES = Profile(role=WorkerRole.DECODE, speed=ABLE.speed, actions=EVERY_ACTION)
APART = PlacementAction.REMOTE_PREFILL


def states(*actions: str, role: str = "hybrid") -> bytes:
    """What a worker with these abilities says of itself."""
    return msgspec.json.encode(
        WorkerStatus(
            unit=unit_statement(RoutingUnit(WorkerId("w"), 0, Incarnation(1))),
            load=LoadStatement(as_of_s=1.0),
            profile=ProfileStatement(models=("m",), actions=actions, role=role),
        )
    )


PLAIN_WORKER = states("colocated_prefill", "decode_continuation")
ABLE_WORKER = states("colocated_prefill", "decode_continuation", "remote_prefill")


@pytest.mark.parametrize(
    ("profiles", "is_met"),
    [
        ((), False),
        ((PLAIN, PLAIN), False),
        ((ABLE,), False),  # nobody else computes its prompts
        ((ABLE, ABLE), True),
        ((PREFILLS, DECODES), True),
        ((DECODES, DECODES), False),
        ((PREFILLS, PREFILLS), False),
        ((DECODES, Profile(role=WorkerRole.PREFILL, spec_digest="another")), False),
        ((PLAIN, PLAIN, DECODES, PREFILLS), True),
    ],
)
def test_who_offers_that_prompts_are_computed_apart(
    profiles: tuple[Profile, ...], is_met: bool
) -> None:
    candidates = fleet_of(*profiles).candidates(None)
    for name in ROUTING_POLICIES:
        expected = None if is_met or name not in PD else APART
        assert unmet(make_policy(name), candidates) == expected


@pytest.mark.parametrize("name", PD)
def test_one_able_worker_among_plain_ones_is_found(name: str) -> None:
    state = RouterState(make_policy(name))
    for number, profile in enumerate((PLAIN, PLAIN, PREFILLS, DECODES)):
        state.handle(WorkerUp(WorkerId(f"w{number}"), 0, Incarnation(1), profile), 0.0)
    for number in range(4):
        dispatch = dispatched(state, f"s{number}", 1.0)
        assert (dispatch.worker, dispatch.reason) == ("w3", DispatchReason.SPLIT)


@pytest.mark.parametrize("name", PD)
def test_the_last_worker_that_offered_it_is_lost(name: str) -> None:
    state = RouterState(make_policy(name))
    for worker, profile in (("p", PREFILLS), ("d", DECODES)):
        state.handle(WorkerUp(WorkerId(worker), 0, Incarnation(1), profile), 0.0)
    assert dispatched(state, "a", 1.0).reason is DispatchReason.SPLIT
    state.handle(WorkerDown(WorkerId("p"), Down.UNHEALTHY), 2.0)
    for session in ("a", "b", None):
        fallen = dispatched(state, session, 3.0)
        assert (fallen.worker, fallen.reason) == ("d", DispatchReason.NOT_OFFERED)
        assert fallen.decision.action is PlacementAction.COLOCATED_PREFILL
    assert state.account.reasons[DispatchReason.NOT_OFFERED] == 3
    state.handle(WorkerUp(WorkerId("p"), 0, Incarnation(2), PREFILLS), 4.0)
    assert dispatched(state, "a", 5.0).reason is DispatchReason.SPLIT


@pytest.mark.parametrize("name", PD)
def test_the_gateway_refuses_a_policy_that_no_worker_can_carry_out(name: str, play: Play) -> None:
    async def scenario(world: World) -> None:
        raise AssertionError("it started")

    with pytest.raises(InvalidInput) as refused:
        play(scenario, states=[PLAIN_WORKER, PLAIN_WORKER], policy=name)
    assert refused.value.field == "policy"
    assert f"{name} needs remote_prefill, which none of 2 workers offers" in str(refused.value)
    assert "start workers that offer remote_prefill" in str(refused.value)


def test_it_starts_where_workers_can(play: Play) -> None:
    async def scenario(world: World) -> None:
        answer = await (await world.client()).post("/v1/chat/completions", x__session__id="a")
        assert answer["x-ownerserve-reason"] == "split"

    play(scenario, states=[ABLE_WORKER, ABLE_WORKER], policy="static_pd")


def test_who_has_not_answered_yet_may_offer_it(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    """A gateway that starts beside its workers: turns that can't wait are counted as fallbacks."""

    async def scenario(world: World) -> None:
        first, second = world.engines
        port = second.port
        await second.kill()
        addresses = tuple(Address("127.0.0.1", engine.port) for engine in world.engines)
        config = Config(workers=addresses, policy="static_pd", health_interval_s=0.05)
        other = Gateway(config)
        await other.start()
        try:
            world.gateway, before = other, world.gateway
            client = await world.client()
            fallen = await client.post("/v1/chat/completions", x__session__id="a")
            assert fallen["x-ownerserve-reason"] == "not_offered"
            assert other.turns.observer.pressure["fallback", "not_offered"] == 1
            second.states = first.states = ABLE_WORKER
            await second.start(port)
            async with asyncio.timeout(WAIT_S):
                while fallen["x-ownerserve-reason"] != "split":
                    await asyncio.sleep(0.02)
                    fallen = await client.post("/v1/chat/completions", x__session__id="a")
        finally:
            world.gateway = before
            await other.stop()

    with caplog.at_level(logging.WARNING, "ownerserve.gateway"):
        play(scenario, states=[PLAIN_WORKER, PLAIN_WORKER])
    (warning,) = [line for line in caplog.messages if "remote_prefill" in line]
    assert "none of the 1 workers that answered offers; 1 have not answered" in warning


def test_a_gateway_before_its_workers_starts_and_waits() -> None:
    async def scenario() -> None:
        gateway = Gateway(Config(workers=(Address("127.0.0.1", 1),), policy="static_pd"))
        await gateway.start()
        await gateway.stop()

    uvloop.run(scenario())


def test_help_says_what_a_policy_needs() -> None:
    said = CliRunner().invoke(command, ["--help"]).output
    lines = [*said.partition("Policies:")[2].splitlines(), ""]
    for name in ROUTING_POLICIES:
        (at,) = [at for at, line in enumerate(lines) if line.split()[:1] == [name]]
        assert ("needs remote_prefill" in lines[at + 1]) == (name in PD)
