"""This module reads Claude-Code sessions as recorded by WEKA (kv-cache-tester), one JSON object a
session.

Reads the origin's form (`hash_ids`, a `.json` file a session) and its run-length form
(`hash_runs`, a line a session). Field meanings: the origin's docs/trace_replay_tester.md.

A nested record of type `subagent` stands where its *answer* came back: its `t` is the end, `t -
duration_ms` its start, and its own requests count from that start. It was spawned by the request
listed before it and the next request of its parent waits for it, together with others that stand
beside it.

`think_time` after a streamed request without `api_time` contradicts the recorded starts (in 98 %
of 4,157 cases it is longer than start to start); such a value is dropped, the starts stand.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from ownerserve.trace.draft import end_s, settle
from ownerserve.trace.lines import Problems, TraceLine
from ownerserve.trace.model import Agent, IdScope, Runs, Trace, TraceRequest, TraceSession, fault
from ownerserve.trace.readers.base import FirstRecord, decode_each, misfit
from ownerserve.trace.runs import encode

# Contradictions are told from rounding: starts are recorded in whole seconds.
CLOCK_SLACK_S = 2.0

Count = Annotated[int, msgspec.Meta(ge=0)]


class _Turn(msgspec.Struct, gc=False):
    t: float
    input_tokens: Count = msgspec.field(name="in")
    output_tokens: Count = msgspec.field(name="out")
    model: str = ""
    hash_runs: Runs | None = None
    hash_ids: list[int] | None = None
    stop: str | None = None
    api_time: float | None = None
    think_time: float | None = None
    ttft: float | None = None


class _Plain(_Turn, tag_field="type", tag="n", gc=False):
    kind = "plain"


class _Streamed(_Turn, tag_field="type", tag="s", gc=False):
    kind = "streamed"


class _SubAgent(msgspec.Struct, tag_field="type", tag="subagent"):
    t: float
    requests: list[_Plain | _Streamed | _SubAgent]
    agent_id: str = ""
    subagent_type: str | None = None
    duration_ms: float | None = None
    models: list[str] = []
    tool_tokens: Count | None = None
    system_tokens: Count | None = None


class _Session(msgspec.Struct):
    id: str
    requests: list[_Plain | _Streamed | _SubAgent]
    block_size: Annotated[int, msgspec.Meta(gt=0)] = 64
    hash_id_scope: str = "local"
    models: list[str] = []
    tool_tokens: Count | None = None
    system_tokens: Count | None = None


class WekaReader:
    """This reader reads Claude-Code sessions as WEKA recorded them."""

    name = "weka"
    about = "Claude-Code sessions by WEKA: a session a line (hash_runs) or a file (hash_ids)"

    def claims(self, head: FirstRecord) -> bool:
        """Return whether a file that begins with `head` is of this format."""
        return {"requests", "block_size"} <= head.keys and "ownerserve_trace" not in head.keys

    def read(self, lines: Iterable[TraceLine], problems: Problems) -> Trace:
        """Return a trace without a name; a record that can't be used is reported and left out."""
        decoder = msgspec.json.Decoder(_Session)
        sessions: list[TraceSession] = []
        block_tokens, scope = 64, "local"
        for line, row in decode_each(decoder, lines, problems):
            if not sessions:
                block_tokens, scope = row.block_size, row.hash_id_scope
            elif (row.block_size, row.hash_id_scope) != (block_tokens, scope):
                problems.report(
                    line, f"block_size {row.block_size} or scope differs from the first"
                )
                continue
            session = _translate(row)
            reason = fault(session) or misfit(session, block_tokens)
            if reason is not None:
                problems.report(line, reason)
            elif session.requests:
                sessions.append(session)
        ids: IdScope = "trace" if scope == "global" else "session"
        return Trace("", self.name, block_tokens, ids, "recorded", "unknown", tuple(sessions))


def _translate(row: _Session) -> TraceSession:
    agents = [_agent("main", row)]
    drafts: list[TraceRequest] = []
    _converse(row.requests, agent=0, base_s=0.0, spawned_by=(), drafts=drafts, agents=agents)
    return TraceSession(row.id, settle(drafts), agents=tuple(agents))


def _agent(name: str, row: _Session | _SubAgent) -> Agent:
    kind = row.subagent_type if isinstance(row, _SubAgent) else None
    model = row.models[0] if row.models else ""
    return Agent(name, kind or "", model, row.tool_tokens or 0, row.system_tokens or 0)


def _converse(
    entries: list[_Plain | _Streamed | _SubAgent],
    *,
    agent: int,
    base_s: float,
    spawned_by: tuple[int, ...],
    drafts: list[TraceRequest],
    agents: list[Agent],
) -> int | None:
    """Draft one agent's conversation and those it spawns; returns its last draft's number.

    Drafts are made so that each one's waits are made before it and start no later.
    """
    previous: int | None = None
    returned: list[tuple[int, float]] = []  # (last draft of a sub-agent, when it came back)
    for entry in entries:
        spawner = spawned_by if previous is None else (previous,)
        if isinstance(entry, _SubAgent):
            agents.append(_agent(entry.agent_id, entry))
            last = _converse(
                entry.requests,
                agent=len(agents) - 1,
                base_s=base_s + entry.t - _duration_s(entry),
                spawned_by=spawner,
                drafts=drafts,
                agents=agents,
            )
            if last is not None:
                returned.append((last, base_s + entry.t))
            continue
        waits = (*spawner, *(number for number, _ in returned))
        start_s = max([base_s + entry.t, *(drafts[number].start_s for number in waits)])
        request = _request(entry, start_s, agent=agent)
        if previous is not None and not _credible(drafts[previous], request):
            request = msgspec.structs.replace(request, think_s=None)
        if returned or (previous is None and waits):
            ends_s = [at_s for _, at_s in returned] + [end_s(drafts[n]) for n in spawner]
            think_s = max(0.0, start_s - max(ends_s))
            request = msgspec.structs.replace(request, after=waits, think_s=think_s)
        drafts.append(request)
        previous, returned = len(drafts) - 1, []
    return previous


def _credible(earlier: TraceRequest, later: TraceRequest) -> bool:
    gap_s = later.start_s - earlier.start_s
    return later.think_s is None or later.think_s <= gap_s + CLOCK_SLACK_S


def _duration_s(entry: _SubAgent) -> float:
    """Return how long a sub-agent ran; where not recorded, until the end of its last request."""
    if entry.duration_ms is not None:
        return entry.duration_ms / 1000
    turns = [turn for turn in entry.requests if not isinstance(turn, _SubAgent)]
    return max((turn.t + (turn.api_time or 0.0) for turn in turns), default=0.0)


def _request(turn: _Plain | _Streamed, start_s: float, *, agent: int) -> TraceRequest:
    return TraceRequest(
        start_s=start_s,
        input_tokens=turn.input_tokens,
        output_tokens=turn.output_tokens,
        runs=turn.hash_runs if turn.hash_runs is not None else encode(turn.hash_ids or ()),
        agent=agent,
        think_s=turn.think_time,
        api_s=turn.api_time,
        ttft_s=turn.ttft,
        stop=turn.stop or "",
        model=turn.model,
        kind=turn.kind,
    )
