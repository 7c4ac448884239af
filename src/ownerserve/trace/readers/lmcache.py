"""This module reads LMCache's agent traces: one request a line, sessions recorded, starts only.

Two forms. Blocks: `timestamp` (s), `session`, `input_length`, `output_length`, `hash_runs` of
16-token blocks. Texts, as the origin has them: `timestamp` (us), `session_id`, `input`, `output`;
no tokenizer is at hand here, so a token is taken as 4 bytes of UTF-8 and lengths are estimates.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from ownerserve.trace.lines import Problems, TraceLine
from ownerserve.trace.model import Runs, Trace, TraceRequest
from ownerserve.trace.readers.base import Chainer, FirstRecord, blocks_fit, decode_each, in_order
from ownerserve.trace.runs import blocks

BLOCK_TOKENS = 16
TEXT_BYTES_PER_TOKEN = 4
Count = Annotated[int, msgspec.Meta(ge=0)]


class _Blocks(msgspec.Struct, gc=False):
    timestamp: float
    session: int | str
    input_length: Count
    output_length: Count
    hash_runs: Runs


class _Texts(msgspec.Struct, gc=False):
    timestamp: int
    session_id: str
    input: str
    output: str


class LmcacheReader:
    """This reader reads LMCache's agent traces."""

    name = "lmcache"
    about = "LMCache agent traces: a request a line, 16-token block runs"

    def claims(self, head: FirstRecord) -> bool:
        """Return whether a file that begins with `head` is of this format."""
        return {"session", "input_length", "hash_runs"} <= head.keys

    def read(self, lines: Iterable[TraceLine], problems: Problems) -> Trace:
        """Return a trace without a name; a record that can't be used is reported and left out."""
        grouped: dict[str, list[TraceRequest]] = {}
        for line, row in decode_each(msgspec.json.Decoder(_Blocks), lines, problems):
            reason = blocks_fit(blocks(row.hash_runs), BLOCK_TOKENS, row.input_length)
            if reason is not None:
                problems.report(line, reason)
                continue
            request = TraceRequest(
                row.timestamp, row.input_length, row.output_length, row.hash_runs
            )
            grouped.setdefault(str(row.session), []).append(request)
        return Trace(
            "", self.name, BLOCK_TOKENS, "trace", "recorded", "recorded", in_order(grouped)
        )


class LmcacheTextReader:
    """This reader reads LMCache's agent traces with their texts."""

    name = "lmcache-text"
    about = "LMCache agent traces with full texts: lengths estimated at 4 bytes a token"

    def claims(self, head: FirstRecord) -> bool:
        """Return whether a file that begins with `head` is of this format."""
        return {"timestamp", "session_id", "input", "output"} <= head.keys

    def read(self, lines: Iterable[TraceLine], problems: Problems) -> Trace:
        """Return a trace without a name; a record that can't be used is reported and left out."""
        chainer = Chainer()
        grouped: dict[str, list[TraceRequest]] = {}
        for _, row in decode_each(msgspec.json.Decoder(_Texts), lines, problems):
            text = row.input.encode()
            size = BLOCK_TOKENS * TEXT_BYTES_PER_TOKEN
            whole = len(text) - len(text) % size
            runs = chainer.runs(text[at : at + size] for at in range(0, whole, size))
            request = TraceRequest(
                row.timestamp / 1e6,
                len(text) // TEXT_BYTES_PER_TOKEN,
                len(row.output.encode()) // TEXT_BYTES_PER_TOKEN,
                runs,
            )
            grouped.setdefault(row.session_id, []).append(request)
        return Trace(
            "", self.name, BLOCK_TOKENS, "trace", "recorded", "recorded", in_order(grouped)
        )
