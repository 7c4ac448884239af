"""This module ends a stream of server-sent events that stops in its middle, so that its client
hears why. Pure.

A client sees whole lines alone: what ends amid a line, or amid a chunk's frame, is held until the
rest has come. So an event of the gateway's own can stand behind whatever came, and is read by every
client that reads errors of its API. The connection closes behind it without the body's end: to who
looks at frames alone, the answer is as short as it is.

    ... event | event | half an event            the worker dies
    ... event | event | error, in the client's dialect | close
"""

from __future__ import annotations

import re

import msgspec

from ownerserve.gateway.http.replies import Rejected, error_body

_UNNAMED = (b"/v1/chat/completions", b"/v1/completions")
"""Targets of streams whose events have no names."""
_GAP = re.compile(rb"\r?\n\r?\n")
_NUMBER = re.compile(rb'"sequence_number"\s*:\s*(\d{1,9})')
_NEWLINE = 0x0A
_END = re.compile(
    rb"""^data:[ ]?\[DONE\] | "message_stop" | "response\.completed" """, re.MULTILINE | re.VERBOSE
)
"""What stands in the last event of a stream that has come to its end. An answer may speak of it
too: in a text no line begins, and no quote stands bare."""


def has_said_all(tail: bytes) -> bool:
    """Return whether a stream whose last bytes are `tail` has said its last word, and only its
    body's end may be missing."""
    gap = list(_GAP.finditer(tail))
    last = tail[gap[-2].end() if len(gap) > 1 else 0 :]
    return _END.search(last) is not None


def error_event(target: bytes, tail: bytes, *, code: str, message: str) -> bytes:
    """Return the bytes that end a stream with an error, in the dialect of the API at `target`;
    `tail` is the end of what its client has of the body. They are empty where that is the whole
    answer, and only the body's end is missing."""
    if has_said_all(tail):
        return b""
    gap = list(_GAP.finditer(tail))
    begun = tail[gap[-1].end() :] if gap else tail
    closed = b"\n" if b"data" in begun or (begun and not gap) else b""
    if target.startswith(b"/v1/messages"):
        said = {"type": "error", "error": {"type": "api_error", "message": message}}
        return closed + b"event: error\ndata: %b\n\n" % msgspec.json.encode(said)
    if target.startswith(b"/v1/responses"):
        numbers = _NUMBER.findall(tail)
        told = {
            "type": "error",
            "code": code,
            "message": message,
            "param": None,
            "sequence_number": int(numbers[-1]) + 1 if numbers else 0,
        }
        return closed + b"event: error\ndata: %b\n\n" % msgspec.json.encode(told)
    error = {"message": message, "type": "server_error", "param": None, "code": code}
    return closed + b"data: %b\n\n" % msgspec.json.encode({"error": error})


def rejected_event(target: bytes, rejected: Rejected) -> bytes:
    """Return the event that is a stream's only one, in the dialect of the API at `target`: a
    request that is told no after its answer's head."""
    body = error_body(rejected, target)
    if target.startswith(b"/v1/responses"):  # OpenAI's client looks for `error` in it
        beside = {"code": rejected.code, "message": rejected.message, "param": None}
        told = {"type": "error", **beside, "sequence_number": 0, **msgspec.json.decode(body)}
        body = msgspec.json.encode(told)
    name = b"" if target.startswith(_UNNAMED) else b"event: error\n"
    return b"%bdata: %b\n\n" % (name, body)


def comment(text: str) -> bytes:
    """Return a comment, one for each line of `text`: nobody's event."""
    return b"".join(b": %b\n" % line.encode() for line in text.splitlines()) + b"\n"


def chunk(payload: bytes) -> bytes:
    """Return `payload` as a chunk of a body; nothing as nothing, since an empty one ends it."""
    return b"%x\r\n%b\r\n" % (len(payload), payload) if payload else b""


def unframed(chunks: bytes) -> bytes:
    """Return the payload of `chunks`, which begin with a chunk's frame and may stop anywhere."""
    payload, at = b"", 0
    while (end := chunks.find(b"\r\n", at)) >= 0:
        try:
            size = int(chunks[at:end].partition(b";")[0], 16)
        except ValueError:
            break
        payload += chunks[end + 2 : end + 2 + size]
        at = end + 2 + size + 2
    return payload


def split_events(payload: bytes) -> tuple[list[bytes], bytes]:
    """Return the events that are whole in `payload`, each with the blank line that ends it, and
    what has begun behind them."""
    events, at = [], 0
    for gap in _GAP.finditer(payload):
        events.append(payload[at : gap.end()])
        at = gap.end()
    return events, payload[at:]


def whole_frames(chunks: bytes) -> int:
    """Return how many bytes of `chunks`, which begin with a chunk's frame, are whole frames up to
    one that ends a line."""
    at = whole = 0
    while (end := chunks.find(b"\r\n", at)) >= 0:
        try:
            size = int(chunks[at:end].partition(b";")[0], 16)
        except ValueError:
            break
        at = end + 2 + size + 2
        if size == 0 or at > len(chunks):
            break
        if chunks[at - 3] == _NEWLINE:
            whole = at
    return whole


def whole_events(payload: bytes) -> bytes:
    """Return the events that are whole in `payload`."""
    gaps = list(_GAP.finditer(payload))
    return payload[: gaps[-1].end()] if gaps else b""
