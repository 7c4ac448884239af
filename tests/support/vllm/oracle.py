"""Is an answer that used restored state the answer a cold engine gives? Judged by logprobs.

Tokens alone can't tell: with flat logits a wrong cache may pick the same tokens, and batch shape
alone may flip an argmax between near-equal ones. So the log probabilities of the chosen token and
of the top k are compared at every position up to and including the first token that differs: until
there both engines have seen the same input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from tests.support.vllm.wire import Answer

TOLERANCE = 2e-3
NOISY = {"qwen3next": 0.1, "deepseek3": 0.12}
"""Largest difference in log probability that batch shape and chunking alone may make: 0.0 measured
for the float32 families; bfloat16 (Qwen3-Next) 0.008; vLLM's reference MLA kernels 0.05."""


class Judgement(msgspec.Struct, frozen=True):
    """`worst`: largest |difference| of a log probability; `flip`: position of the first other
    token, with the cold engine's margin between its two best there (None: no flip)."""

    worst: float
    compared: int
    flip: int | None = None
    margin: float | None = None


def judge(cold: Answer, restored: Answer) -> Judgement:
    """Compare two answers to the same prompt."""
    worst, compared = 0.0, 0
    pairs = zip(cold.tokens, restored.tokens, strict=True)
    for position, (ours, theirs) in enumerate(pairs):
        one, other = cold.top[position], restored.top[position]
        for token in one.keys() & other.keys():
            worst = max(worst, abs(one[token] - other[token]))
            compared += 1
        if ours != theirs:
            best = sorted(one.values(), reverse=True)
            missing = ours not in other or theirs not in one
            return Judgement(
                float("inf") if missing else worst, compared, position, best[0] - best[1]
            )
    return Judgement(worst, compared)


def same(family: str, cold: Answer, restored: Answer) -> bool:
    """Whether every compared log probability is within the tolerance."""
    judgement = judge(cold, restored)
    return judgement.compared > 0 and judgement.worst <= NOISY.get(family, TOLERANCE)


def assert_same(family: str, cold: Answer, restored: Answer) -> None:
    assert same(family, cold, restored), (
        f"restored answer differs: {judge(cold, restored)};"
        f" cold {cold.tokens}, restored {restored.tokens}, cached {restored.cached}"
    )


def assert_same_in_parts(
    family: str,
    cold: Callable[[Sequence[int], int], Answer],
    prompt: Sequence[int],
    *,
    answer: Answer,
    resumed_at: Sequence[int],
) -> None:
    """The same for an answer whose request came back after its first `resumed_at` tokens.

    What was known then is computed as a prompt. In bfloat16 that is not what decoding it gave:
    vLLM 0.30 alone, without any cache, moves a log probability by up to 0.31 (144 prefixes of tiny
    Qwen3-Next answers). So each part is held against a cold engine that has the same prompt.
    `cold` answers a prompt with so many tokens.
    """
    starts = [0, *(at for at in resumed_at if at)]
    for start, end in zip(starts, [*starts[1:], len(answer.tokens)], strict=True):
        if end > start:
            part = replace(answer, tokens=answer.tokens[start:end], top=answer.top[start:end])
            known = [*prompt, *answer.tokens[:start]]
            assert_same(family, cold(known, end - start), part)
