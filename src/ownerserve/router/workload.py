"""The workload is what a fleet's own sessions look like, by the turns that ended there last.

Owns the window of turns: bounded memory, no clock. A long session ends more turns than others: from
ONE_MAX in the window on its turns share the weight of so many, so that it does not speak for all.

    took ──> | a | a | b | c | a | b | ...  TURNS_KEPT |    facts: quantiles by weight
    weight     1, or ONE_MAX / how many turns of its session are in the window
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from operator import mul, sub
from typing import NamedTuple

from ownerserve.kv.ids import SessionId
from ownerserve.router.settings import WorkloadFacts

TURNS_KEPT = 1024
ONE_MAX = 64
"""So many turns of the window one session counts for at most."""


class EndedTurn(NamedTuple):
    """An ended turn says whose it was, how long its prompt and its answer were, in tokens, how much
    of the prompt an earlier turn had left, and how many sequences ran at its worker with it."""

    session: SessionId | None
    prompt_tokens: int
    output_tokens: int
    known_tokens: int
    batch: int


class WorkloadWindow:
    """The window holds the last TURNS_KEPT turns of a fleet."""

    def __init__(self) -> None:
        self._turns: deque[EndedTurn] = deque(maxlen=TURNS_KEPT)

    def __len__(self) -> int:
        return len(self._turns)

    def took(self, turn: EndedTurn) -> None:
        """Take in a turn, in place of the oldest where the window is full."""
        self._turns.append(turn)

    def facts(self) -> WorkloadFacts:
        """Return what the sessions look like. Raises ValueError where no turn is known."""
        turns = self._turns
        if not turns:
            raise ValueError("no turn has ended: there are no facts")
        counts = Counter([turn.session for turn in turns])
        shares = [min(1.0, ONE_MAX / counts[turn.session]) for turn in turns]
        reused = [_reused(turn) for turn in turns]
        prompts = [turn.prompt_tokens for turn in turns]
        contexts = sorted(
            zip([one.prompt_tokens + one.output_tokens for one in turns], shares, strict=True)
        )
        additions = sorted(zip(map(sub, prompts, reused), shares, strict=True))
        return WorkloadFacts(
            context_tokens_p50=_quantile(contexts, 0.5),
            context_tokens_p90=_quantile(contexts, 0.9),
            addition_tokens_p50=_quantile(additions, 0.5),
            reuse_share=_weighed(reused, shares) / max(_weighed(prompts, shares), 1.0),
            decoding=_weighed([turn.batch for turn in turns], shares) / sum(shares),
        )


def _reused(turn: EndedTurn) -> int:
    """Return how many tokens of the prompt an earlier turn had left; the last is always new."""
    return min(turn.known_tokens, max(turn.prompt_tokens - 1, 0))


def _weighed(values: Sequence[int], shares: Sequence[float]) -> float:
    """Return the sum of the values by their shares."""
    return float(sum(map(mul, values, shares)))


def _quantile(values: list[tuple[int, float]], share: float) -> int:
    """Return the value below or at which `share` of the weight lies; `values`, with their weights,
    are sorted."""
    left = share * sum(weight for _, weight in values)
    for value, weight in values:
        left -= weight
        if left <= 0.0:
            return value
    return values[-1][0]
