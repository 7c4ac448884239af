"""A gateway with a queue before its fleet, on real sockets: who floods and who does not, deadlines,
rate limits, and what clients of each API hear."""

from __future__ import annotations

import asyncio
import json
import re
import statistics
from collections.abc import Awaitable, Callable
from itertools import pairwise
from math import inf
from pathlib import Path

import msgspec
import pytest

from ownerserve.gateway.entry import entering
from ownerserve.gateway.entry.entering import Entering
from ownerserve.gateway.http.callers import KeyedCallers
from ownerserve.gateway.live import counts
from ownerserve.gateway.metrics import GatewayCollector
from ownerserve.gateway.tenants import read_tenants
from ownerserve.kv.errors import InvalidInput
from ownerserve.router.entry import queue
from ownerserve.router.entry.fair import FairLine, InLine
from ownerserve.router.entry.limits import RateLimits
from ownerserve.router.entry.queue import QueueSettings
from tests.support.gateway.world import Answer, Client, FakeEngine, Play, World
from tests.support.waits import WAIT_S

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
FLOOD, CALM, LIMITED = "sk-flood-0123456789", "sk-calm-0123456789", "sk-limited-0123456"
TENANTS = f"""
secret = "{"s" * 40}"

[tenants.flood]
keys = ["{FLOOD}"]

[tenants.calm]
keys = ["{CALM}"]

[tenants.limited]
keys = ["{LIMITED}"]
requests_per_minute = 3
tokens_per_minute = 100000
"""
KEPT = '{"mode":"direct_append"}'
SERVICE_S = 0.02
ONE_EACH = QueueSettings(running_max=1)


def written(folder: Path, text: str) -> Path:
    path = folder / "tenants.toml"
    path.write_text(text)
    path.chmod(0o600)
    return path


@pytest.fixture
def tenants(tmp_path: Path) -> KeyedCallers:
    return read_tenants(written(tmp_path, TENANTS))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def body_of(number: int) -> bytes:
    return b'{"messages": "%d", "stream": false}' % number


def error_of(answer: Answer) -> dict[str, str]:
    error: dict[str, str] = json.loads(answer.body)["error"]
    return error


