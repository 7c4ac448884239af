"""A gateway with seats, on real sockets: a new session waits, and is let in, or hangs up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from ownerserve.gateway import service
from ownerserve.gateway.asking import IdentifiedRequest
from ownerserve.gateway.turns import LostDispatch, Route
from ownerserve.kv.ids import Incarnation
from ownerserve.kv.messages import Tier
from ownerserve.router import admission
from ownerserve.router.admission import SeatSettings
from ownerserve.router.entry.stay import RETURNS_LEAST
from ownerserve.router.messages import Down, Gone, Refuse, WorkerDown, WorkerUp
from ownerserve.router.worker import Profile
from tests.support.gateway.world import Play, World
from tests.support.router.stays import FixedStay
from tests.support.waits import WAIT_S, until_async

SEATS = SeatSettings(share=1.0, growth_tokens=0, idle_s=60.0, patience_s=60.0)
BRIEF = SeatSettings(share=1.0, growth_tokens=0, idle_s=0.2, patience_s=60.0)
CHAT = "/v1/chat/completions"
ONE = b'{"messages":"' + b"x" * 3000 + b'"}'
OTHER = b'{"messages":"' + b"y" * 3000 + b'"}'
"""750 tokens each, and nothing in common: what begins alike counts as a fork."""


def small(world: World, *, tokens: int = 1000) -> None:
    """The worker says that it has room for so many tokens."""
    gateway = world.gateway
    (worker,) = gateway.state.fleet.up
    speed = gateway.config.speed
    profile = Profile(speed=speed, kv_bytes_total=int(tokens * speed.kv_bytes_per_token))
    gateway.state.handle(WorkerUp(worker.id, profile=profile), gateway.now())


async def waiting(world: World, count: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while len(world.gateway.turns.admission) != count:
            await asyncio.sleep(0.001)


def test_a_new_session_waits_until_another_is_over(play: Play) -> None:
    async def scenario(world: World) -> None:
        small(world)
        first, second = await world.client(), await world.client()
        assert (await first.post(CHAT, ONE, x__session__id="a")).status == 200
        answer = asyncio.ensure_future(second.post(CHAT, OTHER, x__session__id="b"))
        await waiting(world, 1)
        assert (await first.post(CHAT, ONE, x__session__id="a")).status == 200, "a goes on"
        assert not answer.done()
        ended = await first.post(CHAT, ONE, x__session__id="a", x__ownerserve__session__final="1")
        assert ended.status == 200
        assert (await answer).status == 200
        assert len(world.gateway.turns.admission) == 0
        world.gateway.turns.admission.seats.check()

    play(scenario, engines=1, seats=SEATS, health_interval_s=60.0)


def test_seats_are_counted_unless_told_otherwise(play: Play) -> None:
    """As `ownerserve gateway` starts without a word about them."""

    async def scenario(world: World) -> None:
        small(world)
        first, second = await world.client(), await world.client()
        assert (await first.post(CHAT, ONE, x__session__id="a")).status == 200
        answer = asyncio.ensure_future(second.post(CHAT, OTHER, x__session__id="b"))
        await waiting(world, 1)
        ended = await first.post(CHAT, ONE, x__session__id="a", x__ownerserve__session__final="1")
        assert ended.status == 200
        assert (await answer).status == 200

    play(scenario, engines=1, health_interval_s=60.0)


def test_a_client_that_gives_up_and_tries_again_has_its_place_back(play: Play) -> None:
    async def scenario(world: World) -> None:
        small(world)
        first = await world.client()
        assert (await first.post(CHAT, ONE, x__session__id="a")).status == 200
        turns = world.gateway.turns.admission
        impatient, patient = await world.client(), await world.client()
        given_up = asyncio.ensure_future(impatient.post(CHAT, OTHER, x__session__id="b"))
        await waiting(world, 1)
        other = b'{"messages":"' + b"z" * 3000 + b'"}'
        last = asyncio.ensure_future(patient.post(CHAT, other, x__session__id="c"))
        await waiting(world, 2)
        impatient.hang_up()
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await given_up
        await waiting(world, 1)
        again = await world.client()
        answer = asyncio.ensure_future(again.post(CHAT, OTHER, x__session__id="b"))
        await waiting(world, 2)
        places = [turns.place(held).place for held in turns.waiting()]
        assert places == [2, 1], "the one who came last is first"
        for name, turn, body in (("a", answer, ONE), ("b", last, OTHER)):
            client = await world.client()
            ended = await client.post(
                CHAT, body, x__session__id=name, x__ownerserve__session__final="1"
            )
            assert ended.status == 200
            assert (await turn).status == 200

    play(scenario, engines=1, seats=SEATS, health_interval_s=60.0)


def test_nobody_waits_beyond_the_patience(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session inside never goes; who waits is served all the same, and counted."""
    monkeypatch.setattr(service, "SWEEP_INTERVAL_S", 0.05)

    async def scenario(world: World) -> None:
        small(world)
        client = await world.client()
        assert (await client.post(CHAT, ONE, x__session__id="a")).status == 200
        assert (await client.post(CHAT, OTHER, x__session__id="b")).status == 200
        assert world.gateway.turns.admission.seats.impatient == 1

    patient = SeatSettings(share=1.0, growth_tokens=0, patience_s=0.3)
    play(scenario, engines=1, seats=patient, health_interval_s=60.0)


