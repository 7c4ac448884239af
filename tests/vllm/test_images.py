"""Prompts with images, over a tiny LLaVA: the same image restores, another one does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.vllm import connectors, oracle, tiny
from tests.support.vllm.rig import Rig, settle
from tests.support.vllm.seeing import IMAGE, IMAGE_TOKENS, SEEING
from tests.support.vllm.wire import Answer

pytestmark = pytest.mark.vllm

B = 32
BEFORE, BETWEEN = 100, 150
CAT, DOG, COW = 1, 2, 3


def prompt(images: int) -> list[int]:
    """Text, images with text behind each; vLLM repeats the placeholders."""
    tokens = tiny.prompt(BEFORE, seed=30)
    for number in range(images):
        tokens += [IMAGE, *tiny.prompt(BETWEEN, seed=31 + number)]
    return tokens


def length(tokens: list[int], pictures: list[int]) -> int:
    """Tokens of a prompt once the placeholders are repeated."""
    return len(tokens) + len(pictures) * (IMAGE_TOKENS - 1)


def assert_like_cold(rig: Rig, tokens: list[int], pictures: list[int], answer: Answer) -> None:
    oracle.assert_same(SEEING, rig.cold(SEEING, tokens, pictures=pictures), answer)


def test_the_same_image_restores_and_another_does_not(rig: Rig, store: Path) -> None:
    """In other processes. Two images in a prompt: where the second is another one, what lies before
    it comes back, and nothing of it or behind it."""
    tokens = prompt(2)
    worker = rig.worker(SEEING, connectors.ours(store))
    first = worker.generate(tokens, pictures=[CAT, DOG], session="s")
    assert_like_cold(rig, tokens, [CAT, DOG], first)
    settle(worker)
    assert "bypassed_multimodal" not in worker.hook("connector_status")
    worker.shutdown()

    after = rig.worker(SEEING, connectors.ours(store))
    before_second = tokens[: BEFORE + 1 + BETWEEN]
    for pictures, known in (
        ([CAT, COW], length(before_second, [CAT])),
        ([COW, DOG], BEFORE),
        ([CAT, DOG], length(tokens, [CAT, DOG]) - 1),
    ):
        answer = after.generate(tokens, pictures=pictures)
        assert answer.cached == known // B * B
        assert_like_cold(rig, tokens, pictures, answer)
    settle(after)
    after.shutdown()

    last = rig.worker(SEEING, connectors.ours(store))
    following = [*tokens, *first.tokens, IMAGE, *tiny.prompt(40, seed=40)]
    shown = [CAT, DOG, COW]
    answer = last.generate(following, session="s", pictures=shown)
    known = length(tokens, [CAT, DOG]) + len(first.tokens) - 1
    assert answer.cached == known // B * B
    assert_like_cold(rig, following, shown, answer)
