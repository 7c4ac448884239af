"""A worker that speaks our protocol is told in its turn's line who computes the prompt, and asks it
itself: the gateway sends one leg, and hears what came of it with the answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from ownerserve.gateway.config import PrefillLegs
from ownerserve.gateway.workers.rpc import WorkerLines, WorkerNames
from ownerserve.kv.ids import Incarnation, WorkerId
from ownerserve.kv.messages import PlacementAction, RoutingUnit, Tier
from ownerserve.kv.wire.headers import TURN_HEADER, LenderAddress, TurnLine, decode_turn_line
from ownerserve.kv.wire.status import (
    LoadStatement,
    ProfileStatement,
    WorkerStatus,
    unit_statement,
)
from ownerserve.router.decision import Decision, DispatchReason
from ownerserve.router.fleet import Fleet
from ownerserve.router.messages import WorkerUp
from ownerserve.router.worker import EVERY_ACTION, Profile, Worker, WorkerRole
from tests.support.gateway.admission import Admission
from tests.support.gateway.world import FakeEngine, Play, World, header
from tests.support.router.answer_lines import said
from tests.support.router.fleets import SPEED
from tests.support.waits import WAIT_S

P_UNIT = RoutingUnit(WorkerId("p-by-its-own-name"), 0, Incarnation(7))
D_UNIT = RoutingUnit(WorkerId("d-by-its-own-name"), 0, Incarnation(8))
ACTIONS = ("colocated_prefill", "remote_prefill")


def states(unit: RoutingUnit, rpc: str | None, **profile: Any) -> bytes:
    """What a worker of ours says of itself."""
    return msgspec.json.encode(
        WorkerStatus(
            unit=unit_statement(unit),
            load=LoadStatement(as_of_s=1.0),
            profile=ProfileStatement(models=("m",), actions=ACTIONS, rpc=rpc, **profile),
        )
    )


class Pair:
    """A worker that prefills and one that decodes, as the gateway sees them."""

    def __init__(self, **profile: Any) -> None:
        self.profile = {"lends": ("device",), **profile}
        self.ports: list[Admission] = []
        self.engines: list[FakeEngine] = []

    def prepare(self, engines: list[FakeEngine]) -> None:
        self.engines, self.ports = engines, [Admission(), Admission()]
        for engine, port, unit, role in zip(
            engines, self.ports, (P_UNIT, D_UNIT), ("prefill", "decode"), strict=True
        ):
            engine.states = states(unit, port.address, role=role, **self.profile)

    @property
    def orders(self) -> list[LenderAddress | None]:
        """Whom the decoding worker was told to ask, turn by turn."""
        lines = [header(head, TURN_HEADER.encode()) for head, _ in self.engines[1].seen]
        return [decode_turn_line((line or b"{}").decode()).decode_from for line in lines]

    def close(self) -> None:
        for port in self.ports:
            port.close()


def said_of_legs(world: World) -> dict[str, int]:
    counts = world.gateway.legs.counts
    return {outcome: count for (leg, outcome), count in counts.items() if leg == "prefill"}


def test_the_worker_that_answers_is_told_who_computes_its_prompt(play: Play) -> None:
    pair = Pair()

    async def scenario(world: World) -> None:
        prefill, decode = world.engines
        decode.says = said(D_UNIT.incarnation, mode="remote_prefill")
        decode.cached_tokens = 900  # what it has read of the other one is cached there
        client = await world.client()
        answer = await client.post("/v1/completions", x__session__id="a")
        assert (answer["x-ownerserve-action"], answer["x-ownerserve-reason"]) == (
            "remote_prefill",
            "split",
        )
        assert pair.orders == [LenderAddress(P_UNIT, pair.ports[0].address)]
        assert prefill.seen == [], "the gateway sends it no leg"
        assert len(pair.ports[1].reserves) == 1, "a place is asked for as for any other turn"
        assert pair.ports[0].asked == []
        assert said_of_legs(world) == {"done": 1}
        # Where the worker computed the prompt itself, the books say so, and no turn fails.
        decode.says = said(D_UNIT.incarnation, as_of=2.0, mode="cold_prefill")
        again = await client.post("/v1/completions", x__session__id="b")
        assert (again.status, again["x-ownerserve-action"]) == (200, "remote_prefill")
        assert said_of_legs(world) == {"done": 1, "on_the_spot": 1}
        await world.settled()
        assert all(not worker.requests for worker in world.gateway.state.fleet)
        assert prefill.seen == []
        compared = world.gateway.turns.observer.receipt_error_tokens
        assert not any(compared.counts), "nobody expected anything there"
        pair.close()

    play(scenario, prepare=pair.prepare, policy="static_pd")


def test_who_lends_nothing_is_asked_by_the_gateway(play: Play) -> None:
    """As vLLM beside our plugin, whose role its operator vouches for: two legs."""
    pair = Pair(lends=())

    async def scenario(world: World) -> None:
        prefill, decode = world.engines
        answer = await (await world.client()).post("/v1/completions", b'{"prompt": "x"}')
        assert answer["x-ownerserve-action"] == "remote_prefill"
        assert pair.orders == [None]
        [(_, body)] = prefill.seen
        assert json.loads(body)["kv_transfer_params"]["do_remote_decode"] is True
        assert len(decode.seen) == 1
        assert said_of_legs(world) == {"done": 1}
        pair.close()

    play(scenario, prepare=pair.prepare, policy="static_pd")


def test_a_worker_that_answers_with_an_error_has_had_nothing_computed(play: Play) -> None:
    pair = Pair()

    async def scenario(world: World) -> None:
        decode = world.engines[1]
        decode.refuses = (400, "")
        answer = await (await world.client()).post("/v1/chat/completions", x__session__id="a")
        assert answer.status == 400
        assert said_of_legs(world) == {}
        await world.settled()
        assert all(not worker.requests for worker in world.gateway.state.fleet)
        pair.close()

    play(scenario, prepare=pair.prepare, policy="static_pd")


# Both are asked at once


def leg_lines(engine: FakeEngine) -> list[TurnLine]:
    said = [header(head, TURN_HEADER.encode()) for head, _ in engine.seen]
    return [decode_turn_line((line or b"{}").decode()) for line in said]


def ahead(world: World) -> dict[str, int]:
    counts = world.gateway.legs.counts
    return {outcome: count for (leg, outcome), count in counts.items() if leg == "ahead"}


def queued(world: World) -> list[float]:
    return [worker.queue_ms for worker in world.gateway.state.fleet]


def test_who_computes_and_who_answers_are_asked_at_once_under_one_number(play: Play) -> None:
    pair = Pair()

    async def scenario(world: World) -> None:
        prefill, decode = world.engines
        decode.says = said(D_UNIT.incarnation, mode="remote_prefill")
        decode.is_mute = True
        client = await world.client()
        body = b'{"prompt": "x", "max_tokens": 9, "stream": false, "session_id": "a"}'
        turn = asyncio.create_task(client.post("/v1/completions", body, x__session__id="a"))
        async with asyncio.timeout(WAIT_S):
            while not (ahead(world) and decode.seen):
                await asyncio.sleep(0.001)
        assert ahead(world) == {"computed": 1}
        assert queued(world)[0] == 0.0, "what is computed is no load any more"
        [(_, asked)] = prefill.seen
        assert (json.loads(asked)["max_tokens"], json.loads(asked)["session_id"]) == (1, None)
        [to_p], [to_d] = leg_lines(prefill), leg_lines(decode)
        assert to_p.nonce is not None
        assert to_p == TurnLine(target=to_p.target, nonce=to_p.nonce, prefill=True)
        assert to_p.target is not None and to_p.target.incarnation == P_UNIT.incarnation
        assert (to_d.nonce, to_d.prefill) == (to_p.nonce, False)
        assert to_d.decode_from == LenderAddress(P_UNIT, pair.ports[0].address)
        decode.go_on.set()
        assert (await turn).status == 200
        assert said_of_legs(world) == {"done": 1}
        # Its next turn: what the one that answered has is read from there, by the session's name.
        assert (await client.post("/v1/completions", body, x__session__id="a")).status == 200
        lender = leg_lines(prefill)[1]
        assert lender.bring_from == LenderAddress(D_UNIT, pair.ports[1].address)
        assert lender.name == leg_lines(decode)[1].name is not None
        assert lender.nonce != to_p.nonce
        await world.settled()
        assert all(not worker.requests for worker in world.gateway.state.fleet)
        pair.close()

    play(scenario, prepare=pair.prepare, policy="static_pd", prefill_legs=PrefillLegs.BOTH)


def test_who_would_compute_and_is_silent_is_hung_up_on_as_the_answer_begins(play: Play) -> None:
    pair = Pair()

    async def scenario(world: World) -> None:
        prefill, decode = world.engines
        decode.says = said(D_UNIT.incarnation, mode="cold_prefill")
        prefill.is_mute = True
        client = await world.client()
        answer = await client.post("/v1/completions", b'{"prompt": "x"}')
        assert answer.status == 200
        assert ahead(world) == {"unwanted": 1}
        assert said_of_legs(world) == {"on_the_spot": 1}
        await world.settled()
        assert queued(world) == [0.0, 0.0]
        assert world.gateway.turns.pools[WorkerId(f"127.0.0.1:{prefill.port}")].idle == 0
        # What is no turn has one leg, and so has what nobody is asked of by our protocol.
        assert (await client.post("/v1/embeddings", b'{"input": "x"}')).status == 200
        assert ahead(world) == {"unwanted": 1}
        pair.close()

    play(scenario, prepare=pair.prepare, policy="static_pd", prefill_legs=PrefillLegs.BOTH)


def test_a_leg_ahead_that_fails_fails_no_turn(play: Play) -> None:
    pair = Pair()

    async def scenario(world: World) -> None:
        prefill, decode = world.engines
        decode.says = said(D_UNIT.incarnation, mode="cold_prefill")
        prefill.refuses, client = (429, "queue_full"), await world.client()
        answer = await client.post("/v1/chat/completions", x__session__id="a")
        assert answer.status == 200
        async with asyncio.timeout(WAIT_S):
            while not ahead(world):
                await asyncio.sleep(0.001)
        assert set(ahead(world)) <= {"refused", "unwanted"}
        prefill.drops_next, prefill.refuses = True, None
        assert (await client.post("/v1/completions", b'{"prompt": "x"}')).status == 200
        await prefill.kill()
        assert (await client.post("/v1/completions", b'{"prompt": "x"}')).status == 200
        await world.settled()
        assert len(decode.seen) == 3
        world.gateway.state.check()
        pair.close()

    play(scenario, prepare=pair.prepare, policy="static_pd", prefill_legs=PrefillLegs.BOTH)


# Who is named


def worker(fleet: Fleet, name: str, life: int, **profile: Any) -> Worker:
    known = {"speed": SPEED, "actions": EVERY_ACTION, **profile}
    fleet.raise_up(WorkerUp(WorkerId(name), 0, Incarnation(life), Profile(**known)))
    return fleet[WorkerId(name)]


@pytest.mark.parametrize(
    ("prefill_lends", "decode_lends", "prefill_host", "is_named"),
    [
        ({Tier.DEVICE}, {Tier.DEVICE}, "127.0.0.1", True),
        ({Tier.DEVICE, Tier.HOST}, {Tier.DEVICE}, "127.0.0.1", True),
        (set(), {Tier.DEVICE}, "127.0.0.1", False),
        ({Tier.DEVICE}, set(), "127.0.0.1", False),
        ({Tier.HOST}, {Tier.DEVICE}, "127.0.0.1", False),
        ({Tier.DEVICE}, {Tier.DEVICE}, "10.0.0.7", False),  # the other one is on loopback
        ({Tier.DEVICE}, {Tier.DEVICE}, None, False),  # no RPC port that can be reached
    ],
)
def test_a_worker_is_named_that_lends_and_can_be_reached_by_one_that_reads(
    prefill_lends: set[Tier], decode_lends: set[Tier], prefill_host: str | None, is_named: bool
) -> None:
    async def scenario() -> None:
        fleet, lines, names = Fleet(), WorkerLines(), WorkerNames()
        p = worker(fleet, "p", 7, role=WorkerRole.PREFILL, lends=frozenset(prefill_lends))
        d = worker(fleet, "d", 8, role=WorkerRole.DECODE, lends=frozenset(decode_lends))
        split = Decision(d, PlacementAction.REMOTE_PREFILL, DispatchReason.SPLIT, prefill=p)
        if prefill_host is not None:
            lines.learn(p.id, prefill_host, f"tcp://{prefill_host}:9")
        lines.learn(d.id, "127.0.0.1", "tcp://127.0.0.1:10")
        assert lines.prefiller_of(split, names) is None, "it never said what it calls itself"
        assert p.unit is not None
        names.up(p.unit, P_UNIT.worker)
        named = LenderAddress(P_UNIT, "tcp://127.0.0.1:9")
        assert lines.prefiller_of(split, names) == (named if is_named else None)
        assert lines.prefiller_of(Decision(d, *_ON_THE_SPOT), names) is None
        alone = Decision(p, PlacementAction.REMOTE_PREFILL, DispatchReason.SPLIT, prefill=p)
        assert lines.prefiller_of(alone, names) is None, "nobody is asked by itself"
        lines.close()

    asyncio.run(scenario())


_ON_THE_SPOT = (PlacementAction.COLOCATED_PREFILL, DispatchReason.NOT_OFFERED)
