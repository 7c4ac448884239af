"""What bodies say: the few fields of a request that routing needs, and an answer's `usage`.

**Fields**: owns what the gateway believes a request's body says. Never parses what it does not need
(a conversation is skipped, not decoded), never changes a byte, and never believes a body that two
readers could read differently: a top-level key given twice, or a control key written with escapes,
is refused.

How: one pass of msgspec over the top level gives every value as a slice. Then a walk lays the
entries end to end, as an honest body would be written:

    {"model": "tiny", "stream": true}
     ^key     ^value  ^next key starts where this value's separator ends

A body that hides an entry (the second of two equal keys, an escaped spelling) does not line up.
The walk also yields the offset of each control value, which byte splices need.

**Usage**: a best-effort scan of an answer's last bytes; never parses an answer. OpenAI chat,
completions and responses and Anthropic messages all end with a `usage` object, streamed (in the
last events, when asked for) or not. The pattern '"usage":' can't occur inside a JSON string, where
its quotes would be escaped.

Owns too what of it is believed: an engine's counts teach the router how long sessions are, and a
wrong one must cost an estimate at most. Counts that no sequence can have are refused whole; what a
body's bytes say of its tokens is learnt only when the prompt is in the body.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import Enum, StrEnum

import msgspec

from ownerserve.kv.errors import UNREADABLE, InvalidInput

PROMPT_KEYS = frozenset({"conversation", "previous_response_id", "prompt_embeds"})
"""Top-level fields by which a part of the prompt is elsewhere, or no text."""

CONTROL_KEYS = PROMPT_KEYS | frozenset(
    {
        "cache_salt",
        "max_completion_tokens",
        "max_output_tokens",
        "max_tokens",
        "metadata",
        "min_tokens",
        "model",
        "n",
        "prompt_cache_key",
        "seed",
        "session_id",
        "store",
        "stream",
        "stream_options",
        "temperature",
        "user",
        "vllm_xargs",
    }
)
"""Top-level fields the router acts on; nobody may hide or double them."""

INTERNAL_KEYS = frozenset(
    {
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "data_parallel_rank",
        "disagg_prefill_dp_rank",
        "kv_transfer_params",
    }
)
"""Top-level fields by which routers tell engines where state comes from: no client's."""

CONTENT_KEYS = frozenset({"input", "instructions", "messages", "prompt", "system", "tools"})
"""Top-level fields that are the conversation: located, never looked into."""

_WHITESPACE = b" \t\r\n"
_QUOTE, _COLON, _COMMA, _CLOSE = b'":,}'
_KEY = re.compile(rb'"(?:[^"\\]|\\.)*"')
_TOP_LEVEL = msgspec.json.Decoder(dict[str, msgspec.Raw])
_STRING = msgspec.json.Decoder(str)


class Span(msgspec.Struct, frozen=True, gc=False):
    """A span is where a value lies in the body: bytes [start, end)."""

    start: int
    end: int


class BodyFields(msgspec.Struct, frozen=True):
    """The fields are what a body says to the router. `spans` locates every control value present,
    `content` every value of the conversation."""

    spans: Mapping[str, Span]
    content: Mapping[str, Span]
    body: bytes

    def text(self, key: str) -> str | None:
        """Return the control field `key` when it is a string, else None (absent, null, other
        type). Raises InvalidInput when its bytes are no UTF-8: the pass over the body skips them.
        """
        span = self.spans.get(key)
        if span is None or self.body[span.start] != _QUOTE:
            return None
        try:
            return _STRING.decode(self.body[span.start : span.end])
        except UNREADABLE as error:
            raise InvalidInput(key, str(error), "send UTF-8") from error

    def raw(self, key: str) -> bytes | None:
        """Return the control field `key` as the client wrote it."""
        span = self.spans.get(key)
        return None if span is None else self.body[span.start : span.end]

    def slice(self, key: str) -> bytes:
        """Return the part `key` of the conversation as the client wrote it."""
        span = self.content[key]
        return self.body[span.start : span.end]


NO_FIELDS = BodyFields(spans={}, content={}, body=b"")


def scan(body: bytes) -> BodyFields:
    """Find the control fields of a JSON object. Raises InvalidInput for a body that is not to be
    forwarded."""
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


def check_as_engines_read(body: bytes) -> None:
    """Look at a body that `scan` refuses as lenient engines read it: half of a surrogate pair, in a
    text that was cut, is no JSON, and they take it. Raises InvalidInput unless it is an object that
    says nothing twice, no `session_id` or `cache_salt`, and nothing that is between routers and
    engines.
    """
    pairs: list[tuple[str, object]] = []

    def top_level(found: list[tuple[str, object]]) -> None:
        pairs[:] = found  # the outermost object is the last that is whole

    try:
        json.loads(body.decode(), object_pairs_hook=top_level)
    except (ValueError, RecursionError) as error:
        raise InvalidInput("body", str(error), "send one JSON object") from error
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise _doubled(name)
        if name in INTERNAL_KEYS or name in ("cache_salt", "session_id"):
            raise InvalidInput(
                name, "stands in a body that is no JSON", "send JSON, or leave it out"
            )


