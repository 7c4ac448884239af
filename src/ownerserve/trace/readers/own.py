"""This module reads our own JSONL (docs/traces.md): a header line, then a session a line, fields as
in model.py."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.trace.lines import Problems, TraceLine
from ownerserve.trace.model import Arrivals, Grouping, IdScope, Trace, TraceSession, fault
from ownerserve.trace.readers.base import FirstRecord, decode_each, misfit

VERSION = 1


class TraceHeader(msgspec.Struct, frozen=True):
    """The header is the first line. `ownerserve_trace` is the format's version."""

    ownerserve_trace: int
    name: str
    origin: str
    block_tokens: int
    ids: IdScope
    grouping: Grouping
    arrivals: Arrivals


class OwnReader:
    """This reader reads our own JSONL."""

    name = "ownerserve"
    about = "ours: a header line, then a session a line (docs/traces.md)"

    def claims(self, head: FirstRecord) -> bool:
        """Return whether a file that begins with `head` is of this format."""
        return "ownerserve_trace" in head.keys

    def read(self, lines: Iterable[TraceLine], problems: Problems) -> Trace:
        """Return a trace without a name; a record that can't be used is reported and left out."""
        remaining = iter(lines)
        header = self._header(next(remaining, None))
        sessions = []
        for line, session in decode_each(msgspec.json.Decoder(TraceSession), remaining, problems):
            reason = fault(session)
            if reason is None and header.ids != "none":
                reason = misfit(session, header.block_tokens)
            if reason is None:
                sessions.append(session)
            else:
                problems.report(line, reason)
        return Trace(
            header.name,
            header.origin,
            header.block_tokens,
            header.ids,
            header.grouping,
            header.arrivals,
            tuple(sessions),
        )

    def _header(self, line: TraceLine | None) -> TraceHeader:
        """Return the header. Raises InvalidInput: without it nothing in the file has a meaning, so
        this is no mere problem."""
        mend = "the first line must be the header; see docs/traces.md"
        if line is None:
            raise InvalidInput("header", "the file is empty", mend)
        try:
            header = msgspec.json.decode(line.data, type=TraceHeader)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidInput(f"{line.file}:{line.number}", str(error), mend) from error
        if header.ownerserve_trace > VERSION:
            raise InvalidInput(
                f"{line.file}: ownerserve_trace",
                f"version {header.ownerserve_trace} is newer than {VERSION}",
                "read it with a newer ownerserve",
            )
        if header.ids != "none" and header.block_tokens < 1:
            raise InvalidInput(
                f"{line.file}: block_tokens",
                f"{header.block_tokens} tokens a block",
                "give 1 or more, or ids: none",
            )
        return header
