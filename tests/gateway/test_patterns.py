"""How each session's turns were served, and how answers ended: two classes of sessions show, so
does one that starves, and a truncated answer is counted as one."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from ownerserve.gateway.admin import admin_app
from ownerserve.gateway.metrics import GatewayCollector
from ownerserve.gateway.patterns import BANDS, KNOWN_MAX, LATER_LEAST, SessionPatterns
from ownerserve.kv.ids import SessionId
from ownerserve.kv.messages import ExecutionMode as Mode
from ownerserve.router.requests.body import AnswerFinish, scan_finish
from tests.support.gateway.world import Play, World
from tests.support.router.answer_lines import said


def ran(patterns: SessionPatterns, name: str, *modes: Mode) -> None:
    for mode in modes:
        patterns.ran(SessionId(name), mode, 0.5)


def test_two_classes_of_sessions_show_and_so_does_the_one_that_starves() -> None:
    patterns = SessionPatterns()
    for number in range(3):
        ran(patterns, f"lucky{number}", Mode.SEED, *[Mode.DIRECT_APPEND] * 9)
    for number in range(2):
        ran(patterns, f"starved{number}", Mode.COLD_PREFILL, *[Mode.RESEED] * (5 + number))
    ran(patterns, "mixed", Mode.SEED, Mode.RESEED, Mode.FETCH, Mode.MIGRATE, Mode.REMOTE_PREFILL)
    bands = dict.fromkeys(BANDS, 0)
    assert patterns.bands() == bands | {"0": 2, "50-75": 1, "100": 3}
    assert patterns.longest_lost_run() == 6
    worst = patterns.worst(2)
    assert [name for name, _ in worst] == ["starved1", "starved0"]
    assert worst[0][1].modes == {Mode.RESEED: 6}
    # It is served from its state again: what it had to wait for is remembered, and over.
    ran(patterns, "starved1", Mode.DIRECT_APPEND)
    assert patterns.longest_lost_run() == 5
    [(name, pattern)] = patterns.worst(1)
    assert (name, pattern.longest_lost_run, pattern.lost_run) == ("starved1", 6, 0)


def test_a_first_turn_and_a_few_say_nothing_of_a_pattern_and_few_sessions_are_kept() -> None:
    patterns = SessionPatterns()
    ran(patterns, "new", Mode.COLD_PREFILL, *[Mode.RESEED] * (LATER_LEAST - 1))
    assert sum(patterns.bands().values()) == 0
    ran(patterns, "new", Mode.RESEED)
    assert patterns.bands()["0"] == 1
    for number in range(KNOWN_MAX):
        ran(patterns, f"other{number}", Mode.SEED)
    assert not patterns.told


@pytest.mark.parametrize(
    ("tail", "finish"),
    [
        (b'"finish_reason":"length"}],"usage":{"prompt_tokens":3}}', AnswerFinish.LENGTH),
        (b'"finish_reason": "stop", "stop_reason": null}]}', AnswerFinish.STOP),
        (b'"finish_reason":null}]}\n\ndata: {"choices":[{"finish_reason":"tool_calls"}]}\n\n'
         b'data: {"choices":[],"usage":{}}\n\ndata: [DONE]\n\n', AnswerFinish.TOOL_CALLS),
        (b'"delta":{"stop_reason":"max_tokens","stop_sequence":null}', AnswerFinish.LENGTH),
        (b'"delta":{"stop_reason":"end_turn"}', AnswerFinish.STOP),
        (b'"stop_reason":"tool_use"', AnswerFinish.TOOL_CALLS),
        (b'"incomplete_details":{"reason":"max_output_tokens"}', AnswerFinish.LENGTH),
        (b'"incomplete_details":null,"output":[]', AnswerFinish.STOP),
        (b'"finish_reason":"content_filter"', AnswerFinish.CONTENT_FILTER),
        (b'"finish_reason":"abort"', AnswerFinish.OTHER),
        (b'"content":"\\"finish_reason\\":\\"length\\""', AnswerFinish.UNSAID),
        (b'"finish_reason":"len', AnswerFinish.UNSAID),
        (b"", AnswerFinish.UNSAID),
    ],
)  # fmt: skip
def test_why_an_answer_ended_is_one_word_in_every_dialect(tail: bytes, finish: Any) -> None:
    assert scan_finish(tail) is finish


def test_an_operator_sees_patterns_latencies_and_truncated_answers(play: Play) -> None:
    async def scenario(world: World) -> None:
        [engine] = world.engines
        client = await world.client()
        engine.usage = b'{"prompt_tokens": 9, "completion_tokens": 1}, "finish_reason": "length"'

        async def turns(session: str, *modes: str) -> None:
            for at, mode in enumerate(modes):
                engine.says = said(1, as_of=float(at), mode=mode)
                answer = await client.post("/v1/completions", x__session__id=session)
                assert answer.status == 200

        await turns("lucky", "seed", *["direct_append"] * 4)
        await turns("starved", "cold_prefill", *["reseed"] * 4)
        await world.settled()
        transport = httpx.ASGITransport(admin_app(world.gateway))
        async with httpx.AsyncClient(transport=transport, base_url="http://admin") as operator:
            told = (await operator.get("/status")).json()["patterns"]
        assert (told["kept_share"]["0"], told["kept_share"]["100"]) == (1, 1)
        [worst] = told["worst"]
        assert (worst["later_turns"], worst["kept"], worst["longest_lost_run"]) == (4, 0, 4)
        assert worst["modes"] == {"reseed": 4}
        assert told["finishes"] == {"length": 10}
        registry = CollectorRegistry()
        registry.register(GatewayCollector(world.gateway))

        def value(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(f"ownerserve_gateway_{name}", labels)

        assert value("sessions_by_kept_share", share="0") == 1
        assert value("longest_lost_run_turns") == 4
        assert value("answers_total", finish="length") == 10
        assert value("mode_first_byte_seconds_count", mode="direct_append") == 4
        waited_s = value("mode_first_byte_seconds_sum", mode="reseed")
        assert waited_s is not None  # 0 where all came within the clock's millisecond
        assert worst["first_byte_mean_s"] == pytest.approx(waited_s / 4, abs=1e-3)

    play(scenario, engines=1)
