"""Epochs say who is the later owner, without asking a clock.

An epoch is (term, counter). The directory issues it with every grant; a node keeps the highest one
that it has heard of each session (directory/owner/doors.py) and refuses what is asked under a lower
one. A directory that lost its memory, or found itself promoted, starts a new *term*; two that do so
at the same time draw different nonces, so no epoch is ever issued twice, and any two epochs compare
the same everywhere.
"""

from __future__ import annotations

import msgspec

from ownerserve.kv.errors import InvalidInput

ORDINAL_LIMIT = 1 << 48
NONCE_LIMIT = 1 << 48
COUNTER_LIMIT = 1 << 48
"""All stay exact in JSON and in Lua, whose numbers are doubles."""


class Term(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """A term is one memory of a directory. `ordinal` grows; `nonce` is random and tells twins
    apart.
    """

    ordinal: int
    nonce: int

    def __post_init__(self) -> None:
        if not 0 <= self.ordinal < ORDINAL_LIMIT or not 0 <= self.nonce < NONCE_LIMIT:
            raise InvalidInput("term", f"({self.ordinal}, {self.nonce})", "use 48-bit numbers")


class Epoch(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """An epoch is one grant of ownership. Epochs compare by term, then by counter."""

    term: Term
    counter: int


def later(first: Epoch | None, second: Epoch | None) -> Epoch | None:
    """Return the higher of two epochs, either of which may be absent."""
    if first is None or second is None:
        return first or second
    return max(first, second)
