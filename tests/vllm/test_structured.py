"""Turns whose answers obey a schema: their state is the tokens' alone, and goes on either way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.vllm import connectors, oracle, tiny
from tests.support.vllm.rig import Rig, next_turn, settle

pytestmark = pytest.mark.vllm

B = 32
PROMPT, ANSWER = 300, 60
NUMBERS: dict[str, Any] = {"type": "array", "items": {"type": "integer"}, "minItems": 200}


def test_a_structured_turn_and_the_next_ones_restore(rig: Rig, store: Path) -> None:
    prompt = tiny.prompt(PROMPT, seed=50)
    worker = rig.worker("qwen3", connectors.ours(store))
    answer = worker.generate(prompt, max_tokens=ANSWER, schema=NUMBERS, session="s")
    assert set(bytes(answer.tokens).decode()) <= set("[]-0123456789, \n")
    cold = rig.cold("qwen3", prompt, max_tokens=ANSWER, schema=NUMBERS)
    oracle.assert_same("qwen3", cold, answer)
    assert cold.tokens != rig.cold("qwen3", prompt, max_tokens=ANSWER).tokens
    settle(worker)
    worker.shutdown()

    after = rig.worker("qwen3", connectors.ours(store))
    following = next_turn(prompt, answer, seed=51)
    for options in ({"schema": NUMBERS}, {}):
        restored = after.generate(following, **options)
        assert restored.cached >= (PROMPT + ANSWER - 1) // B * B
        oracle.assert_same("qwen3", rig.cold("qwen3", following, **options), restored)
