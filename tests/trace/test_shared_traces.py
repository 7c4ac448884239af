"""The shared traces give the figures of research/simulators-traces.md 1.2, cheaply."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ownerserve.trace.read import read_trace
from ownerserve.trace.reuse import ideal_reuse
from ownerserve.trace.stats import TraceStats, measure

pytestmark = pytest.mark.slow


# A child's ru_maxrss starts from its parent's at exec, which here may hold torch: ask the child.
WEIGHED = """
import sys
from ownerserve.cli.main import cli
cli.main(sys.argv[1:], standalone_mode=False)
print(*(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


class Measured(NamedTuple):
    stats: dict[str, Any]
    peak_mib: float


@pytest.fixture(scope="module")
def claude_code(shared_traces: Path, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """All 570 sessions by the command itself, in a process of its own, weighed."""
    result = tmp_path_factory.mktemp("stats") / "stats.json"
    path = shared_traces / "claude-code-weka" / "sessions.jsonl.zst"
    arguments = ["trace", "stats", str(path), "--json", str(result)]
    process = subprocess.Popen(
        [sys.executable, "-c", WEIGHED, *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    peak_kib = int(process.stdout.read().split()[-2])
    process.stdout.close()
    assert process.wait() == 0
    return Measured(json.loads(result.read_bytes()), peak_kib / 1024)


def test_all_sessions_in_500_mb(claude_code: Measured) -> None:
    assert claude_code.peak_mib < 500


CLAUDE_CODE = {
    "turns_per_session": (64, 38, 154, 330),
    "input_tokens": (134e3, 110e3, 261e3, 526e3),
    "output_tokens": (453, 228, 924, 3687),
    "uncached_suffix_tokens": (3.6e3, 758, 4.2e3, 78e3),
    "gap_s": (None, 18, 127, 2543),
}


@pytest.mark.parametrize("quantity", CLAUDE_CODE)
def test_claude_code_distributions(claude_code: Measured, quantity: str) -> None:
    found = claude_code.stats[quantity]
    figures = zip(("mean", "p50", "p90", "p99"), CLAUDE_CODE[quantity], strict=True)
    for figure, expected in figures:
        if expected is not None:
            assert found[figure] == pytest.approx(expected, rel=0.02), figure


def test_claude_code_shares(claude_code: Measured) -> None:
    stats = claude_code.stats
    assert (stats["requests"], stats["sessions"], stats["sub_agents"]) == (36_725, 570, 63)
    assert stats["total_input_tokens"] == 4_905_476_500
    assert stats["input_output_ratio"] == pytest.approx(295, abs=1)
    ideal = stats["ideal_cached_token_share"]
    assert ideal["any_session"] == pytest.approx(0.961, abs=0.001)
    assert ideal["intra_session"] == pytest.approx(0.961, abs=0.001)
    assert ideal["estimated"] is True
    assert stats["input_share"]["top1"] == pytest.approx(0.059, abs=0.001)
    assert stats["input_share"]["top10"] == pytest.approx(0.414, abs=0.001)
    tool = stats["think_s_after"]["tool_use"]["spread"]
    assert (tool["p10"], tool["p50"]) == (4, 9)
    assert stats["api_share_of_tool_loop"] == pytest.approx(0.18, abs=0.01)


class Expected(NamedTuple):
    requests: int
    sessions: int
    turns: tuple[float, float, float, float]
    inputs: tuple[float, float, float, float]
    outputs: tuple[float, float, float, float]
    gaps: tuple[float, float, float]
    shares: tuple[float, float]
    split: tuple[float, float, float]


OTHERS = {
    "mooncake-fast25/conversation_trace.jsonl.zst": Expected(
        12_031, 7_373, (1.6, 1, 3, 8), (12.0e3, 6.9e3, 27e3, 85e3), (343, 350, 597, 1119),
        (123, 480, 1477), (0.374, 0.348), (0.886, 0, 0.114),
    ),
    "mooncake-fast25/synthetic_trace.jsonl.zst": Expected(
        3_993, 2_256, (1.8, 1, 4, 10), (15.3e3, 11.6e3, 39e3, 66e3), (149, 69, 389, 768),
        (59, 282, 572), (0.651, 0.630), (0.967, 0.033, 0),
    ),
    "lmcache-agent/miniswe.jsonl.zst": Expected(
        402, 20, (20, 22, 30, 30), (6.6e3, 4.4e3, 14e3, 41e3), (114, 98, 187, 300),
        (1.1, 2.0, 2.7), (0.934, 0.933), (0.999, 0.001, 0),
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=OTHERS)
def other(request: pytest.FixtureRequest, shared_traces: Path) -> tuple[TraceStats, Expected]:
    return measure(read_trace(shared_traces / request.param)), OTHERS[request.param]


def test_other_traces(other: tuple[TraceStats, Expected]) -> None:
    stats, expected = other
    assert (stats.requests, stats.sessions) == (expected.requests, expected.sessions)
    for found, figures in (
        (stats.turns_per_session, expected.turns),
        (stats.input_tokens, expected.inputs),
        (stats.output_tokens, expected.outputs),
    ):
        assert (found.mean, found.p50, found.p90, found.p99) == pytest.approx(figures, rel=0.06)
    assert stats.gap_s is not None
    gaps = (stats.gap_s.p50, stats.gap_s.p90, stats.gap_s.p99)
    assert gaps == pytest.approx(expected.gaps, rel=0.03)
    ideal, split = stats.ideal_cached_token_share, stats.reuse_split
    assert ideal is not None
    assert split is not None
    assert (ideal.any_session, ideal.intra_session) == pytest.approx(expected.shares, abs=0.001)
    found_split = (split.intra_session, split.cross_session, split.shared_head)
    assert found_split == pytest.approx(expected.split, abs=0.001)


def test_taubench(shared_traces: Path) -> None:
    stats = measure(read_trace(shared_traces / "lmcache-agent" / "taubench.jsonl.zst"))
    assert (stats.requests, stats.sessions) == (471, 24)
    assert stats.input_output_ratio == pytest.approx(7.2, abs=0.1)
    assert stats.ideal_cached_token_share is not None
    assert stats.ideal_cached_token_share.any_session == pytest.approx(0.823, abs=0.001)


def test_azure_has_lengths_and_no_reuse(shared_traces: Path) -> None:
    path = shared_traces / "azure-llm-2023" / "AzureLLMInferenceTrace_code.csv.zst"
    trace = read_trace(path)
    stats = measure(trace)
    assert (stats.requests, round(stats.input_tokens.mean)) == (8_819, 2_048)
    assert stats.input_output_ratio == pytest.approx(73, abs=1)
    assert ideal_reuse(trace) is None


def test_vllm_ground_truth_is_readable(shared_traces: Path) -> None:
    folder = shared_traces / "llmservingsim-vllm-groundtruth"
    trace = read_trace(folder / "RTXPRO6000-Qwen3-30B-A3B-Instruct-2507.requests.jsonl")
    ttft_s = [session.requests[0].ttft_s or 0.0 for session in trace.sessions]
    assert sum(ttft_s) / len(ttft_s) == pytest.approx(1.086, rel=0.01)
