"""Tokens to text as they come: no broken characters, no leaked stop strings.

Owns the text side of one choice. Never decides what is computed; it only says when a choice ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ownerserve.engines.hf.scheduling.requests import Delta, FinishReason, Sampled, Stopping

BROKEN = "\N{REPLACEMENT CHARACTER}"
HELD_BYTES = 3
"""A UTF-8 character has at most four bytes, so at most three are ever incomplete."""
WINDOW_TOKENS = 64
"""Tokens decoded again with each new one, at most: output that is never text must stay linear."""


class Decoder(Protocol):
    """The part of a tokenizer that this module needs."""

    def decode(self, tokens: Sequence[int]) -> str: ...


class Detokenizer:
    """Incremental decoding.

    A tokenizer's output for a token depends on its neighbours (spaces, split characters), so a
    window of recent tokens is decoded anew and what is stable beyond the last time is given out.

        |---- known ----|--- new ---|held|      window, as text; held: up to 3 broken characters
    """

    __slots__ = ("_decoder", "_given", "_window")

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._window: list[int] = []
        self._given = 0

    def push(self, token: int) -> str:
        """Text that `token` made certain."""
        self._window.append(token)
        text = self._decoder.decode(self._window)
        stable = text.rstrip(BROKEN)
        if len(self._window) >= WINDOW_TOKENS:
            return self._restart(text, [])
        if len(stable) == len(text) and text:
            # The last token stays as context for the next one's leading space.
            return self._restart(text, [token])
        return self._give(text[: max(len(stable), len(text) - HELD_BYTES)])

    def flush(self) -> str:
        """What was held back, broken or not."""
        return self._restart(self._decoder.decode(self._window), [])

    def _give(self, text: str) -> str:
        new = text[self._given :]
        self._given += len(new)
        return new

    def _restart(self, text: str, context: list[int]) -> str:
        new = self._give(text)
        self._window = context
        self._given = len(self._decoder.decode(context)) if context else 0
        return new


class StopStrings:
    """Finds the first stop string in a growing text, and holds back what may become one."""

    __slots__ = ("_held", "_strings")

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._strings = strings
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is safe to show, whether a stop string was met; it and the rest are cut)."""
        if not self._strings:
            return text, False
        text = self._held + text
        self._held = ""
        found = [at for at in map(text.find, self._strings) if at >= 0]
        if found:
            return text[: min(found)], True
        keep = max(_overlap(text, string) for string in self._strings)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What was held back: the choice ended, so it is no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, string: str) -> int:
    """Length of the longest proper prefix of `string` that ends `text`."""
    for size in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:size]):
            return size
    return 0


class Choice:
    """The text side of one choice: takes sampled tokens, gives deltas, says when it is over."""

    def __init__(self, index: int, stopping: Stopping, decoder: Decoder) -> None:
        self.index = index
        self.completion_tokens = 0
        self._stopping = stopping
        self._text = Detokenizer(decoder)
        self._stops = StopStrings(stopping.strings)

    def push(self, sampled: Sampled) -> Delta:
        """One more token."""
        stopping, token = self._stopping, sampled.token
        self.completion_tokens += 1
        if self.completion_tokens > stopping.min_tokens and (
            token in stopping.eos_token_ids or token in stopping.token_ids
        ):
            return self._last("", sampled, FinishReason.STOP)
        text, is_stopped = self._text.push(token), False
        if self.completion_tokens >= stopping.min_tokens:
            text, is_stopped = self._stops.push(text)
        if is_stopped:
            return Delta(self.index, text, (sampled,), FinishReason.STOP)
        if self.completion_tokens >= stopping.max_tokens:
            return self._last(text, sampled, FinishReason.LENGTH)
        return Delta(self.index, text, (sampled,))

    def _last(self, text: str, sampled: Sampled, finish: FinishReason) -> Delta:
        """End with what was held back; even that may complete a stop string."""
        more, is_stopped = self._stops.push(self._text.flush())
        if is_stopped:
            return Delta(self.index, text + more, (sampled,), FinishReason.STOP)
        return Delta(self.index, text + more + self._stops.flush(), (sampled,), finish)
