"""This module makes a byte-level tokenizer on the spot: 256 bytes and 16 specials, no files, no
downloads.

Token i < 256 is the byte i; text and tokens are one-to-one. The chat template renders turn k to a
prefix of turn k+1's rendering, as a prefix cache wants it.
"""

from __future__ import annotations

from typing import Any

ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
BOS, EOS, PAD, END = "<|bos|>", "<|eos|>", "<|pad|>", "<|end|>"
SPECIAL_TOKENS = (
    BOS,
    EOS,
    PAD,
    *ROLE_TOKENS,
    END,
    *(f"<|reserved_{i}|>" for i in range(8)),
)
BYTES = 256
VOCAB_SIZE = BYTES + len(SPECIAL_TOKENS)
BOS_ID, EOS_ID, PAD_ID = BYTES, BYTES + 1, BYTES + 2

PRINTABLE_IDS = (0x0A, *range(0x20, 0x7F))
"""Newline and printable ASCII: what the tiny models write."""

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- if tools %}{{ '<|system|>' + (tools | tojson) + '<|end|>' }}{% endif -%}
{%- for message in messages -%}
{%- set role = message['role'] if message['role'] in ('user', 'assistant', 'tool') else 'system' -%}
{{- '<|' + role + '|>' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- elif message['content'] -%}
{%- for part in message['content'] if part['type'] == 'text' -%}
{{- part['text'] -}}
{%- endfor -%}
{%- endif -%}
{%- if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif -%}
"""


def byte_tokenizer() -> Any:
    """Make a PreTrainedTokenizerFast over bytes, with the chat template above."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {letter: byte for byte, letter in enumerate(_byte_letters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[*ROLE_TOKENS, END],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def _byte_letters() -> list[str]:
    """Return GPT-2's letter for each byte: itself where printable in Latin-1, else from U+0100
    on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(BYTES) if byte not in printable)
    shifted = {byte: chr(BYTES + i) for i, byte in enumerate(others)}
    return [shifted.get(byte) or chr(byte) for byte in range(BYTES)]
