"""Spans of turns, over OTLP/HTTP, as a collector reads them with the official protobuf."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from ownerserve.gateway.http.heads import read_request_head
from ownerserve.gateway.tracing.opening import open_tracer
from ownerserve.gateway.tracing.otel import OtelTracer
from ownerserve.kv.errors import InvalidInput
from tests.support.children import importing
from tests.support.gateway.collector import SentSpan, collector
from tests.support.gateway.world import World, header
from tests.support.waits import until

Play = Callable[..., None]
CHAT = "/v1/chat/completions"
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"
BODY = b'{"model":"tiny","stream":true,"a":1}'
USAGE = (
    b'{"prompt_tokens": 90, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 64}}'
)
SERVER, CLIENT = 2, 3


def spans_of(play: Play, scenario: Any, **settings: Any) -> list[SentSpan]:
    """What a collector has of a scenario once the gateway has ended."""
    with collector() as to:
        play(scenario, otlp_endpoint=to.url, **settings)
        return to.spans


def named(spans: list[SentSpan], name: str) -> list[SentSpan]:
    return [one for one in spans if one.name == name]


def test_a_turn_is_a_span_below_its_clients_with_its_steps_below(play: Play) -> None:
    heads: list[bytes] = []

    async def scenario(world: World) -> None:
        (engine,) = world.engines
        engine.usage = USAGE
        client = await world.client()
        told = {"traceparent": SAMPLED, "tracestate": "a=1", "x-request-id": "r1"}
        await client.post(CHAT, BODY, x__session__id="secret-name", **told)
        heads.append(engine.seen[-1][0])

    spans = spans_of(play, scenario, engines=1)
    (turn,) = named(spans, "chat tiny")
    (leg,) = named(spans, "turn at worker")
    assert {one.trace_id for one in spans} == {TRACE}
    assert {one.service for one in spans} == {"ownerserve-gateway"}
    assert (turn.parent_id, turn.kind, turn.failed) == (SPAN, SERVER, False)
    assert (leg.parent_id, leg.kind, leg.failed) == (turn.span_id, CLIENT, False)
    below = {"queue": turn, "decide": turn, "connect": leg, "first byte": leg, "relay": leg}
    for name, above in below.items():
        (step,) = named(spans, name)
        assert step.parent_id == above.span_id
        assert above.begin_ns <= step.begin_ns <= step.end_ns <= above.end_ns
    begun = [named(spans, name)[0].begin_ns for name in below]
    assert begun == sorted(begun)
    parent = (header(heads[0], b"traceparent") or b"").decode().split("-")
    assert parent[1:3] == [TRACE, leg.span_id], "the worker's spans are below the leg"
    assert header(heads[0], b"tracestate") == b"a=1"
    said = turn.said
    assert (said["gen_ai.operation.name"], said["gen_ai.request.model"]) == ("chat", "tiny")
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (90, 3)
    assert said["gen_ai.usage.cache_read.input_tokens"] == 64
    assert said["ownerserve.computed_tokens"] == 26
    assert (said["ownerserve.request_id"], said["url.path"]) == ("r1", CHAT)
    assert len(said["gen_ai.conversation.id"]) == 32
    assert said["ownerserve.worker"] == leg.said["ownerserve.worker"]
    assert leg.said["http.response.status_code"] == 200
    assert leg.said["ownerserve.reason"] == said["ownerserve.reason"]
    assert "secret-name" not in repr(spans)


def test_a_worker_that_drops_a_turn_is_a_failed_leg_and_another_one_follows(play: Play) -> None:
    async def scenario(world: World) -> None:
        for engine in world.engines:
            engine.drops_next = True
        await (await world.client()).post(CHAT, BODY, x__session__id="a")

    spans = spans_of(play, scenario, engines=2, health_interval_s=60.0)
    (turn,) = named(spans, "chat tiny")
    legs = named(spans, "turn at worker")
    assert len(legs) >= 2 and all(leg.parent_id == turn.span_id for leg in legs)
    assert legs[0].failed and legs[0].said["error.type"]
    assert len(named(spans, "decide")) >= len(legs)
    assert {one.said["ownerserve.attempt"] for one in legs} == set(range(1, len(legs) + 1))


def test_refused_broken_and_left_turns_end_their_spans(play: Play) -> None:
    async def scenario(world: World) -> None:
        (engine,) = world.engines
        leaver = await world.client()
        await leaver.begin(f"{CHAT}?slow", BODY)
        leaver.hang_up()
        await world.settled()
        await engine.kill()
        assert (await (await world.client()).post(CHAT, BODY)).status == 503

    spans = spans_of(play, scenario, engines=1, health_interval_s=60.0)
    turns = named(spans, "chat tiny")
    assert [one.said["ownerserve.end"] for one in turns] == ["aborted", "refused"]
    assert all(one.failed for one in turns)
    assert turns[1].said["ownerserve.reason"] in ("all_tried", "no_worker")


@pytest.mark.parametrize(
    ("told", "share", "recorded"),
    [
        (SAMPLED, 0.0, True),
        (UNSAMPLED, 1.0, False),
        (None, 1.0, True),
        (None, 0.0, False),
        ("nonsense", 1.0, True),
        ("nonsense", 0.0, False),
    ],
)
def test_who_is_recorded_goes_by_the_parent_and_else_by_the_share(
    play: Play, told: str | None, share: float, recorded: bool
) -> None:
    async def scenario(world: World) -> None:
        lines = {} if told is None else {"traceparent": told}
        await (await world.client()).post(CHAT, BODY, **lines)
        parent = header(world.engines[0].seen[-1][0], b"traceparent") or b""
        assert bool(int(parent[-2:], 16) & 1) is recorded
        assert (TRACE.encode() in parent) == (told in (SAMPLED, UNSAMPLED))
        assert SPAN.encode() not in parent

    spans = spans_of(play, scenario, engines=1, otlp_share=share)
    assert bool(spans) is recorded


@pytest.mark.slow
def test_a_collector_that_is_away_touches_no_turn_and_is_told_of_once(
    play: Play, entries: list[dict[str, Any]]
) -> None:
    async def scenario(world: World) -> None:
        client = await world.client()
        for _ in range(20):
            assert (await client.post(CHAT, BODY)).status == 200

    with socket.create_server(("127.0.0.1", 0)) as nobody:
        place = f"http://127.0.0.1:{nobody.getsockname()[1]}"
    play(scenario, engines=1, otlp_endpoint=place)
    assert [one["event"] for one in entries].count("traces_lost") == 1


def test_a_collector_that_comes_back_gets_what_comes_then(
    entries: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(tracer: OtelTracer) -> None:
        head = read_request_head(b"POST", CHAT.encode(), b"1.1", headers=[(b"Host", b"t")])
        tracer.begin(head).ended("finished")

    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")  # ms between two batches
    with collector() as to:
        to.refuses = True
        tracer = OtelTracer(to.url, share=1.0, patience_s=0.2)
        record(tracer)
        until(lambda: any(one["event"] == "traces_lost" for one in entries))
        assert not to.spans and to.asked
        to.refuses = False
        record(tracer)
        tracer.close()
        assert len(named(to.spans, "chat")) == 1
    told = [one for one in entries if one["event"].startswith("traces_")]
    assert [one["event"] for one in told] == ["traces_lost", "traces_sent_again"]
    assert told[1]["spans_lost"] == 1


def test_without_the_extra_the_option_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ownerserve.gateway.tracing.otel", None)
    with pytest.raises(InvalidInput, match="otlp-endpoint") as caught:
        open_tracer("http://127.0.0.1:4318", share=1.0)
    assert "ownerserve[otel]" in caught.value.mend
    with pytest.raises(InvalidInput, match="no http"):
        open_tracer("127.0.0.1:4318", share=1.0)


@pytest.mark.slow
def test_a_gateway_without_the_option_imports_no_sdk() -> None:
    code = (
        "import sys, ownerserve.cli.gateway, ownerserve.gateway.service;"
        "print([one for one in sys.modules if one.startswith('opentelemetry')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=importing(), check=True
    )
    assert done.stdout.strip() == "[]"
