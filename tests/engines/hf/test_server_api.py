"""Request bodies: what is taken, what is refused by name. No torch, no HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ownerserve.engines.hf.http.openai_api import (
    ChatBody,
    CompletionBody,
    ModelNotFound,
    TurnHeaders,
    make_request,
    parse_body,
)
from ownerserve.engines.hf.scheduling.requests import EngineRequest, Facts
from ownerserve.kv.errors import InvalidInput

FACTS = Facts(
    model="tiny",
    vocab_size=272,
    sequence_tokens=100,
    eos_token_ids=frozenset({257}),
    block_tokens=16,
)
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> EngineRequest:
    body = parse_body(json.dumps({"messages": MESSAGES, **fields}).encode(), ChatBody)
    return _make(body, [1, 2, 3])


def complete(**fields: Any) -> EngineRequest:
    body = parse_body(json.dumps({"prompt": [1, 2, 3], **fields}).encode(), CompletionBody)
    assert isinstance(body.prompt, list)
    return _make(body, body.prompt)


def _make(body: ChatBody | CompletionBody, prompt: list[int]) -> EngineRequest:
    return make_request(body, prompt, facts=FACTS, request_id="r", turn=TurnHeaders(), fresh_seed=5)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 1000}, "n"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop_token_ids": [999]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"min_tokens": 5, "max_tokens": 3}, "min_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_token": 3}, "max_token"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"session_id": ""}, "session_id"),
    ],
)
def test_a_bad_field_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        chat(**fields)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("data", "field"),
    [(b"", "body"), (b"[1]", "body"), (b'{"n":', "body"), (b"{}", "messages"), (b"\xff", "body")],
)
def test_a_body_that_is_no_request(data: bytes, field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_body(data, ChatBody)
    assert refused.value.field == field


@pytest.mark.parametrize("prompt", [[], [1, 272], [-1], ["a"]])
def test_bad_prompts(prompt: list[Any]) -> None:
    with pytest.raises(InvalidInput) as refused:
        complete(prompt=prompt)
    assert refused.value.field == "prompt"


def test_a_misspelt_field_names_the_nearest() -> None:
    with pytest.raises(InvalidInput, match="did you mean 'max_tokens'"):
        chat(max_token=3)


def test_an_unknown_model_is_not_found() -> None:
    with pytest.raises(ModelNotFound):
        chat(model="gpt-9")


def test_harmless_and_neutral_fields_pass() -> None:
    request = chat(user="u", metadata={"a": 1}, response_format={"type": "text"}, suffix=None)
    assert request.choices == 1
    assert complete(echo=False, best_of=1).choices == 1


def test_defaults() -> None:
    assert complete().stopping.max_tokens == 16
    # chat: what is left of the context; the last sampled token needs no place
    assert chat().stopping.max_tokens == 98
    assert chat().sampling.seed == 5
    assert chat().stopping.eos_token_ids == {257}
    assert chat(ignore_eos=True).stopping.eos_token_ids == frozenset()


def test_max_completion_tokens_is_max_tokens() -> None:
    assert chat(max_completion_tokens=7).stopping.max_tokens == 7


def test_logprobs_in_both_forms() -> None:
    assert chat().sampling.logprobs is None
    assert chat(logprobs=True).sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).sampling.logprobs == 3
    assert complete(logprobs=0).sampling.logprobs == 0


def test_a_tiny_temperature_is_greedy() -> None:
    assert chat(temperature=1e-9).sampling.temperature == 0
