"""How long an idle session keeps its seat: as long as its memory does more work there.

A session away for longer than the stay A gives its seat up; when it comes back, its state may have
to be computed again. A long stay fills memory with sessions that wait for their tools, a short one
fills engines with what they had computed before. From what was seen lately, turns a second are
foretold for some stays, and the longest of those that do best is kept:

    memory    X (E[c min(G, A)] + k E[c T; G > A] + E[c] (s + g r / 2 (1 - r))) = M
    engines   X g = r W,    g = u + k E[T; G > A]

G: s between a session's turns; c: its tokens; T: engine s to bring them back; s: s of an answer; u:
engine s of a turn that brings nothing back; W engines with a load of r each, of whose turns each
waits g r / 2 (1 - r) (M/D/1); M: tokens of memory that seats may fill. k is what was brought back
over what the stays in force foretold: caches keep some sessions beyond their stay and lose others
before. Both lines together are one quadratic equation in r.

That is true of means over many sessions. One whose context takes a good part of an engine's memory
displaces a device when it comes back, and takes minutes to compute: where such were seen lately the
stay is the longest.

Owns what was seen. Pure. On what its constants were fitted: docs/evidence/admission.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import sqrt

import msgspec

STAYS_S = (2.0, 4.0, 7.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0)
RETURNS_KEPT = 1000
RETURNS_LEAST = 100
"""After fewer returns nothing is foretold."""
TURNS_LEAST = 100
"""An engine's time is shared out over at least so many turns."""
LOSS = 0.02
"""So much less work than the best stay's is as good: what is foretold is no truer."""
SMALL = 1.0 / 3.0
"""So much of an engine's memory a context takes at most; with a larger one nothing is foretold."""
FORGET = 0.2
"""Share of the last TURNS_LEAST turns in what is remembered."""
BIAS_MAX = 4.0
REFILLS_ASSUMED = 8.0
"""So many refills are taken to have been as foretold, before any was."""


class Return(msgspec.Struct, frozen=True, gc=False, order=True):
    """A return is a session that came back after `gap_s`; computing its `tokens` anew would take an
    engine `refill_s`."""

    gap_s: float
    tokens: int
    refill_s: float


class IdleStay:
    """The stay is `seconds`, between `least_s` and `longest_s`, and that until enough was seen."""

    def __init__(self, longest_s: float, *, least_s: float = 0.0) -> None:
        self.seconds = longest_s
        self._stays_s = [one for one in STAYS_S if least_s <= one < longest_s] + [longest_s]
        self._returns: deque[Return] = deque(maxlen=RETURNS_KEPT)
        self.refilled_s = 0.0
        """Engine s that went into bringing back what sessions had before; the past counts less."""
        self.turns = 0
        """Turns since an engine's time was shared out over them last."""
        self._foretold_s = 0.0
        self._engine_s = self._window_refilled_s = self._window_answers_s = 0.0
        self._useful_s: float | None = None
        """Engine s of a turn, without what it brought back."""
        self._answer_s = 0.0

    def came_back(self, gap_s: float, tokens: int, refill_s: float) -> None:
        """Note that a session's next turn is here, and what its state would cost."""
        self._returns.append(Return(gap_s, tokens, refill_s))
        if gap_s > self.seconds:
            self._foretold_s += refill_s

    def answered(self, answer_s: float, refilled_s: float) -> None:
        """Note a turn's end: how long its answer took from its first byte on, and how long its
        engine brought back what the session had before."""
        self.turns += 1
        self.refilled_s += refilled_s
        self._window_refilled_s += refilled_s
        self._window_answers_s += answer_s

    def ran(self, engine_s: float) -> None:
        """Note that engines computed for `engine_s` since the last word."""
        self._engine_s += engine_s
        if self.turns >= TURNS_LEAST:
            self._close_window()

    def _close_window(self) -> None:
        turns = self.turns
        useful_s = max(self._engine_s - self._window_refilled_s, 0.0) / turns
        answer_s = self._window_answers_s / turns
        if self._useful_s is None:
            self._useful_s, self._answer_s = useful_s, answer_s
        else:
            self._useful_s += FORGET * (useful_s - self._useful_s)
            self._answer_s += FORGET * (answer_s - self._answer_s)
        self._foretold_s *= 1.0 - FORGET
        self.refilled_s *= 1.0 - FORGET
        self.turns = 0
        self._engine_s = self._window_refilled_s = self._window_answers_s = 0.0

    def decide(self, memory_tokens: float, engines: int) -> None:
        """Set the stay by which most turns are foretold, for `memory_tokens` that seats may fill
        and so many `engines`."""
        if not self._can_foretell(memory_tokens, engines):
            self.seconds = self._stays_s[-1]
            return
        stays = self._stays_s
        rates = self._rates(stays, memory_tokens, engines)
        enough = (1.0 - LOSS) * max(rates)
        self.seconds = max(
            stay_s for stay_s, rate in zip(stays, rates, strict=True) if rate >= enough
        )

    def _can_foretell(self, memory_tokens: float, engines: int) -> bool:
        """Return whether enough was seen, of contexts that are small beside an engine's memory."""
        if self._useful_s is None or len(self._returns) < RETURNS_LEAST or not engines:
            return False
        return max(one.tokens for one in self._returns) <= SMALL * memory_tokens / engines

    def _rates(self, stays: Sequence[float], memory_tokens: float, engines: int) -> list[float]:
        """Return the turns a second that are foretold for each stay."""
        assert self._useful_s is not None
        returns = sorted(self._returns)
        count, gaps = len(returns), [one.gap_s for one in returns]
        tokens = _sums(float(one.tokens) for one in returns)
        idle = _sums(one.tokens * one.gap_s for one in returns)
        refills = _sums(one.refill_s for one in returns)
        filled = _sums(one.tokens * one.refill_s for one in returns)
        bias, mean_tokens = self._bias(refills[-1] / count), tokens[-1] / count
        rates = []
        for stay_s in stays:
            at = bisect_right(gaps, stay_s)
            engine_s = self._useful_s + bias * (refills[-1] - refills[at]) / count
            idle_tokens_s = (idle[at] + stay_s * (tokens[-1] - tokens[at])) / count
            refill_tokens_s = bias * (filled[-1] - filled[at]) / count
            held_s = idle_tokens_s + refill_tokens_s + mean_tokens * self._answer_s
            most = engines / max(engine_s, 1e-9)
            waiting = mean_tokens * engines / 2.0
            rates.append(most * _load(most * held_s, waiting, memory_tokens))
        return rates

    def _bias(self, refill_s: float) -> float:
        """Return what was brought back over what was foretold."""
        assumed_s = REFILLS_ASSUMED * refill_s
        bias = (self.refilled_s + assumed_s) / (self._foretold_s + assumed_s or 1.0)
        return min(max(bias, 1.0 / BIAS_MAX), BIAS_MAX)


def _sums(values: Iterable[float]) -> list[float]:
    return list(accumulate(values, initial=0.0))


def _load(held: float, waiting: float, memory: float) -> float:
    """Return the r in (0, 1) with r held + waiting r^2 / (1 - r) = memory."""
    return 2.0 * memory / (held + memory + sqrt((held - memory) ** 2 + 4.0 * waiting * memory))
