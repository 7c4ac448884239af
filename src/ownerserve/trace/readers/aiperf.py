"""This module reads the agentic sessions that AIPerf synthesizes: Mooncake's words, a turn a line.

A session's first line has its whole prompt; each later one only what is added to the prompt and the
answer before it, `delay` ms after that answer's end. `hash_ids` number 512-token blocks from the
beginning of what the line adds: equal ones in a first line are a prefix in common.

    {"session_id": "a", "input_length": 1100, "output_length": 90, "hash_ids": [0, 1, 7]}
    {"session_id": "a", "input_length": 300, "output_length": 20, "hash_ids": [8], "delay": 1800}
                        prompt: 1100 + 90 + 300
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from ownerserve.trace.lines import Problems, TraceLine
from ownerserve.trace.model import Arrivals, Trace, TraceRequest, TraceSession
from ownerserve.trace.readers.base import Chainer, FirstRecord, blocks_fit, decode_each
from ownerserve.trace.readers.mooncake import BLOCK_TOKENS, Count

Duration = Annotated[float, msgspec.Meta(ge=0)]


class _Row(msgspec.Struct, gc=False):
    session_id: str
    input_length: Count
    output_length: Count
    hash_ids: list[int]
    timestamp: Duration | None = None
    delay: Duration | None = None


class _Growing:
    """A session as far as it was read: `keys` name the full blocks of its newest prompt."""

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self.keys: list[object] = []
        self.requests: list[TraceRequest] = []


class AiperfReader:
    """This reader reads AIPerf's `synthesize agentic-code`, and Mooncake lines with sessions of any
    other source."""

    name = "aiperf"
    about = "AIPerf's synthesized sessions: Mooncake lines with session_id, deltas and delays"

    def claims(self, head: FirstRecord) -> bool:
        """Return whether a file that begins with `head` is of this format."""
        return {"session_id", "input_length", "hash_ids"} <= head.keys

    def read(self, lines: Iterable[TraceLine], problems: Problems) -> Trace:
        """Return a trace without a name; a record that can't be used is reported and left out."""
        chainer = Chainer()
        sessions: dict[str, _Growing] = {}
        for line, row in decode_each(msgspec.json.Decoder(_Row), lines, problems):
            reason = blocks_fit(len(row.hash_ids), BLOCK_TOKENS, row.input_length)
            session = sessions.get(row.session_id)
            if reason is None and session is not None and row.delay is None:
                reason = "delay is missing: a session's later lines say how long after the answer"
            if reason is not None:
                problems.report(line, reason)
                continue
            if session is None:
                session = sessions[row.session_id] = _Growing((row.timestamp or 0.0) / 1000)
            _grow(session, row, chainer)
        are_timed = any(session.start_s for session in sessions.values())
        found = [
            TraceSession(name, tuple(session.requests), session.start_s)
            for name, session in sessions.items()
        ]
        found.sort(key=lambda session: session.start_s)
        arrivals: Arrivals = "recorded" if are_timed else "unknown"
        return Trace("", self.name, BLOCK_TOKENS, "trace", "recorded", arrivals, tuple(found))


def _grow(session: _Growing, row: _Row, chainer: Chainer) -> None:
    """Add a turn. What it adds has no blocks in common with anybody, but a first prompt's begin."""
    before, keys = session.requests, session.keys
    start_s, prompt_tokens = 0.0, row.input_length
    if before:
        prompt_tokens += before[-1].input_tokens + before[-1].output_tokens
        start_s = before[-1].start_s + (row.delay or 0.0) / 1000
    else:
        keys.extend(row.hash_ids[: prompt_tokens // BLOCK_TOKENS])
    while len(keys) < prompt_tokens // BLOCK_TOKENS:
        keys.append((row.session_id, len(keys)))
    think_s = None if not before else (row.delay or 0.0) / 1000
    request = TraceRequest(
        start_s, prompt_tokens, row.output_length, chainer.runs(keys), think_s=think_s
    )
    before.append(request)
