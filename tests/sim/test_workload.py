"""Releases: what comes when, in closed, open and capped runs. Properties on generated traces."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerserve.kv.errors import InvalidInput
from ownerserve.sim.timeline.turns import SimTurn
from ownerserve.sim.workload import (
    Capped,
    Closed,
    First,
    Open,
    Poisson,
    Sample,
    TopShare,
    WorkloadDriver,
    WorkloadShape,
    Zipf,
)
from ownerserve.trace.model import Trace, release_delay_s, waits_for
from ownerserve.trace.synth.generate import generate
from ownerserve.trace.synth.options import Options
from tests.support.sim.workload_walk import Walk, at_once, of_one, request, traces, uneven

replace = msgspec.structs.replace


modes = st.sampled_from([Closed(), Open(), Capped(1), Capped(3)])


@settings(max_examples=15, deadline=None)
@given(traces(), modes)
def test_every_turn_is_released_once(trace: Trace, mode: Closed | Open | Capped) -> None:
    workload = WorkloadDriver.of(trace, WorkloadShape(mode=mode))
    walk = Walk(workload, uneven)
    places = [(done.turn.session, done.turn.position) for done in walk.done]
    assert len(places) == len(set(places)) == workload.requests == trace.request_count
    numbers = sorted(done.turn.number for done in walk.done)
    assert numbers == list(range(workload.requests))
    assert workload.ended == workload.sessions


@settings(max_examples=15, deadline=None)
@given(traces(), st.sampled_from([Closed(), Capped(2)]), st.sampled_from([0.0, 0.5, 1.0]))
def test_closed_a_turn_comes_its_think_time_after_the_last_it_waits_for(
    trace: Trace, mode: Closed | Capped, tool_scale: float
) -> None:
    done = Walk(
        WorkloadDriver.of(trace, WorkloadShape(mode=mode, tool_scale=tool_scale)), uneven
    ).by_place()
    for number, session in enumerate(trace.sessions):  # they arrive in the trace's order
        for position, waits in enumerate(waits_for(session)):
            if waits:
                last_s = max(done[number, wait].done_s for wait in waits)
                think_s = tool_scale * release_delay_s(session, position, waits)
                assert done[number, position].turn.arrived_s == pytest.approx(last_s + think_s)


@settings(max_examples=15, deadline=None)
@given(traces(), st.sampled_from([0.25, 1.0]))
def test_open_turns_come_when_they_were_recorded(trace: Trace, time_scale: float) -> None:
    workload = WorkloadDriver.of(
        trace, WorkloadShape(mode=Open(), time_scale=time_scale, tool_scale=9.0)
    )
    for (number, position), done in Walk(workload, uneven).by_place().items():
        session = trace.sessions[number]
        recorded_s = session.start_s + session.requests[position].start_s
        assert done.turn.arrived_s == pytest.approx(recorded_s * time_scale)


@settings(max_examples=15, deadline=None)
@given(traces(), st.integers(1, 4))
def test_capped_never_runs_more_sessions_than_lanes(trace: Trace, lanes: int) -> None:
    walk = Walk(WorkloadDriver.of(trace, WorkloadShape(mode=Capped(lanes))), uneven)
    assert walk.busiest == min(lanes, len(trace.sessions))
    first = [done for done in walk.done if done.turn.position == 0]
    starts = sorted((done.turn.arrived_s, done.turn.session) for done in first)
    assert [number for _, number in starts[:lanes]] == list(range(min(lanes, len(starts))))


@settings(max_examples=15, deadline=None)
@given(traces(), modes, st.integers(0, 3))
def test_the_same_seed_gives_the_same_turns(
    trace: Trace, mode: Closed | Open | Capped, seed: int
) -> None:
    shape = WorkloadShape(mode=mode, arrivals=Poisson(2.0), sessions=Sample(4), seed=seed)
    once, again = (Walk(WorkloadDriver.of(trace, shape), uneven).done for _ in range(2))
    assert once == again


@settings(max_examples=15, deadline=None)
@given(traces())
def test_what_a_turn_asks_for_does_not_depend_on_when_others_end(trace: Trace) -> None:
    slow = Walk(WorkloadDriver.of(trace, WorkloadShape()), uneven).by_place()
    quick = Walk(WorkloadDriver.of(trace, WorkloadShape(mode=Open())), at_once).by_place()
    for place, done in slow.items():
        assert done.turn.prompt == quick[place].turn.prompt
        assert done.turn.output == quick[place].turn.output


@settings(max_examples=15, deadline=None)
@given(traces(), modes)
def test_an_oracle_hears_when_the_next_turn_comes(
    trace: Trace, mode: Closed | Open | Capped
) -> None:
    workload = WorkloadDriver.of(trace, WorkloadShape(mode=mode, tool_scale=0.5))
    told: dict[tuple[str, int], float | None] = {}

    def listening(turn: SimTurn) -> float:
        service_s = uneven(turn)
        end_s = turn.arrived_s + service_s
        told[turn.name, turn.position] = workload.next_release_s(turn, end_s)
        return service_s

    conversations: dict[str, list[SimTurn]] = {}
    for done in sorted(Walk(workload, listening).done, key=lambda done: done.turn.position):
        conversations.setdefault(done.turn.name, []).append(done.turn)
    waits = [waits_for(session) for session in trace.sessions]
    for name, turns in conversations.items():
        assert [turn.is_last for turn in turns] == [False] * (len(turns) - 1) + [True]
        assert told[name, turns[-1].position] is None
        for earlier, later in pairwise(turns):
            promised_s = told[name, earlier.position]
            assert promised_s is not None
            # What else it waits for is expected to last as recorded, and here lasts otherwise.
            if set(waits[later.session][later.position]) <= {earlier.position}:
                assert later.arrived_s == pytest.approx(promised_s)


def test_a_sub_agent_is_a_conversation_and_its_parent_waits_for_it() -> None:
    trace = of_one(
        request(0),
        request(5, stop="tool_use"),
        request(6, agent=1, after=(1,), think_s=1),
        request(6, agent=2, after=(1,), think_s=2),
        request(9, agent=1, think_s=3),
        request(20, after=(1, 3, 4), think_s=4),
        agents=3,
    )
    walk = Walk(WorkloadDriver.of(trace, WorkloadShape()), lambda turn: 10.0)
    released = {d.turn.position: (d.turn.name, d.turn.arrived_s) for d in walk.done}
    assert released == {
        0: ("s0", 0.0),
        1: ("s0", 15.0),
        2: ("s0/a1", 26.0),
        3: ("s0/a2", 27.0),
        4: ("s0/a1", 39.0),
        5: ("s0", 53.0),
    }
    turns = {done.turn.position: done.turn for done in walk.done}
    assert (turns[2].parent, turns[2].shared_tokens) == ("s0", 32)
    assert (turns[4].parent, turns[4].shared_tokens) == (None, 0)
    assert [position for position, turn in turns.items() if turn.is_last] == [3, 4, 5]


def test_a_failed_turn_marks_its_session_and_frees_its_successors() -> None:
    trace = of_one(request(0), request(5, think_s=1), request(9, think_s=1))
    workload = WorkloadDriver.of(trace, WorkloadShape())
    walk = Walk(workload, at_once, fails=lambda turn: turn.position == 0)
    assert [done.turn.position for done in walk.done] == [0, 1, 2]
    assert workload.failed_sessions == {0}
    assert workload.ended == 1


def test_a_turn_can_not_end_twice() -> None:
    workload = WorkloadDriver.of(of_one(request(0), request(1), request(2)), WorkloadShape())
    turn = workload.turn(workload.first()[0][1], 0.0)
    workload.finished(turn, 0.0)
    with pytest.raises(AssertionError, match="finished twice"):
        workload.finished(turn, 0.0)


def test_a_run_may_begin_later_and_arrivals_be_pressed() -> None:
    trace = of_one(request(0), request(30, agent=1), agents=2, start_s=100.0)
    shape = WorkloadShape(time_scale=0.1, tool_scale=2.0)
    assert [when_s for when_s, _ in WorkloadDriver.of(trace, shape).first(now=7.0)] == [17.0, 77.0]
    shape = replace(shape, mode=Open())
    assert [when_s for when_s, _ in WorkloadDriver.of(trace, shape).first(now=7.0)] == [17.0, 20.0]
    shape = replace(shape, mode=Capped(1))
    assert [when_s for when_s, _ in WorkloadDriver.of(trace, shape).first(now=7.0)] == [7.0, 67.0]


def test_poisson_arrivals_have_their_rate_and_are_the_same_sessions_at_every_rate() -> None:
    trace = generate("chat", Options(sessions=400))

    def starts_s(per_s: float) -> list[float]:
        shape = WorkloadShape(arrivals=Poisson(per_s), sessions=Sample(400))
        return [when_s for when_s, _ in WorkloadDriver.of(trace, shape).first()]

    assert starts_s(2.0)[-1] == pytest.approx(200, rel=0.15)
    assert starts_s(4.0) == pytest.approx([when_s / 2 for when_s in starts_s(2.0)])


def test_sessions_are_taken_first_or_drawn_by_the_seed() -> None:
    trace = generate("swe", Options(sessions=10))

    def lengths(shape: WorkloadShape) -> list[int]:
        workload = WorkloadDriver.of(trace, shape)
        return [workload.input_tokens_in(number) for number in range(workload.sessions)]

    everyone = lengths(WorkloadShape())
    assert lengths(WorkloadShape(sessions=First(4))) == everyone[:4]
    assert sorted(lengths(WorkloadShape(sessions=Sample(10), seed=3))) == sorted(everyone)
    drawn = {tuple(lengths(WorkloadShape(sessions=Sample(4), seed=seed))) for seed in range(8)}
    assert len(drawn) > 4
    assert sorted(lengths(WorkloadShape(sessions=Sample(20)))) == sorted(everyone * 2)


def test_skew_gives_the_largest_sessions_the_wanted_share() -> None:
    trace = generate("coding-agent", Options(sessions=120, max_input_tokens=100_000))
    for share in (0.2, 0.465, 0.6):
        workload = WorkloadDriver.of(trace, WorkloadShape(skew=TopShare(share)))
        held = sorted((workload.input_tokens_in(n) for n in range(120)), reverse=True)
        assert sum(held[:2]) / sum(held) == pytest.approx(share, abs=0.02)
        assert len(Walk(workload).done) == workload.requests < trace.request_count


def test_steeper_is_more_skewed_and_cuts_only_from_the_end() -> None:
    trace = generate("coding-agent", Options(sessions=50, max_input_tokens=100_000))
    turns = []
    for alpha in (0.0, 0.5, 1.0, 2.0):
        workload = WorkloadDriver.of(trace, WorkloadShape(skew=Zipf(alpha)))
        turns.append([workload.requests_in(number) for number in range(50)])
        assert min(turns[-1]) >= 1
    assert turns[0] == [len(session.requests) for session in trace.sessions]
    for gentle, steep in pairwise(turns):
        assert sum(steep) < sum(gentle)
        assert all(few <= many for few, many in zip(steep, gentle, strict=True))


def test_a_skew_that_these_sessions_can_not_have_is_refused() -> None:
    trace = generate("coding-agent", Options(sessions=100))
    with pytest.raises(InvalidInput, match=r"skew.share: 0.001 can't be had"):
        WorkloadDriver.of(trace, WorkloadShape(skew=TopShare(0.001)))
    with pytest.raises(InvalidInput, match=r"skew.share: 0.9999 can't be had"):
        WorkloadDriver.of(trace, WorkloadShape(skew=TopShare(0.9999)))


@pytest.mark.parametrize(
    ("shape", "field"),
    [
        (WorkloadShape(mode=Capped(0)), "mode.lanes"),
        (WorkloadShape(arrivals=Poisson(0.0)), "arrivals.per_s"),
        (WorkloadShape(sessions=First(0)), "sessions.count"),
        (WorkloadShape(sessions=Sample(-1)), "sessions.count"),
        (WorkloadShape(skew=Zipf(-1.0)), "skew.alpha"),
        (WorkloadShape(skew=TopShare(1.0)), "skew.share"),
        (WorkloadShape(skew=TopShare(0.5, top=0.0)), "skew.top"),
        (WorkloadShape(time_scale=float("nan")), "time_scale"),
        (WorkloadShape(tool_scale=-0.1), "tool_scale"),
        (WorkloadShape(unit_tokens=0), "unit_tokens"),
    ],
)
def test_a_choice_out_of_range_is_named(shape: WorkloadShape, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        WorkloadDriver.of(of_one(request(0)), shape)
    assert caught.value.field == field


def test_a_trace_without_requests_is_refused() -> None:
    with pytest.raises(InvalidInput, match="has no requests"):
        WorkloadDriver.of(replace(of_one(request(0)), sessions=()), WorkloadShape())
