"""A stream that goes on at another worker: no gap, nothing twice, wherever either cuts its events
and wherever the first one stops."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerserve.gateway.exchange.told import Joining, NotTheSame, Told
from tests.support.examples import examples

TEXTS = (("role", "assistant"), ("reasoning", 'Wéll "so"\n'), ("content", "The 🙂 cat sat\\. "))
LENGTH = sum(len(text) for _, text in TEXTS)


def event(id: str, *choices: dict[str, Any], **more: Any) -> bytes:
    said = {"id": id, "created": len(id), "model": "m", "choices": choices, **more}
    return b"data: %b\n\n" % json.dumps(said).encode()


def stream(id: str, cuts: set[int], index: int = 0) -> list[bytes]:
    """One choice's stream, cut at these characters; a role is never cut."""
    events, at = [], 0
    for name, text in TEXTS:
        inner = sorted(cut - at for cut in cuts if 0 < cut - at < len(text) and name != "role")
        for begin, end in zip([0, *inner], [*inner, len(text)], strict=True):
            events.append(event(id, {"index": index, "delta": {name: text[begin:end]}}))
        at += len(text)
    last = event(id, {"index": index, "delta": {}, "finish_reason": "stop"})
    return [*events, last, event(id, usage={"prompt_tokens": 3}), b"data: [DONE]\n\n"]


def read(events: list[bytes]) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """The texts that a client reads, and the chunks that have none."""
    texts: dict[str, str] = {}
    rest = []
    for one in events:
        if one == b"data: [DONE]\n\n":
            rest.append({"done": True})
            continue
        said = json.loads(one[6:])
        assert (said["id"], said["created"]) == ("first", 5)
        deltas = [choice["delta"] for choice in said["choices"]]
        for name, text in (pair for delta in deltas for pair in delta.items()):
            texts[name] = texts.get(name, "") + text
        if not any(deltas):
            rest.append(said)
    return texts, rest


CUTS = st.sets(st.integers(1, LENGTH))


@settings(max_examples=examples(200), deadline=None)
@given(first=CUTS, other=CUTS, data=st.data())
def test_wherever_it_is_cut_and_stops(
    first: set[int], other: set[int], data: st.DataObject
) -> None:
    mine = stream("first", first)
    has = mine[: data.draw(st.integers(1, len(mine) - 1))]
    told = Told()
    for one in has:
        told.hear(one)
    assert told.can_be_continued
    joining = Joining(told)
    passed = [more for one in stream("second", other) if (more := joining.take(one))]
    joining.end()
    assert read([*has, *passed]) == read(mine)


@settings(max_examples=examples(100), deadline=None)
@given(first=CUTS, other=CUTS, at=st.integers(0, LENGTH - len("assistant") - 1), data=st.data())
def test_another_text_is_never_joined(
    first: set[int], other: set[int], at: int, data: st.DataObject
) -> None:
    """One character differs in what the client has."""
    told = Told()
    mine = stream("first", first)[:-3]
    for one in mine:
        told.hear(one)
    joining = Joining(told)
    letters = [letter for _, text in TEXTS[1:] for letter in text]
    letters[at] = "#"
    wrong, where = [], 0
    for name, text in TEXTS[1:]:
        piece = "".join(letters[where : where + len(text)])
        wrong.append(event("second", {"index": 0, "delta": {name: piece}}))
        where += len(text)
    joining.take(event("second", {"index": 0, "delta": {"role": "assistant", "content": ""}}))
    with pytest.raises(NotTheSame):
        for one in wrong:
            joining.take(one)


SAID = event("first", {"index": 0, "delta": {"content": "The cat"}})


@pytest.mark.parametrize(
    "other",
    [
        event("second", {"index": 0, "delta": {"content": "The"}, "finish_reason": "stop"}),
        event("second", {"index": 0, "delta": {"reasoning": "The cat"}}),
        event("second", {"index": 0, "delta": {"tool_calls": [{"index": 0}]}}),
        event("second", {"index": 0, "delta": {"content": "The"}, "logprobs": {"content": []}}),
        event("second", usage={}),
        b"data: [DONE]\n\n",
        b'data: {"error": {"message": "no"}}\n\n',
        b"data: no json\n\n",
    ],
)
def test_what_ends_or_says_else_before_the_join_is_not_the_same(other: bytes) -> None:
    told = Told()
    told.hear(SAID)
    with pytest.raises(NotTheSame):
        Joining(told).take(other)
    with pytest.raises(NotTheSame):
        Joining(told).end()


def test_what_a_choice_says_after_its_end_is_not_the_same() -> None:
    told = Told()
    told.hear(event("first", {"index": 0, "delta": {"content": "The"}, "finish_reason": "stop"}))
    for other in (
        [event("second", {"index": 0, "delta": {"content": "The cat"}})],
        [
            event("second", {"index": 0, "delta": {"content": "The"}}),
            event("second", {"index": 0, "delta": {"content": " cat"}}),
        ],
    ):
        joining = Joining(told)
        with pytest.raises(NotTheSame):
            for one in other:
                joining.take(one)


@pytest.mark.parametrize(
    "said",
    [
        event("first", {"index": 0, "delta": {"tool_calls": [{"index": 0}]}}),
        event("first", {"index": 0, "delta": {"content": "T"}, "token_ids": [1]}),
        event("first", {"index": 0, "text": "T", "logprobs": {"tokens": ["T"]}}),
        b'data: {"error": {"message": "no"}}\n\n',
        b"data: no json\n\n",
    ],
)
def test_what_is_not_text_alone_is_not_continued(said: bytes) -> None:
    told = Told()
    told.hear(SAID)
    assert told.can_be_continued
    told.hear(said)
    assert not told.can_be_continued


def test_choices_are_joined_one_by_one_and_go_on_with_whatever_comes() -> None:
    told = Told()
    told.hear(event("first", {"index": 0, "text": "a b"}, {"index": 1, "text": "x"}))
    joining = Joining(told)
    both = event("second", {"index": 0, "text": "a "}, {"index": 1, "text": "x y"})
    more = json.loads(joining.take(both)[6:])
    assert (more["id"], more["choices"]) == ("first", [{"index": 1, "text": " y"}])
    assert joining.take(event("second", {"index": 0, "text": "b"})) == b""
    assert joining.is_joined
    ping = b": ping\n\n"
    assert joining.take(ping) == ping
    logprobs = joining.take(event("second", {"index": 0, "text": "c", "logprobs": {"tokens": []}}))
    assert json.loads(logprobs[6:])["choices"][0]["logprobs"] == {"tokens": []}
