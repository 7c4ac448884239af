"""Prompts and answers: which units a turn shows, and who else shows them."""

from __future__ import annotations

from array import array
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerserve.kv.errors import InvalidInput
from ownerserve.sim.timeline.turns import SimTurn
from ownerserve.sim.workload import (
    Capped,
    Sample,
    SharedHeads,
    TopShare,
    WorkloadDriver,
    WorkloadShape,
)
from ownerserve.trace.model import Agent, Trace, TraceRequest, TraceSession
from ownerserve.trace.read import read_trace
from ownerserve.trace.runs import common_prefix
from ownerserve.trace.synth.generate import generate
from ownerserve.trace.synth.options import Options
from ownerserve.trace.transform import share_heads
from tests.support.sim.workload_walk import Walk, of_one, traces

replace = msgspec.structs.replace


def units(packed: bytes) -> list[int]:
    return array("I", packed).tolist()


def turns_of(trace: Trace, shape: WorkloadShape) -> dict[tuple[int, int], SimTurn]:
    walk = Walk(WorkloadDriver.of(trace, shape))
    return {place: done.turn for place, done in walk.by_place().items()}


def common(left: list[int], right: list[int]) -> int:
    """Units that both begin with."""
    return next(
        (n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )


def one_place_only(turns: dict[tuple[int, int], SimTurn]) -> None:
    """Ids are chained: an id has one place, and one id before it."""
    before: dict[int, tuple[int, int]] = {}
    for turn in turns.values():
        ids = units(turn.prompt + turn.output)
        for place, (previous, unit) in enumerate(pairwise([-1, *ids])):
            assert before.setdefault(unit, (place, previous)) == (place, previous)


@settings(max_examples=15, deadline=None)
@given(traces(), st.sampled_from(["next_prompt", "never"]))
def test_prompts_share_what_the_trace_says(trace: Trace, reuse: str) -> None:
    turns = turns_of(trace, WorkloadShape(output_reuse=reuse))  # type: ignore[arg-type]
    places = sorted(turns)
    ids = {place: units(turns[place].prompt) for place in places}
    runs = {(s, p): trace.sessions[s].requests[p].runs for s, p in places}
    for left, right in zip(places, places[1:] + places[:1], strict=True):
        full = min(turns[place].prompt_tokens // trace.block_tokens for place in (left, right))
        assert min(full, common(ids[left], ids[right])) == common_prefix(runs[left], runs[right])
    one_place_only(turns)


@settings(max_examples=15, deadline=None)
@given(traces())
def test_ids_of_a_session_are_its_own(trace: Trace) -> None:
    local = replace(trace, ids="session")
    turns = turns_of(local, WorkloadShape())
    one_place_only(turns)
    owner: dict[int, int] = {}
    for (number, _), turn in turns.items():
        for unit in units(turn.prompt + turn.output):
            assert owner.setdefault(unit, number) == number
    for number, session in enumerate(trace.sessions):
        for p, (left, right) in enumerate(pairwise(session.requests)):
            full = min(left.input_tokens, right.input_tokens) // trace.block_tokens
            shown = common(units(turns[number, p].prompt), units(turns[number, p + 1].prompt))
            assert min(full, shown) == common_prefix(left.runs, right.runs)


@settings(max_examples=15, deadline=None)
@given(traces(), st.sampled_from(["next_prompt", "never"]))
def test_lengths_are_those_of_the_trace(trace: Trace, reuse: str) -> None:
    u = trace.block_tokens
    for (s, p), turn in turns_of(trace, WorkloadShape(output_reuse=reuse)).items():  # type: ignore[arg-type]
        request = trace.sessions[s].requests[p]
        assert (turn.prompt_tokens, turn.output_tokens) == (
            request.input_tokens,
            max(1, request.output_tokens),
        )
        in_prompt = -(-turn.prompt_tokens // u)
        assert len(turn.prompt) == 4 * in_prompt
        full_after = (turn.prompt_tokens + turn.output_tokens - 1) // u
        assert len(turn.output) == 4 * max(0, full_after - in_prompt)


FIRST = TraceRequest(0.0, 20, 45, runs=((100, 1),), think_s=0.0)
GOES_ON = TraceRequest(1.0, 100, 4, runs=((100, 3), (200, 3)), think_s=0.0)


def test_an_answer_is_what_the_next_prompt_shows() -> None:
    turns = turns_of(of_one(FIRST, GOES_ON), WorkloadShape())
    # 20 + 45 - 1 = 64 tokens are computed: units 0-3. Unit 1 was partial and is filled.
    assert units(turns[0, 0].prompt) == [100, 101]
    assert units(turns[0, 0].output) == [102, 200]
    assert units(turns[0, 1].prompt)[:6] == [100, 101, 102, 200, 201, 202]


def test_an_answer_that_is_never_asked_for_again_has_ids_of_its_own() -> None:
    turns = turns_of(of_one(FIRST, GOES_ON), WorkloadShape(output_reuse="never"))
    decoded = units(turns[0, 0].prompt)[1:] + units(turns[0, 0].output)
    assert len(decoded) == 3
    assert min(decoded) > 202
    assert not set(decoded) & set(units(turns[0, 1].prompt))


def test_a_partial_unit_that_is_not_filled_is_not_found_again() -> None:
    short = replace(FIRST, output_tokens=5)
    turns = turns_of(of_one(short, GOES_ON), WorkloadShape())
    assert units(turns[0, 0].prompt)[0] == 100
    assert units(turns[0, 0].prompt)[1] > 202
    assert turns[0, 0].output == b""


def test_after_a_rewrite_the_answer_is_nobodys() -> None:
    rewritten = replace(GOES_ON, runs=((300, 6),))
    turns = turns_of(of_one(FIRST, rewritten), WorkloadShape())
    seen = set(units(turns[0, 1].prompt))
    assert not seen & set(units(turns[0, 0].prompt + turns[0, 0].output))


def test_where_the_next_prompt_ends_early_the_answer_goes_on_with_ids_of_its_own() -> None:
    turns = turns_of(
        of_one(FIRST, replace(GOES_ON, input_tokens=50, runs=((100, 3),))), WorkloadShape()
    )
    assert units(turns[0, 0].prompt + turns[0, 0].output)[:3] == [100, 101, 102]
    assert units(turns[0, 0].output)[1] not in units(turns[0, 1].prompt)
    one_place_only(turns)


def test_ids_beyond_the_prompt_are_cut_and_missing_ones_made() -> None:
    over = TraceRequest(0.0, 40, 1, runs=((10, 9),), think_s=0.0)
    under = TraceRequest(1.0, 80, 1, runs=((10, 2),), think_s=0.0)
    partial_recorded = TraceRequest(2.0, 40, 1, runs=((10, 2), (500, 1)), think_s=0.0)
    turns = turns_of(of_one(over, under, partial_recorded), WorkloadShape())
    assert units(turns[0, 0].prompt) == [10, 11, 12]
    made = units(turns[0, 1].prompt)
    assert made[:2] == [10, 11]
    assert len(set(made)) == 5
    assert min(made[2:]) > 500
    assert units(turns[0, 2].prompt) == [10, 11, 500]


def test_an_empty_prompt_or_answer_counts_as_one_token() -> None:
    turns = turns_of(of_one(TraceRequest(0.0, 0, 0)), WorkloadShape())
    turn = turns[0, 0]
    assert (turn.prompt_tokens, turn.output_tokens) == (1, 1)
    assert (len(turn.prompt), turn.output) == (4, b"")


def test_without_ids_every_prompt_is_new() -> None:
    known = of_one(FIRST, GOES_ON)
    sessions = tuple(
        replace(s, requests=tuple(replace(r, runs=()) for r in s.requests)) for s in known.sessions
    )
    blind = replace(known, ids="none", block_tokens=0, sessions=sessions)
    workload = WorkloadDriver.of(blind, WorkloadShape(unit_tokens=10))
    assert workload.block_tokens == 10
    turns = turns_of(blind, WorkloadShape(unit_tokens=10))
    shown = units(b"".join(turn.prompt + turn.output for turn in turns.values()))
    assert len(shown) == len(set(shown)) == 2 + 4 + 10 + 0


def headed(*sizes: tuple[int, int, str], ids: str = "session") -> Trace:
    """Sessions of one request of 100 tokens each, in units of 16, with heads of these sizes."""
    sessions = tuple(
        TraceSession(
            f"{n}",
            (TraceRequest(0.0, 100, 1, runs=((7, 6),)),),
            agents=(Agent("", "", model, t, s),),
        )
        for n, (t, s, model) in enumerate(sizes)
    )
    return Trace("hand", "hand", 16, ids, "recorded", "unknown", sessions)  # type: ignore[arg-type]


def test_equal_heads_are_shared_only_where_that_was_asked_for() -> None:
    trace = headed((30, 20, "big"), (30, 20, "big"), (30, 20, "small"), (20, 30, "big"))
    heads_off = turns_of(trace, WorkloadShape())
    shown = units(b"".join(turn.prompt for turn in heads_off.values()))
    assert len(shown) == len(set(shown))

    turns = turns_of(trace, WorkloadShape(shared_heads=SharedHeads()))
    prompts = [units(turns[number, 0].prompt) for number in range(4)]
    assert [common(prompts[0], prompt) for prompt in prompts] == [7, 50 // 16, 0, 0]
    one_place_only(turns)


def test_within_a_session_the_recorded_ids_decide() -> None:
    agents = (Agent("main", "", "big", 30, 20), Agent("sub", "", "big", 30, 20))
    requests = (
        TraceRequest(0.0, 100, 1, runs=((0, 6),)),
        TraceRequest(1.0, 100, 1, runs=((50, 6),), agent=1),
    )
    trace = headed((30, 20, "big"))
    both = replace(trace.sessions[0], agents=agents, requests=requests)
    turns = turns_of(
        replace(trace, sessions=(*trace.sessions, both)), WorkloadShape(shared_heads=SharedHeads())
    )
    elsewhere, main, sub = (units(turns[place].prompt) for place in ((0, 0), (1, 0), (1, 1)))
    assert common(elsewhere, main) == 3
    assert common(main, sub) == 0


@settings(max_examples=15, deadline=None)
@given(traces())
def test_shared_heads_share_no_more_than_the_statistics_assume(trace: Trace) -> None:
    local = replace(trace, ids="session")
    turns = turns_of(local, WorkloadShape(shared_heads=SharedHeads()))
    one_place_only(turns)
    ideal = share_heads(local)
    for left, right in pairwise(range(len(trace.sessions))):
        runs = [ideal.sessions[number].requests[0].runs for number in (left, right)]
        shown = common(units(turns[left, 0].prompt), units(turns[right, 0].prompt))
        assert shown == common_prefix(*runs)


def test_a_session_drawn_again_shares_only_what_sessions_share() -> None:
    shared = ((0, 2),)
    sessions = tuple(
        TraceSession(f"{n}", (TraceRequest(0.0, 64, 1, runs=(*shared, (10 * (n + 1), 2))),))
        for n in range(2)
    )
    trace = replace(of_one(FIRST), sessions=sessions)
    turns = turns_of(trace, WorkloadShape(sessions=Sample(6)))
    prompts = [units(turn.prompt) for turn in turns.values()]
    for number, left in enumerate(prompts):
        assert [common(left, right) for right in prompts[number + 1 :]] == [2] * (5 - number)


def test_copies_of_sessions_with_ids_of_their_own_share_nothing() -> None:
    turns = turns_of(headed((30, 20, "big")), WorkloadShape(sessions=Sample(3)))
    shown = units(b"".join(turn.prompt for turn in turns.values()))
    assert len(shown) == len(set(shown)) == 21


def test_a_run_with_more_units_than_32_bits_can_name_is_refused() -> None:
    far = replace(FIRST, runs=((2**32 - 2, 1),))
    with pytest.raises(InvalidInput, match="more than the 4,294,967,296 of 32 bits"):
        WorkloadDriver.of(of_one(far, GOES_ON), WorkloadShape())
    last = WorkloadDriver.of(of_one(replace(far, output_tokens=1)), WorkloadShape())
    assert units(last.turn(last.first()[0][1], 0.0).prompt) == [2**32 - 2, 2**32 - 1]


def test_memory_follows_the_sessions_that_run() -> None:
    trace = generate("swe", Options(sessions=30, max_input_tokens=8_000))
    workload = WorkloadDriver.of(trace, WorkloadShape(mode=Capped(2)))
    most = 0

    def looking(turn: SimTurn) -> float:
        nonlocal most
        most = max(most, len(workload._live))  # noqa: SLF001 - its memory is what is tested
        return 1.0

    Walk(workload, looking)
    assert most == 2
    assert not workload._live  # noqa: SLF001
    assert not workload._courses  # noqa: SLF001


def test_claude_code_is_walked_whole(shared_traces: Path) -> None:
    trace = read_trace(shared_traces / "claude-code-weka" / "sessions.jsonl.zst")
    workload = WorkloadDriver.of(trace, WorkloadShape(shared_heads=SharedHeads()))
    turns, shown = 0, 0
    pending = workload.first()
    while pending:
        now, key = pending.pop()
        turn = workload.turn(key, now)
        turns, shown = turns + 1, shown + len(turn.prompt)
        pending += workload.finished(turn, now)
    assert turns == workload.requests == 36_725
    assert shown == 4 * sum(-(-r.input_tokens // 64) for s in trace.sessions for r in s.requests)


def test_seed_002s_skew_can_be_had_from_claude_code(shared_traces: Path) -> None:
    trace = read_trace(shared_traces / "claude-code-weka" / "sessions.jsonl.zst")
    workload = WorkloadDriver.of(trace, WorkloadShape(skew=TopShare(0.465)))
    held = sorted((workload.input_tokens_in(n) for n in range(570)), reverse=True)
    assert sum(held[:6]) / sum(held) == pytest.approx(0.465, abs=0.01)


@pytest.mark.parametrize(
    "name",
    [
        "mooncake-fast25/conversation_trace.jsonl.zst",
        "lmcache-agent/taubench.jsonl.zst",
        "azure-llm-2023/AzureLLMInferenceTrace_code.csv.zst",
        "llmservingsim-vllm-groundtruth/RTXPRO6000-Qwen3-32B.requests.jsonl",
    ],
)
def test_every_kind_of_trace_is_driven_to_its_end(shared_traces: Path, name: str) -> None:
    trace = read_trace(shared_traces / name)
    workload = WorkloadDriver.of(trace, WorkloadShape())
    walk = Walk(workload)
    assert len(walk.done) == trace.request_count
    assert workload.ended == workload.sessions
