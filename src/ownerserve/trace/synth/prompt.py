"""This module has prompts as they grow: a length, and ids for the blocks it fills."""

from __future__ import annotations

from ownerserve.trace.model import Runs
from ownerserve.trace.runs import concat, take


class BlockIds:
    """This source hands out block ids, each once."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = 0

    def fresh(self, count: int) -> Runs:
        """Return `count` ids that were never used."""
        first = self._next
        self._next += count
        return ((first, count),) if count else ()


class SynthPrompt:
    """A prompt is one conversation's. Owns its length and its block ids; forks share what they
    have."""

    __slots__ = ("_block_tokens", "_ids", "runs", "tokens")

    def __init__(self, ids: BlockIds, block_tokens: int) -> None:
        self._ids = ids
        self._block_tokens = block_tokens
        self.tokens = 0
        self.runs: Runs = ()

    def append(self, tokens: int) -> None:
        """Append text that nobody else has."""
        full_before = self.tokens // self._block_tokens
        self.tokens += tokens
        fresh = self.tokens // self._block_tokens - full_before
        self.runs = concat(self.runs, self._ids.fresh(fresh))

    def rewind(self, tokens: int) -> None:
        """Forget everything after the first `tokens` (at block granularity for the ids)."""
        self.tokens = min(tokens, self.tokens)
        self.runs = take(self.runs, self.tokens // self._block_tokens)

    def rewrite(self) -> None:
        """Keep the length with other content: nothing of it is found again."""
        tokens = self.tokens
        self.rewind(0)
        self.append(tokens)

    def fork(self) -> SynthPrompt:
        """Return an independent prompt with the same content."""
        twin = SynthPrompt(self._ids, self._block_tokens)
        twin.tokens, twin.runs = self.tokens, self.runs
        return twin


class Shared:
    """The shared prefixes are those that several sessions begin with: heads (tools + system prompt)
    or documents.

    Owns one prompt a key; the same key always gives the same blocks.
    """

    __slots__ = ("_block_tokens", "_ids", "_prompts")

    def __init__(self, ids: BlockIds, block_tokens: int) -> None:
        self._ids = ids
        self._block_tokens = block_tokens
        self._prompts: dict[object, SynthPrompt] = {}

    def begin(self, key: object, tokens: int) -> SynthPrompt:
        """Return a prompt that begins with the prefix `key`, `tokens` long when first asked for."""
        if key not in self._prompts:
            prompt = SynthPrompt(self._ids, self._block_tokens)
            prompt.append(tokens)
            self._prompts[key] = prompt
        return self._prompts[key].fork()