class Said(msgspec.Struct, frozen=True, gc=False):
    """A body is to say `value`, which is JSON, as its field `key`: in place of the value at `span`,
    or, where that is None, before all others."""

    key: str
    span: Span | None
    value: bytes


def pieces(body: bytes, *saids: Said) -> list[bytes | memoryview]:
    """Return the body, an object, with what it is to say, in pieces of which the long ones are
    views of it; every other byte is as it was."""
    view, done, found = memoryview(body), 0, list[bytes | memoryview]()
    entries = b",".join([b'"%b":%b' % (said.key.encode(), said.value) for said in saids
                         if said.span is None])  # fmt: skip
    if entries:
        done = body.index(b"{") + 1
        is_empty = body[_skip_whitespace(body, done)] == _CLOSE
        found.append(b"%b%b%b" % (body[:done], entries, b"" if is_empty else b","))
    for start, end, value in sorted([(said.span.start, said.span.end, said.value) for said in saids
                                     if said.span is not None]):  # fmt: skip
        found += (view[done:start], value)
        done = end
    found.append(view[done:])
    return found


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
        elif key in INTERNAL_KEYS:
            raise InvalidInput(key, "is between routers and engines", "leave it out")
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


TAIL_BYTES = 4096
"""How much of an answer's end is kept to be scanned."""

TOKENS_MAX = 1 << 24
"""Longer is no sequence, whatever the model: 16 times the longest contexts that are served."""

BYTES_PER_TOKEN_MIN = 1.0
"""A token takes a byte at least: tokenizers fall back to single bytes, and JSON only adds some."""
BYTES_PER_TOKEN_MAX = 16.0
"""Text and code lie between 3 and 5; runs of blanks, the longest tokens in use, reach this."""

_USAGE_KEY = b'"usage":'
_WINDOW = 1024
_PLAIN_USAGE = re.compile(
    rb'"usage":\s?\{"prompt_tokens":\s?(\d{1,10}),\s?(?:"total_tokens":\s?\d{1,10},\s?)?'
    rb'"completion_tokens":\s?(\d{1,10}),\s?(?:"total_tokens":\s?\d{1,10},\s?)?'
    rb'"prompt_tokens_details":\s?\{"cached_tokens":\s?(\d{1,10})\}\}'
)
"""vLLM's and ours, as most answers end: read so in a fourth of the time."""
_JSON = json.JSONDecoder()
_RESPONSE_ID = re.compile(rb'"id":\s*"(resp_[0-9A-Za-z_-]{1,200})"')


class Usage(msgspec.Struct, frozen=True, gc=False):
    """A usage is the token counts of one finished turn. `cached_tokens` is the part of the prompt
    found cached.

    `tells_cached`: the engine counts that part; where it does not, 0 says nothing.
    """

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    tells_cached: bool = True


class Prompt(Enum):
    """A prompt's place says whether the text of a turn's prompt is in its body."""

    IN_BODY = "in_body"
    ELSEWHERE = "elsewhere"
    """A part of it is not in the body: a former answer that the body names, a stored prompt, an
    image, a file; or nobody has read the body. Its bytes say nothing of its tokens."""


_FOREIGN = re.compile(
    rb'"type"\s*:\s*"(?:image|image_url|input_image|video_url|audio_url|input_audio|document'
    rb'|file|input_file|item_reference)"'
)
"""Inside a JSON string the quotes would be escaped."""
_PROMPTS = ("messages", "input", "prompt")


def place_of_prompt(fields: BodyFields) -> Prompt:
    """Return where the prompt of a request is. Takes some 0.3 ms for 400 KB."""
    body, content = fields.body, fields.content
    starts = [body[content[key].start] for key in _PROMPTS if key in content]
    is_in_body = (
        any(start in b'["' for start in starts)
        and not any(start in b"{" for start in starts)  # a stored prompt's reference
        and all(fields.raw(key) in (None, b"null") for key in PROMPT_KEYS)
        and _FOREIGN.search(body) is None
    )
    return Prompt.IN_BODY if is_in_body else Prompt.ELSEWHERE


