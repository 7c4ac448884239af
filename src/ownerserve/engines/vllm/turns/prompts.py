"""`Prompts` keeps what sessions' last turns left, packed and hashed: a prompt costs what is new.

    left by the last turn   |======== packed, hashed =======|      marks: vLLM's own hashes at some
    next prompt             |===============================|+++|  ends stand for what lies before
    done by the hook                                         new

vLLM has hashed a prompt before its scheduler sees it: where its hash at a mark is the one of then,
the tokens before are the same, and none of them is looked at. Such an alias stays in this process
and in no name (its algorithm, seed and extra keys are settings), and is believed only where the
algorithm is a SHA-256. What is new and long (a first prompt, an edited one) is packed and hashed on
another thread, in pieces, so that the scheduler's does not wait for the interpreter's lock.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from ownerserve.engines.vllm.media import Words
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.prefix import TOKEN_BYTES, HashedPrefix, Packed
from ownerserve.node.vocabulary.chains import PromptPrefix

AT_ONCE_TOKENS = 4096
"""New tokens that a hook packs and hashes by itself, at most: about 0.3 ms."""
PIECE_TOKENS = 8192
"""What another thread packs or hashes before it lets go of the interpreter's lock."""
KEPT_TOKENS = 1 << 24
"""Tokens of all sessions that are kept: some 100 MB, packed and with their digests."""
MARKS = 8
TRUSTED = "sha256"
"""What the name of a hash begins with that no two prompts share."""


class PrefixAlias(msgspec.Struct, frozen=True):
    """A `PrefixAlias` is vLLM's hash of the first `tokens` tokens."""

    tokens: int
    alias: bytes


class SessionText(msgspec.Struct, frozen=True):
    """A `SessionText` is what a session's last turn left: tokens, their digests, and marks in them,
    the deepest first."""

    tokens: Packed
    hashed: HashedPrefix
    marks: tuple[PrefixAlias, ...]


class HashedPrompt(msgspec.Struct, frozen=True):
    """A `HashedPrompt` is a turn's prompt, packed, with the digests of its full blocks."""

    turn_id: TurnId
    tokens: Packed
    hashed: HashedPrefix


