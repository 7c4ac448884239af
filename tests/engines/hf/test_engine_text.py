"""Streaming text: characters stay whole, stop strings never show. No torch, no tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ownerserve.engines.hf.model.text import BROKEN, Choice, Detokenizer, StopStrings
from ownerserve.engines.hf.scheduling.requests import (
    Delta,
    FinishReason,
    SaidSoFar,
    Sampled,
    Stopping,
)

EOS = 256


class Bytes:
    """Token i is the byte i; 256 is special and shows nothing."""

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(t for t in tokens if t < EOS).decode(errors="replace")


def stream(data: bytes) -> list[str]:
    detokenizer = Detokenizer(Bytes())
    return [*map(detokenizer.push, data), detokenizer.flush()]


def speak(data: bytes, stopping: Stopping) -> list[Delta]:
    """Deltas of a choice that samples `data`, then end-of-sequence."""
    choice = Choice(0, stopping, Bytes())
    deltas = []
    for token in (*data, EOS):
        deltas.append(choice.push(Sampled(token)))
        if deltas[-1].finish:
            break
    return deltas


def moved(before: Choice, said: Sequence[int], stopping: Stopping) -> Choice:
    """The choice as it goes on at another worker."""
    return Choice(0, stopping, Bytes(), SaidSoFar(tuple(said), before.text_state(), b"", 0))


def stopping(*strings: str, max_tokens: int = 1000, min_tokens: int = 0) -> Stopping:
    return Stopping(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        strings=strings,
        eos_token_ids=frozenset({EOS}),
    )


def test_a_split_character_is_held_until_it_is_whole() -> None:
    assert stream("aé€😀".encode()) == ["a", "", "é", "", "", "€", "", "", "", "😀", ""]


def test_an_unfinished_character_is_shown_broken_at_the_end() -> None:
    assert stream(b"a\xe2\x82") == ["a", "", "", BROKEN]


@given(st.text("aé€😀\n", max_size=40))
def test_pieces_of_text_join_to_the_text(text: str) -> None:
    assert "".join(stream(text.encode())) == text


@given(st.binary(max_size=40))
def test_pieces_of_rubbish_join_to_what_decoding_it_whole_gives(data: bytes) -> None:
    assert "".join(stream(data)) == data.decode(errors="replace")


def test_endless_rubbish_is_not_held_for_ever() -> None:
    detokenizer = Detokenizer(Bytes())
    shown = "".join(detokenizer.push(0xFF) for _ in range(10_000))
    assert len(shown) >= 9_900


def test_a_stop_string_over_several_tokens_is_cut() -> None:
    deltas = speak(b"hello</end>more", stopping("</end>"))
    assert "".join(delta.text for delta in deltas) == "hello"
    assert deltas[-1].finish is FinishReason.STOP


def test_what_only_looked_like_a_stop_string_is_shown() -> None:
    deltas = speak(b"a</en>b</en", stopping("</end>"))
    assert "".join(delta.text for delta in deltas) == "a</en>b</en"
    assert deltas[-1].finish is FinishReason.STOP


@given(
    st.lists(st.text("ab", max_size=3), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_shown_text_never_runs_into_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    scanner, shown, whole, met = StopStrings(tuple(stops)), "", "", False
    for piece in pieces:
        whole += piece
        text, met = scanner.push(piece)
        shown += text
        assert not any(stop in shown for stop in stops)
        assert whole.startswith(shown)
        if met:
            break
    assert met == any(stop in whole for stop in stops)
    if not met:
        assert shown + scanner.flush() == whole


def test_length_ends_with_all_text_shown() -> None:
    deltas = speak("né€".encode(), stopping("x", max_tokens=4))
    assert "".join(delta.text for delta in deltas) == "né" + BROKEN
    assert deltas[-1].finish is FinishReason.LENGTH


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "a"), (3, "a.b"), (4, "a.b"), (5, "a.b.c")])
def test_stop_strings_count_from_min_tokens_on(min_tokens: int, text: str) -> None:
    deltas = speak(b"a.b.c", stopping(".", min_tokens=min_tokens))
    assert "".join(delta.text for delta in deltas) == text


def test_end_of_sequence_adds_no_text_but_counts() -> None:
    choice = Choice(0, stopping(), Bytes())
    assert choice.push(Sampled(97)).finish is None
    last = choice.push(Sampled(EOS))
    assert (last.text, last.finish) == ("", FinishReason.STOP)
    assert choice.completion_tokens == 2


@given(
    st.one_of(st.text("aé€😀.\n", max_size=24).map(str.encode), st.binary(max_size=24)),
    st.lists(st.text("aé.", min_size=1, max_size=3), max_size=2),
    st.integers(1, 30),
    st.lists(st.integers(1, 24), max_size=3),
)
def test_a_choice_that_moves_says_what_it_would_have_said(
    data: bytes, stops: list[str], most: int, moves: list[int]
) -> None:
    """Wherever it is stopped, and however often: amid a character, or what may be a stop string."""
    how = stopping(*stops, max_tokens=most)
    alone = speak(data, how)
    choice, deltas = Choice(0, how, Bytes()), list[Delta]()
    for count, token in enumerate((*data, EOS)):
        if count in moves:
            choice = moved(choice, data[:count], how)
        deltas.append(choice.push(Sampled(token)))
        if deltas[-1].finish:
            break
    assert deltas == alone
