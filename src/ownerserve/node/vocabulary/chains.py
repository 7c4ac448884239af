"""Chains and marks remember sessions' tokens: prefix digests by block, and what each last turn
left. Pure.

A turn hashes only what it adds to the session's last one. A prompt that does not go on from its
session's tokens (a branch, a compaction) is hashed from where the two part. A long prompt is hashed
where it is read (`PromptPrefixes`, on any thread) and comes to the node with its digests; what
comes without is hashed by the node. `Chains` owns the digests of the sessions seen last,
`KnownSessions` the marks of what their last turns left.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Protocol

import msgspec
from xxhash import xxh3_128_digest

from ownerserve.kv.ids import PrefixHash, SessionId
from ownerserve.kv.prefix import (
    NO_SALT,
    TOKEN_BYTES,
    HashedPrefix,
    Packed,
    PrefixChain,
    PrefixSalt,
    digests_behind,
    pack,
    unpack,
)
from ownerserve.node.vocabulary.records import Digests, RecordNames

HASHED_SESSIONS = 256


class Hashes(Protocol):
    """A `Hashes` makes or finds the digests of a prompt's full blocks."""

    def hashed(
        self, tokens: Packed, session_id: SessionId | None, made: HashedPrefix | None = None
    ) -> HashedPrefix:
        """Return the full blocks of `tokens` with their digests; `made` are digests that
        somebody else made."""
        ...


class Chains:
    """`Chains` keeps the prefix digests of the sessions seen last, HASHED_SESSIONS of them; the one
    unused for longest is forgotten first."""

    def __init__(
        self,
        block_tokens: int,
        *,
        block_bytes: int,
        chain: type[PrefixChain] = PrefixChain,
    ) -> None:
        """`chain` makes the digests of a prefix (HashedPrefix)."""
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._chain = chain
        self._known: OrderedDict[SessionId, HashedPrefix] = OrderedDict()

    @classmethod
    def of(cls, names: RecordNames) -> Chains:
        """Return chains of the prefixes whose records `names` names."""
        layout = names.layout
        return cls(
            layout.block_tokens, block_bytes=layout.packed_block_bytes, chain=names.chain_maker
        )

    def tokens(self, session_id: SessionId) -> Packed:
        """Return the whole blocks of the session, packed, as it was last seen; empty when it is not
        known."""
        known = self._known.get(session_id)
        return known.tokens if known is not None else b""

    def known_tokens(self, session_id: SessionId) -> int:
        """Return how many tokens the session's whole blocks have, as it was last seen; 0 when it is
        not known."""
        known = self._known.get(session_id)
        return len(known.digests) * self._block_tokens if known is not None else 0

    def digest_at(self, session_id: SessionId, depth: int) -> PrefixHash | None:
        """Return the digest of the session's first `depth` blocks; None where it was not seen here
        that far."""
        known = self._known.get(session_id)
        if known is None or not 0 < depth <= len(known.digests):
            return None
        return known.digests[depth - 1]

    def knows(self, session_id: SessionId | None) -> bool:
        """Return whether the session's digests are kept here."""
        return session_id in self._known

    def peek(self, tokens: Packed, session_ids: Iterable[SessionId] = ()) -> Digests:
        """Return the digests of `tokens`, which are whole blocks, and remember nothing: they are
        taken from the first of the sessions that begins with `tokens`, else hashed, from where
        they go on behind one of the sessions."""
        begun: HashedPrefix | None = None
        for session_id in session_ids:
            known = self._known.get(session_id)
            if known is not None and known.digest_of(tokens) is not None:
                return known.digests[: len(tokens) // self._block_bytes]
            begun = begun or known
        if begun is not None:
            return begun.branch(tokens).digests
        return self._chain(self._block_tokens).extend(tokens)

    def digests(self, tokens: Packed, session_id: SessionId | None) -> Digests:
        """Return the digests of all full blocks of `tokens` and remember them for the session. The
        caller must neither change nor keep the result: it grows with the session."""
        return self.hashed(tokens, session_id).digests

    def hashed(
        self, tokens: Packed, session_id: SessionId | None, made: HashedPrefix | None = None
    ) -> HashedPrefix:
        """Return the full blocks of `tokens` with their digests, and remember them for the session,
        with which the result grows.

        `made`: the same as somebody else made it; it is the caller's to give away. What of it does
        not begin `tokens` is not used. One that goes on from what is known is followed: to let go
        of that would cost as much as it is long.
        """
        known = self._known.pop(session_id, None) if session_id is not None else None
        if made is not None and not (known is not None and known.follow(made)):
            known = made
        if known is None:
            known = HashedPrefix(self._block_tokens, chain=self._chain)
        if not known.grow(tokens):
            known = known.branch(tokens)
        if session_id is not None:
            self._known[session_id] = known
            if len(self._known) > HASHED_SESSIONS:
                self._known.popitem(last=False)
        return known


class PromptPrefix(msgspec.Struct, frozen=True):
    """A `PromptPrefix` is a prompt as packed tokens with the digests of its full blocks: there are
    `blocks` of them, and the last is `tip`. `hashed` grows with its session once a node has it; the
    other fields stay. Tokens and digests bear the `salt`."""

    tokens: Packed
    hashed: HashedPrefix
    blocks: int
    block_tokens: int
    salt: PrefixSalt = NO_SALT

    @property
    def tip(self) -> PrefixHash | None:
        """`tip` is the digest of all full blocks; None for a prompt without a full block."""
        return self.hashed.digests[self.blocks - 1] if self.blocks else None

    @property
    def count(self) -> int:
        """`count` is the number of tokens in the prompt."""
        return len(self.tokens) // TOKEN_BYTES

    def digest_at(self, tokens: int) -> PrefixHash | None:
        """Return the digest of the full blocks in the first `tokens` tokens; None where there is
        none, or the prompt has fewer blocks."""
        blocks = tokens // self.block_tokens
        return self.hashed.digests[blocks - 1] if 0 < blocks <= self.blocks else None

    def plain(self, start: int, end: int) -> array[int]:
        """Return the tokens [start, end) as a model computes them, without the salt."""
        return unpack(self.salt.turned(self.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES], start))

    def salted(self, tokens: Iterable[int], at: int) -> Packed:
        """Return `tokens`, which stand at position `at` of the prompt or behind it, packed and
        under its salt."""
        return self.salt.turned(pack(tokens), at)

    def answered(self, answer: Sequence[int]) -> AnsweredPrompt:
        """Return this prompt followed by `answer`, hashing only what that fills; O(answer)."""
        said = self.salted(answer, self.count)
        rest = self.tokens[self.blocks * self.block_tokens * TOKEN_BYTES :] + said
        return AnsweredPrompt(self, said, digests_behind(self.tip, rest, self.block_tokens))


