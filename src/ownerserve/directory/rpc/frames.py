"""Frames are what is said on the directory's port, and how it is encoded. Version 1.

    request   [number, msgpack [version, Batch | Status | Forget]]
    answer    [number, msgpack [version, Outcomes | StatusIs | Failed]]

`number` is the client's, eight bytes, and comes back as it was. Unknown fields are ignored and new
ones have defaults, so that version N reads N - 1.
"""

from __future__ import annotations

from typing import Generic, TypeAlias, TypeVar

import msgspec

from ownerserve.directory.messages import Outcome, Request
from ownerserve.directory.port import DirectoryStatus
from ownerserve.kv.wire.framed import open_frame

VERSION = 1
OLDEST = 1
MAX_FRAME_BYTES = 64 << 20


class RequestBatch(msgspec.Struct, frozen=True, tag="batch"):
    """A batch is requests that are answered together, in order."""

    requests: tuple[Request, ...]


class StatusQuestion(msgspec.Struct, frozen=True, tag="status"):
    """A status question asks how the directory is."""


class ForgetAll(msgspec.Struct, frozen=True, tag="forget"):
    """ForgetAll demands that the directory lose all memory: workers fill it again from their
    inventories.
    """


Question: TypeAlias = RequestBatch | StatusQuestion | ForgetAll


class Outcomes(msgspec.Struct, frozen=True, tag="outcomes"):
    """Outcomes answer a batch: one outcome for each of its requests, in their order."""

    outcomes: tuple[Outcome, ...]


class StatusAnswer(msgspec.Struct, frozen=True, tag="status_is"):
    """A status answer answers both other questions: the directory as it is now."""

    status: DirectoryStatus


class FrameFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The frame could not be read or done; nothing was changed."""

    why: str


Answer: TypeAlias = Outcomes | StatusAnswer | FrameFailed

T = TypeVar("T")


class _Frame(msgspec.Struct, Generic[T], frozen=True, array_like=True):
    version: int
    body: T


_encoder = msgspec.msgpack.Encoder()
_questions: msgspec.msgpack.Decoder[_Frame[Question]] = msgspec.msgpack.Decoder(_Frame[Question])
_answers: msgspec.msgpack.Decoder[_Frame[Answer]] = msgspec.msgpack.Decoder(_Frame[Answer])


def encode(body: Question | Answer) -> bytes:
    """Return the bytes of one frame."""
    return _encoder.encode(_Frame(VERSION, body))


def decode_question(data: bytes) -> Question:
    """Return the question in a frame. Raises InvalidInput unless it is one, of a version that is
    read here.
    """
    return open_frame(data, _questions, oldest=OLDEST, newest=VERSION).body


def decode_answer(data: bytes) -> Answer:
    """Return the answer in a frame. Raises InvalidInput unless it is one, of a version that is read
    here.
    """
    return open_frame(data, _answers, oldest=OLDEST, newest=VERSION).body