def test_a_fault_in_one_look_at_who_waits_is_not_the_last_look(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "SWEEP_INTERVAL_S", 0.05)

    async def scenario(world: World) -> None:
        queue = world.gateway.turns.admission
        look, looks = queue.look, list[float]()

        def faulty(now_s: float) -> None:
            looks.append(now_s)
            if len(looks) == 1:
                raise KeyError("a fault of ours")
            look(now_s)

        monkeypatch.setattr(queue, "look", faulty)
        async with asyncio.timeout(WAIT_S):
            while len(looks) < 2:
                await asyncio.sleep(0.001)

    play(scenario, engines=1, seats=SEATS, health_interval_s=60.0)


def test_small_sessions_enter_a_small_worker_that_states_its_memory(play: Play) -> None:
    """Priced like an H200's tokens, a worker of 64 MiB had no room for a second of ten tokens."""
    state = {
        "version": 1,
        "unit": {"worker": "w", "rank": 0, "incarnation": 5},
        "load": {"as_of_s": 1.0, "kv_bytes_free": 64 << 20, "kv_bytes_total": 64 << 20},
        "profile": {"models": ["m"], "kv_bytes_per_token": 1024.0},
    }

    async def scenario(world: World) -> None:
        client = await world.client()
        for _ in range(2):
            for name in "abc":
                body = b'{"prompt": "%b %b"}' % (name.encode(), b"z" * 20)
                async with asyncio.timeout(WAIT_S):
                    assert (await client.post(CHAT, body, x__session__id=name)).status == 200
        assert world.gateway.turns.admission.seats.impatient == 0

    states = [json.dumps(state).encode()]
    play(scenario, engines=1, states=states, seats=SeatSettings(share=0.9))


def test_a_sub_agent_that_its_client_names_does_not_wait(play: Play) -> None:
    async def scenario(world: World) -> None:
        small(world)
        client = await world.client()
        await client.post(CHAT, ONE, x__session__id="a")
        names = {"x-session-id": "b", "x-parent-session-id": "a"}
        child = await client.post(
            CHAT, OTHER, **{k.replace("-", "__"): v for k, v in names.items()}
        )
        assert child.status == 200

    play(scenario, engines=1, seats=SEATS, health_interval_s=60.0)


def conversation(shared: int, mark: bytes) -> bytes:
    """A body of 7,000 bytes that begins with so many of one sort."""
    return b'{"messages":"%b"}' % (b"x" * shared + mark * (7000 - shared))


