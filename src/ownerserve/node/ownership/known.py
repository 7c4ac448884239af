"""What each session's last turn left, told from prompts by comparing. Pure.

A next prompt begins with the session's tokens, or its history was edited: then what was cut off is
not lost. Two marks of a turn are kept, where its prompt ended and where its output ended, each as a
length and a digest: an answer is often told back in other tokens (its thinking left out), so that
only the prompt goes on. Marks of earlier turns stay while turns go on from them, the last few.

    last turn    |──────────── prompt ───────────|──── output ────|
    marks                                      ^ A              ^ B      (full blocks)
    next prompt begins with B's tokens: B is known; with A's only: A; else an earlier turn's

Where a prompt has a digest for each block (`PromptPrefix`) a mark is compared in O(1); of plain
tokens (`Plain`) the digest is made for the mark, and tells accidents apart, not attackers: a wrong
one gives a wrong word in a metric, never wrong state.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

import msgspec
from xxhash import xxh3_128_digest

from ownerserve.kv.ids import SessionId
from ownerserve.kv.prefix import TOKEN_BYTES, Packed

SESSIONS_KEPT = 16_384
MARKS_KEPT = 8
"""For a session, the longest first: four turns may be taken back."""


class Text(Protocol):
    """Tokens, and the digests of their first so many."""

    @property
    def count(self) -> int:
        """How many tokens there are."""

    def digest_at(self, tokens: int) -> bytes | None:
        """The digest of the first `tokens` of them, whole blocks; None: there are not so many."""


class Plain(msgspec.Struct, frozen=True):
    """Tokens that nobody hashes elsewhere."""

    tokens: Packed

    @property
    def count(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    def digest_at(self, tokens: int) -> bytes | None:
        """An xxh3 of those tokens. O(tokens)."""
        if tokens > self.count:
            return None
        return xxh3_128_digest(self.tokens[: tokens * TOKEN_BYTES])


class Mark(msgspec.Struct, frozen=True):
    """The first `tokens` tokens of a turn, by their digest."""

    tokens: int
    digest: bytes

    def begins(self, text: Text) -> bool:
        """Whether `text` begins with the tokens of this mark."""
        return text.digest_at(self.tokens) == self.digest


class KnownSessions:
    """Owns the marks of the sessions whose turns ended last, `limit` of them."""

    def __init__(self, block_tokens: int, *, limit: int = SESSIONS_KEPT) -> None:
        self._block = block_tokens
        self._limit = limit
        self._marks: OrderedDict[SessionId, tuple[Mark, ...]] = OrderedDict()

    def left(self, session_id: SessionId, text: Text, *, prompt_tokens: int) -> None:
        """A turn of the session has ended: `text` is computed, the prompt's tokens first."""
        ends = {self._floor(text.count), self._floor(prompt_tokens)} - {0}
        before = self._marks.get(session_id, ())
        first = next((n for n, mark in enumerate(before) if mark.begins(text)), len(before))
        earlier = [mark for mark in before[first:] if mark.tokens not in ends]
        digests = ((end, text.digest_at(end)) for end in sorted(ends, reverse=True))
        marks = [Mark(end, digest) for end, digest in digests if digest is not None]
        self._marks[session_id] = (*marks, *earlier)[:MARKS_KEPT]
        self._marks.move_to_end(session_id)
        if len(self._marks) > self._limit:
            self._marks.popitem(last=False)

    def tokens_of(self, session_id: SessionId, prompt: Text) -> int:
        """Tokens of `prompt` that the session's last turn left: full blocks, and never all of a
        prompt, whose last token must be computed in any case."""
        most = self._floor(max(0, prompt.count - 1))
        for mark in self._marks.get(session_id, ()):
            if mark.begins(prompt):
                return min(mark.tokens, most)
        return 0

    def forget(self, session_id: SessionId) -> None:
        """The session went elsewhere: its next turn here, if any, loses nothing."""
        self._marks.pop(session_id, None)

    def _floor(self, tokens: int) -> int:
        return tokens // self._block * self._block
