"""The workload is what a fleet's own sessions look like, by the turns that ended there last.

Owns the window of turns: bounded memory, no clock. A long session ends more turns than others: from
ONE_MAX in the window on its turns share the weight of so many, so that it does not speak for all.

    took ──> | a | a | b | c | a | b | ...  TURNS_KEPT |    facts: quantiles by weight
    weight     1, or ONE_MAX / how many turns of its session are in the window
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from operator import mul
from typing import NamedTuple, TypeAlias

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


class _Seen(NamedTuple):
    """A seen turn is what the window keeps of one that ended, the `number`th; `reused_tokens` of
    its prompt an earlier turn had left: never all of it, the last token is always new."""

    session: SessionId | None
    prompt_tokens: int
    context_tokens: int
    reused_tokens: int
    new_tokens: int
    batch: int
    number: int


_Ranked: TypeAlias = list[tuple[int, int, SessionId | None]]
"""A value of each turn in the window with the turn's number and session, the least first."""


class WorkloadWindow:
    """The window holds the last TURNS_KEPT turns of a fleet."""

    def __init__(self) -> None:
        self._turns: deque[_Seen] = deque()
        self._counts: dict[SessionId | None, int] = {}
        """How many turns of each session are in the window."""
        self._contexts: _Ranked = []
        self._new: _Ranked = []
        self._taken = 0

    def __len__(self) -> int:
        return len(self._turns)

    def took(self, turn: EndedTurn) -> None:
        """Take in a turn, in place of the oldest where the window is full."""
        counts, prompt = self._counts, turn.prompt_tokens
        reused, context = min(turn.known_tokens, max(prompt - 1, 0)), prompt + turn.output_tokens
        self._taken += 1
        seen = _Seen(
            turn.session, prompt, context, reused, prompt - reused, turn.batch, self._taken
        )
        self._turns.append(seen)
        insort(self._contexts, (context, seen.number, seen.session))
        insort(self._new, (seen.new_tokens, seen.number, seen.session))
        counts[turn.session] = counts.get(turn.session, 0) + 1
        if len(self._turns) > TURNS_KEPT:
            self._forget(self._turns.popleft())

    def _forget(self, oldest: _Seen) -> None:
        number, counts = oldest.number, self._counts
        del self._contexts[bisect_left(self._contexts, (oldest.context_tokens, number))]
        del self._new[bisect_left(self._new, (oldest.new_tokens, number))]
        counts[oldest.session] -= 1
        if not counts[oldest.session]:
            del counts[oldest.session]

    def facts(self) -> WorkloadFacts:
        """Return what the sessions look like. Raises ValueError where no turn is known."""
        if not self._turns:
            raise ValueError("no turn has ended: there are no facts")
        sessions, prompts, _, reused, _, batches, _ = zip(*self._turns, strict=True)
        share_of = {name: min(1.0, ONE_MAX / count) for name, count in self._counts.items()}
        shares = [share_of[name] for name in sessions]
        context_p50, context_p90 = _quantiles(self._contexts, share_of, (0.5, 0.9))
        (new_p50,) = _quantiles(self._new, share_of, (0.5,))
        return WorkloadFacts(
            context_tokens_p50=context_p50,
            context_tokens_p90=context_p90,
            addition_tokens_p50=new_p50,
            reuse_share=_weighed(reused, shares) / max(_weighed(prompts, shares), 1.0),
            decoding=_weighed(batches, shares) / sum(shares),
        )


def _weighed(values: Sequence[int], shares: Sequence[float]) -> float:
    """Return the sum of the values by their shares."""
    return float(sum(map(mul, values, shares)))


def _quantiles(
    ranked: _Ranked, share_of: Mapping[SessionId | None, float], parts: Sequence[float]
) -> list[int]:
    """Return the values below or at which those `parts` of the weight lie."""
    weights = [share_of[name] for _, _, name in ranked]
    total, found = sum(weights), list[int]()
    for part in parts:
        left = part * total
        for (value, _, _), weight in zip(ranked, weights, strict=True):
            left -= weight
            if left <= 0.0:
                found.append(value)
                break
        else:
            found.append(ranked[-1][0])
    return found
