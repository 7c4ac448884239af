"""This module turns prompts into tokens, and tokens into text as they come.

`ChatCodec` is a thin translation of a transformers tokenizer. The server (encoding) and the engine
thread (decoding) both use it; a fast tokenizer allows that as long as nobody changes its truncation
or padding. `Choice` owns the text side of one choice: no broken characters, no leaked stop strings.
It never decides what is computed; it only says when a choice ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ownerserve.engines.hf.scheduling.requests import (
    Delta,
    FinishReason,
    SaidSoFar,
    Sampled,
    Stopping,
    TextState,
)
from ownerserve.kv.errors import InvalidInput

BROKEN = "\N{REPLACEMENT CHARACTER}"
NO_TEXT = TextState()


class ChatCodec:
    """A `ChatCodec` turns text and messages into tokens, and back; `tokenizer` is a
    PreTrainedTokenizerFast."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a plain prompt, with the special tokens that the model expects
        around it."""
        tokens: list[int] = self._tokenizer.encode(text)
        return tokens

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[int]:
        """Return the tokens of a conversation in the model's own template, up to where the
        assistant speaks. Raises InvalidInput where the template refuses, or there is none."""
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                add_generation_prompt=True,
                tokenize=False,
            )
        except (TemplateError, TypeError, ValueError) as error:  # it refuses, or there is none
            raise InvalidInput(
                "messages", str(error), "send what the model's chat template takes"
            ) from error
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens` without special ones; a broken character shows as U+FFFD."""
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def show(self, token: int) -> str:
        """Return one token as it is named in log-probabilities, special ones included."""
        text: str = self._tokenizer.decode(
            [token], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def token_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes that `token` stands for, even when they are part of a
        character."""
        text = self.show(token)
        if BROKEN not in text:
            return text.encode()
        piece = self._tokenizer.convert_ids_to_tokens(token) or ""
        if piece.startswith("<0x") and piece.endswith(">"):  # SentencePiece's byte fallback
            return bytes([int(piece[3:-1], 16)])
        letters = [_BYTE_OF_LETTER.get(letter) for letter in piece]
        known = [byte for byte in letters if byte is not None]
        return bytes(known) if len(known) == len(letters) else text.encode()


def _byte_letters() -> dict[str, int]:
    """Return the byte that each letter of byte-level BPE stands for: byte b is itself where
    printable in Latin-1, else from U+0100 on (GPT-2, Radford et al. 2019)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(256 + i): byte for i, byte in enumerate(others)},
    }


_BYTE_OF_LETTER = _byte_letters()


HELD_BYTES = 3
"""A UTF-8 character has at most four bytes, so at most three are ever incomplete."""
WINDOW_TOKENS = 64
"""Tokens decoded again with each new one, at most: output that is never text must stay linear."""


class Decoder(Protocol):
    """A `Decoder` is the part of a tokenizer that this module needs."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`."""
        ...


class Detokenizer:
    """A `Detokenizer` decodes tokens as they come.

    A tokenizer's output for a token depends on its neighbours (spaces, split characters), so a
    window of recent tokens is decoded anew and what is stable beyond the last time is given out.

        |---- known ----|--- new ---|held|      window, as text; held: up to 3 broken characters
    """

    __slots__ = ("_decoder", "_given", "_window")

    def __init__(self, decoder: Decoder, state: TextState = NO_TEXT) -> None:
        self._decoder = decoder
        self._window = list(state.window)
        self._given = state.given

    def push(self, token: int) -> str:
        """Take a token and return the text that it made certain."""
        self._window.append(token)
        text = self._decoder.decode(self._window)
        stable = text.rstrip(BROKEN)
        if len(self._window) >= WINDOW_TOKENS:
            return self._restart(text, [])
        if len(stable) == len(text) and text:
            # The last token stays as context for the next one's leading space.
            return self._restart(text, [token])
        return self._give(text[: max(len(stable), len(text) - HELD_BYTES)])

    def state(self, held: str) -> TextState:
        """Return where it stands, with what is `held` back behind it."""
        return TextState(tuple(self._window), self._given, held)

    def flush(self) -> str:
        """Return what was held back, broken or not."""
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
    """`StopStrings` finds the first stop string in a growing text, and holds back what may become
    one."""

    __slots__ = ("_held", "_strings")

    def __init__(self, strings: tuple[str, ...], held: str = "") -> None:
        self._strings = strings
        self._held = held

    @property
    def held(self) -> str:
        """`held` is what may become a stop string."""
        return self._held

    def push(self, text: str) -> tuple[str, bool]:
        """Take more text; return the text that is safe to show, and whether a stop string was met:
        it and the rest are cut."""
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
        """Return what was held back: the choice ended, so it is no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, string: str) -> int:
    """Return the length of the longest proper prefix of `string` that ends `text`."""
    for size in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:size]):
            return size
    return 0


class Choice:
    """A `Choice` is the text side of one choice: it takes sampled tokens, gives deltas, and says
    when it is over. It goes on behind what it has `said` elsewhere."""

    def __init__(
        self, index: int, stopping: Stopping, decoder: Decoder, said: SaidSoFar | None = None
    ) -> None:
        self.index = index
        self.completion_tokens = 0 if said is None else len(said.tokens)
        text = NO_TEXT if said is None else said.text
        self._stopping = stopping
        self._text = Detokenizer(decoder, text)
        self._stops = StopStrings(stopping.strings, text.held)

    def text_state(self) -> TextState:
        """Return where its text stands, for whoever goes on with it."""
        return self._text.state(self._stops.held)

    def push(self, sampled: Sampled) -> Delta:
        """Take one more token and return the delta that it makes; the delta with a `finish` is the
        last."""
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
        """Return the last delta, with what was held back; even that may complete a stop string."""
        more, is_stopped = self._stops.push(self._text.flush())
        if is_stopped:
            return Delta(self.index, text + more, (sampled,), FinishReason.STOP)
        return Delta(self.index, text + more + self._stops.flush(), (sampled,), finish)