async def waiting(world: World, count: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while len(world.gateway.turns.admission) != count:
            await asyncio.sleep(0.001)


async def occupied(world: World, **headers: str) -> asyncio.Future[Answer]:
    """One turn that runs until the engine's `go_on` is set."""
    (engine,) = world.engines
    engine.is_mute = True
    client = await world.client()
    running = asyncio.ensure_future(client.post(CHAT, body_of(0), **headers))
    async with asyncio.timeout(WAIT_S):
        while not engine.seen:
            await asyncio.sleep(0.001)
    return running


async def serve_slowly(engine: FakeEngine) -> None:
    """Answer a turn after SERVICE_S at least: `is_mute` holds a turn until `go_on` is set. When
    cancelled, all at once."""
    engine.is_mute = True
    try:
        while True:
            await asyncio.sleep(SERVICE_S)
            engine.go_on.set()
            await asyncio.sleep(0)
            engine.go_on.clear()
    finally:
        engine.is_mute = False
        engine.go_on.set()


async def one_after_another(client: Client, key: str, times: int, *, order: list[str]) -> None:
    for number in range(times):
        answer = await client.post(CHAT, body_of(number), **bearer(key))
        assert answer.status == 200
        order.append(key)


def test_a_flood_takes_no_more_than_its_share(play: Play, tenants: KeyedCallers) -> None:
    """40 clients of one tenant beside 2 of another, before an engine that runs one turn at a time.
    By count of turns, not by the clock: while both wait, every second turn is the other's."""
    order: list[str] = []

    async def scenario(world: World) -> None:
        serving = asyncio.ensure_future(serve_slowly(world.engines[0]))
        flood = [
            asyncio.ensure_future(one_after_another(await world.client(), FLOOD, 100, order=order))
            for _ in range(40)
        ]
        await waiting(world, 39)
        calm = [
            asyncio.ensure_future(one_after_another(await world.client(), CALM, 15, order=order))
            for _ in range(2)
        ]
        began = len(order)
        await asyncio.gather(*calm)
        for task in flood:
            task.cancel()
        meanwhile = order[began:]
        share = meanwhile.count(CALM) / len(meanwhile)
        assert share >= 0.4, f"{share:.2f} of {len(meanwhile)} turns"
        at = [place for place, key in enumerate(meanwhile) if key == CALM]
        behind = [later - earlier - 1 for earlier, later in pairwise(at)]
        assert statistics.median(behind) <= 1, "of the flood's turns before each of its own"
        serving.cancel()

    play(scenario, engines=1, tenants=tenants, queue=ONE_EACH, health_interval_s=60.0)


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [(CHAT, 429, "rate_limit_error"), (MESSAGES, 529, "overloaded_error")],
)
def test_a_full_fleet_is_told_in_the_clients_dialect(
    play: Play, path: str, status: int, kind: str
) -> None:
    async def scenario(world: World) -> None:
        running = await occupied(world)
        held = [
            asyncio.ensure_future((await world.client()).post(CHAT, body_of(n))) for n in (1, 2)
        ]
        await waiting(world, 2)
        client = await world.client()
        full = await client.post(path, body_of(3))
        assert (full.status, error_of(full)["type"]) == (status, kind)
        assert error_of(full)["code"] == "queue_full"
        assert int(full["retry-after"] or 0) >= 1
        in_vain = await client.post(path, body_of(4), x__ownerserve__deadline__ms="30")
        assert in_vain.status == status
        world.engines[0].go_on.set()
        assert [one.status for one in await asyncio.gather(running, *held)] == [200, 200, 200]
        again = await client.post(path, body_of(5))
        assert again.status == 200, "the connection is kept"
        account = world.gateway.state.account
        assert account.received == account.done == 4, "who is turned away never comes so far"

    rules = QueueSettings(running_max=1, waiting_max=2)
    play(scenario, engines=1, queue=rules, health_interval_s=60.0)


@pytest.mark.parametrize(
    ("path", "status"), [(CHAT, 429), (MESSAGES, 529)], ids=["openai", "anthropic"]
)
def test_a_turn_past_its_deadline_is_refused(play: Play, path: str, status: int) -> None:
    async def scenario(world: World) -> None:
        running = await occupied(world)
        client = await world.client()
        async with asyncio.timeout(30):  # below the 45 s without the header
            late = await client.post(path, body_of(1), x__ownerserve__deadline__ms="50")
        assert (late.status, error_of(late)["code"]) == (status, "deadline_past")
        assert int(late["retry-after"] or 0) >= 1
        for said in ("x", "0", "-5", "1.5", "99999999", ""):
            wrong = await client.post(path, body_of(1), x__ownerserve__deadline__ms=said)
            assert (wrong.status, error_of(wrong)["code"]) == (400, "invalid_deadline")
        wrong = await client.post(path, body_of(1), x__ownerserve__class="urgent")
        assert (wrong.status, error_of(wrong)["code"]) == (400, "invalid_class")
        world.engines[0].go_on.set()
        assert (await running).status == 200
        assert len(world.engines[0].seen) == 1
        families = {one.name: one for one in GatewayCollector(world.gateway).collect()}
        away = families["ownerserve_gateway_not_let_in"].samples
        assert [(one.labels["reason"], one.value) for one in away] == [("deadline_past", 1.0)]
        told = msgspec.to_builtins(counts(world.gateway))
        assert told["errors"]["deadline_past"] == 1
        assert told["queue"]["not_let_in"][0]["reason"] == "deadline_past"

    play(scenario, engines=1, queue=ONE_EACH, health_interval_s=60.0)


