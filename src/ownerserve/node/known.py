"""What each session's last turn left, told from prompts by comparing. Pure.

A next prompt begins with the session's tokens, or its history was edited: then what was cut off is
not lost. Two marks of a turn are kept, where its prompt ended and where its output ended, each as a
length and a digest: an answer is often told back in other tokens (its thinking left out), so that
only the prompt goes on. Marks of earlier turns stay while turns go on from them, the last few.

    last turn    |──────────── prompt ───────────|──── output ────|
    marks                                      ^ A              ^ B      (full blocks)
    next prompt begins with B's tokens: B is known; with A's only: A; else an earlier turn's

Digests tell accidents apart, not attackers: a wrong one gives a wrong word in a metric, never
wrong state.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec
from xxhash import xxh3_128_digest

from ownerserve.kv.ids import SessionId
from ownerserve.kv.prefix import TOKEN_BYTES, Packed

SESSIONS_KEPT = 16_384
MARKS_KEPT = 8
"""For a session, the longest first: four turns may be taken back."""


class Mark(msgspec.Struct, frozen=True):
    """The first `tokens` tokens of a turn, by their digest."""

    tokens: int
    digest: bytes

    def begins(self, tokens: Packed) -> bool:
        """Whether `tokens` begin with those of this mark."""
        count = self.tokens * TOKEN_BYTES
        return len(tokens) >= count and xxh3_128_digest(tokens[:count]) == self.digest


class KnownSessions:
    """Owns the marks of the sessions whose turns ended last, `limit` of them."""

    def __init__(self, block_tokens: int, *, limit: int = SESSIONS_KEPT) -> None:
        self._block = block_tokens
        self._limit = limit
        self._marks: OrderedDict[SessionId, tuple[Mark, ...]] = OrderedDict()

    def left(self, session_id: SessionId, tokens: Packed, *, prompt_tokens: int) -> None:
        """A turn of the session has ended: `tokens` are computed, the prompt's first."""
        ends = {self._floor(len(tokens) // TOKEN_BYTES), self._floor(prompt_tokens)}
        before = self._marks.get(session_id, ())
        first = next((n for n, mark in enumerate(before) if mark.begins(tokens)), len(before))
        earlier = [mark for mark in before[first:] if mark.tokens not in ends]
        marks = (
            Mark(end, xxh3_128_digest(tokens[: end * TOKEN_BYTES]))
            for end in sorted(ends, reverse=True)
            if end
        )
        self._marks[session_id] = (*marks, *earlier)[:MARKS_KEPT]
        self._marks.move_to_end(session_id)
        if len(self._marks) > self._limit:
            self._marks.popitem(last=False)

    def tokens_of(self, session_id: SessionId, prompt: Packed) -> int:
        """Tokens of `prompt` that the session's last turn left: full blocks, and never all of a
        prompt, whose last token must be computed in any case."""
        most = self._floor(max(0, len(prompt) // TOKEN_BYTES - 1))
        for mark in self._marks.get(session_id, ()):
            if mark.begins(prompt):
                return min(mark.tokens, most)
        return 0

    def forget(self, session_id: SessionId) -> None:
        """The session went elsewhere: its next turn here, if any, loses nothing."""
        self._marks.pop(session_id, None)

    def _floor(self, tokens: int) -> int:
        return tokens // self._block * self._block
