"""How much a streamed turn took is asked for where its client does not ask: chat and completions
say it at a stream's end only to who wants it (`stream_options.include_usage`). Pure.

The gateway learns from it how long sessions are, and whether state was where it was expected. The
event that says it is kept back from a client that did not ask; all others pass as they come.
"""

from __future__ import annotations

import re

import msgspec

from ownerserve.gateway.http.events import split_events
from ownerserve.kv.errors import UNREADABLE
from ownerserve.router.requests.body import BodyFields, Said

_PATHS = (b"/v1/chat/completions", b"/v1/completions")
_OPTIONS, _INCLUDE = "stream_options", "include_usage"
_WANTED = b'{"include_usage":true}'
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')
USAGE = b'"usage"'
_SAID = re.compile(rb'"usage"\s*:\s*\{')


def usage_saids(target: bytes, fields: BodyFields) -> tuple[Said, ...]:
    """Return what the body is to say so that its stream ends with its usage; nothing where it does
    anyway, or where the client wants it with each event or not at all."""
    if target.partition(b"?")[0] not in _PATHS or fields.raw("stream") != b"true":
        return ()
    span, raw = fields.spans.get(_OPTIONS), fields.raw(_OPTIONS)
    if raw is None or raw == b"null":
        return (Said(_OPTIONS, span, _WANTED),)
    try:
        options = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except UNREADABLE:
        return ()  # the engine's to refuse
    included = bytes(options.get(_INCLUDE, b"false"))
    if included not in (b"false", b"null") or options.keys() - {_INCLUDE}:
        return ()
    return (Said(_OPTIONS, span, _WANTED),)


def is_usage_event(event: bytes) -> bool:
    """Return whether an event says the usage and nothing else."""
    return _SAID.search(event) is not None and _NO_CHOICES.search(event) is not None


def without_usage(payload: bytes) -> bytes:
    """Return the payload, which begins with an event, without the event that says the usage."""
    events, begun = split_events(payload)
    kept = [event for event in (*events, begun) if not is_usage_event(event)]
    return b"".join(kept)
