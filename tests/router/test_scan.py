"""The body scanner: exact fields and offsets, and no body that two readers read differently."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerserve.kv.errors import InvalidInput
from ownerserve.router.requests.body import CONTROL_KEYS, Usage, scan, scan_response_id, scan_usage
from tests.support.examples import LETTERS, examples


def test_fields_are_sliced_at_their_offsets() -> None:
    body = b' { "model" :"m" ,\n"messages":[{"user":"not me"}], "user": "me", "stream":true } '
    fields = scan(body)
    assert fields.text("model") == "m"
    assert fields.text("user") == "me"
    assert fields.raw("stream") == b"true"
    assert fields.text("stream") is None
    assert fields.text("prompt_cache_key") is None
    span = fields.spans["user"]
    assert body[span.start : span.end] == b'"me"'


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"user":"a","user":"b"}', "user"),
        (b'{"user":"a","user":"a"}', "user"),
        (b'{"user":1,"x":2,"user":12}', "user"),
        (b'{"user":12,"user":1}', "user"),
        (b'{"x":{"a":1},"user":"u","x":{"a":1}}', "x"),
        (b'{"us\\u0065r":"a"}', "user"),
        (b'{"us\\u0065r":"a","user":"b"}', "user"),
        (b'{"user":"b","us\\u0065r":"a"}', "user"),
        (b'{"k":1,"m":"zz","k":{"q":1,"m":   "zz"}}', "k"),
    ],
)
def test_hidden_and_doubled_keys_are_refused_by_name(body: bytes, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        scan(body)
    assert caught.value.field == field


def test_escapes_in_a_key_that_controls_nothing_do_no_harm() -> None:
    assert scan(b'{"caf\\u00e9": 1, "user": "u"}').text("user") == "u"


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"null", b'{"a":1', b'{"a":1}{"a":1}', b'{"a":1,}', b'{"a":' + b"[" * 100_000],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidInput, match="body"):
        scan(body)


KEYS = st.sampled_from([*sorted(CONTROL_KEYS), "messages", "tools", "a", 'q"', "é", ""])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 120) | st.text(LETTERS, max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
PAIRS = st.lists(st.tuples(KEYS, VALUES), max_size=5)
STYLES = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t")])


@settings(max_examples=examples(60), deadline=None)
@given(PAIRS, STYLES, st.booleans())
def test_the_scan_agrees_with_a_full_parse_or_refuses(
    pairs: list[tuple[str, Any]], style: tuple[str, str], ascii_only: bool
) -> None:
    """Unique keys: the same values as json.loads. A key twice: refused."""
    comma, colon = style

    def dump(value: Any) -> str:
        return json.dumps(value, ensure_ascii=ascii_only, separators=style)

    text = comma.join(dump(key) + colon + dump(value) for key, value in pairs)
    body = f"{{{text}}}".encode()
    if len({key for key, _ in pairs}) < len(pairs):
        with pytest.raises(InvalidInput):
            scan(body)
        return
    fields = scan(body)
    assert set(fields.spans) == {key for key, _ in pairs} & CONTROL_KEYS
    for key in fields.spans:
        assert json.loads(fields.raw(key) or b"") == json.loads(body)[key]


def test_usage_of_openai_and_anthropic_answers() -> None:
    openai = b'"}],"usage":{"prompt_tokens":9,"total_tokens":12,"completion_tokens":3'
    assert scan_usage(openai + b',"prompt_tokens_details":{"cached_tokens":4}}}') == Usage(9, 3, 4)
    anthropic = b'{"usage": {"input_tokens": 5, "cache_read_input_tokens": 90, '
    anthropic += b'"cache_creation_input_tokens": 5, "output_tokens": 7}}'
    assert scan_usage(anthropic) == Usage(100, 7, 90)
    streamed = b'data: {"choices":[],"usage":null}\n\ndata: {"usage":{"prompt_tokens":1,'
    assert scan_usage(streamed + b'"completion_tokens":2}}\n\ndata: [DONE]\n\n') == Usage(
        1, 2, 0, tells_cached=False
    )


def test_usage_that_a_model_writes_is_not_believed() -> None:
    said = json.dumps({"content": '"usage":{"prompt_tokens":99}'}).encode()
    assert scan_usage(said) is None
    assert scan_usage(b'{"usage":{}}') is None


def test_response_ids() -> None:
    assert scan_response_id(b'{"id": "resp_a1-B", "object": "response"}') == "resp_a1-B"
    assert scan_response_id(b'{"id": "chatcmpl-1"}') is None
