"""This module measures what a workload is like: the quantities of docs/traces.md, from one pass
over requests.

Field names are the JSON keys of `ownerserve trace stats`; None where the trace does not record
what a quantity needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from math import ceil

import msgspec
import numpy as np

from ownerserve.trace.model import Trace, TraceSession, waits_for
from ownerserve.trace.reuse import Reuse, ideal_reuse

LONG_GAPS_S = (60.0, 300.0)


class Distribution(msgspec.Struct, frozen=True):
    """A distribution has six numbers; percentiles interpolate linearly."""

    count: int
    mean: float
    p10: float
    p50: float
    p90: float
    p99: float


class GapsAfter(msgspec.Struct, frozen=True):
    """The gaps are the think times after one stop reason, and how much of them is long."""

    spread: Distribution
    share_over_60s: float
    share_over_300s: float


class CachedShare(msgspec.Struct, frozen=True):
    """The share is the ideal cached-token share. `estimated`: equal heads of different sessions
    were assumed."""

    any_session: float
    intra_session: float
    estimated: bool


class ReuseSplit(msgspec.Struct, frozen=True):
    """The split says where re-usable tokens were last seen; shares of 1."""

    intra_session: float
    cross_session: float
    shared_head: float


class InputShare(msgspec.Struct, frozen=True):
    """The share is that of all input tokens in the largest 1 % and 10 % of sessions."""

    top1: float
    top10: float


class TraceStats(msgspec.Struct, frozen=True):
    """The statistics describe one trace; docs/traces.md defines each quantity."""

    name: str
    origin: str
    requests: int
    sessions: int
    sub_agents: int
    grouping: str
    total_input_tokens: int
    total_output_tokens: int
    input_output_ratio: float
    turns_per_session: Distribution
    input_tokens: Distribution
    output_tokens: Distribution
    uncached_suffix_tokens: Distribution | None
    gap_s: Distribution | None
    think_s_after: dict[str, GapsAfter]
    api_s: Distribution | None
    api_share_of_tool_loop: float | None
    ideal_cached_token_share: CachedShare | None
    reuse_split: ReuseSplit | None
    input_share: InputShare


def spread(values: Iterable[float]) -> Distribution | None:
    """Return the distribution of `values`, or None when there are none."""
    array = np.fromiter(values, dtype=np.float64)
    if not array.size:
        return None
    p10, p50, p90, p99 = (float(p) for p in np.percentile(array, (10, 50, 90, 99)))
    return Distribution(array.size, float(array.mean()), p10, p50, p90, p99)


def measure(trace: Trace) -> TraceStats:
    """Measure all statistics of a trace. Raises nothing: a trace has at least one request."""
    sessions = trace.sessions
    requests = [request for session in sessions for request in session.requests]
    inputs = sum(r.input_tokens for r in requests)
    outputs = sum(r.output_tokens for r in requests)
    thinks = _think_after(sessions)
    api_s = [r.api_s for r in requests if r.api_s is not None]
    reuse = ideal_reuse(trace)
    return TraceStats(
        name=trace.name,
        origin=trace.origin,
        requests=len(requests),
        sessions=len(sessions),
        sub_agents=sum(len(session.agents) - 1 for session in sessions),
        grouping=trace.grouping,
        total_input_tokens=inputs,
        total_output_tokens=outputs,
        input_output_ratio=inputs / max(1, outputs),
        turns_per_session=_sure(len(session.requests) for session in sessions),
        input_tokens=_sure(r.input_tokens for r in requests),
        output_tokens=_sure(r.output_tokens for r in requests),
        uncached_suffix_tokens=None if reuse is None else spread(reuse.uncached_suffix()),
        gap_s=spread(_start_gaps(sessions)),
        think_s_after={stop: _gaps(values) for stop, values in sorted(thinks.items())},
        api_s=spread(api_s),
        api_share_of_tool_loop=_api_share(api_s, thinks.get("tool_use", [])),
        ideal_cached_token_share=None if reuse is None else _cached_share(trace, reuse),
        reuse_split=None if reuse is None else ReuseSplit(*reuse.split()),
        input_share=_input_share(sessions),
    )


def _sure(values: Iterable[float]) -> Distribution:
    found = spread(values)
    assert found is not None, "readers and generators make no trace without requests"
    return found


def _cached_share(trace: Trace, reuse: Reuse) -> CachedShare:
    any_session, intra_session = reuse.shares()
    return CachedShare(any_session, intra_session, estimated=trace.ids == "session")


def _start_gaps(sessions: Iterable[TraceSession]) -> Iterable[float]:
    """Yield the seconds between the starts of successive requests of a session."""
    for session in sessions:
        requests = session.requests
        for earlier, later in pairwise(requests):
            yield later.start_s - earlier.start_s


def _think_after(sessions: Iterable[TraceSession]) -> dict[str, list[float]]:
    """Return think times by the stop reason of the same agent's request before."""
    after: dict[str, list[float]] = {}
    for session in sessions:
        for request, waits in zip(session.requests, waits_for(session), strict=True):
            own = [w for w in waits if session.requests[w].agent == request.agent]
            if request.think_s is not None and own:
                stop = session.requests[max(own)].stop or "unknown"
                after.setdefault(stop, []).append(request.think_s)
    return after


def _gaps(values: list[float]) -> GapsAfter:
    array = np.array(values)
    over = [float((array > limit).mean()) for limit in LONG_GAPS_S]
    return GapsAfter(_sure(values), over[0], over[1])


def _api_share(api_s: list[float], tool_s: list[float]) -> float | None:
    """Return service time / (service + tool time): how tightly the loop is coupled to the
    service."""
    if not api_s or not tool_s:
        return None
    return sum(api_s) / (sum(api_s) + sum(tool_s))


def _input_share(sessions: tuple[TraceSession, ...]) -> InputShare:
    tokens = np.sort([sum(r.input_tokens for r in session.requests) for session in sessions])[::-1]
    total = max(1, int(tokens.sum()))
    top1, top10 = (
        float(tokens[: ceil(len(tokens) * share)].sum() / total) for share in (0.01, 0.10)
    )
    return InputShare(top1, top10)
