"""Bytes in, bytes out; a conversation only grows."""

from __future__ import annotations

from itertools import pairwise

import pytest

pytest.importorskip("transformers", reason="the hf engine needs the [engine] extra")

from ownerserve.engines.hf.model.tokenizer import BOS_ID, byte_tokenizer

pytestmark = pytest.mark.engine

TOOL_CALL = {"id": "1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
TOOLS = [{"type": "function", "function": {"name": "ls", "parameters": {}}}]
CONVERSATION = [
    {"role": "system", "content": "You are terse."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "List"}, {"type": "text", "text": " it"}],
    },
    {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "a.txt\nb.txt  \n"},
    {"role": "assistant", "content": " Two files. "},
    {"role": "user", "content": "Thanks <3"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.mark.parametrize("text", ["plain\n  text ", "naïve — ☃ 𝄞", "\x00\x7f\r\n\t", "a" * 50_000])
def test_tokens_are_bytes(tokenizer, text):
    tokens = tokenizer.encode(text)
    assert tokens == list(text.encode())
    assert tokenizer.decode(tokens) == text


def test_roles_are_single_tokens(tokenizer):
    assert tokenizer.encode("<|bos|>") == [BOS_ID]
    assert len(tokenizer.encode("<|user|>hi<|end|>")) == 4
    assert tokenizer.decode(tokenizer.encode("<|user|>hi<|end|>"), skip_special_tokens=True) == "hi"


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_each_turn_is_a_prefix_of_the_next(tokenizer, tools):
    rendered = [
        tokenizer.apply_chat_template(
            CONVERSATION[:turn],
            tools=tools,
            add_generation_prompt=CONVERSATION[turn]["role"] == "assistant",
            return_dict=False,
        )
        for turn in range(1, len(CONVERSATION))
    ]
    for shorter, longer in pairwise(rendered):
        assert longer[: len(shorter)] == shorter
        assert len(longer) > len(shorter)


def test_an_answer_continues_its_prompt(tokenizer):
    """Prompt tokens + generated tokens are the beginning of the next turn's prompt."""
    prompt = tokenizer.apply_chat_template(
        CONVERSATION[:4], add_generation_prompt=True, return_dict=False
    )
    following = tokenizer.apply_chat_template(CONVERSATION, return_dict=False)
    grown = prompt + tokenizer.encode(" Two files. ")
    assert following[: len(grown)] == grown
