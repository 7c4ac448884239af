"""What an answer says about its cost: a best-effort scan of its last bytes for `usage`.

Owns the patterns; never parses an answer. OpenAI chat, completions and responses and Anthropic
messages all end with a `usage` object, streamed (in the last events, when asked for) or not.
The pattern '"usage":' can't occur inside a JSON string, where its quotes would be escaped.
"""

from __future__ import annotations

import json
import re

import msgspec

TAIL_BYTES = 4096
"""How much of an answer's end is kept to be scanned; longer tails hide `usage` and cost nothing."""

_KEY = b'"usage":'
_WINDOW = 1024
_JSON = json.JSONDecoder()
_RESPONSE_ID = re.compile(rb'"id":\s*"(resp_[0-9A-Za-z_-]{1,200})"')


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Token counts of one finished turn. `cached_tokens` is the part of the prompt found cached.

    `tells_cached`: the engine counts that part; where it does not, 0 says nothing.
    """

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    tells_cached: bool = True


def scan_usage(tail: bytes) -> Usage | None:
    """The last `usage` object in `tail`, or None when the answer carries none."""
    at = tail.rfind(_KEY)
    if at < 0:
        return None
    at += len(_KEY)
    try:
        found, _ = _JSON.raw_decode(tail[at : at + _WINDOW].decode("latin-1").lstrip())
    except ValueError:
        return None  # cut off
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


def _natural(value: object) -> int:
    return value if type(value) is int and value > 0 else 0


def scan_response_id(data: bytes) -> str | None:
    """The Responses API id ("resp_...") in `data`, which a later turn may name."""
    match = _RESPONSE_ID.search(data)
    return match[1].decode() if match else None
