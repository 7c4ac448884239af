"""Each format, sniffed from its content, comes out as the sessions it describes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ownerserve.trace.lines import Collected
from ownerserve.trace.model import fault, waits_for
from ownerserve.trace.read import read_trace

FORMATS = {
    "own.jsonl": "hand",
    "weka_runs.jsonl": "weka",
    "weka_ids.json": "weka",
    "mooncake.jsonl": "mooncake",
    "aiperf.jsonl": "aiperf",
    "bailian.jsonl": "bailian",
    "lmcache.jsonl": "lmcache",
    "lmcache_text.jsonl": "lmcache-text",
    "azure.csv": "azure",
    "llmservingsim.jsonl": "llmservingsim",
    "vllm_timings.jsonl": "vllm-timings",
}


@pytest.mark.parametrize(("file", "origin"), FORMATS.items())
def test_the_format_is_told_from_the_content(fixtures: Path, file: str, origin: str) -> None:
    problems = Collected()
    trace = read_trace(fixtures / file, problems=problems)
    assert (trace.origin, problems.count) == (origin, 0)
    assert [fault(session) for session in trace.sessions] == [None] * len(trace.sessions)


def test_weka_sub_agents_are_a_graph_under_their_session(fixtures: Path) -> None:
    session = read_trace(fixtures / "weka_runs.jsonl").sessions[0]
    # a1 came back at 60 after 50 s; a2's length is not recorded: its one request took 3 s.
    assert [(r.agent, r.start_s) for r in session.requests] == [
        (0, 0.0), (1, 10.0), (1, 50.0), (2, 59.0), (0, 65.0), (0, 165.0), (0, 170.0),
    ]  # fmt: skip
    assert waits_for(session) == [(), (0,), (1,), (0,), (0, 2, 3), (4,), (5,)]
    assert [agent.kind for agent in session.agents] == ["", "explore", "plan"]
    spawned, joined = session.requests[1], session.requests[4]
    assert spawned.think_s == 8.0  # after the answer of request 0, at 2.0
    assert joined.think_s == 3.0  # after the last sub-agent came back, at 62.0, not after 2.0


def test_weka_think_times_that_contradict_the_starts_are_dropped(fixtures: Path) -> None:
    credible, impossible = read_trace(fixtures / "weka_runs.jsonl").sessions[0].requests[5:]
    assert credible.think_s == 97.0
    assert impossible.think_s is None  # 900 s can't pass between 165 and 170


def test_weka_block_id_lists_become_runs(fixtures: Path) -> None:
    requests = read_trace(fixtures / "weka_ids.json").sessions[0].requests
    assert [r.runs for r in requests] == [((1, 3),), ((1, 3), (7, 2))]
    assert requests[1].think_s is None


def test_mooncake_sessions_are_inferred_from_the_deepest_known_block(fixtures: Path) -> None:
    trace = read_trace(fixtures / "mooncake.jsonl")
    # Four requests make every block rare, so the shared block 0 also joins request 1 to s0.
    assert [len(s.requests) for s in trace.sessions] == [3, 1]
    assert trace.grouping == "inferred"
    assert [r.start_s for r in trace.sessions[0].requests] == [0.0, 0.5, 30.0]
    assert trace.sessions[0].requests[2].runs == ((0, 3), (5, 1))


def test_aiperf_lines_are_what_a_turn_adds_to_its_session(fixtures: Path) -> None:
    trace = read_trace(fixtures / "aiperf.jsonl")
    first, other = trace.sessions
    assert (trace.grouping, trace.arrivals) == ("recorded", "unknown")
    assert [r.input_tokens for r in first.requests] == [1100, 1100 + 90 + 400, 1590 + 5 + 600]
    assert [r.think_s for r in first.requests] == [None, 1.8005, 25.0]
    # Full blocks: two are in common with the other session, what a session adds is its own.
    assert [r.runs for r in first.requests] == [((0, 2),), ((0, 3),), ((0, 4),)]
    assert other.requests[0].runs == ((0, 2),)


def test_an_aiperf_turn_without_its_delay_is_left_out_and_said(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = '{"session_id":"a","input_length":600,"output_length":9,"hash_ids":[0,1]}\n'
    path.write_text(line * 2)
    problems = Collected()
    trace = read_trace(path, problems=problems)
    assert [len(session.requests) for session in trace.sessions] == [1]
    assert "delay is missing" in problems.first[0].reason


def test_bailian_conversations_are_trees_by_parent(fixtures: Path) -> None:
    trace = read_trace(fixtures / "bailian.jsonl")
    tree, orphan = trace.sessions
    assert waits_for(tree) == [(), (0,), (0,), (2,)]
    assert (tree.id, orphan.id, orphan.requests[0].kind) == ("chat11", "chat20", "file")


def test_bailian_ids_are_chained(fixtures: Path) -> None:
    tree = read_trace(fixtures / "bailian.jsonl").sessions[0]
    first, branch, other, last = (r.runs for r in tree.requests)
    assert first == ((0, 3),)
    assert branch == ((0, 2), (3, 2))
    assert other == ((0, 2), (5, 1))
    assert last == ((0, 2), (5, 3))  # 8 and 9 after 40 are not the 8 and 9 of the first prompt


def test_lmcache_sessions_start_at_their_first_request(fixtures: Path) -> None:
    trace = read_trace(fixtures / "lmcache.jsonl")
    assert [(s.id, s.start_s) for s in trace.sessions] == [("0", 10.0), ("b", 12.0)]
    assert trace.sessions[0].requests[1].start_s == 1.5


def test_lmcache_texts_share_the_blocks_they_begin_with(fixtures: Path) -> None:
    first, second = read_trace(fixtures / "lmcache_text.jsonl").sessions[0].requests
    assert second.start_s == 2.5
    assert (first.runs, first.input_tokens) == (((0, 1),), 22)
    assert second.runs == ((0, 1),)


def test_azure_rows_are_arrivals_without_sessions(fixtures: Path) -> None:
    trace = read_trace(fixtures / "azure.csv")
    assert (trace.ids, trace.grouping) == ("none", "unknown")
    assert [s.start_s for s in trace.sessions] == [0.0, 0.5]


def test_llmservingsim_tool_time_comes_before_the_next_call(fixtures: Path) -> None:
    flat, agent = read_trace(fixtures / "llmservingsim.jsonl").sessions
    assert (flat.start_s, flat.requests[0].input_tokens) == (0.0, 100)
    assert (agent.id, agent.start_s) == ("agent", 2.0)
    assert [r.think_s for r in agent.requests] == [None, 1.5]
    assert [r.runs for r in agent.requests] == [((0, 2),), ((0, 3),)]


def test_vllm_timings_give_service_times(fixtures: Path) -> None:
    first, second = read_trace(fixtures / "vllm_timings.jsonl").sessions
    assert first.requests[0].api_s == pytest.approx(17.0)
    assert first.requests[0].ttft_s == pytest.approx(0.7)
    assert second.start_s == 0.25
