"""A stream whose client does not ask for its usage: the gateway asks, learns, and keeps it back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from ownerserve.gateway.config import Config, StreamUsage
from ownerserve.gateway.exchange.usage import is_usage_event, usage_saids, without_usage
from ownerserve.gateway.http.access import Address
from ownerserve.gateway.http.events import unframed
from ownerserve.gateway.service import Gateway
from ownerserve.router.requests.body import pieces, scan
from tests.support.gateway.leg_play import LegPlay, chunk_of
from tests.support.gateway.talker import Talker, words_of
from tests.support.gateway.world import World

MESSAGES = [{"role": "user", "content": "go on"}]
TEXT = "".join(words_of(MESSAGES, None))
CHAT = b"/v1/chat/completions"


def played(scenario: Callable[[World, Talker], Any], **settings: Any) -> None:
    async def main() -> None:
        talker = Talker()
        await talker.start()
        config = Config(workers=(Address("127.0.0.1", talker.port),), **settings)
        world = World([], Gateway(config))
        try:
            await world.gateway.start()
            async with asyncio.timeout(60):
                await scenario(world, talker)
                await world.settled()
        finally:
            await talker.kill()
            await world.close()

    asyncio.run(main())


def text_of(stream: bytes) -> str:
    events = [one[6:] for one in stream.split(b"\n\n") if one.startswith(b"data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@pytest.mark.parametrize("carry_on", [False, True])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_it_is_learnt_and_not_told(carry_on: bool, version: bytes) -> None:
    async def scenario(world: World, talker: Talker) -> None:
        client = await world.client()
        body = json.dumps({"messages": MESSAGES, "stream": True, "temperature": 0}).encode()
        client.writer.write(
            b"POST %b HTTP/%b\r\nHost: t\r\nx-session-id: a\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (CHAT, version, len(body), body)
        )
        answer = await client.read()
        assert text_of(answer.body) == TEXT
        assert b"usage" not in answer.body
        assert answer.body.endswith(b"data: [DONE]\n\n")
        [(_, seen)] = talker.seen
        assert seen["stream_options"] == {"include_usage": True}
        await world.settled()
        assert world.gateway.turns.observer.prompt_tokens == 50

    played(scenario, carry_on=carry_on)


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_it_is_kept_back_of_a_stream_that_ends_by_close(version: bytes) -> None:
    """An old proxy before a worker takes its chunks' frames away."""

    async def scenario(world: World, talker: Talker) -> None:
        talker.does["by_close"] = True
        client = await world.client()
        body = json.dumps({"messages": MESSAGES, "stream": True}).encode()
        client.writer.write(
            b"POST %b HTTP/%b\r\nHost: t\r\nContent-Length: %d\r\n\r\n%b"
            % (CHAT, version, len(body), body)
        )
        answer = await client.read()
        assert text_of(answer.body) == TEXT
        assert b"usage" not in answer.body
        assert answer.body.endswith(b"data: [DONE]\n\n")
        await world.settled()
        assert world.gateway.turns.observer.prompt_tokens == 50

    played(scenario)


@pytest.mark.parametrize("usage", [StreamUsage.ASK, StreamUsage.LEAVE])
def test_who_asks_is_told_and_who_is_left_alone_is_not_asked_for(usage: StreamUsage) -> None:
    async def scenario(world: World, talker: Talker) -> None:
        client = await world.client()
        for options in ({"include_usage": True}, None):
            body = {"messages": MESSAGES, "stream": True, "stream_options": options}
            answer = await client.post(CHAT.decode(), json.dumps(body).encode())
            assert (b'"usage"' in answer.body) is (options is not None)
        asked = talker.seen[1][1]["stream_options"]
        assert asked == (None if usage is StreamUsage.LEAVE else {"include_usage": True})
        whole = await client.post(CHAT.decode(), json.dumps({"messages": MESSAGES}).encode())
        assert b"usage" in whole.body
        assert "stream_options" not in talker.seen[2][1]

    played(scenario, stream_usage=usage)


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        (None, {"include_usage": True}),
        ({}, {"include_usage": True}),
        ({"include_usage": False}, {"include_usage": True}),
        ({"include_usage": True}, None),
        ({"include_usage": False, "continuous_usage_stats": True}, None),
        ("no options", None),
        (7, None),
    ],
)
def test_what_is_asked_for(options: object, sent: object) -> None:
    body = json.dumps({"stream": True, "stream_options": options, "a": [1, {}]}).encode()
    saids = usage_saids(CHAT, scan(body))
    said = json.loads(b"".join(pieces(body, *saids)))
    assert said == {**json.loads(body), "stream_options": options if sent is None else sent}