def believed(usage: Usage | None, tokens_max: int) -> Usage | None:
    """Return `usage`, or None when no sequence of a model that takes `tokens_max` tokens (0:
    unknown) can have such counts."""
    if usage is None:
        return None
    limit = tokens_max or TOKENS_MAX
    is_possible = (
        0 < usage.prompt_tokens <= limit
        and 0 <= usage.output_tokens <= limit - usage.prompt_tokens
        and 0 <= usage.cached_tokens <= usage.prompt_tokens
    )
    return usage if is_possible else None


def bytes_per_token(prompt_bytes: int, prompt_tokens: int) -> float | None:
    """Return the bytes a token that a turn teaches; None when it has more tokens than bytes, which
    then are not all in the body."""
    ratio = prompt_bytes / prompt_tokens
    return None if ratio < BYTES_PER_TOKEN_MIN else min(ratio, BYTES_PER_TOKEN_MAX)


def usage_before(data: bytes, end: int) -> bytes:
    """Return what there is of the last `usage` object that begins before `end` in `data`, for
    `scan_usage`; empty when there is none."""
    at = data.rfind(_USAGE_KEY, 0, end + len(_USAGE_KEY) - 1)
    return b"" if at < 0 else data[at : at + len(_USAGE_KEY) + _WINDOW] + b"\n"


def scan_usage(tail: bytes) -> Usage | None:
    """Return the last `usage` object in `tail`, or None when the answer carries none."""
    at = tail.rfind(_USAGE_KEY)
    if at < 0:
        return None
    plain = _PLAIN_USAGE.match(tail, at)
    if plain is not None:
        counts = [int(digits) for digits in plain.groups()]
        if counts[0]:
            return Usage(counts[0], counts[1], min(counts[2], counts[0]))
    at += len(_USAGE_KEY)
    try:
        found, _ = _JSON.raw_decode(tail[at : at + _WINDOW].decode("latin-1").lstrip())
    except (ValueError, RecursionError):
        return None  # cut off, a number of thousands of digits, or a nest
    if not isinstance(found, dict):
        return None
    count = found.get
    cached = count("cache_read_input_tokens")
    tells_cached = True
    if cached is not None:  # Anthropic counts a prompt in three disjoint parts
        prompt = _natural(count("input_tokens")) + _natural(cached)
        prompt += _natural(count("cache_creation_input_tokens"))
    else:
        prompt = _natural(count("prompt_tokens") or count("input_tokens"))
        details = count("prompt_tokens_details") or count("input_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        tells_cached = cached is not None
    if prompt == 0:
        return None
    output = _natural(count("completion_tokens") or count("output_tokens"))
    return Usage(prompt, output, min(_natural(cached), prompt), tells_cached)


class AnswerFinish(StrEnum):
    """An answer's finish says why it ended, whatever its API calls that."""

    STOP = "stop"
    LENGTH = "length"
    """The answer is cut off: it has as many tokens as it may, or as there is room for."""
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"
    OTHER = "other"
    UNSAID = "unsaid"
    """Nothing was read of it."""


_FINISH_KEYS = (b'"finish_reason"', b'"stop_reason"', b'"incomplete_details"')
_FINISH = re.compile(rb':\s*(?:"([a-z_]{1,32})"|(null)|\{\s*"reason"\s*:\s*"([a-z_]{1,32})")')
_FINISHES = {
    b"stop": AnswerFinish.STOP,
    b"end_turn": AnswerFinish.STOP,
    b"stop_sequence": AnswerFinish.STOP,
    b"length": AnswerFinish.LENGTH,
    b"max_tokens": AnswerFinish.LENGTH,
    b"max_output_tokens": AnswerFinish.LENGTH,
    b"tool_calls": AnswerFinish.TOOL_CALLS,
    b"tool_use": AnswerFinish.TOOL_CALLS,
    b"function_call": AnswerFinish.TOOL_CALLS,
    b"content_filter": AnswerFinish.CONTENT_FILTER,
    b"refusal": AnswerFinish.CONTENT_FILTER,
}


def scan_finish(tail: bytes) -> AnswerFinish:
    """Return why the answer whose last bytes are `tail` ended, by the last word in them."""
    for key in _FINISH_KEYS:
        at = tail.rfind(key)
        found = None if at < 0 else _FINISH.match(tail, at + len(key))
        if found is not None and found[2] is None:
            return _FINISHES.get(found[1] or found[3], AnswerFinish.OTHER)
        if found is not None and key == _FINISH_KEYS[-1]:
            return AnswerFinish.STOP  # a response that is not incomplete
    return AnswerFinish.UNSAID


def _natural(value: object) -> int:
    return value if type(value) is int and value > 0 else 0


def scan_response_id(data: bytes) -> str | None:
    """The Responses API id ("resp_...") in `data`, which a later turn may name."""
    match = _RESPONSE_ID.search(data)
    return match[1].decode() if match else None
