"""The frames of the TCP mover: what each says, and the bytes that it is.

    asks      | kind 1, digest 1, 0 x 6 | number 8 | ticket 8 | artifact 32 | 0 x 32 | first and
              end unit, layer, head: 4 each | bytes 8 | MAC 16 |                      = 136 bytes
    answers   | kind 1, outcome 1, 0 x 6 | number 8 | bytes 8 | digest 32 | MAC 16 |   = 72 bytes

All little-endian; each direction's frames are of one length, so that no length is believed before
its MAC. A `PartHead` is followed by as many bytes of the piece as it says: whole slices
(gather.py), but for the piece's end. The MAC is of the frame's place in its direction, and its
body: a frame left out, sent twice or out of turn does not match.
"""

from __future__ import annotations

import hmac
from enum import IntEnum
from struct import Struct

import msgspec
from blake3 import blake3

from ownerserve.kv.errors import Corrupt
from ownerserve.transfer.vocabulary import FramePiece

ARTIFACT_BYTES = 32
MAC_BYTES = 16
DIGEST_BYTES = 32
_ASK = Struct("<BB6xQQ32s32sIIIIIIQ")
_ANSWER = Struct("<BB6xQQ32s")
ASK_BYTES = _ASK.size + MAC_BYTES
ANSWER_BYTES = _ANSWER.size + MAC_BYTES
_PLACE = Struct("<Q")
_NO_DIGEST = bytes(DIGEST_BYTES)
_SPARE = bytes(32)
_BRING, _PART, _OVER = 1, 2, 3


class DigestKind(IntEnum):
    """A `DigestKind` says which digest of its bytes ends an answer."""

    NONE = 0
    """The reader has the digest already, from whoever told it of the piece."""
    XXH3 = 1
    """xxh3-128, against accidents; the MAC around it is no proof against who can alter bytes."""
    BLAKE3 = 2
    """blake3 under the connection's key: nobody without the key can alter a byte unseen."""


class AnswerOutcome(IntEnum):
    """An `AnswerOutcome` is how an answer ended, as the lender says."""

    BROUGHT = 0
    GONE = 1
    REFUSED = 2


class Bring(msgspec.Struct, frozen=True, gc=False):
    """`Bring` asks for a piece of `size_bytes` bytes under a ticket. `number` is the asker's."""

    number: int
    ticket: int
    piece: FramePiece
    size_bytes: int
    digest: DigestKind

    def body(self) -> bytes:
        """Return the frame without its MAC. Raises ValueError for what does not fit into it."""
        piece = self.piece
        if len(piece.artifact) != ARTIFACT_BYTES:
            raise ValueError("an artifact's name of another length")
        layers = (piece.first_layer, piece.end_layer)
        heads = (piece.first_head, piece.end_head)
        cut = (piece.first_unit, piece.end_unit, *layers, *heads)
        numbers = (self.number, self.ticket, self.size_bytes)
        if min(*numbers, *cut) < 0 or max(cut) >> 32 or max(numbers) >> 64:
            raise ValueError("a number that does not fit")
        facts = (self.number, self.ticket, piece.artifact, _SPARE, *cut, self.size_bytes)
        return _ASK.pack(_BRING, self.digest, *facts)


class PartHead(msgspec.Struct, frozen=True, gc=False):
    """A `PartHead` says that the next `size_bytes` bytes are the piece's."""

    number: int
    size_bytes: int

    def body(self) -> bytes:
        """Return the frame without its MAC."""
        return _ANSWER.pack(_PART, 0, self.number, self.size_bytes, _NO_DIGEST)


class Over(msgspec.Struct, frozen=True, gc=False):
    """An `Over` ends an answer. `size_bytes` are those that were sent, `digest` is theirs, of the
    kind that was asked for, filled up with zeros."""

    number: int
    outcome: AnswerOutcome
    size_bytes: int
    digest: bytes

    def body(self) -> bytes:
        """Return the frame without its MAC."""
        digest = self.digest.ljust(DIGEST_BYTES, b"\0")
        return _ANSWER.pack(_OVER, self.outcome, self.number, self.size_bytes, digest)


def decode_ask(body: bytes) -> Bring:
    """Return what is asked. Raises Corrupt for what no asker of ours writes."""
    kind, digest, number, ticket, artifact, spare, *cut, size = _unpacked(_ASK, body)
    piece = FramePiece(artifact, *cut)
    if kind != _BRING or digest not in tuple(DigestKind) or spare != _SPARE:
        raise Corrupt("no frame that asks")
    return Bring(number, ticket, piece, size, DigestKind(digest))


def decode_answer(body: bytes) -> PartHead | Over:
    """Return what is answered. Raises Corrupt for what no lender of ours writes."""
    kind, outcome, number, size, digest = _unpacked(_ANSWER, body)
    if kind == _PART and not outcome and size and digest == _NO_DIGEST:
        return PartHead(number, size)
    if kind == _OVER and outcome in tuple(AnswerOutcome):
        return Over(number, AnswerOutcome(outcome), size, digest)
    raise Corrupt("no frame that answers")


def _unpacked(form: Struct, body: bytes) -> tuple:  # type: ignore[type-arg]
    if len(body) != form.size or any(body[2:8]):
        raise Corrupt("no frame")
    return form.unpack(body)


class Signing:
    """A `Signing` makes the frames of one direction of a connection, each for its place."""

    def __init__(self, key: bytes) -> None:
        self._key, self._place = key, 0

    def frame(self, body: bytes) -> bytes:
        """Return the frame: the body and its MAC."""
        mac = _mac(self._key, self._place, body)
        self._place += 1
        return body + mac


class Checking:
    """A `Checking` reads the frames of one direction of a connection, in their order."""

    def __init__(self, key: bytes) -> None:
        self._key, self._place = key, 0

    def body(self, frame: bytes) -> bytes:
        """Return what the frame says. Raises Corrupt where it is not the next of its signer's."""
        body, mac = frame[:-MAC_BYTES], frame[-MAC_BYTES:]
        if not hmac.compare_digest(mac, _mac(self._key, self._place, body)):
            raise Corrupt("a frame whose MAC is another")
        self._place += 1
        return body


def _mac(key: bytes, place: int, body: bytes) -> bytes:
    return blake3(_PLACE.pack(place) + body, key=key).digest(MAC_BYTES)