class Prompts:
    """`Prompts` packs and hashes the prompts of one engine (see the module). Called on the
    scheduler's thread; only what `later` takes runs elsewhere."""

    def __init__(
        self,
        block_tokens: int,
        later: Callable[[Callable[[], None]], None],
        *,
        algorithm: str,
        processing: bytes = b"",
        kept_tokens: int = KEPT_TOKENS,
    ) -> None:
        """Make it. `later` does something on another thread; `algorithm` names how vLLM hashes
        blocks; `processing` is what `Words` needs of the engine."""
        self._block = block_tokens
        self.words = Words(block_tokens, processing=processing)
        self._later = later
        self._trusts_aliases = algorithm.startswith(TRUSTED)
        self._alias_tokens = 0
        self._kept_tokens = kept_tokens
        self._tokens = 0
        self._sessions: OrderedDict[SessionId, SessionText] = OrderedDict()
        self._done: deque[HashedPrompt] = deque()

    def bind(self, alias_tokens: int) -> None:
        """Note how many tokens one of vLLM's block hashes is over."""
        self._alias_tokens = alias_tokens if self._trusts_aliases else 0

    def __len__(self) -> int:
        """Return how many tokens of sessions are kept."""
        return self._tokens

    def hashed(self, request: Any, session_id: SessionId | None) -> HashedPrompt | None:
        """Return the request's prompt, if little of it is new; None: it comes by `poll`, once
        another thread has hashed it."""
        text = self._sessions.get(session_id) if session_id is not None else None
        known = 0 if text is None else self._known(text, request.block_hashes)
        if getattr(request, "mm_features", None):  # one that follows is in all words of its block
            known -= known % self._block
        turn_id, count = TurnId(request.request_id), request.num_tokens
        if count - known > AT_ONCE_TOKENS:
            own = None if text is None else text.hashed.copy()
            words, done = partial(self.words.of, request), self._done

            def chore() -> None:
                done.append(_hashed_in_pieces(turn_id, words, count, own=own, block=self._block))

            self._later(chore)
            return None
        packed = self.words.of(request, known, count)
        if text is None:
            hashed = HashedPrefix(self._block)
        else:
            packed = text.tokens[: known * TOKEN_BYTES] + packed
            hashed = text.hashed.copy()
        if not hashed.grow(packed):
            hashed = hashed.branch(packed)
        return HashedPrompt(turn_id, packed, hashed)

    @property
    def has_answers(self) -> bool:
        """`has_answers` tells whether `poll` has any."""
        return bool(self._done)

    def poll(self) -> Iterator[HashedPrompt]:
        """Yield the prompts that another thread has hashed since the last call."""
        while self._done:
            yield self._done.popleft()

    def extended(self, prompt: HashedPrompt, request: Any, tokens: int) -> PromptPrefix | None:
        """Return the first `tokens` tokens of a request whose prompt this is, and may be longer
        now; None where those are fewer than the prompt's full blocks."""
        known = len(prompt.tokens) // TOKEN_BYTES
        text = prompt.tokens[: tokens * TOKEN_BYTES]
        if tokens > known:
            text += self.words.of(request, known, tokens)
        if not prompt.hashed.grow(text):
            return None
        return PromptPrefix(text, prompt.hashed, len(prompt.hashed.digests), self._block)

    def left(self, session_id: SessionId, text: PromptPrefix, request: Any) -> None:
        """Keep `text`, which a request has left computed, for the session's next prompt."""
        before = self._sessions.pop(session_id, None)
        marks = () if before is None else self._marks_of(before.marks, request.block_hashes)
        ends = (text.count, min(text.count, request.num_prompt_tokens))
        own = [self._mark(request, end) for end in ends]
        found = {
            mark.tokens: mark
            for mark in (*marks, *own)
            if mark is not None and mark.tokens <= text.count
        }
        kept = sorted(found.values(), key=lambda mark: mark.tokens, reverse=True)
        self._sessions[session_id] = SessionText(text.tokens, text.hashed, tuple(kept[:MARKS]))
        self._tokens += text.count - _count(before)
        while self._tokens > self._kept_tokens:
            _, oldest = self._sessions.popitem(last=False)
            self._tokens -= _count(oldest)

    def forget(self, session_id: SessionId) -> None:
        """Forget the session, which has ended or gone elsewhere."""
        self._tokens -= _count(self._sessions.pop(session_id, None))

    def clear(self) -> None:
        """Forget all sessions."""
        self._sessions.clear()
        self._tokens = 0

    # -- parts ---------------------------------------------------------------------------------

    def _known(self, text: SessionText, hashes: Sequence[bytes]) -> int:
        """Return how many tokens a prompt that vLLM hashed so begins with of a session's."""
        return max((mark.tokens for mark in self._marks_of(text.marks, hashes)), default=0)

    def _marks_of(
        self, marks: tuple[PrefixAlias, ...], hashes: Sequence[bytes]
    ) -> tuple[PrefixAlias, ...]:
        size = self._alias_tokens
        if not size:
            return ()
        return tuple(
            mark
            for mark in marks
            if mark.tokens // size <= len(hashes) and hashes[mark.tokens // size - 1] == mark.alias
        )

    def _mark(self, request: Any, end: int) -> PrefixAlias | None:
        size = self._alias_tokens
        blocks = min(end // size, len(request.block_hashes)) if size else 0
        return PrefixAlias(blocks * size, request.block_hashes[blocks - 1]) if blocks else None


def _count(text: SessionText | None) -> int:
    return 0 if text is None else len(text.tokens) // TOKEN_BYTES


def _hashed_in_pieces(
    turn_id: TurnId,
    words: Callable[[int, int], Packed],
    count: int,
    *,
    own: HashedPrefix | None,
    block: int,
) -> HashedPrompt:
    """Return a prompt of `count` tokens, packed and hashed; what it begins with of `own`, digests
    that nobody else has, is not hashed again. Lets go of the interpreter's lock between pieces."""
    pieces = []
    for start in range(0, count, PIECE_TOKENS):
        pieces.append(words(start, min(start + PIECE_TOKENS, count)))
        time.sleep(0)
    packed = b"".join(pieces)
    hashed = HashedPrefix(block) if own is None else own.beginning_of(packed)
    known = len(hashed.tokens) // TOKEN_BYTES
    for end in (*range(known + PIECE_TOKENS, count, PIECE_TOKENS), count):
        hashed.grow(packed if end == count else packed[: end * TOKEN_BYTES])
        time.sleep(0)
    return HashedPrompt(turn_id, packed, hashed)
