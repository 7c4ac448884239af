"""The demo's comparison and workload, without processes."""

from __future__ import annotations

import asyncio
import math

import pytest

from ownerserve.cli.demo.compare import TOLERANCE, compare
from ownerserve.cli.demo.drive import SessionResult, TurnAnswer, run_conversations
from ownerserve.cli.demo.fleets import ALL_POLICIES, LONG_TOKENS, can_run, run_of
from ownerserve.cli.demo.run import computed_tokens, hotspot_index, moved_turns, sources_of
from ownerserve.cli.demo.workload import Conversation, DemoTurn, conversations
from ownerserve.kv.errors import InvalidInput
from ownerserve.report.demo_table import heat_line
from ownerserve.trace.model import Agent, Trace, TraceRequest, TraceSession
from tests.support.report.demo_results import made


def answer(tokens: str, *, logprobs: list[float] | None = None, margin: float = 1.0) -> TurnAnswer:
    mine = logprobs or [-1.0] * len(tokens)
    return TurnAnswer(
        session="s",
        turn=0,
        tokens=list(tokens),
        logprobs=mine,
        runner_up_logprobs=[value - margin for value in mine],
    )


def test_the_same_answer_is_equal() -> None:
    assert compare([answer("abc")], [answer("abc")]).equal


def test_a_logprob_beyond_tolerance_is_not_equal() -> None:
    other = answer("abc", logprobs=[-1.0, -1.0 - 2 * TOLERANCE, -1.0])
    result = compare([answer("abc")], [other])
    assert not result.equal
    assert result.tokens_beyond == 1


def test_nan_is_never_equal() -> None:
    assert not compare([answer("a", logprobs=[math.nan])], [answer("a")]).equal


def test_a_flip_within_noise_is_reported_and_equal() -> None:
    result = compare([answer("abc", margin=1e-6)], [answer("axc")])
    assert result.equal
    assert [(flip.position, flip.margin < TOLERANCE) for flip in result.flips] == [(1, True)]
    assert result.tokens_compared == 1  # what follows a flip has another prefix


def test_a_flip_with_a_margin_is_a_wrong_answer() -> None:
    assert not compare([answer("abc", margin=0.5)], [answer("axc")]).equal


def test_an_answer_cut_short_failed_or_absent_is_not_equal() -> None:
    failed = answer("abc")
    failed.error = "HTTP 500"
    for others in ([answer("ab")], [failed], []):
        assert not compare([answer("abc")], others).equal
        assert compare([answer("abc")], others).missing == 1


def trace(*requests: TraceRequest, agents: tuple[Agent, ...] = (Agent(),)) -> Trace:
    session = TraceSession(id="s", requests=requests, agents=agents)
    return Trace("t", "test", 16, "none", "recorded", "recorded", (session,))


def test_a_turn_adds_what_its_prompt_has_beyond_prompt_and_answer_before() -> None:
    first = TraceRequest(start_s=0.0, input_tokens=200, output_tokens=20, stop="tool_use")
    second = TraceRequest(start_s=9.0, input_tokens=300, output_tokens=5, think_s=4.0)
    [conversation] = conversations(trace(first, second), time_scale=0.5)
    opening, turn = conversation.turns
    assert opening.restart
    assert not turn.restart
    [message] = turn.messages
    assert message.role == "tool"
    assert 60 <= len(message.text) <= 80
    assert (turn.after, turn.gap_s) == ((0,), 2.0)


def test_a_prompt_that_shrinks_starts_the_context_again() -> None:
    first = TraceRequest(start_s=0.0, input_tokens=200, output_tokens=20)
    second = TraceRequest(start_s=1.0, input_tokens=100, output_tokens=5, think_s=0.0)
    [conversation] = conversations(trace(first, second), time_scale=1.0)
    assert [turn.restart for turn in conversation.turns] == [True, True]
    assert [turn.is_last for turn in conversation.turns] == [False, True]


def test_heads_of_equal_sizes_are_equal_text_and_agents_have_contexts_of_their_own() -> None:
    agents = (Agent(tool_tokens=40, system_tokens=8), Agent(tool_tokens=40, system_tokens=8))
    spawn = TraceRequest(start_s=0.0, input_tokens=90, output_tokens=4)
    child = TraceRequest(start_s=1.0, input_tokens=90, output_tokens=4, agent=1, after=(0,))
    [conversation] = conversations(trace(spawn, child, agents=agents), time_scale=1.0)
    main, sub = conversation.turns
    assert main.messages[0] == sub.messages[0]
    assert main.messages[1] != sub.messages[1]
    assert (main.agent, sub.agent) == ("s", "s/1")
    assert main.is_last and sub.is_last, "each agent is a session of its own"


