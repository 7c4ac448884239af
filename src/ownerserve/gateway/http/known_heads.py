"""Known heads are those that requests came with before: most clients say the same again with each
request but for its body's length.

Owns which heads are known: plain ones, whose body has a length and on whose connection another
request may follow. One is found by all its bytes but the length's digits, after the parser and all
rules have passed it once: what they would say again is not asked again. Keys are in these bytes,
and are compared nowhere: a head is known by its digest under a secret of this process, so that the
time of a look-up tells nothing of a key that is nearly right, whatever Python's own hash is seeded
with (PYTHONHASHSEED).
"""

from __future__ import annotations

import os
from hashlib import sha256
from typing import TypeAlias

from msgspec import structs

from ownerserve.gateway.http.heads import HOP_BY_HOP, RequestHead
from ownerserve.kv.units import KIB

KNOWN_MAX = 2048
HEAD_MAX_BYTES = 2 * KIB
"""Longer heads are parsed each time."""
_LENGTHS = (b"\r\ncontent-length: ", b"\r\nContent-Length: ")
_LENGTH_BYTES = len(_LENGTHS[0])
_DIGITS_MAX = 12
_UNFIT = (HOP_BY_HOP - {b"connection"}) | {b"expect", b"x-request-id", b"traceparent"}
"""Headers with which a head is not a plain one, or comes once alone."""

HeadBytes: TypeAlias = tuple[bytes, int, int]
"""A head's bytes without its body's length, that length, and where the body begins."""


def head_bytes(data: bytes) -> HeadBytes | None:
    """Return what `data` begins with, if that is a whole head that may be known; else None."""
    end = data.find(b"\r\n\r\n", 0, HEAD_MAX_BYTES)
    if end < 0:
        return None
    at = data.find(_LENGTHS[0], 0, end)
    if at < 0:
        at = data.find(_LENGTHS[1], 0, end)
        if at < 0:
            return None
    at += _LENGTH_BYTES
    stop = data.find(b"\r\n", at)
    digits = data[at:stop]
    if not digits.isdigit() or len(digits) > _DIGITS_MAX:
        return None
    return data[:at] + data[stop:end], int(digits), end + 4


class KnownHeads:
    """The known heads of one gateway, at most KNOWN_MAX; the one that was learnt first goes
    first."""

    def __init__(self) -> None:
        self._secret = sha256(os.urandom(sha256().block_size))
        self._heads: dict[bytes, RequestHead] = {}

    def get(self, head: bytes) -> RequestHead | None:
        """Return the head with these bytes; None when it is not known."""
        return self._heads.get(self._digest(head))

    def learn(self, data: bytes, head: RequestHead) -> None:
        """Know the head with these bytes from now on, if it is a plain one."""
        special = head.special
        if head.version != b"1.1" or head.method != b"POST" or not _UNFIT.isdisjoint(special):
            return
        if special.get(b"connection", b"keep-alive").lower() != b"keep-alive":
            return
        if len(self._heads) >= KNOWN_MAX:
            del self._heads[next(iter(self._heads))]
        said = {name: value for name, value in special.items() if name != b"content-length"}
        self._heads[self._digest(data)] = structs.replace(head, special=said)

    def _digest(self, head: bytes) -> bytes:
        digest = self._secret.copy()
        digest.update(head)
        return digest.digest()

    def forget(self) -> None:
        """Know none any more: who is let in may be another now."""
        self._heads.clear()
