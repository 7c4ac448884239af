"""Who waits for whom, and for how long."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ownerserve.trace.model import TraceRequest, TraceSession, fault, release_delay_s, waits_for
from ownerserve.trace.read import read_trace


def test_a_join_waits_for_all_and_counts_from_the_last(fixtures: Path) -> None:
    session = read_trace(fixtures / "own.jsonl").sessions[0]
    waits = waits_for(session)
    assert waits == [(), (0,), (0, 1)]
    assert [release_delay_s(session, i, w) for i, w in enumerate(waits)] == [0.0, 0.5, 0.5]


def test_without_a_think_time_the_recorded_gap_counts_less_the_service() -> None:
    first = TraceRequest(0.0, 10, 1, api_s=2.0)
    session = TraceSession("s", (first, TraceRequest(7.0, 20, 1)))
    assert release_delay_s(session, 1, (0,)) == 5.0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"start_s": -1.0}, "starts before"),
        ({"agent": 3}, "of 2 agents"),
        ({"after": (2,)}, "earlier requests"),
        ({"after": (-1,)}, "earlier requests"),
        ({"output_tokens": -1}, "negative length"),
        ({"runs": ((4, 0),)}, "empty or negative run"),
    ],
)
def test_faults_are_named(fixtures: Path, change: dict[str, object], problem: str) -> None:
    session = read_trace(fixtures / "own.jsonl").sessions[0]
    assert fault(session) is None
    *before, last = session.requests
    bad = msgspec.structs.replace(last, **change)
    reason = fault(msgspec.structs.replace(session, requests=(*before, bad)))
    assert reason is not None
    assert problem in reason
