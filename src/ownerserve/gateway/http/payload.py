"""An answer's body as it passes by: the parts of the last read, its last bytes, and its usage.

Owns what is remembered of bytes that went to the client. Engines tell `usage` at the end of an
answer, but for the prompt's token ids, which may follow it and are as long as the prompt: so what
leaves the kept end is looked through for it, once.
"""

from __future__ import annotations

from ownerserve.router.requests.body import TAIL_BYTES, usage_before

_PIECES_MAX = 16


class AnswerPayload:
    """A payload is a body without chunk frames, of which are kept the parts of the last read, the
    last bytes of all and the last `usage` before those."""

    __slots__ = ("_last", "_usage", "parts")

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._last: list[bytes] = []
        self._usage = b""

    def take(self, part: bytes) -> None:
        """Take in a part of the last read."""
        last = self._last
        last.append(part)
        if len(last) > _PIECES_MAX or len(part) > TAIL_BYTES:
            self._cut()

    @property
    def now(self) -> bytes:
        """The bytes of the last read."""
        return b"".join(self.parts)

    @property
    def tail(self) -> bytes:
        """The last bytes of all, behind the last `usage` before them."""
        self._cut()
        return self._usage + b"".join(self._last)

    def _cut(self) -> None:
        whole = b"".join(self._last)
        end = len(whole) - TAIL_BYTES
        if end > 0:
            self._usage = usage_before(whole, end) or self._usage
        self._last = [whole[-TAIL_BYTES:]]
