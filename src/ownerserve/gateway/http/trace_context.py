"""This module reads and writes the W3C trace context (traceparent and tracestate, level 2), by
which a turn's spans in clients, gateways and workers are one trace.

A request that brings a context goes on under it, with a span id of this gateway's own. One that
brings a malformed one is part of a new trace; one that brings none is part of none, so that a
worker's own sampling decides. Nothing here ever refuses a request. Pure, but for the ids.

    traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01
                 version  trace id                  span id (parent)  flags
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import msgspec

TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
TRACE_HEADERS = frozenset((TRACEPARENT, TRACESTATE))
_KNOWN_FLAGS = 0x03
"""Sampled, and that the trace id is random; what else later versions mean is not passed on."""
_STATE_MAX_BYTES = 8192
_MEMBERS_MAX = 32

_PARENT = re.compile(
    rb"([0-9a-f]{2})-((?!0{32})[0-9a-f]{32})-((?!0{16})[0-9a-f]{16})-([0-9a-f]{2})(-.*)?",
    re.DOTALL,
)
_KEY = rb"(?:[a-z0-9][a-z0-9_\-*/@]{0,255})"
_VALUE = rb"(?:[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e])"
_MEMBER = re.compile(rb"(%b)=%b" % (_KEY, _VALUE))

_NO_SPAN = "0" * 16


class TraceContext(msgspec.Struct, frozen=True, gc=False):
    """A trace context says to which trace a request belongs, and which span of it asks; `parent_id`
    is empty where the trace begins here. `state` are the vendors' words, passed on as they came."""

    trace_id: str
    parent_id: str
    flags: int
    state: bytes = b""

    def lines(self, span_id: str) -> bytes:
        """Return the header lines for what is asked by the span `span_id`."""
        return context_lines(self.trace_id, span_id, flags=self.flags, state=self.state)


def context_lines(trace_id: str, span_id: str, *, flags: int, state: bytes) -> bytes:
    """Return the header lines of a context."""
    line = b"traceparent: 00-%b-%b-%02x\r\n" % (trace_id.encode(), span_id.encode(), flags)
    return line + b"tracestate: %b\r\n" % state if state else line


def new_span_id() -> str:
    """Make a span's id: 16 hex digits, not all zero."""
    drawn = os.urandom(8).hex()
    return drawn if drawn != _NO_SPAN else new_span_id()


def new_trace() -> TraceContext:
    """Begin a trace. It may be recorded by whoever wants to: nobody decided against it."""
    return TraceContext(new_span_id() + new_span_id(), "", _KNOWN_FLAGS)


def read_trace(headers: Mapping[bytes, bytes]) -> TraceContext | None:
    """Return the context that a request's lower-case headers bring; a new one where theirs is
    malformed, and None where they bring none. A state that stands alone says nothing."""
    told = headers.get(TRACEPARENT)
    if told is None:
        return None
    found = _PARENT.fullmatch(told)
    if found is None:
        return new_trace()
    version, trace_id, parent_id, flags, more = found.groups()
    if version == b"ff" or (version == b"00" and more is not None):
        return new_trace()
    state = _state(headers.get(TRACESTATE, b""))
    known = int(flags, 16) & _KNOWN_FLAGS
    return TraceContext(trace_id.decode(), parent_id.decode(), known, state)


def joined(name: bytes, first: bytes, more: bytes) -> bytes:
    """Return what a trace header that is given twice says: a state goes on, and two parents are
    none that could be believed."""
    return first + b"," + more if name == TRACESTATE else b"given twice"


def _state(told: bytes) -> bytes:
    """Return the state as it came; nothing of one that is malformed, which the parent outlives."""
    if not told or len(told) > _STATE_MAX_BYTES:
        return b""
    members = [member for part in told.split(b",") if (member := part.strip(b" \t"))]
    if len(members) > _MEMBERS_MAX:
        return b""
    keys = set()
    for member in members:
        found = _MEMBER.fullmatch(member)
        if found is None or found[1] in keys:
            return b""
        keys.add(found[1])
    return b",".join(members)