@pytest.mark.parametrize("name", ["c", None], ids=["named itself", "has no name"])
def test_a_fork_that_nobody_names_does_not_wait_and_who_shares_less_does(
    play: Play, name: str | None
) -> None:
    """Of 7,000 bytes the one has 4,096 in common with a session inside, the other 2,048, as far as
    whole pieces are compared: a system prompt."""

    async def scenario(world: World) -> None:
        small(world, tokens=2000)
        client, other = await world.client(), await world.client()
        assert (await client.post(CHAT, conversation(7000, b""), x__session__id="a")).status == 200
        late = asyncio.ensure_future(other.post(CHAT, conversation(3000, b"z"), x__session__id="b"))
        await waiting(world, 1)
        said = {} if name is None else {"x__session__id": name}
        fork = asyncio.ensure_future(client.post(CHAT, conversation(4500, b"y"), **said))
        await until_async(lambda: fork.done() or len(world.gateway.turns.admission) > 1)
        assert fork.done() and (await fork).status == 200
        assert not late.done()
        late.cancel()
        other.hang_up()
        await waiting(world, 0)
        world.gateway.turns.admission.seats.check()

    play(scenario, engines=1, seats=SEATS, health_interval_s=60.0)


def test_a_session_has_one_seat_whatever_its_turns_call_it(play: Play) -> None:
    """A turn that names the answer before it was a new session to the seats: it waited for its own
    seat, and its end freed none."""

    async def scenario(world: World) -> None:
        small(world)
        client = await world.client()
        first = await client.post("/v1/responses", ONE.replace(b"messages", b"input"))
        told = json.loads(first.body)["id"]
        later = OTHER.replace(b"messages", b"input")
        body = b'{"previous_response_id": "%b", %b' % (told.encode(), later[1:])
        async with asyncio.timeout(WAIT_S):
            answer = await client.post("/v1/responses", body, x__ownerserve__session__final="1")
            assert answer.status == 200
            assert (await client.post(CHAT, OTHER, x__session__id="b")).status == 200

    play(scenario, engines=1, seats=SEATS, health_interval_s=60.0)


def test_who_was_inside_and_whose_state_is_gone_waits_for_room(play: Play) -> None:
    """10,000 tokens of a's prompt were on the worker, which says that they are no more; b has the
    room now. What a had before and was computed again is told to the rule of the stay."""
    long, other = (b'{"messages":"' + mark * 40_000 + b'"}' for mark in (b"x", b"y"))

    async def scenario(world: World) -> None:
        small(world, tokens=12_000)
        (worker,) = world.gateway.state.fleet.up
        up = WorkerUp(worker.id, incarnation=Incarnation(1))
        world.gateway.state.handle(up, world.gateway.now())
        gateway, stay = world.gateway, FixedStay(BRIEF.idle_s / 2)
        gateway.turns.admission.seats.stay = stay
        world.engines[0].usage = (
            b'{"prompt_tokens": 10000, "completion_tokens": 1,'
            b' "prompt_tokens_details": {"cached_tokens": 0}}'
        )
        first, second = await world.client(), await world.client()
        assert (await first.post(CHAT, long, x__session__id="a")).status == 200
        assert (stay.turns, stay.refilled_s) == (1, 0.0)
        ((session, _),) = gateway.state.sessions.items()
        gone = Gone(worker.unit, Tier.DEVICE, session=session)
        await asyncio.sleep(2 * BRIEF.idle_s)
        gateway.state.handle(gone, gateway.now())
        assert (await second.post(CHAT, other, x__session__id="b")).status == 200
        gateway.state.handle(gone, gateway.now())
        held = asyncio.ensure_future(first.post(CHAT, long, x__session__id="a"))
        await waiting(world, 1)
        assert not held.done()
        last = await second.post(CHAT, other, x__session__id="b", x__ownerserve__session__final="1")
        assert last.status == 200
        assert (await held).status == 200
        assert stay.refilled_s > 0.0

    play(scenario, engines=1, seats=BRIEF, health_interval_s=60.0)


TOLD = {"refill_shares": [[1, 2.0]]}
"""Bringing back what a prompt displaces would take a worker twice the time it has."""
UNTOLD: dict[str, Any] = {}
"""As workers of vLLM say it: nothing."""


def busy(refills: Sequence[dict[str, Any]]) -> list[bytes]:
    """What busy workers state that have 24,000 tokens of memory in all."""
    tokens = 24_000 // len(refills)
    load = {"as_of_s": 1.0, "kv_bytes_free": 0, "kv_bytes_total": tokens << 10, "busy_share": 0.9}
    state = {
        "version": 1,
        "unit": {"worker": "w", "rank": 0, "incarnation": 5},
        "profile": {"models": ["m"], "kv_bytes_per_token": 1024.0},
    }
    return [json.dumps({**state, "load": {**load, **one}}).encode() for one in refills]


