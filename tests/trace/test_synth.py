"""Generated workloads: reproducible, sweepable, and near what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from ownerserve.kv.errors import InvalidInput
from ownerserve.trace.model import Trace, fault, waits_for
from ownerserve.trace.runs import blocks, common_prefix
from ownerserve.trace.stats import TraceStats, measure
from ownerserve.trace.synth.generate import WORKLOADS, generate
from ownerserve.trace.synth.options import Options
from ownerserve.trace.write import trace_lines, write_trace

everyone = pytest.mark.parametrize("workload", WORKLOADS)


def make(workload: str = "coding-agent", **options: float) -> Trace:
    return generate(workload, Options(**{"sessions": 16, **options}))  # type: ignore[arg-type]


@everyone
def test_the_same_seed_gives_the_same_bytes(workload: str, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.jsonl.zst", "b.jsonl.zst", "c.jsonl.zst")]
    for file, seed in zip(files, (5, 5, 6), strict=True):
        write_trace(make(workload, sessions=8, seed=seed), file)
    first, same, other = (file.read_bytes() for file in files)
    assert first == same
    assert first != other


@everyone
def test_sessions_are_consistent(workload: str) -> None:
    trace = make(workload, sessions=12, max_input_tokens=50_000)
    for session in trace.sessions:
        assert fault(session) is None
        for request in session.requests:
            assert 0 < request.input_tokens <= 50_000
            assert request.output_tokens > 0
            assert blocks(request.runs) == request.input_tokens // trace.block_tokens
        for position, waits in enumerate(waits_for(session)):
            starts = [session.requests[wait].start_s for wait in waits]
            assert all(start <= session.requests[position].start_s for start in starts)


@everyone
def test_without_reuse_nothing_is_found_again(workload: str) -> None:
    stats = measure(make(workload, reuse=0))
    assert stats.ideal_cached_token_share is not None
    assert stats.ideal_cached_token_share.any_session < 0.02


@everyone
def test_with_reuse_later_turns_add_little(workload: str) -> None:
    full, half = (measure(make(workload, reuse=share)) for share in (1.0, 0.5))
    assert full.ideal_cached_token_share is not None
    assert half.ideal_cached_token_share is not None
    all_kept = full.ideal_cached_token_share.any_session
    assert half.ideal_cached_token_share.any_session < all_kept - 0.1


def test_skew_concentrates_input() -> None:
    top1 = [
        measure(make("chat", sessions=100, skew=skew)).input_share.top1 for skew in (0, 0.8, 1.4)
    ]
    assert top1 == sorted(top1)
    assert top1[0] < 0.2
    assert top1[2] > 0.45  # seed 002's 46.5 % lies inside the sweep


def test_skew_of_long_documents_is_their_popularity() -> None:
    flat, skewed = (make("longdoc", sessions=100, skew=skew) for skew in (0.0, 2.0))
    assert _busiest(flat) < 40 < _busiest(skewed)


def _busiest(trace: Trace) -> int:
    firsts = [session.requests[0].runs[0][0] for session in trace.sessions]
    return max(firsts.count(first) for first in firsts)


def test_tool_time_scales_waits_alone() -> None:
    slow, fast = make(seed=2), make(seed=2, tool_time=0.1)
    before, after = slow.sessions[3].requests, fast.sessions[3].requests
    assert [r.input_tokens for r in before] == [r.input_tokens for r in after]
    assert [r.api_s for r in before] == [r.api_s for r in after]
    waits = [(r.think_s, s.think_s) for r, s in zip(before, after, strict=True) if r.think_s]
    assert all(now == pytest.approx(then / 10, abs=0.001) for then, now in waits if now is not None)


def test_arrivals_follow_the_rate() -> None:
    trace = make("chat", sessions=400, arrivals_per_s=2.0)
    assert trace.sessions[-1].start_s == pytest.approx(200, rel=0.2)


def test_rollouts_fork_from_one_prefix_at_once() -> None:
    for session in make("rollouts", sessions=3).sessions:
        firsts = [next(r for r in session.requests if r.agent == a) for a in range(8)]
        assert {(r.start_s, r.runs) for r in firsts} == {(0.0, firsts[0].runs)}
        lasts = [[r for r in session.requests if r.agent == a][-1] for a in (0, 1)]
        if all(blocks(r.runs) > blocks(firsts[0].runs) for r in lasts):
            assert common_prefix(lasts[0].runs, lasts[1].runs) == blocks(firsts[0].runs)


def test_sub_agents_are_spawned_and_awaited() -> None:
    session = next(s for s in make(sessions=120, seed=3).sessions if len(s.agents) > 1)
    waits = waits_for(session)
    spawned = [i for i, r in enumerate(session.requests) if r.agent and r.after]
    joins = [i for i, r in enumerate(session.requests) if r.agent == 0 and len(waits[i]) > 1]
    assert spawned
    assert joins
    for position in spawned:
        (spawner,) = waits[position]
        assert session.requests[spawner].stop == "tool_use"
        assert session.requests[position].model == "small"


@pytest.fixture(scope="module")
def coding() -> TraceStats:
    return measure(generate("coding-agent", Options(sessions=300, seed=1)))


# quantity -> (measured on the 570 Claude-Code sessions, relative tolerance)
MEASURED = {
    ("turns_per_session", "mean"): (64.4, 0.25),
    ("turns_per_session", "p50"): (37.5, 0.25),
    ("turns_per_session", "p90"): (154, 0.25),
    ("input_tokens", "mean"): (133_573, 0.25),
    ("input_tokens", "p50"): (110_256, 0.25),
    ("input_tokens", "p90"): (261_018, 0.35),
    ("output_tokens", "mean"): (453, 0.15),
    ("output_tokens", "p50"): (228, 0.10),
    ("output_tokens", "p99"): (3687, 0.20),
    ("uncached_suffix_tokens", "mean"): (3634, 0.30),
    ("uncached_suffix_tokens", "p50"): (758, 0.15),
    ("uncached_suffix_tokens", "p90"): (4234, 0.40),
    ("gap_s", "p50"): (18, 0.20),
    ("gap_s", "p90"): (127, 0.50),
    ("gap_s", "p99"): (2543, 0.50),
    ("api_s", "p50"): (6.7, 0.20),
}


@pytest.mark.parametrize(("quantity", "figure"), MEASURED)
def test_coding_agents_lie_near_the_measured_ones(
    coding: TraceStats, quantity: str, figure: str
) -> None:
    measured, tolerance = MEASURED[quantity, figure]
    assert getattr(getattr(coding, quantity), figure) == pytest.approx(measured, rel=tolerance)


def test_coding_agents_reuse_as_much_as_the_measured_ones(coding: TraceStats) -> None:
    assert coding.ideal_cached_token_share is not None
    assert coding.ideal_cached_token_share.intra_session == pytest.approx(0.961, abs=0.02)
    assert coding.input_output_ratio == pytest.approx(295, rel=0.25)
    tool, person = (coding.think_s_after[stop].spread for stop in ("tool_use", "end_turn"))
    assert tool.p50 == pytest.approx(9, rel=0.1)
    assert person.p50 == pytest.approx(258, rel=0.3)


@pytest.mark.parametrize(
    ("field", "value"),
    [("sessions", 0), ("skew", -1), ("reuse", 1.5), ("arrivals_per_s", 0), ("block_tokens", 8)],
)
def test_an_option_out_of_range_is_named(field: str, value: float) -> None:
    with pytest.raises(InvalidInput, match=field):
        make(**{field: value})


def test_fewer_sessions_are_the_first_of_more() -> None:
    few, many = make("swe", sessions=5), make("swe", sessions=9)
    shapes = [
        [[(r.input_tokens, r.output_tokens, r.think_s) for r in s.requests] for s in t.sessions[:5]]
        for t in (few, many)
    ]
    assert shapes[0] == shapes[1]
    assert len(list(trace_lines(few))) == 6