def test_a_deadline_counts_from_when_the_turn_came(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room, but the directory took longer to say whose the session is."""

    async def slow() -> None:
        await asyncio.sleep(0.05)

    async def scenario(world: World) -> None:
        monkeypatch.setattr(world.gateway.turns, "_look_up", lambda _: slow)
        client = await world.client()
        late = await client.post(CHAT, body_of(1), x__ownerserve__deadline__ms="10")
        assert (late.status, error_of(late)["code"]) == (429, "deadline_past")
        assert (await client.post(CHAT, body_of(2))).status == 200
        assert len(world.engines[0].seen) == 1

    play(scenario, engines=1, queue=ONE_EACH, health_interval_s=60.0)


def test_later_turns_go_before_first_ones_and_those_before_background_work(
    play: Play, tenants: KeyedCallers
) -> None:
    async def scenario(world: World) -> None:
        (engine,) = world.engines
        client = await world.client()
        known = await client.post(CHAT, body_of(7), x__session__id="known")
        assert known.status == 200
        engine.is_mute = True
        first = asyncio.ensure_future((await world.client()).post(CHAT, body_of(0)))
        async with asyncio.timeout(WAIT_S):
            while len(engine.seen) < 2:
                await asyncio.sleep(0.001)
        order: list[str] = []

        async def ask(name: str, **headers: str) -> None:
            answer = await (await world.client()).post(CHAT, body_of(1), **headers)
            assert answer.status == 200
            order.append(name)

        held = []
        for name, headers in (
            ("batch", {"x__session__id": "c", "x__ownerserve__class": "batch"}),
            ("batch", {"x__session__id": "b", "x__ownerserve__class": "batch"}),
            ("new", {"x__session__id": "n"}),
            ("new", {"x__session__id": "m"}),
            ("inside", {"x__session__id": "known"}),
            ("inside", {"x__session__id": "known"}),
        ):
            held.append(asyncio.ensure_future(ask(name, **headers)))
            await waiting(world, len(held))
        told = msgspec.to_builtins(counts(world.gateway))["queue"]["waiting"]
        assert {(one["class"], one["turns"]) for one in told} == {
            ("batch", 2), ("new", 2), ("inside", 2)
        }  # fmt: skip
        engine.go_on.set()
        await asyncio.gather(first, *held)
        assert (order[0], order[-1]) == ("inside", "batch"), "by the shares of 16, 4 and 1"
        assert order.index("new") > 1 and order.count("inside") == 2
        for head, _ in engine.seen:
            assert not re.search(rb"x-ownerserve-(class|deadline)", head, re.IGNORECASE)

    play(scenario, engines=1, queue=ONE_EACH, health_interval_s=60.0)


def test_who_hangs_up_in_the_line_is_forgotten(play: Play) -> None:
    async def scenario(world: World) -> None:
        running = await occupied(world)
        gone, stays = await world.client(), await world.client()
        gone.writer.write(
            b"POST %b HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n\r\n{}" % CHAT.encode()
        )
        await waiting(world, 1)
        answer = asyncio.ensure_future(stays.post(CHAT, body_of(1)))
        await waiting(world, 2)
        gone.hang_up()
        await waiting(world, 1)
        world.engines[0].go_on.set()
        assert (await running).status == (await answer).status == 200
        assert len(world.engines[0].seen) == 2

    play(scenario, engines=1, queue=ONE_EACH, health_interval_s=60.0)


def test_a_worker_that_goes_down_takes_nobody_with_it(play: Play) -> None:
    """Those in line are let in, to be told at once that nobody is up."""

    async def scenario(world: World) -> None:
        running = await occupied(world)
        held = [asyncio.ensure_future((await world.client()).post(CHAT, body_of(1)))]
        await waiting(world, 1)
        await world.engines[0].kill()
        answers = await asyncio.gather(running, *held)
        assert {one.status for one in answers} <= {502, 503}

    play(scenario, engines=1, queue=ONE_EACH, health_interval_s=0.05)


def test_a_draining_gateway_refuses_those_in_line(play: Play) -> None:
    async def scenario(world: World) -> None:
        running = await occupied(world)
        held = asyncio.ensure_future((await world.client()).post(CHAT, body_of(1)))
        await waiting(world, 1)
        draining = asyncio.ensure_future(world.gateway.drain())
        assert (await held).status == 503
        world.engines[0].go_on.set()
        assert (await running).status == 200
        await draining

    play(scenario, engines=1, queue=ONE_EACH, health_interval_s=60.0)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_rate_limit_is_told_exactly_before_the_body_is_looked_at(
    play: Play, tenants: KeyedCallers, path: str
) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        for left in (2, 1, 0):
            answer = await client.post(path, body_of(1), **bearer(LIMITED))
            assert answer.status == 200
            assert answer["x-ratelimit-limit-requests"] == "3"
            assert answer["x-ratelimit-remaining-requests"] == str(left)
            assert re.fullmatch(r"(\d+m)?[\d.]+m?s", answer["x-ratelimit-reset-tokens"] or "")
        over = await client.post(path, b'{"not json', **bearer(LIMITED))
        error = error_of(over)
        assert (over.status, error["code"]) == (429, "rate_limit_exceeded")
        assert error["type"] == ("requests" if path == CHAT else "rate_limit_error")
        assert 18 <= int(over["retry-after"] or 0) <= 20, "one of three a minute"
        assert over["x-ratelimit-remaining-requests"] == "0"
        assert len(world.engines[0].seen) == 3
        free = await client.post(path, body_of(1), **bearer(CALM))
        assert free.status == 200 and free["x-ratelimit-limit-requests"] is None
        told = msgspec.to_builtins(counts(world.gateway))["queue"]["not_let_in"]
        assert told == [{"tenant": "limited", "class": "", "reason": "limit_requests", "count": 1}]

    play(scenario, engines=1, tenants=tenants, health_interval_s=60.0)


def test_tokens_are_settled_by_what_the_answer_says(play: Play, tmp_path: Path) -> None:
    """2,000 a minute: an answer of 5,000 puts the tenant in debt, what was cached is free."""
    text = TENANTS.replace("requests_per_minute = 3\n", "").replace("= 100000", "= 2000")

    async def scenario(world: World) -> None:
        (engine,) = world.engines
        client = await world.client()
        engine.usage = (
            b'{"prompt_tokens": 90000, "completion_tokens": 10,'
            b' "prompt_tokens_details": {"cached_tokens": 89990}}'
        )
        for _ in range(5):
            answer = await client.post(CHAT, body_of(1), **bearer(LIMITED))
            assert answer.status == 200
        assert int(answer["x-ratelimit-remaining-tokens"] or 0) >= 1500
        engine.usage = b'{"prompt_tokens": 4000, "completion_tokens": 1000}'
        assert (await client.post(CHAT, body_of(1), **bearer(LIMITED))).status == 200
        over = await client.post(CHAT, body_of(1), **bearer(LIMITED))
        assert (over.status, error_of(over)["type"]) == (429, "tokens")
        assert 90 <= int(over["retry-after"] or 0) <= 105, "some 3,100 in debt, 2,000 a minute"

    limited = read_tenants(written(tmp_path, text))
    play(scenario, engines=1, tenants=limited, health_interval_s=60.0)


@pytest.mark.parametrize(
    ("mode", "stream", "refused"), [("", "slow", True), ("", "stream", True), (KEPT, "slow", False)]
)
def test_another_prompt_under_a_known_name_is_paid_for_though_nobody_tells_its_tokens(
    play: Play, tmp_path: Path, mode: str, stream: str, refused: bool
) -> None:
    """20,000 a minute, and a session of 90,000: a prompt as long under its name, hung up amid the
    answer or without usage at its end, is not free, unless the worker has said what it kept."""
    text = TENANTS.replace("requests_per_minute = 3\n", "").replace("= 100000", "= 20000")

    async def scenario(world: World) -> None:
        (engine,) = world.engines
        named = {"x-session-id": "s", **bearer(LIMITED)}
        client = await world.client()
        engine.usage = (
            b'{"prompt_tokens": 90000, "completion_tokens": 10,'
            b' "prompt_tokens_details": {"cached_tokens": 89990}}'
        )
        long = b'{"messages": "%b"}' % (b"x" * 360_000)
        for _ in range(2):
            assert (await client.post(CHAT, long, **named)).status == 200
        if mode:
            engine.says = {"x-ownerserve-answer": mode}
        other = long.replace(b"x", b"y")
        if stream == "stream":
            engine.go_on.set()
            answer = await client.post(f"{CHAT}?{stream}", other, **named)
            assert answer.status == 200
        else:
            leaver = await world.client()
            head = "".join(f"{name}: {value}\r\n" for name, value in named.items())
            length = f"Content-Length: {len(other)}\r\n"
            told = f"POST {CHAT}?{stream} HTTP/1.1\r\nHost: t\r\n{length}{head}\r\n"
            leaver.writer.write(told.encode() + other)
            await leaver.reader.readuntil(b"\r\n\r\n")
            leaver.hang_up()
            await world.settled()
        after = await client.post(CHAT, body_of(1), **named)
        assert (after.status == 429) is refused

    limited = read_tenants(written(tmp_path, text))
    play(scenario, engines=1, tenants=limited, health_interval_s=60.0)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ("weight = 0", "tenants.limited.weight"),
        ("weight = inf", "tenants.limited.weight"),
        ('class = "urgent"', "class"),
        ("tokens_per_minut = 5", "tokens_per_minut"),
        ("[priorities]\nbatch = -1", "priorities.batch"),
        ("[priorities]\nurgent = 1", "urgent"),
    ],
)
def test_a_tenants_file_says_what_is_wrong_in_it(tmp_path: Path, more: str, field: str) -> None:
    with pytest.raises(InvalidInput) as told:
        read_tenants(written(tmp_path, TENANTS + more + "\n"))
    assert field in str(told.value) and "--tenants-file" in str(told.value)


def test_terms_are_read_from_the_tenants_file(tmp_path: Path) -> None:
    more = 'weight = 2.5\nclass = "batch"\n[priorities]\nnew = 8\n'
    callers = read_tenants(written(tmp_path, TENANTS + more))
    terms = callers.of({b"x-api-key": LIMITED.encode()}).terms
    assert (terms.name, terms.weight, terms.is_batch) == ("limited", 2.5, True)
    assert (terms.requests_per_minute, terms.tokens_per_minute) == (3.0, 100_000.0)
    assert (terms.priorities.inside, terms.priorities.new) == (16.0, 8.0)


# Each wire is cut once: what it is for does not come, and comes when the wire is whole.


CUT_S = 0.4
"""So long is waited for what does not come where a wire is cut."""


async def soon(answer: asyncio.Future[Answer], patience_s: float) -> int | None:
    """The status of an answer; None: there is none in time."""
    await asyncio.wait((answer,), timeout=patience_s)
    return answer.result().status if answer.done() else None


async def an_end_lets_the_next_one_in(world: World, patience_s: float) -> bool:
    running = await occupied(world)
    world.engines[0].is_mute = False
    held = asyncio.ensure_future((await world.client()).post(CHAT, body_of(1)))
    await waiting(world, 1)
    world.engines[0].go_on.set()
    await running
    came = await soon(held, patience_s)
    world.gateway.turns.admission.look(world.gateway.now())
    assert (await held).status == 200
    return came == 200


async def a_deadline_ends_the_wait(world: World, patience_s: float) -> bool:
    running = await occupied(world)
    client = await world.client()
    late = asyncio.ensure_future(client.post(CHAT, body_of(1), x__ownerserve__deadline__ms="20"))
    came = await soon(late, patience_s)
    world.engines[0].go_on.set()
    await asyncio.gather(running, late)
    return came == 429


async def a_tenant_is_held_to_its_limit(world: World, _patience_s: float) -> bool:
    client = await world.client()
    told = [(await client.post(CHAT, body_of(n), **bearer(LIMITED))).status for n in range(4)]
    return told == [200, 200, 200, 429]


async def long_answers_put_into_debt(world: World, _patience_s: float) -> bool:
    world.engines[0].usage = b'{"prompt_tokens": 4000, "completion_tokens": 200000}'
    client = await world.client()
    told = [(await client.post(CHAT, body_of(n), **bearer(LIMITED))).status for n in range(2)]
    return told == [200, 429]


async def two_tenants_take_turns(world: World, _patience_s: float) -> bool:
    running = await occupied(world, **bearer(FLOOD))
    order: list[str] = []
    tasks = []
    for number, key in enumerate((FLOOD, FLOOD, FLOOD, FLOOD, CALM)):
        client = await world.client()
        tasks.append(asyncio.ensure_future(one_after_another(client, key, 1, order=order)))
        await waiting(world, number + 1)
    world.engines[0].go_on.set()
    await asyncio.gather(running, *tasks)
    return order.index(CALM) < 3


async def background_work_goes_last(world: World, _patience_s: float) -> bool:
    running = await occupied(world)
    order: list[str] = []

    async def ask(name: str, **headers: str) -> None:
        await (await world.client()).post(
            CHAT, b'{"messages": "%b"}' % (name * 400).encode(), **headers
        )
        order.append(name)

    tasks = [asyncio.ensure_future(ask("b", x__ownerserve__class="batch")) for _ in range(2)]
    await waiting(world, 2)
    tasks += [asyncio.ensure_future(ask("n")) for _ in range(2)]
    await waiting(world, 4)
    world.engines[0].go_on.set()
    await asyncio.gather(running, *tasks)
    return order[-1] == "b"


def nothing(*_: object, **__: object) -> None:
    """What is left of a wire that is cut."""


KEYED = (a_tenant_is_held_to_its_limit, long_answers_put_into_debt, two_tenants_take_turns)


def by_arrival(line: FairLine) -> InLine:
    """The order of a line in which tenants are not told apart."""
    return min(line.in_order(), key=lambda one: one.ticket)


CUTS: dict[str, tuple[Callable[[World, float], Awaitable[bool]], object, str, object]] = {
    "the end of a turn": (an_end_lets_the_next_one_in, Entering, "ended", nothing),
    "the timer": (a_deadline_ends_the_wait, Entering, "_arm", nothing),
    "the deadline's header": (a_deadline_ends_the_wait, entering, "_deadline_s", lambda _: inf),
    "the check of limits": (a_tenant_is_held_to_its_limit, RateLimits, "look", nothing),
    "the charge": (a_tenant_is_held_to_its_limit, RateLimits, "take", nothing),
    "the settling": (long_answers_put_into_debt, Entering, "settle", nothing),
    "the tenant": (two_tenants_take_turns, FairLine, "first", by_arrival),
    "the class's header": (background_work_goes_last, entering, "_is_batch", lambda *_: False),
}


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
def test_what_a_wire_is_for_comes_when_it_is_whole_and_not_when_it_is_cut(
    play: Play, tmp_path: Path, name: str, is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    effect, where, wire, instead = CUTS[name]
    if is_cut:
        monkeypatch.setattr(where, wire, instead)
    if name != "the timer":  # else who waits is looked at all the same, later
        monkeypatch.setattr(queue, "LOOK_S", 60.0)

    async def scenario(world: World) -> None:
        assert await effect(world, CUT_S if is_cut else WAIT_S) is not is_cut

    callers = read_tenants(written(tmp_path, TENANTS)) if effect in KEYED else None
    play(scenario, engines=1, tenants=callers, queue=ONE_EACH, health_interval_s=60.0)
