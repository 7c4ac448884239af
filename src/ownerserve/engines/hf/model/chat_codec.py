"""Text and messages to tokens, and back: a thin translation of a transformers tokenizer.

Owns nothing. Both the server (encoding) and the engine thread (decoding) use it; a fast tokenizer
allows that as long as nobody changes its truncation or padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ownerserve.kv.errors import InvalidInput

BROKEN = "\N{REPLACEMENT CHARACTER}"


class Codec:
    """`tokenizer` is a PreTrainedTokenizerFast."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """A plain prompt, with the special tokens that the model expects around it."""
        tokens: list[int] = self._tokenizer.encode(text)
        return tokens

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[int]:
        """A conversation in the model's own template, up to where the assistant speaks."""
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
        """Text of `tokens` without special ones; a broken character shows as U+FFFD."""
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def show(self, token: int) -> str:
        """One token as it is named in log-probabilities, special ones included."""
        text: str = self._tokenizer.decode(
            [token], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes that `token` stands for, even when they are part of a character."""
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
    """Byte-level BPE writes byte b as itself where printable in Latin-1, else from U+0100 on
    (GPT-2, Radford et al. 2019).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(256 + i): byte for i, byte in enumerate(others)},
    }


_BYTE_OF_LETTER = _byte_letters()