LONG, LONG_OTHER = (b'{"messages":"' + mark * 52_000 + b'"}' for mark in (b"x", b"y"))


async def outgrown(world: World) -> None:
    """Two sessions come to have 13,000 tokens each, and the state of the first goes."""
    gateway = world.gateway
    for engine in world.engines:
        engine.usage = (
            b'{"prompt_tokens": 13000, "completion_tokens": 1,'
            b' "prompt_tokens_details": {"cached_tokens": 0}}'
        )
    client = await world.client()
    assert (await client.post(CHAT, ONE, x__session__id="a")).status == 200
    ((session, _),) = gateway.state.sessions.items()
    assert (await client.post(CHAT, OTHER, x__session__id="b")).status == 200
    for worker in gateway.state.fleet.up:
        gateway.state.handle(Gone(worker.unit, Tier.DEVICE, session=session), gateway.now())


@pytest.mark.parametrize("refills", [[TOLD], [TOLD, TOLD]], ids=["one worker", "two"])
def test_who_lost_its_state_makes_room_where_contexts_outgrow_memory(
    play: Play, refills: list[dict[str, Any]]
) -> None:
    """The one whose state went waits till the other is over."""

    async def scenario(world: World) -> None:
        await outgrown(world)
        first, second = await world.client(), await world.client()
        held = asyncio.ensure_future(first.post(CHAT, LONG, x__session__id="a"))
        await waiting(world, 1)
        assert (await second.post(CHAT, LONG_OTHER, x__session__id="b")).status == 200, "b goes on"
        assert not held.done()
        last = await second.post(
            CHAT, LONG_OTHER, x__session__id="b", x__ownerserve__session__final="1"
        )
        assert last.status == 200
        answer = await held
        assert answer.status == 200
        assert (answer["x-ownerserve-wait"] or "").startswith("state;ms=")

    play(scenario, engines=len(refills), states=busy(refills), seats=SEATS)


@pytest.mark.parametrize(
    "refills", [[UNTOLD], [TOLD, UNTOLD]], ids=["vLLM's alone", "vLLM's beside another"]
)
def test_nobody_is_suspended_where_one_worker_does_not_say_what_refills_take(
    play: Play, refills: list[dict[str, Any]]
) -> None:
    async def scenario(world: World) -> None:
        await outgrown(world)
        client = await world.client()
        answer = await client.post(CHAT, LONG, x__session__id="a")
        assert (answer.status, answer["x-ownerserve-wait"]) == (200, None)
        world.gateway.turns.admission.seats.check()

    play(scenario, engines=len(refills), states=busy(refills), seats=SEATS)


@pytest.mark.parametrize("host_mib", [0, 96])
def test_host_memory_that_a_worker_states_is_room_for_sessions(play: Play, host_mib: int) -> None:
    """13,000 tokens each of a worker's 24,000: the second waits, unless host memory keeps both."""
    host = {"name": "host", "bytes_total": host_mib << 20, "latency_ms": 0.1, "bytes_per_ms": 5e7}
    total = 24_000 << 10
    state = {
        "version": 1,
        "unit": {"worker": "w", "rank": 0, "incarnation": 5},
        "load": {"as_of_s": 1.0, "kv_bytes_free": 0, "kv_bytes_total": total},
        "profile": {"models": ["m"], "kv_bytes_per_token": 1024.0, "tiers": [host]},
    }
    long, other = (b'{"messages":"' + mark * 52_000 + b'"}' for mark in (b"x", b"y"))

    async def scenario(world: World) -> None:
        first, second = await world.client(), await world.client()
        assert (await first.post(CHAT, long, x__session__id="a")).status == 200
        asked = asyncio.ensure_future(second.post(CHAT, other, x__session__id="b"))
        if not host_mib:
            await waiting(world, 1)
            assert not asked.done()
            final = {"x__ownerserve__session__final": "1"}
            assert (await first.post(CHAT, long, x__session__id="a", **final)).status == 200
        answer = await asked
        assert answer.status == 200
        assert (answer["x-ownerserve-wait"] is None) is bool(host_mib)

    states = [json.dumps(state).encode()]
    play(scenario, engines=1, states=states, seats=SEATS, health_interval_s=60.0)