def test_heat_moves_are_counted_by_the_gateways_own_reasons_or_their_lack_is_explained() -> None:
    moved = [made(owner=5, hot_owner=2), made(owner=7)]
    assert heat_line("ear", moved) == "ear: 2 turns left a hot worker"
    assert moved[0].heat_moves == 2
    assert "busier than T_hot" in heat_line("ear", [made(owner=9)])
    stuck = [made(owner=5, hot_cooling=1, hot_no_target=3), made(hot_too_dear=2)]
    line = heat_line("ear", stuck)
    assert "6 met a hot one: 3 had no other with room" in line
    assert "2 had one with room, where the turn would have cost more than the wait" in line
    assert "1 had moved a short time before" in line


SPLIT = ("static_pd", "static_pd_delta", "round_robin_pd", "pd_hybrid")


@pytest.mark.parametrize("name", ALL_POLICIES)
def test_half_of_the_workers_prefill_where_prompts_are_computed_apart(name: str) -> None:
    run = run_of(name, 5)
    halves = ("prefill",) * 2 + ("decode",) * 3
    assert run.roles == (halves if name in SPLIT else ("hybrid",) * 5)
    assert run.policy == ("ownerserve" if name == "pd_hybrid" else name)
    told = ("--long-tokens", str(LONG_TOKENS)) if name == "pd_hybrid" else ()
    assert run.gateway_arguments == told


def test_one_worker_computes_nothing_apart() -> None:
    assert can_run(ALL_POLICIES, 2) == ALL_POLICIES
    assert set(ALL_POLICIES) - set(can_run(ALL_POLICIES, 1)) == set(SPLIT)
    for name in SPLIT:
        with pytest.raises(InvalidInput, match="2 or more"):
            run_of(name, 1)


TOLD = """# TYPE ownerserve_prompt_tokens_total counter
ownerserve_prompt_tokens_total 900.0
ownerserve_cached_tokens_total{component="csa_main"} 400.0
ownerserve_cached_tokens_total{component="swa"} 128.0
ownerserve_cached_tokens_created{component="swa"} 1.7e9
"""


def test_what_a_worker_computed_is_told_by_its_own_counts() -> None:
    """State whose window is gone is computed again, though its other components are there."""
    assert computed_tokens(TOLD) == 772
    assert computed_tokens("ownerserve_prompt_tokens_total 900.0\n") == 900
    assert computed_tokens("") == 0
    assert hotspot_index([300, 100], 2) == 1.5
    assert hotspot_index([300], 2) == 2.0, "who computed nothing counts"
    assert hotspot_index([0, 0], 2) == hotspot_index([], 2) == 1.0


def turn(agent: str = "s", *, after: tuple[int, ...] = (), last: str = "") -> DemoTurn:
    return DemoTurn(agent, (), 1, after, 0.0, restart=True, is_last=agent == last)


def at(worker: str, *, cached: int = 0, **brought: int) -> TurnAnswer:
    return TurnAnswer("s", 0, worker=worker, cached_tokens=cached, brought=brought)


def test_what_was_at_hand_and_not_loaded_was_on_the_device() -> None:
    answers = [at("w", cached=900), at("w", cached=500, host=300, peer=100), at("w", host=64)]
    assert sources_of(answers) == {"device": 1000, "host": 364, "peer": 100}


def test_a_move_is_a_turn_elsewhere_than_its_sessions_turn_before() -> None:
    """A sub-agent is a session of its own; a turn that got no worker is passed over."""
    conversation = Conversation("s", 0.0, tuple(map(turn, ("s", "s/1", "s", "s", "s/1", "s"))))
    answers = [at("a"), at("b"), at("a"), at(""), at("b"), at("b")]
    assert moved_turns([conversation], [SessionResult("s", answers, 1.0)]) == 1


async def answered(says: str, conversation: Conversation) -> tuple[list[TurnAnswer], list[str]]:
    """The answers to a conversation of an engine that says these lines of each, and its heads."""
    heads: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode().lower())
        writer.write(f"HTTP/1.1 200 OK\r\nconnection: close\r\n{says}\r\n".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        [session] = await run_conversations(
            url, [conversation], model="m", transcript={}, on_turn=lambda answer: None
        )
    return session.answers, heads


def test_an_answer_says_what_was_loaded_and_the_last_turn_that_its_session_ends() -> None:
    """Who says nothing keeps its seat at the gateway, and others wait for it, for minutes."""
    conversation = Conversation("s", 0.0, (turn(), turn(after=(0,), last="s")))
    says = "x-ownerserve-brought-tokens: host=32, remote_prefill=16\r\nx-ownerserve-worker: w\r\n"
    answers, heads = asyncio.run(answered(says, conversation))
    assert [a.brought for a in answers] == [{"host": 32, "remote_prefill": 16}] * 2
    assert ["x-ownerserve-session-final: true" in head for head in heads] == [False, True]
