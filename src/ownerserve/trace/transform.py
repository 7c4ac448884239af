"""This module makes traces from traces: cut, slowed, scaled to a small model, heads shared.

Each keeps the structure: who waits for whom, and which prompts share how much.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.trace.model import Run, Runs, Trace, TraceRequest, TraceSession
from ownerserve.trace.runs import blocks, common_prefix, concat, drop, encode, take

replace = msgspec.structs.replace


def keep(
    trace: Trace,
    *,
    sessions: int | None = None,
    turns: int | None = None,
    max_input_tokens: int | None = None,
) -> Trace:
    """Return the first `sessions` sessions, of each the first `turns` requests, and of those the
    ones before the first whose prompt is longer than `max_input_tokens`.

    Cutting from the end keeps every wait inside the session. Sessions left empty are dropped.
    """
    kept = []
    for session in trace.sessions:
        requests = session.requests[:turns]
        if max_input_tokens is not None:
            too_long = (i for i, r in enumerate(requests) if r.input_tokens > max_input_tokens)
            requests = requests[: next(too_long, len(requests))]
        if requests:
            kept.append(replace(session, requests=requests))
        if len(kept) == sessions:
            break
    return replace(trace, sessions=tuple(kept))


def scale_gaps(trace: Trace, factor: float) -> Trace:
    """Return the trace with all waits (tools, people) and arrivals times `factor`; service times
    stay as recorded."""

    def scaled(request: TraceRequest) -> TraceRequest:
        think_s = None if request.think_s is None else request.think_s * factor
        return replace(request, start_s=request.start_s * factor, think_s=think_s)

    return replace(
        trace,
        sessions=tuple(
            replace(s, start_s=s.start_s * factor, requests=tuple(map(scaled, s.requests)))
            for s in trace.sessions
        ),
    )


def scale_lengths(
    trace: Trace, *, factor: float | None = None, max_tokens: int | None = None
) -> Trace:
    """Return the trace with all lengths times `factor`, or by the factor that makes the longest
    prompt + answer fit `max_tokens`. Which prompts share a prefix, and where they part, stays as it
    was.

    g old blocks become one new block of n tokens, with n/g the best fraction not above what was
    asked for; so a part shared up to block k is shared up to block floor(k/g). Without block ids
    lengths are scaled alone. A prompt keeps at least one token, an answer that had any also.
    """
    if (factor is None) == (max_tokens is None):
        raise InvalidInput("scale_lengths", "factor and max_tokens exclude each other", "give one")
    if max_tokens is not None:
        longest = max(r.input_tokens + r.output_tokens for s in trace.sessions for r in s.requests)
        factor = min(1.0, max_tokens / longest)
    assert factor is not None
    if not 0 < factor <= 1:
        raise InvalidInput("factor", f"{factor} is out of range", "use 0 < factor <= 1")
    if trace.ids == "none":
        return _map_requests(trace, lambda request: _shorter(request, factor))
    new_tokens, group = _fraction(factor * trace.block_tokens)
    scaler = _Scaler(trace.block_tokens, new_tokens, group)
    sessions = []
    for session in trace.sessions:
        if trace.ids == "session":
            scaler.forget_ids()
        sessions.append(replace(session, requests=scaler.session(session)))
    return replace(trace, block_tokens=new_tokens, sessions=tuple(sessions))


def _map_requests(trace: Trace, change: Callable[[TraceRequest], TraceRequest]) -> Trace:
    return replace(
        trace,
        sessions=tuple(
            replace(session, requests=tuple(map(change, session.requests)))
            for session in trace.sessions
        ),
    )


def _shorter(request: TraceRequest, factor: float) -> TraceRequest:
    return replace(
        request,
        input_tokens=max(1, int(request.input_tokens * factor)),
        output_tokens=ceil(request.output_tokens * factor),
    )


def _fraction(tokens_per_block: float) -> tuple[int, int]:
    """Return (n, g): the largest n/g <= `tokens_per_block`, of the eight smallest g that give n >=
    1."""
    smallest = max(1, ceil(1 / tokens_per_block - 1e-9))
    candidates = [(int(g * tokens_per_block + 1e-9), g) for g in range(smallest, smallest + 8)]
    return max(candidates, key=lambda pair: (pair[0] / pair[1], -pair[1]))


class _Scaler:
    """A scaler owns the ids of new blocks: one for each old block that ends a group of g.

    Old ids are chained, so the last block of a group stands for the whole prefix up to it.
    """

    def __init__(self, old_tokens: int, new_tokens: int, group: int) -> None:
        self._old_tokens, self._new_tokens, self._group = old_tokens, new_tokens, group
        self._factor = new_tokens / (group * old_tokens)
        self._new_id: dict[int, int] = {}

    def forget_ids(self) -> None:
        """Forget the old ids: those of the next session mean something else."""
        self._new_id.clear()

    def session(self, session: TraceSession) -> tuple[TraceRequest, ...]:
        """Return the scaled requests. Only blocks that a turn adds to the one before it are looked
        at singly."""
        scaled = []
        old: Runs = ()
        new: Runs = ()
        for request in session.requests:
            full = request.input_tokens // self._old_tokens
            runs = take(request.runs, full)
            groups = blocks(runs) // self._group
            shared = min(common_prefix(old, runs) // self._group, groups)
            ends = _every(drop(runs, shared * self._group), self._group)
            added = [self._new_id.setdefault(block, len(self._new_id)) for block in ends]
            old, new = runs, concat(take(new, shared), encode(added))
            rest = request.input_tokens - groups * self._group * self._old_tokens
            length = groups * self._new_tokens + int(rest * self._factor)
            scaled.append(
                replace(
                    request,
                    input_tokens=max(1, length),
                    output_tokens=ceil(request.output_tokens * self._factor),
                    runs=new,
                )
            )
        return tuple(scaled)


def _every(runs: Runs, group: int) -> list[int]:
    """Return the last id of each full group of `group` consecutive blocks."""
    ends: list[int] = []
    before = 0  # blocks in front of this run, modulo the group
    for first, count in runs:
        ends.extend(range(first + group - 1 - before, first + count, group))
        before = (before + count) % group
    return ends


def share_heads(trace: Trace) -> Trace:
    """Make session-local ids global, taking heads of equal (tool, system, model) as equal.

    An estimate: that two heads of equal sizes hold the same text was never recorded. Traces
    whose ids are global already come back as they are.
    """
    if trace.ids != "session":
        return trace
    bases: dict[tuple[int, int, str], int] = {}
    free = 0
    for session in trace.sessions:
        for agent in session.agents:
            key = (agent.tool_tokens, agent.system_tokens, agent.model)
            if key not in bases:
                bases[key] = free
                free += (agent.tool_tokens + agent.system_tokens) // trace.block_tokens
    sessions = []
    for session in trace.sessions:
        heads = _heads(session, trace.block_tokens, bases)
        top = max((first + count for r in session.requests for first, count in r.runs), default=0)
        requests = tuple(replace(r, runs=_globalise(r.runs, heads, free)) for r in session.requests)
        sessions.append(replace(session, requests=requests))
        free += top
    return replace(trace, ids="trace", sessions=tuple(sessions))


def _heads(
    session: TraceSession, block_tokens: int, bases: dict[tuple[int, int, str], int]
) -> list[tuple[Runs, int]]:
    """Return (local ids of a head, its global base), no two beginning alike."""
    heads: list[tuple[Runs, int]] = []
    done: set[int] = set()
    for request in session.requests:
        agent = session.agents[request.agent]
        size = (agent.tool_tokens + agent.system_tokens) // block_tokens
        if request.agent in done or not size or blocks(request.runs) < size:
            continue
        done.add(request.agent)
        head = take(request.runs, size)
        if not any(common_prefix(head, other) for other, _ in heads):
            heads.append((head, bases[agent.tool_tokens, agent.system_tokens, agent.model]))
    return heads


def _globalise(runs: Runs, heads: list[tuple[Runs, int]], offset: int) -> Runs:
    for head, base in heads:
        shared = common_prefix(head, runs)
        if shared:
            first: Run = (base, shared)
            return concat((first,), _shift(drop(runs, shared), offset))
    return _shift(runs, offset)


def _shift(runs: Runs, offset: int) -> Runs:
    return tuple((first + offset, count) for first, count in runs)