@pytest.mark.parametrize("suspends", [True, False], ids=["can be suspended", "can not"])
def test_a_tenth_more_is_booked_where_workers_say_what_suspending_goes_by(
    play: Play, suspends: bool
) -> None:
    """12,250 tokens each of a worker's 24,000."""
    said = {"refill_shares": [[1, 0.1]], "busy_share": 0.1} if suspends else {}
    state = {
        "version": 1,
        "unit": {"worker": "w", "rank": 0, "incarnation": 5},
        "load": {"as_of_s": 1.0, "kv_bytes_free": 0, "kv_bytes_total": 24_000 << 10, **said},
        "profile": {"models": ["m"], "kv_bytes_per_token": 1024.0},
    }
    long, other = (b'{"messages":"' + mark * 49_000 + b'"}' for mark in (b"x", b"y"))

    async def scenario(world: World) -> None:
        world.engines[0].usage = b'{"prompt_tokens": 12250, "completion_tokens": 1}'
        first, second = await world.client(), await world.client()
        assert (await first.post(CHAT, long, x__session__id="a")).status == 200
        asked = asyncio.ensure_future(second.post(CHAT, other, x__session__id="b"))
        if not suspends:
            await waiting(world, 1)
            final = {"x__ownerserve__session__final": "1"}
            assert (await first.post(CHAT, long, x__session__id="a", **final)).status == 200
        answer = await asked
        assert answer.status == 200
        assert (answer["x-ownerserve-wait"] is None) is suspends

    states = [json.dumps(state).encode()]
    play(scenario, engines=1, states=states, seats=SEATS, health_interval_s=60.0)


