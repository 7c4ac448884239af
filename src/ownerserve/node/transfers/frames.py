"""Frames carry what peers say of lends, inside requests of the node's RPC port. Version 2.

A frame is msgpack `[version, message]`; messages are tagged structs (transfer.control.messages),
whose unknown fields are ignored and whose new fields have defaults. Ranks and pieces are read by
their places: what is taken out of them is another version, and who speaks version 1 is answered as
malformed, so that its turn computes.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from ownerserve.kv.wire.framed import open_frame
from ownerserve.transfer.control.messages import PeerAnswer, PeerQuestion

VERSION = 2
OLDEST = 2

T = TypeVar("T")


class _Frame(msgspec.Struct, Generic[T], frozen=True, array_like=True):
    version: int
    message: T


_encoder = msgspec.msgpack.Encoder()
_questions: msgspec.msgpack.Decoder[_Frame[PeerQuestion]] = msgspec.msgpack.Decoder(
    _Frame[PeerQuestion]
)
_answers: msgspec.msgpack.Decoder[_Frame[PeerAnswer]] = msgspec.msgpack.Decoder(_Frame[PeerAnswer])


def encode_message(message: PeerQuestion | PeerAnswer) -> bytes:
    """Return the frame of a message."""
    return _encoder.encode(_Frame(VERSION, message))


def decode_question(data: bytes) -> PeerQuestion:
    """Return what a peer asks. Raises InvalidInput for what is no question of a version that is
    read here."""
    return open_frame(data, _questions, oldest=OLDEST, newest=VERSION).message


def decode_reply(data: bytes) -> PeerAnswer:
    """Return what a peer answers. Raises as `decode_question`."""
    return open_frame(data, _answers, oldest=OLDEST, newest=VERSION).message