class AnsweredPrompt(msgspec.Struct, frozen=True):
    """An `AnsweredPrompt` is a prompt and what was said behind it; `digests` are those of the
    blocks that the answer filled."""

    prompt: PromptPrefix
    said: Packed
    digests: Sequence[PrefixHash]

    @property
    def count(self) -> int:
        """`count` is the number of tokens in prompt and answer."""
        return self.prompt.count + len(self.said) // TOKEN_BYTES

    def digest_at(self, tokens: int) -> PrefixHash | None:
        """Return the digest of the full blocks in the first `tokens` tokens of prompt and answer;
        None where there is none, or there are fewer blocks."""
        beyond = tokens // self.prompt.block_tokens - self.prompt.blocks
        if beyond <= 0:
            return self.prompt.digest_at(tokens)
        return self.digests[beyond - 1] if beyond <= len(self.digests) else None


def prefix_of(prompt: Iterable[int], block_tokens: int, salt: PrefixSalt = NO_SALT) -> PromptPrefix:
    """Hash a prompt of which no digest is known yet, all of it, and return its prefix;
    O(prompt)."""
    tokens, hashed = salt.turned(pack(prompt), 0), HashedPrefix(block_tokens)
    hashed.grow(tokens)
    return PromptPrefix(tokens, hashed, len(hashed.digests), block_tokens, salt)