def test_who_hangs_up_while_waiting_is_forgotten(play: Play) -> None:
    async def scenario(world: World) -> None:
        small(world)
        first, second = await world.client(), await world.client()
        await first.post(CHAT, ONE, x__session__id="a")
        second.writer.write(
            b"POST %b HTTP/1.1\r\nHost: t\r\nx-session-id: b\r\nContent-Length: %d\r\n\r\n%b"
            % (CHAT.encode(), len(OTHER), OTHER)
        )
        await waiting(world, 1)
        second.hang_up()
        await waiting(world, 0)
        assert len(world.engines[0].seen) == 1
        assert world.gateway.state.account.received == 1

    play(scenario, engines=1, seats=SEATS, health_interval_s=60.0)


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "is alone"])
def test_a_fault_in_a_decision_ends_that_request_and_no_other(
    play: Play, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for a seat is decided on in the midst of another's end, which must go on."""

    async def scenario(world: World) -> None:
        small(world)
        gateway = world.gateway
        decide = gateway.turns.decide

        def broken(
            asked: IdentifiedRequest, lost: LostDispatch | None = None, *, request_id: bytes
        ) -> Route | Refuse:
            if len(asked.fields.body) == len(OTHER) + 1:
                raise KeyError("a fault of ours")
            return decide(asked, lost, request_id=request_id)

        monkeypatch.setattr(gateway.turns, "decide", broken)
        first, second = await world.client(), await world.client()
        if waits:
            assert (await first.post(CHAT, ONE, x__session__id="a")).status == 200
        answer = asyncio.ensure_future(second.post(CHAT, OTHER + b" ", x__session__id="b"))
        if waits:
            await waiting(world, 1)
            final = {"x__session__id": "a", "x__ownerserve__session__final": "1"}
            assert (await first.post(CHAT, ONE, **final)).status == 200
        async with asyncio.timeout(WAIT_S):
            told = await answer
            assert (told.status, json.loads(told.body)["error"]["code"]) == (500, "gateway_fault")
            assert (await first.post(CHAT, ONE, x__session__id="c")).status == 200
            assert (await second.post(CHAT, ONE, x__session__id="c")).status == 200
        gateway.turns.admission.seats.check()

    play(scenario, engines=1, seats=SEATS, health_interval_s=60.0)


def test_a_gateway_that_drains_refuses_those_who_wait(play: Play) -> None:
    async def scenario(world: World) -> None:
        small(world)
        first, second = await world.client(), await world.client()
        await first.post(CHAT, ONE, x__session__id="a")
        answer = asyncio.ensure_future(second.post(CHAT, OTHER, x__session__id="b"))
        await waiting(world, 1)
        draining = asyncio.ensure_future(world.gateway.drain())
        assert (await answer).status == 503
        await draining

    play(scenario, engines=1, seats=SEATS, health_interval_s=60.0)


def test_while_no_worker_is_up_a_new_session_is_refused_at_once(play: Play) -> None:
    """It waited for its whole patience, for a refusal that it gets at once without seats."""

    async def scenario(world: World) -> None:
        small(world)
        client = await world.client()
        assert (await client.post(CHAT, ONE, x__session__id="a")).status == 200
        (worker,) = world.gateway.state.fleet.up
        world.gateway.state.handle(WorkerDown(worker.id, Down.REMOVED), world.gateway.now())
        async with asyncio.timeout(WAIT_S):
            assert (await client.post(CHAT, OTHER, x__session__id="b")).status == 503
        world.gateway.turns.admission.seats.check()

    play(scenario, engines=1, seats=SEATS, health_interval_s=60.0)


def test_nobody_waits_where_a_worker_does_not_say_what_a_token_takes(play: Play) -> None:
    """Its memory is known, and what lies in it is not: by an H200's tokens one of these would be
    all that fits."""
    state = {
        "version": 1,
        "unit": {"worker": "w", "rank": 0, "incarnation": 5},
        "load": {"as_of_s": 1.0, "kv_bytes_free": 64 << 20, "kv_bytes_total": 64 << 20},
        "profile": {"models": ["m"]},
    }

    async def scenario(world: World) -> None:
        client = await world.client()
        for name in "abc":
            body = b'{"messages":"%b"}' % (name.encode() * 2400)
            async with asyncio.timeout(WAIT_S):
                assert (await client.post(CHAT, body, x__session__id=name)).status == 200
        assert world.gateway.turns.admission.seats.impatient == 0

    play(scenario, engines=1, states=[json.dumps(state).encode()])


@pytest.mark.parametrize(("busy", "falls"), [(0.002, True), (None, False)])
def test_an_idle_session_keeps_its_seat_by_how_busy_workers_say_they_are(
    play: Play, monkeypatch: pytest.MonkeyPatch, *, busy: float | None, falls: bool
) -> None:
    """All come back after a gap of 3 s. Where engines idle two seconds are the better stay; where
    nobody says how busy they are it is the longest."""
    monkeypatch.setattr(admission, "STAY_EVERY_S", 0.05)
    load = {"as_of_s": 1.0, "kv_bytes_free": 1 << 30, "kv_bytes_total": 40 << 20}
    state = {
        "version": 1,
        "unit": {"worker": "w", "rank": 0, "incarnation": 5},
        "load": load if busy is None else load | {"busy_share": busy},
        "profile": {"models": ["m"], "kv_bytes_per_token": 1024.0},
    }

    async def scenario(world: World) -> None:
        clients = [await world.client() for _ in range(4)]

        async def turns(at: int) -> None:
            for number in range(at, RETURNS_LEAST + 8, len(clients)):
                body = b'{"messages":"%b"}' % (b"%03d " % number * 100)
                sent = await clients[at].post(CHAT, body, x__session__id=f"{number}")
                assert sent.status == 200

        for gap_s in (3.0, 0.2, 0.0):
            await asyncio.gather(*(turns(at) for at in range(len(clients))))
            await asyncio.sleep(gap_s)
        stay = world.gateway.turns.admission.seats.stay
        assert (stay.seconds < SEATS.idle_s) is falls, stay.seconds

    seats = SeatSettings(growth_tokens=0, idle_s=60.0, patience_s=60.0)
    play(scenario, engines=1, states=[json.dumps(state).encode()], seats=seats)
