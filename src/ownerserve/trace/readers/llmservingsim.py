"""This module reads LLMServingSim 2.0's workloads and the timings its benchmarks record of real
vLLM runs.

Workload (its docs/workloads/jsonl-format.md), both kinds may stand in one file: a session a line
with `arrival_time_ns` and `sub_requests[]` of `input_toks`, `output_toks`, `tool_duration_ns`
(the wait *after* that call), or a flat request a line. Token ids (`input_tok_ids`) are optional;
with them, prefixes are known in 16-token blocks. Within a session only waits are recorded, so
`start_s` here counts waits alone, as if each call took no time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from ownerserve.trace.lines import Problems, TraceLine
from ownerserve.trace.model import Runs, Trace, TraceRequest, TraceSession
from ownerserve.trace.readers.base import Chainer, FirstRecord, decode_each

BLOCK_TOKENS = 16
NS = 1e-9
Count = Annotated[int, msgspec.Meta(ge=0)]


class _Call(msgspec.Struct):
    input_toks: Count
    output_toks: Count
    tool_duration_ns: Count = 0
    input_tok_ids: list[int] | None = None


class _Row(msgspec.Struct):
    """A row is a session (`sub_requests`) or a flat request (lengths of its own)."""

    arrival_time_ns: Count
    session_id: str | int | None = None
    sub_requests: list[_Call] | None = None
    input_toks: Count | None = None
    output_toks: Count | None = None
    input_tok_ids: list[int] | None = None


class _Timing(msgspec.Struct):
    input_toks: Count
    output_toks: Count
    arrival_time: float
    queued_ts: float
    first_token_ts: float
    last_token_ts: float
    request_id: str = ""


class LlmServingSimReader:
    """This reader reads LLMServingSim 2.0's workloads."""

    name = "llmservingsim"
    about = "LLMServingSim workloads: sub_requests with tool_duration_ns, or flat requests"

    def claims(self, head: FirstRecord) -> bool:
        """Return whether a file that begins with `head` is of this format."""
        return "arrival_time_ns" in head.keys and bool({"sub_requests", "input_toks"} & head.keys)

    def read(self, lines: Iterable[TraceLine], problems: Problems) -> Trace:
        """Return a trace without a name; a record that can't be used is reported and left out."""
        chainer = Chainer()
        sessions: list[TraceSession] = []
        for line, row in decode_each(msgspec.json.Decoder(_Row), lines, problems):
            calls = row.sub_requests
            if calls is None and row.input_toks is not None and row.output_toks is not None:
                calls = [_Call(row.input_toks, row.output_toks, input_tok_ids=row.input_tok_ids)]
            reason = _reason(calls)
            if reason is not None or not calls:
                problems.report(line, reason or "has neither sub_requests nor input_toks")
                continue
            name = f"r{line.number}" if row.session_id is None else str(row.session_id)
            requests = _chain(calls, chainer)
            sessions.append(TraceSession(name, requests, row.arrival_time_ns * NS))
        sessions.sort(key=lambda session: session.start_s)
        known = any(session.requests[0].runs for session in sessions)
        grouped = any(len(session.requests) > 1 for session in sessions)
        return Trace(
            "",
            self.name,
            BLOCK_TOKENS if known else 0,
            "trace" if known else "none",
            "recorded" if grouped else "unknown",
            "recorded",
            tuple(sessions),
        )


class VllmTimingsReader:
    """This reader reads the timings that LLMServingSim's benchmarks record of vLLM runs."""

    name = "vllm-timings"
    about = "LLMServingSim bench: per-request timings of a real vLLM run"

    def claims(self, head: FirstRecord) -> bool:
        """Return whether a file that begins with `head` is of this format."""
        return {"input_toks", "queued_ts", "last_token_ts"} <= head.keys

    def read(self, lines: Iterable[TraceLine], problems: Problems) -> Trace:
        """Return a trace without a name; a record that can't be used is reported and left out."""
        decoder = msgspec.json.Decoder(_Timing)
        rows = [row for _, row in decode_each(decoder, lines, problems)]
        rows.sort(key=lambda row: row.arrival_time)
        sessions = tuple(
            TraceSession(
                row.request_id or f"r{number}",
                (
                    TraceRequest(
                        start_s=0.0,
                        input_tokens=row.input_toks,
                        output_tokens=row.output_toks,
                        api_s=row.last_token_ts - row.queued_ts,
                        ttft_s=row.first_token_ts - row.queued_ts,
                    ),
                ),
                row.arrival_time - rows[0].arrival_time,
            )
            for number, row in enumerate(rows)
        )
        return Trace("", self.name, 0, "none", "unknown", "recorded", sessions)


def _reason(calls: list[_Call] | None) -> str | None:
    for call in calls or ():
        if call.input_tok_ids is not None and len(call.input_tok_ids) != call.input_toks:
            return f"input_toks is {call.input_toks}, input_tok_ids has {len(call.input_tok_ids)}"
    return None


def _chain(calls: list[_Call], chainer: Chainer) -> tuple[TraceRequest, ...]:
    requests = []
    start_s, wait_s = 0.0, 0.0
    for number, call in enumerate(calls):
        start_s += wait_s
        last = number == len(calls) - 1
        requests.append(
            TraceRequest(
                start_s=start_s,
                input_tokens=call.input_toks,
                output_tokens=call.output_toks,
                runs=_runs(call.input_tok_ids, chainer),
                think_s=wait_s if number else None,
                stop="end_turn" if last else "tool_use",
            )
        )
        wait_s = call.tool_duration_ns * NS
    return tuple(requests)


def _runs(tokens: list[int] | None, chainer: Chainer) -> Runs:
    if tokens is None:
        return ()
    whole = len(tokens) - len(tokens) % BLOCK_TOKENS
    return chainer.runs(
        tuple(tokens[at : at + BLOCK_TOKENS]) for at in range(0, whole, BLOCK_TOKENS)
    )
