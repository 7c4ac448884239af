"""Traces made smaller keep their structure."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from ownerserve.kv.errors import InvalidInput
from ownerserve.trace.model import Trace, fault
from ownerserve.trace.read import read_trace
from ownerserve.trace.reuse import ideal_reuse
from ownerserve.trace.runs import blocks, common_prefix
from ownerserve.trace.synth.generate import generate
from ownerserve.trace.synth.options import Options
from ownerserve.trace.transform import keep, scale_gaps, scale_lengths, share_heads
from ownerserve.trace.write import write_trace

FIXTURES = sorted(
    path.name for path in (Path(__file__).parent / "fixtures").iterdir() if path.suffix != ".md"
)


@pytest.fixture(scope="module")
def agents() -> Trace:
    return generate("coding-agent", Options(sessions=12, seed=4))


@pytest.mark.parametrize("file", FIXTURES)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])
def test_conversion_to_our_format_loses_nothing(
    fixtures: Path, tmp_path: Path, file: str, suffix: str
) -> None:
    trace = read_trace(fixtures / file)
    write_trace(trace, tmp_path / f"out{suffix}")
    assert read_trace(tmp_path / f"out{suffix}") == trace


@pytest.mark.parametrize("max_tokens", [2_000, 20_000, 300_000])
def test_scaled_lengths_keep_what_is_shared(agents: Trace, max_tokens: int) -> None:
    small = scale_lengths(agents, max_tokens=max_tokens)
    longest = max(r.input_tokens + r.output_tokens for s in small.sessions for r in s.requests)
    assert 0.7 * max_tokens < longest <= max_tokens * 1.01
    factor = small.input_tokens / agents.input_tokens
    for before, after in zip(agents.sessions, small.sessions, strict=True):
        assert fault(after) is None
        old, new = before.requests[:12], after.requests[:12]
        for i, j in combinations(range(len(old)), 2):
            shared = common_prefix(old[i].runs, old[j].runs) * agents.block_tokens * factor
            kept = common_prefix(new[i].runs, new[j].runs) * small.block_tokens
            assert kept == pytest.approx(shared, rel=0.02, abs=3 * small.block_tokens)


def test_scaled_prompts_have_as_many_blocks_as_their_length(agents: Trace) -> None:
    small = scale_lengths(agents, factor=1 / 150)
    for session in small.sessions:
        for request in session.requests:
            assert blocks(request.runs) == request.input_tokens // small.block_tokens


def test_scaling_keeps_the_ideal_share(agents: Trace) -> None:
    before, after = ideal_reuse(agents), ideal_reuse(scale_lengths(agents, factor=0.05))
    assert before is not None
    assert after is not None
    assert after.shares() == pytest.approx(before.shares(), abs=0.01)


def test_scaling_without_ids_scales_lengths_alone(fixtures: Path) -> None:
    small = scale_lengths(read_trace(fixtures / "azure.csv"), factor=0.1)
    assert [s.requests[0].input_tokens for s in small.sessions] == [480, 11]


@pytest.mark.parametrize("arguments", [{}, {"factor": 0.5, "max_tokens": 9}, {"factor": 2.0}])
def test_scaling_wants_one_sensible_target(agents: Trace, arguments: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        scale_lengths(agents, **arguments)  # type: ignore[arg-type]


def test_gaps_scale_and_service_times_stay(agents: Trace) -> None:
    fast = scale_gaps(agents, 0.1)
    before, after = agents.sessions[0].requests[1], fast.sessions[0].requests[1]
    assert before.think_s is not None
    assert after.think_s == pytest.approx(before.think_s / 10)
    assert after.api_s == before.api_s


def test_keeping_the_beginning(agents: Trace) -> None:
    cut = keep(agents, sessions=5, turns=3, max_input_tokens=100_000)
    assert len(cut.sessions) == 5
    assert max(len(s.requests) for s in cut.sessions) <= 3
    assert max(r.input_tokens for s in cut.sessions for r in s.requests) <= 100_000
    assert all(fault(s) is None for s in cut.sessions)


def test_equal_heads_are_taken_as_shared(fixtures: Path) -> None:
    trace = share_heads(read_trace(fixtures / "weka_runs.jsonl"))
    first, second = trace.sessions
    # Tools 128 + system 64 = 3 blocks; the fourth block of each session is its own.
    assert common_prefix(first.requests[0].runs, second.requests[0].runs) == 3
    rewound = first.requests[5]
    assert common_prefix(first.requests[0].runs, rewound.runs) == 3
    assert trace.ids == "trace"
    assert share_heads(trace) is trace
