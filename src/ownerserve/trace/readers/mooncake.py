"""This module reads Mooncake's FAST'25 traces: one request a line, no sessions.

`timestamp` in ms, `input_length`, `output_length`, `hash_ids` of 512-token blocks, the last one
partial. Sessions are inferred from re-use (infer.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from ownerserve.trace.infer import infer_sessions
from ownerserve.trace.lines import Problems, TraceLine
from ownerserve.trace.model import Trace, TraceRequest
from ownerserve.trace.readers.base import Chainer, FirstRecord, blocks_fit, decode_each, in_order

BLOCK_TOKENS = 512
Count = Annotated[int, msgspec.Meta(ge=0)]


class _Row(msgspec.Struct, gc=False):
    timestamp: float
    input_length: Count
    output_length: Count
    hash_ids: list[int]


class MooncakeReader:
    """This reader reads Mooncake's FAST'25 traces."""

    name = "mooncake"
    about = "Mooncake FAST'25: a request a line, 512-token block ids; sessions are inferred"

    def claims(self, head: FirstRecord) -> bool:
        """Return whether a file that begins with `head` is of this format."""
        has = {"timestamp", "input_length", "hash_ids"} <= head.keys
        return has and not {"chat_id", "session_id"} & head.keys

    def read(self, lines: Iterable[TraceLine], problems: Problems) -> Trace:
        """Return a trace without a name; a record that can't be used is reported and left out."""
        chainer = Chainer()
        requests: list[TraceRequest] = []
        for line, row in decode_each(msgspec.json.Decoder(_Row), lines, problems):
            reason = blocks_fit(len(row.hash_ids), BLOCK_TOKENS, row.input_length)
            if reason is not None:
                problems.report(line, reason)
                continue
            runs = chainer.runs(row.hash_ids)
            requests.append(
                TraceRequest(row.timestamp / 1000, row.input_length, row.output_length, runs)
            )
        requests.sort(key=lambda request: request.start_s)
        grouped: dict[str, list[TraceRequest]] = {}
        for request, session in zip(requests, infer_sessions(requests), strict=True):
            grouped.setdefault(f"s{session}", []).append(request)
        return Trace(
            "", self.name, BLOCK_TOKENS, "trace", "inferred", "recorded", in_order(grouped)
        )
