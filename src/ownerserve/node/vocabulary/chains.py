"""Prefix digests of sessions: a turn hashes only what it adds to the session's last one.

Owns the digests of the sessions seen last. A prompt that does not go on from its session's tokens
(a branch, a compaction) is hashed from where the two part.

A long prompt is hashed where it is read (`PromptPrefixes`, on any thread) and comes to the node
with its digests; what comes without is hashed by the node.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Protocol

import msgspec

from ownerserve.kv.ids import PrefixHash, SessionId
from ownerserve.kv.prefix import (
    TOKEN_BYTES,
    HashedPrefix,
    Packed,
    digests_behind,
    hash_prefix,
    pack,
)
from ownerserve.node.vocabulary.records import Digests

SESSIONS = 256


class Hashes(Protocol):
    """Who knows the digests of a prompt."""

    def hashed(
        self, tokens: Packed, session_id: SessionId | None, made: HashedPrefix | None = None
    ) -> HashedPrefix: ...


class Chains:
    """Digests by session, least recently used forgotten first."""

    def __init__(self, block_tokens: int, *, block_bytes: int) -> None:
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._known: OrderedDict[SessionId, HashedPrefix] = OrderedDict()

    def tokens(self, session_id: SessionId) -> Packed:
        """Whole blocks of the session as last seen; empty when it was forgotten."""
        known = self._known.get(session_id)
        return known.tokens if known is not None else b""

    def digest_at(self, session_id: SessionId, depth: int) -> PrefixHash | None:
        """The digest of the session's first `depth` blocks, if it was seen here that far."""
        known = self._known.get(session_id)
        if known is None or not 0 < depth <= len(known.digests):
            return None
        return known.digests[depth - 1]

    def knows(self, session_id: SessionId | None) -> bool:
        """Whether the session was seen here."""
        return session_id in self._known

    def peek(self, tokens: Packed, session_ids: Iterable[SessionId] = ()) -> Digests:
        """Digests of `tokens`, whole blocks, without remembering them: those of a session that
        goes on from there, else hashed."""
        for session_id in session_ids:
            known = self._known.get(session_id)
            if known is not None and known.digest_of(tokens) is not None:
                return known.digests[: len(tokens) // self._block_bytes]
        return hash_prefix(tokens, self._block_tokens)

    def digests(self, tokens: Packed, session_id: SessionId | None) -> Digests:
        """Digests of all full blocks of `tokens`. The result is not to be changed or kept."""
        return self.hashed(tokens, session_id).digests

    def hashed(
        self, tokens: Packed, session_id: SessionId | None, made: HashedPrefix | None = None
    ) -> HashedPrefix:
        """The full blocks of `tokens` with their digests. It grows with its session.

        `made`: the same as somebody else made it; it is the caller's to give away. What of it does
        not begin `tokens` is not used. One that goes on from what is known is followed: to let go
        of that would cost as much as it is long.
        """
        known = self._known.pop(session_id, None) if session_id is not None else None
        if made is not None and not (known is not None and known.follow(made)):
            known = made
        if known is None:
            known = HashedPrefix(self._block_tokens)
        if not known.grow(tokens):
            known = known.branch(tokens)
        if session_id is not None:
            self._known[session_id] = known
            if len(self._known) > SESSIONS:
                self._known.popitem(last=False)
        return known


class PromptPrefix(msgspec.Struct, frozen=True):
    """A prompt as packed tokens with the digests of its full blocks: `blocks` of them, the last is
    `tip`. `hashed` grows with its session once a node has it; the other fields stay."""

    tokens: Packed
    hashed: HashedPrefix
    blocks: int
    block_tokens: int

    @property
    def tip(self) -> PrefixHash | None:
        """The digest of all full blocks; None: there is none."""
        return self.hashed.digests[self.blocks - 1] if self.blocks else None

    @property
    def count(self) -> int:
        """Tokens of the prompt."""
        return len(self.tokens) // TOKEN_BYTES

    def digest_at(self, tokens: int) -> PrefixHash | None:
        """The digest of the first `tokens` tokens, whole blocks; None: there are not so many."""
        blocks = tokens // self.block_tokens
        return self.hashed.digests[blocks - 1] if 0 < blocks <= self.blocks else None

    def answered(self, said: Packed) -> AnsweredPrompt:
        """The prompt and what was said behind it; O(said)."""
        rest = self.tokens[self.blocks * self.block_tokens * TOKEN_BYTES :] + said
        return AnsweredPrompt(self, said, digests_behind(self.tip, rest, self.block_tokens))


class AnsweredPrompt(msgspec.Struct, frozen=True):
    """A prompt and what was said behind it, with the digests of the blocks that this filled."""

    prompt: PromptPrefix
    said: Packed
    digests: Sequence[PrefixHash]

    @property
    def count(self) -> int:
        """Tokens of both."""
        return self.prompt.count + len(self.said) // TOKEN_BYTES

    def digest_at(self, tokens: int) -> PrefixHash | None:
        """The digest of the first `tokens` tokens, whole blocks; None: there are not so many."""
        beyond = tokens // self.prompt.block_tokens - self.prompt.blocks
        if beyond <= 0:
            return self.prompt.digest_at(tokens)
        return self.digests[beyond - 1] if beyond <= len(self.digests) else None


def prefix_of(prompt: Iterable[int], block_tokens: int) -> PromptPrefix:
    """A prompt of which nothing is known: all of it is hashed."""
    tokens, hashed = pack(prompt), HashedPrefix(block_tokens)
    hashed.grow(tokens)
    return PromptPrefix(tokens, hashed, len(hashed.digests), block_tokens)


class PromptPrefixes:
    """Makes prompts' prefixes wherever they are read: any thread may call. A session's next prompt
    costs what it adds."""

    def __init__(self, block_tokens: int) -> None:
        self._block = block_tokens
        self._chains = Chains(block_tokens, block_bytes=block_tokens * TOKEN_BYTES)
        self._lock = Lock()

    def of(self, prompt: Sequence[int], session: str | None) -> PromptPrefix:
        """The prompt's prefix, the receiver's own: what is kept here grows no further with it."""
        tokens = pack(prompt)
        session_id = None if session is None else SessionId(session)
        with self._lock:
            known = self._chains.hashed(tokens, session_id)
            own = known.copy()
        return PromptPrefix(tokens, own, len(own.digests), self._block)
