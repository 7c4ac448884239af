"""Ideal re-use, run-length, against a plain cache of blocks; and the split by source."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerserve.trace.model import Trace, TraceRequest, TraceSession
from ownerserve.trace.reuse import by_arrival, ideal_reuse
from ownerserve.trace.runs import expand
from ownerserve.trace.stats import measure
from ownerserve.trace.synth.prompt import BlockIds, SynthPrompt
from tests.support.examples import examples

BLOCK = 16


def trace_of(*sessions: TraceSession) -> Trace:
    return Trace("t", "test", BLOCK, "trace", "recorded", "recorded", sessions)


@st.composite
def forests(draw: st.DrawFn) -> Trace:
    """Sessions that grow, rewind and begin as forks of one another's prompts."""
    ids = BlockIds()
    roots = [SynthPrompt(ids, BLOCK)]
    sessions = []
    for number in range(draw(st.integers(1, 5))):
        prompt = draw(st.sampled_from(roots)).fork()
        requests = []
        for turn in range(draw(st.integers(1, 4))):
            prompt.rewind(draw(st.integers(0, prompt.tokens)))
            prompt.append(draw(st.integers(1, 100)))
            start_s = float(turn * draw(st.integers(1, 3)))
            requests.append(TraceRequest(start_s, prompt.tokens, 1, prompt.runs))
            roots.append(prompt.fork())
        requests.sort(key=lambda request: request.start_s)
        sessions.append(TraceSession(str(number), tuple(requests), start_s=draw(st.floats(0, 5))))
    return trace_of(*sessions)


@settings(max_examples=examples(40))
@given(forests())
def test_run_length_reuse_equals_a_block_cache(trace: Trace) -> None:
    everyone: set[int] = set()
    own: dict[int, set[int]] = {}
    expected = []
    for number, request in by_arrival(trace):
        mine = own.setdefault(number, set())
        found = [_leading(request, cache) for cache in (everyone, mine)]
        expected.append(tuple(found))
        everyone.update(expand(request.runs))
        mine.update(expand(request.runs))
    reuse = ideal_reuse(trace)
    assert reuse is not None
    assert list(zip(reuse.any_tokens, reuse.intra_tokens, strict=True)) == expected
    assert sum(reuse.split()) == pytest.approx(1.0 if sum(e[0] for e in expected) else 0.0)


def _leading(request: TraceRequest, cache: set[int]) -> int:
    held = 0
    for block in expand(request.runs):
        if block not in cache:
            break
        held += 1
    return min(held * BLOCK, request.input_tokens)


def test_sources_of_reuse() -> None:
    """Three sessions share a head of two blocks; the third also finds a block of the first."""
    head = (0, 2)
    first = TraceSession(
        "1", (TraceRequest(0, 64, 1, ((0, 4),)), TraceRequest(9, 80, 1, ((0, 5),))), 0.0
    )
    second = TraceSession("2", (TraceRequest(0, 48, 1, (head, (50, 1))),), 1.0)
    third = TraceSession("3", (TraceRequest(0, 60, 1, ((0, 3),)),), 2.0)
    reuse = ideal_reuse(trace_of(first, second, third))
    assert reuse is not None
    # In order of arrival: first/0, second, third, first/1.
    assert reuse.any_tokens.tolist() == [0, 32, 48, 64]
    assert reuse.intra_tokens.tolist() == [0, 0, 0, 64]
    assert reuse.head_tokens.tolist() == [0, 32, 32, 32]
    assert reuse.split() == pytest.approx((32 / 144, 16 / 144, 96 / 144))
    assert reuse.uncached_suffix().tolist() == [16]


def test_a_partial_last_block_counts_for_what_it_holds() -> None:
    """Mooncake lists the block a prompt ends in; re-using it saves its tokens, not 16."""
    twice = TraceSession(
        "1", (TraceRequest(0, 20, 1, ((0, 2),)), TraceRequest(1, 20, 1, ((0, 2),)))
    )
    reuse = ideal_reuse(trace_of(twice))
    assert reuse is not None
    assert reuse.intra_tokens.tolist() == [0, 20]


def test_think_time_goes_by_the_stop_reason_of_the_same_agent() -> None:
    session = TraceSession(
        "1",
        (
            TraceRequest(0, 10, 1, stop="tool_use"),
            TraceRequest(30, 10, 1, think_s=30, stop="end_turn"),
            TraceRequest(430, 10, 1, think_s=400, stop="end_turn"),
        ),
    )
    stats = measure(trace_of(session))
    assert stats.think_s_after["tool_use"].spread.p50 == 30
    assert stats.think_s_after["end_turn"].share_over_300s == 1.0
    assert stats.gap_s is not None
    assert stats.gap_s.mean == 215
