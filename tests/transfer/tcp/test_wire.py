"""Frames of the TCP mover: what is written is read, nothing else is, and each only in its turn."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerserve.kv.errors import Corrupt
from ownerserve.transfer.movers.tcp.wire import (
    ANSWER_BYTES,
    ASK_BYTES,
    MAC_BYTES,
    AnswerOutcome,
    Bring,
    Checking,
    DigestKind,
    Over,
    PartHead,
    Signing,
    decode_answer,
    decode_ask,
)
from ownerserve.transfer.vocabulary import FramePiece

quick = settings(max_examples=200, deadline=None, database=None)
small = st.integers(0, 2**32 - 1)
large = st.integers(0, 2**64 - 1)
name = st.binary(min_size=32, max_size=32)
pieces = st.builds(FramePiece, name, small, small, small, small, small, small)
asks = st.builds(Bring, large, large, pieces, large, st.sampled_from(DigestKind))
answers = st.one_of(
    st.builds(PartHead, large, st.integers(1, 2**64 - 1)),
    st.builds(Over, large, st.sampled_from(AnswerOutcome), large, name),
)


@quick
@given(asks)
def test_what_is_asked_is_read_as_it_was(ask: Bring) -> None:
    assert decode_ask(ask.body()) == ask
    assert len(ask.body()) + MAC_BYTES == ASK_BYTES


@quick
@given(answers)
def test_what_is_answered_is_read_as_it_was(answer: PartHead | Over) -> None:
    assert decode_answer(answer.body()) == answer
    assert len(answer.body()) + MAC_BYTES == ANSWER_BYTES


@quick
@given(st.one_of(st.binary(max_size=160), st.binary(min_size=120, max_size=120),
                 st.binary(min_size=56, max_size=56)))  # fmt: skip
def test_anything_is_a_frame_or_corrupt(data: bytes) -> None:
    """And what is read of it is all that it says: written again it is the same."""
    for decode in (decode_ask, decode_answer):
        try:
            said = decode(data)
        except Corrupt:
            continue
        assert said.body() == data


@quick
@given(asks, st.integers(0, 119), st.integers(1, 255))
def test_a_changed_ask_is_another_or_corrupt(ask: Bring, at: int, flip: int) -> None:
    data = bytearray(ask.body())
    data[at] ^= flip
    with suppress(Corrupt):
        assert decode_ask(bytes(data)) != ask


def test_what_is_asked_for_beyond_a_piece_is_corrupt() -> None:
    """And not answered as if it had not been said."""
    body = bytearray(Bring(1, 1, FramePiece(b"a" * 32, 0, 1, 0, 1), 1, DigestKind.NONE).body())
    body[56 + 31] = 1
    with pytest.raises(Corrupt):
        decode_ask(bytes(body))


@pytest.mark.parametrize(
    "piece",
    [
        FramePiece(b"a" * 31, 0, 1, 0, 1),
        FramePiece(b"a" * 33, 0, 1, 0, 1),
        FramePiece(b"a" * 32, -1, 1, 0, 1),
        FramePiece(b"a" * 32, 0, 2**32, 0, 1),
    ],
)
def test_what_does_not_fit_into_a_frame_is_not_written(piece: FramePiece) -> None:
    with pytest.raises(ValueError):
        Bring(1, 1, piece, 1, DigestKind.NONE).body()


@quick
@given(st.lists(st.binary(max_size=40), min_size=2, max_size=5), st.data())
def test_frames_are_read_in_their_order_alone(bodies: list[bytes], data: st.DataObject) -> None:
    signing = Signing(b"k" * 32)
    frames = [signing.frame(body) for body in bodies]
    order = data.draw(st.lists(st.integers(0, len(frames) - 1), max_size=8))
    checking = Checking(b"k" * 32)
    for turn, place in enumerate(order):
        if place != turn:
            with pytest.raises(Corrupt):
                checking.body(frames[place])
            return
        assert checking.body(frames[place]) == bodies[place]


@quick
@given(st.binary(max_size=80), st.integers(0, 95), st.integers(1, 255))
def test_a_frame_changed_or_under_another_key_is_corrupt(body: bytes, at: int, flip: int) -> None:
    frame = bytearray(Signing(b"k" * 32).frame(body))
    with pytest.raises(Corrupt):
        Checking(b"K" * 32).body(bytes(frame))
    frame[at % len(frame)] ^= flip
    with pytest.raises(Corrupt):
        Checking(b"k" * 32).body(bytes(frame))
