"""What workers hear of a session: one name, whatever a client calls it, and only a gateway's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from ownerserve.kv.wire.headers import TurnLine, read_session_id, received_turn_line
from tests.support.gateway.world import Play, World
from tests.support.router import answer_lines
from tests.support.waits import WAIT_S

CHAT = "/v1/chat/completions"


def heard(world: World) -> list[tuple[TurnLine, str | None, dict[str, Any]]]:
    """Of each turn in order: its line, the engine's session id, the body."""
    (engine,) = world.engines
    found = []
    for head, body in engine.seen:
        lines = [line.split(": ", 1) for line in head.decode().split("\r\n")[1:] if line]
        headers = {name.lower(): value for name, value in lines}
        assert len(headers) == len(lines), "a header line came twice"
        line = received_turn_line(headers)
        found.append((line or TurnLine(), headers.get("x-session-id"), json.loads(body)))
    return found


def says(model: str, *, life: int) -> dict[str, str]:
    """A worker's headers."""
    return answer_lines.said(life) | {"x-ownerserve-model": model}


def conversation(task: str, turns: int, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": f"{task} {turn} " * 400} for turn in range(turns)]
    return json.dumps({"messages": messages, **fields}).encode()


def test_the_engines_session_id_is_the_name_and_never_the_clients(play: Play) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        for turns in (1, 2):
            await client.post(CHAT, conversation("a", turns), X__Session__Id="mine")
            await client.post(CHAT, conversation("b", turns, session_id="mine"))
            await client.post(
                CHAT, conversation("c", turns, session_id="mine"), thread__id="mine", user="u"
            )
        turns_heard = heard(world)
        names = {line.name for line, _, _ in turns_heard}
        assert len(names) == 3
        assert None not in names
        for line, session_id, body in turns_heard:
            assert session_id == line.name
            # vLLM believes a body before a header.
            assert body.get("session_id", line.name) == line.name

    play(scenario, engines=1)


def test_a_body_is_changed_at_its_session_id_and_nowhere_else(play: Play) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        for said in ('"mine"', "null", "7", '"\\u00e9"'):
            body = f'{{ "n":1.0, "session_id" :{said} ,"user":"caf\\u00e9"}}'.encode()
            await client.post(CHAT, body, thread__id="t")
        for (line, _, _), (_, body) in zip(heard(world), world.engines[0].seen, strict=True):
            assert body == (
                f'{{ "n":1.0, "session_id" :"{line.name}" ,"user":"caf\\u00e9"}}'.encode()
            )

    play(scenario, engines=1)


HIDDEN = (
    rb'{"session\u005fid": "abc"}',
    rb'{"\u0073\u0065\u0073\u0073\u0069\u006f\u006E\u005F\u0069\u0064": "abc"}',
    b'{"session_id": "q", "session_id": "abc"}',
    b'{"session_id": "abc", "n": NaN}',
    '{"session_id": "abc"}'.encode("utf-16"),
    '{"session_id": "abc"}'.encode("utf-16-be"),
    '{"session_id": "abc"}'.encode("utf-32-le"),
)
"""Bodies in which a worker's reader would find an id that a scan does not."""


def test_an_id_beside_a_header_is_replaced_or_refused_on_every_turn(play: Play) -> None:
    """Equal ids of two tenants met at the worker: it takes a body's word before the header's."""

    async def scenario(world: World) -> None:
        client = await world.client()
        for tenant in ("Bearer a", "Bearer b"):
            asks = {
                "thread__id": "t",
                "authorization": tenant,
                "content__type": "application/json",
            }
            for when in ("first", "later"):
                for body in HIDDEN:
                    answer = await client.post(CHAT, body, **asks)
                    assert answer.status == 400, (when, body)
                    assert json.loads(answer.body)["error"]["code"] == "invalid_body"
                assert (await client.post(CHAT, conversation("a", 1), **asks)).status == 200
            body = conversation("a", 1, session_id="abc")  # never before: a later turn's alone
            assert (await client.post(CHAT, body, **asks)).status == 200
        turns = heard(world)
        assert len({line.name for line, _, _ in turns}) == 2
        for line, _, body in turns:
            assert body.get("session_id", line.name) == line.name

    play(scenario, engines=1)


def test_what_only_looks_like_an_id_is_passed_on_as_it_is(play: Play) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        bodies = (
            rb'{"messages": "a \"session_id\" and \\u005f \u005f \ud83d"}',
            b'{"messages": [{"session_id": "inside"}]}',
            rb'{"messages": "half of a smile: \ud83d"}',
            b"\xef\xbb\xbf{}",
            b"no JSON: the worker says so",
        )
        for _ in range(2):
            for body in bodies:
                assert (await client.post(CHAT, body, thread__id="t")).status == 200
        assert [body for _, body in world.engines[0].seen] == [*bodies, *bodies]

    play(scenario, engines=1)


def test_an_id_in_vllms_own_arguments_names_the_session(play: Play) -> None:
    """vLLM takes it where no header says one: a turn that nothing else names must have a name."""

    async def scenario(world: World) -> None:
        client = await world.client()
        for tenant in ("Bearer a", "Bearer b"):
            for body in (
                b'{"vllm_xargs": {"session_id": "abc"}}',
                rb'{"vllm_xargs": {"session_id": 5, "session\u005fid": "abc"}}',
            ):
                await client.post(CHAT, body, authorization=tenant)
            hidden = rb'{"vllm\u005fxargs": {"session_id": "abc"}}'
            assert (await client.post(CHAT, hidden, authorization=tenant)).status == 400
        await client.post(CHAT, b'{"vllm_xargs": {"session_id": ["abc"]}}')
        *named, nameless = heard(world)
        assert len({line.name for line, _, _ in named}) == 2
        for line, session_id, _ in named:
            assert session_id == line.name is not None
        assert nameless[0] == TurnLine()

    play(scenario, engines=1)


def test_nobody_speaks_a_gateways_line_from_outside(play: Play) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        forged = json.dumps({"name": "ab" * 16, "final": True})
        await client.post(CHAT, X__OwnerServe__Session=forged, thread__id="t")
        await client.post(CHAT, X__OwnerServe__Session=forged)
        (named, _, _), (nameless, session_id, _) = heard(world)
        assert named.name not in (None, "ab" * 16)
        assert not named.final
        assert nameless == TurnLine()
        assert session_id is None

    play(scenario, engines=1)


def test_a_chain_of_responses_is_one_session_under_one_name(play: Play) -> None:
    async def scenario(world: World) -> None:
        client, before = await world.client(), None
        for turn in range(4):
            fields = {} if before is None else {"previous_response_id": before}
            size = 400 if turn == 0 else 2
            body = json.dumps({"input": "word " * size, **fields}).encode()
            answer = await client.post("/v1/responses", body)
            before = json.loads(answer.body)["id"]
        assert len({line.name for line, _, _ in heard(world)}) == 1
        assert len(world.gateway.state.sessions) == 1

    play(scenario, engines=1)


def test_a_session_with_aliases_ends_whole(play: Play) -> None:
    """The content chain knew such a session under its first name only, and kept it."""

    async def scenario(world: World) -> None:
        client = await world.client()
        body = json.dumps({"input": "word " * 400}).encode()
        answer = await client.post("/v1/responses", body)
        before = json.loads(answer.body)["id"]
        body = json.dumps({"input": "more", "previous_response_id": before}).encode()
        await client.post("/v1/responses", body, x__ownerserve__session__final="true")
        (first, _, _), (last, session_id, _) = heard(world)
        assert (first.name, first.final) == (last.name, False)
        assert last.final
        assert read_session_id(session_id or "") == TurnLine(name=last.name, final=True)
        await world.settled()
        assert len(world.gateway.turns.asking.chain) == 0
        assert len(world.gateway.state.sessions) == 0

    play(scenario, engines=1)


def test_a_parent_travels_by_its_name(play: Play) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        await client.post(CHAT, conversation("a", 1), x__claude__code__session__id="cc")
        await client.post(
            CHAT,
            conversation("b", 1),
            x__claude__code__session__id="cc",
            x__claude__code__agent__id="a1",
        )
        await client.post(CHAT, conversation("c", 2))
        await client.post(CHAT, conversation("c", 1)[:-2] + b', {"role": "user"}]}')
        main, agent, content, fork = (line for line, _, _ in heard(world))
        assert main.parent is None
        assert agent.parent == main.name != agent.name
        assert fork.parent == content.name != fork.name

    play(scenario, engines=1)


def test_sessions_that_share_a_head_travel_with_their_group(play: Play) -> None:
    """By what they begin with, or by the client's word, which never leaves the gateway."""
    shared = {"system": "You are an agent. " * 400}

    async def scenario(world: World) -> None:
        client = await world.client()
        for task, name in (("a", "s1"), ("b", "s2"), ("b", "s1")):
            await client.post(CHAT, conversation(task, 1, **shared), x__session__id=name)
        await client.post(CHAT, conversation("c", 1, **shared))
        for key in ("one", "two"):
            await client.post(
                CHAT, conversation("d", 1), authorization=key, x__ownerserve__group="repo",
                x__session__id="s3",
            )  # fmt: skip
        *alike, one, two = (line for line, _, _ in heard(world))
        first, *others = (line.group for line in alike)
        assert first is None  # nobody else had begun like it
        assert len(set(others)) == 1 and others[0] is not None
        assert one.group not in (None, "repo", others[0])
        assert two.group not in (None, one.group)  # another tenant's
        assert all(b"x-ownerserve-group" not in head for head, _ in world.engines[0].seen)

    play(scenario, engines=1)


def test_no_session_is_renamed_when_the_fleet_learns_of_a_second_model(play: Play) -> None:
    """A name without the model lost every session its state on the day of the second model."""

    async def scenario(world: World) -> None:
        client, gateway = await world.client(), world.gateway
        one, two = world.engines
        one.says = two.says = says("tiny-a", life=1)
        async with asyncio.timeout(WAIT_S):
            while {worker.profile.model for worker in gateway.state.fleet} != {"tiny-a"}:
                await asyncio.sleep(0.01)
        names = []
        for turns in (1, 2, 3):
            body = conversation("a", turns, model="tiny-a")
            await client.post(CHAT, body, x__session__id="s")
            await client.post(CHAT, conversation("b", turns, model="tiny-a"))
            names.append([state for state, _ in gateway.state.sessions.items()])
            if turns == 1:
                two.says = says("tiny-b", life=2)
                async with asyncio.timeout(WAIT_S):
                    while not gateway.turns.asking.serves_many:
                        await asyncio.sleep(0.01)
        assert [sorted(known) for known in names] == [sorted(names[0])] * 3
        assert len(names[0]) == 2
        other = await client.post(CHAT, conversation("a", 1, model="tiny-b"), x__session__id="s")
        assert world.engine_of(other) is two
        assert len(gateway.state.sessions) == 3, "who asks two models keeps two states"

    play(scenario, health_interval_s=0.05)
