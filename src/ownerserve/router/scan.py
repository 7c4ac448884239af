"""The field scanner: the few top-level fields of a JSON body that routing needs, and their offsets.

Owns what the gateway believes a body says. Never parses what it does not need (a conversation is
skipped, not decoded), never changes a byte, and never believes a body that two readers could read
differently: a top-level key given twice, or a control key written with escapes, is refused.

How: one pass of msgspec over the top level gives every value as a slice. Then a walk lays the
entries end to end, as an honest body would be written:

    {"model": "tiny", "stream": true}
     ^key     ^value  ^next key starts where this value's separator ends

A body that hides an entry (the second of two equal keys, an escaped spelling) does not line up.
The walk also yields the offset of each control value, which byte splices need.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from ownerserve.kv.errors import InvalidInput

PROMPT_KEYS = frozenset({"conversation", "previous_response_id", "prompt_embeds"})
"""Top-level fields by which a part of the prompt is elsewhere, or no text."""

CONTROL_KEYS = PROMPT_KEYS | frozenset(
    {
        "metadata",
        "model",
        "prompt_cache_key",
        "session_id",
        "stream",
        "user",
        "vllm_xargs",
    }
)
"""Top-level fields the router acts on; nobody may hide or double them."""

CONTENT_KEYS = frozenset({"input", "instructions", "messages", "prompt", "system", "tools"})
"""Top-level fields that are the conversation: located, never looked into."""

_WHITESPACE = b" \t\r\n"
_QUOTE, _COLON, _COMMA, _CLOSE = b'":,}'
_KEY = re.compile(rb'"(?:[^"\\]|\\.)*"')
_SESSION_KEY = re.compile(
    b'"' + b"".join(rb"(?:%c|\\u00(?i:%02x))" % (letter, letter) for letter in b"session_id") + b'"'
)
"""The key in each of its spellings; inside a text its quotes would be escaped."""
_UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_TOP_LEVEL = msgspec.json.Decoder(dict[str, msgspec.Raw])
_STRING = msgspec.json.Decoder(str)


class Span(msgspec.Struct, frozen=True, gc=False):
    """Bytes [start, end) of a value in the body."""

    start: int
    end: int


class BodyFields(msgspec.Struct, frozen=True):
    """What a body says to the router. `spans` locates every control value present, `content`
    every value of the conversation."""

    spans: Mapping[str, Span]
    content: Mapping[str, Span]
    body: bytes

    def text(self, key: str) -> str | None:
        """The control field `key` when it is a string, else None (absent, null, other type)."""
        span = self.spans.get(key)
        if span is None or self.body[span.start] != _QUOTE:
            return None
        return _STRING.decode(self.body[span.start : span.end])

    def raw(self, key: str) -> bytes | None:
        """The control field `key` as the client wrote it."""
        span = self.spans.get(key)
        return None if span is None else self.body[span.start : span.end]

    def slice(self, key: str) -> bytes:
        """The part `key` of the conversation as the client wrote it."""
        span = self.content[key]
        return self.body[span.start : span.end]


NO_FIELDS = BodyFields(spans={}, content={}, body=b"")


def scan(body: bytes) -> BodyFields:
    """Control fields of a JSON object. Raises InvalidInput for a body not to be forwarded."""
    try:
        entries = _TOP_LEVEL.decode(body)
    except msgspec.MsgspecError as error:
        raise InvalidInput("body", str(error), "send one JSON object") from error
    except UnicodeDecodeError as error:
        raise InvalidInput("body", str(error), "send UTF-8") from error
    except RecursionError as error:
        raise InvalidInput("body", "nested too deep", "send fewer than 1,000 levels") from error
    spans, content = _walk(body, entries)
    return BodyFields(spans=spans, content=content, body=body)


def may_say_session(body: bytes) -> bool:
    """Whether any reader could find a `session_id` in a body that can't be scanned, at the top
    level or below. Some readers take more than JSON: NaN, UTF-16 and UTF-32."""
    return _SESSION_KEY.search(body) is not None or b"\0" in body[:4] or body[:2] in _UTF_16_MARKS


def with_text(body: bytes, span: Span, text: str) -> bytes:
    """The body with `text` (plain ASCII without quotes) as the value at `span`."""
    return b'%b"%b"%b' % (body[: span.start], text.encode("ascii"), body[span.end :])


def _walk(
    body: bytes, entries: Mapping[str, msgspec.Raw]
) -> tuple[dict[str, Span], dict[str, Span]]:
    """Lay `entries` end to end over `body`; the spans of the control values and of the content."""
    spans: dict[str, Span] = {}
    content: dict[str, Span] = {}
    at = body.index(b"{") + 1
    for key, value in entries.items():
        if body[at] in _WHITESPACE:
            at = _skip_whitespace(body, at)
        literal = b'"%b"' % key.encode()
        if body.startswith(literal, at):
            at += len(literal)
        else:
            at = _match_spelling(body, at, key=key)
        if body[at] != _COLON:
            at = _skip_whitespace(body, at)
        at += 1
        if body[at] in _WHITESPACE:
            at = _skip_whitespace(body, at)
        end = at + len(value)
        if not body.startswith(bytes(value), at):
            raise _doubled(key)
        if key in CONTROL_KEYS:
            spans[key] = Span(at, end)
        elif key in CONTENT_KEYS:
            content[key] = Span(at, end)
        at = _skip_whitespace(body, end) if body[end] in _WHITESPACE else end
        if body[at] == _COMMA:
            at += 1
        elif body[at] != _CLOSE:
            raise _doubled(key)  # `1` also begins `12`: an earlier value, longer than the last one
    at = _skip_whitespace(body, at)
    if body[at] == _QUOTE:
        raise _doubled(_spelled_key(body, at)[0])
    return spans, content


def _skip_whitespace(body: bytes, at: int) -> int:
    while body[at] in _WHITESPACE:
        at += 1
    return at


def _match_spelling(body: bytes, at: int, *, key: str) -> int:
    """The key at `at` is not the plain spelling of `key`: accept escapes where they do no harm."""
    spelled, end = _spelled_key(body, at)
    if spelled != key:
        raise _doubled(spelled)
    if key in CONTROL_KEYS:
        raise InvalidInput(key, "is written with escapes", f'write it as "{key}"')
    return end


def _spelled_key(body: bytes, at: int) -> tuple[str, int]:
    match = _KEY.match(body, at)
    assert match is not None  # the decoder has accepted this body
    return _STRING.decode(match[0]), match.end()


def _doubled(key: str) -> InvalidInput:
    return InvalidInput(key, "is given twice", "send each top-level field once")