class PromptPrefixes:
    """`PromptPrefixes` makes prompts' prefixes wherever they are read: any thread may call. A
    session's next prompt costs what it adds."""

    def __init__(self, block_tokens: int) -> None:
        self._block = block_tokens
        self._chains = Chains(block_tokens, block_bytes=block_tokens * TOKEN_BYTES)
        self._lock = Lock()

    def of(
        self, prompt: Sequence[int], session: str | None, salt: PrefixSalt = NO_SALT
    ) -> PromptPrefix:
        """Return the prompt's prefix with a copy of its digests, which the caller owns: what is
        kept here does not grow with it."""
        tokens = salt.turned(pack(prompt), 0)
        session_id = None if session is None else SessionId(session)
        with self._lock:
            known = self._chains.hashed(tokens, session_id)
            own = known.copy()
        return PromptPrefix(tokens, own, len(own.digests), self._block, salt)


# ---- what a session's last turn left


MARKED_SESSIONS = 16_384
MARKS_KEPT = 8
"""For a session, the longest first: four turns may be taken back."""


class HashedText(Protocol):
    """A `HashedText` is a row of tokens that can tell the digest of its first so many."""

    @property
    def count(self) -> int:
        """`count` is the number of tokens."""

    def digest_at(self, tokens: int) -> bytes | None:
        """Return the digest of the full blocks in the first `tokens` tokens; None where there are
        not so many."""


class Plain(msgspec.Struct, frozen=True):
    """A `Plain` is a row of packed tokens whose digests are made when they are asked for."""

    tokens: Packed

    @property
    def count(self) -> int:
        """`count` is how many tokens the prompt has."""
        return len(self.tokens) // TOKEN_BYTES

    def digest_at(self, tokens: int) -> bytes | None:
        """Return an xxh3 of exactly the first `tokens` tokens; None where there are not so many.
        O(tokens)."""
        if tokens > self.count:
            return None
        return xxh3_128_digest(self.tokens[: tokens * TOKEN_BYTES])


class Mark(msgspec.Struct, frozen=True):
    """A `Mark` stands for the first `tokens` tokens of a turn by their digest."""

    tokens: int
    digest: bytes

    def begins(self, text: HashedText) -> bool:
        """Return whether `text` begins with the tokens of this mark."""
        return text.digest_at(self.tokens) == self.digest


class KnownSessions:
    """`KnownSessions` keeps marks of the sessions whose turns ended last, `limit` of them, and
    compares new prompts with them.

    A next prompt begins with the session's tokens, or its history was edited: then what was cut off
    is not lost. Two marks of a turn are kept, where its prompt ended and where its output ended,
    each as a length and a digest: an answer is often told back in other tokens (its thinking left
    out), so that only the prompt goes on. Marks of earlier turns stay while turns go on from them,
    the last few.

        last turn    |──────────── prompt ───────────|──── output ────|
        marks                                      ^ A              ^ B      (full blocks)
        next prompt begins with B's tokens: B is known; with A's only: A; else an earlier turn's

    Where a prompt has a digest for each block (`PromptPrefix`) a mark is compared in O(1); of plain
    tokens (`Plain`) the digest is made for the mark, and tells accidents apart, not attackers: a
    wrong one gives a wrong word in a metric, never wrong state.
    """

    def __init__(self, block_tokens: int, *, limit: int = MARKED_SESSIONS) -> None:
        self._block = block_tokens
        self._limit = limit
        self._marks: OrderedDict[SessionId, tuple[Mark, ...]] = OrderedDict()

    def left(self, session_id: SessionId, text: HashedText, *, prompt_tokens: int) -> None:
        """Note that a turn of the session has ended and that `text` is computed, of which the first
        `prompt_tokens` were its prompt."""
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

    def tokens_of(self, session_id: SessionId, prompt: HashedText) -> int:
        """Return how many tokens of `prompt` the session's turns have left computed: full blocks,
        and never all of a prompt, whose last token must be computed in any case; 0 where nothing is
        known."""
        most = self._floor(max(0, prompt.count - 1))
        for mark in self._marks.get(session_id, ()):
            if mark.begins(prompt):
                return min(mark.tokens, most)
        return 0

    def forget(self, session_id: SessionId) -> None:
        """Forget the session, which went elsewhere: a later turn of it here counts no token as
        lost."""
        self._marks.pop(session_id, None)

    def _floor(self, tokens: int) -> int:
        return tokens // self._block * self._block