def test_what_is_no_stream_of_chunks_is_not_asked() -> None:
    for target, body in (
        (CHAT, b'{"stream": false}'),
        (CHAT, b"{}"),
        (b"/v1/messages", b'{"stream": true}'),
        (b"/v1/responses", b'{"stream": true}'),
    ):
        assert usage_saids(target, scan(body)) == ()


def test_only_the_event_that_says_nothing_else_is_kept_back() -> None:
    for first in (b'"usage":null', b'"usage": null,"prompt_filter_results":[]'):
        assert not is_usage_event(b'data: {"choices":[],%b}' % first), "as all events say it then"
    said = b'data: {"choices":[{"delta":{"content":"\\"choices\\":[]"}}],"usage":null}\n\n'
    usage = b'data: {"id":"x","choices": [ ],"usage":{"prompt_tokens":3}}\r\n\r\n'
    done = b"data: [DONE]\n\n"
    assert not is_usage_event(said)
    assert is_usage_event(usage)
    assert without_usage(said + usage + done) == said + done
    assert without_usage(usage) == b""


@pytest.mark.slow
@pytest.mark.parametrize("carry_on", [False, True])
def test_it_is_kept_back_wherever_the_stream_is_cut(carry_on: bool) -> None:
    word = chunk_of("word ", "x")
    usage = b'data: {"id": "x", "choices": [], "usage": {"prompt_tokens": 3}}\n\n'
    done = b"data: [DONE]\n\n"
    payloads = [word, usage, done], [word, usage + done], [word + usage, done]
    for parts in payloads:
        raw = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        for cut in range(len(raw)):
            body = {"messages": MESSAGES, "stream": True, "temperature": 0}
            play = LegPlay(body, carry_on=carry_on)
            try:
                play.do("w0 opens")
                [upstream] = play.upstreams
                assert upstream.body["stream_options"] == {"include_usage": True}
                upstream.streams()
                upstream.sends(raw[:cut])
                upstream.sends(raw[cut:])
                got = play.client.written.partition(b"\r\n\r\n")[2]
                assert (unframed(got), got[-5:]) == (word + done, b"0\r\n\r\n")
                assert play.client.ends == ["complete"]
                assert play.gateway.turns.observer.prompt_tokens == 3
            finally:
                play.close()


@pytest.mark.parametrize("carry_on", [False, True])
def test_a_turn_that_runs_goes_on_as_it_was_asked(carry_on: bool) -> None:
    """A reload has nobody asked from now on: the usage that was asked for is kept back."""
    word = chunk_of("word ", "x")
    usage = b'data: {"id": "x", "choices": [], "usage": {"prompt_tokens": 3}}\n\n'
    body = {"messages": MESSAGES, "stream": True, "temperature": 0}
    play = LegPlay(body, carry_on=carry_on)
    try:
        play.do("w0 opens")
        [upstream] = play.upstreams
        play.gateway.legs.asks_usage = False
        upstream.streams()
        for part in (word, usage):
            upstream.sends(b"%x\r\n%b\r\n" % (len(part), part))
        upstream.sends(b"0\r\n\r\n")
        assert unframed(play.client.written.partition(b"\r\n\r\n")[2]) == word
    finally:
        play.close()
