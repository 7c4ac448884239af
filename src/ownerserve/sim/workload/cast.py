"""This module chooses the cast of a run: which sessions of a trace run, how far each, and when it
begins.

Owns the choice and nothing of its execution. Equal trace, shape and seed give an equal cast.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from math import ceil
from random import Random

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.sim.workload.shape import First, Poisson, TopShare, WorkloadShape, Zipf
from ownerserve.trace.model import Trace

ALPHAS = [step / 2 for step in range(17)]
"""Rank 2 of the steepest holds 1 / 256 of rank 1: hardly anything is left to cut."""
BISECTIONS = 40


class PlayedSession(msgspec.Struct, frozen=True, gc=False):
    """A played session is the first `turns` requests of trace session `source`, starting at
    `start_s`.

    `copy` 0 is the session itself; others are the same session again, with ids of their own.
    """

    source: int
    copy: int
    turns: int
    start_s: float


def cast(trace: Trace, shape: WorkloadShape) -> list[PlayedSession]:
    """Return the sessions of a run, in order of their start. `shape` must have been checked.

    Raises InvalidInput when a wanted skew can't be had from these sessions.
    """
    # Independent streams: another rate does not draw other sessions.
    picks = _picks(trace, shape, Random(f"{shape.seed} sessions"))
    turns = _turns(trace, picks, shape)
    parts = [
        PlayedSession(source, copy, turns[number], start_s)
        for number, ((source, copy), start_s) in enumerate(
            zip(picks, _starts_s(trace, picks, shape), strict=True)
        )
    ]
    parts.sort(key=lambda part: part.start_s)
    return parts


def _picks(trace: Trace, shape: WorkloadShape, rng: Random) -> list[tuple[int, int]]:
    """Return the (session, copy) pairs that run, none twice."""
    everyone = [n for n, session in enumerate(trace.sessions) if session.requests]
    if not everyone:
        raise InvalidInput("trace", "has no requests", "give one that has")
    if shape.sessions is None:
        return [(source, 0) for source in everyone]
    if isinstance(shape.sessions, First):
        return [(source, 0) for source in everyone[: shape.sessions.count]]
    picks: list[tuple[int, int]] = []
    for copy in range(ceil(shape.sessions.count / len(everyone))):
        rng.shuffle(everyone)
        picks += [(source, copy) for source in everyone]
    return picks[: shape.sessions.count]


def _starts_s(trace: Trace, picks: list[tuple[int, int]], shape: WorkloadShape) -> list[float]:
    if isinstance(shape.arrivals, Poisson):
        rng = Random(f"{shape.seed} arrivals")
        gaps_s = [rng.expovariate(shape.arrivals.per_s) for _ in picks[1:]]
        return list(accumulate(gaps_s, initial=0.0))
    return [trace.sessions[source].start_s * shape.time_scale for source, _ in picks]


def _turns(trace: Trace, picks: list[tuple[int, int]], shape: WorkloadShape) -> list[int]:
    """Return how many requests each pick keeps."""
    if shape.skew is None:
        return [len(trace.sessions[source].requests) for source, _ in picks]
    cut = Cut(trace, [source for source, _ in picks])
    if isinstance(shape.skew, Zipf):
        return cut.turns(shape.skew.alpha)
    return cut.turns(cut.alpha_for(shape.skew))


class Cut:
    """A cut shortens sessions so that their inputs follow Zipf's law. Owns their cumulative
    inputs."""

    def __init__(self, trace: Trace, sources: list[int]) -> None:
        inputs = {
            source: list(accumulate(r.input_tokens for r in trace.sessions[source].requests))
            for source in set(sources)
        }
        self._inputs = [inputs[source] for source in sources]
        # Largest first; equal ones in order of the pick.
        self._ranked = sorted(range(len(sources)), key=lambda n: -self._inputs[n][-1])

    def turns(self, alpha: float) -> list[int]:
        """Return, for each session, the turns that fit its rank's share, at least one."""
        kept = [0] * len(self._inputs)
        largest = self._inputs[self._ranked[0]][-1]
        for rank, number in enumerate(self._ranked, 1):
            kept[number] = max(1, bisect_right(self._inputs[number], largest * rank**-alpha))
        return kept

    def share(self, alpha: float, top: float) -> float:
        """Return the share of all input held by the largest `top` of the sessions, as trace.stats
        counts."""
        turns = self.turns(alpha)
        held = sorted(
            (own[n - 1] for own, n in zip(self._inputs, turns, strict=True)), reverse=True
        )
        return sum(held[: ceil(len(held) * top)]) / max(1, sum(held))

    def alpha_for(self, wanted: TopShare) -> float:
        """Find the smallest alpha that gives the share, by bisection. Raises InvalidInput when none
        does."""
        # The share falls again where nothing but the other top sessions is left to cut.
        low, high = 0.0, max(ALPHAS, key=lambda alpha: self.share(alpha, wanted.top))
        least, most = self.share(low, wanted.top), self.share(high, wanted.top)
        if not least <= wanted.share <= most:
            raise InvalidInput(
                "skew.share",
                f"{wanted.share} can't be had: the top {wanted.top:.2%} of these sessions hold "
                f"{least:.3f} of the input uncut, and at most {most:.3f} when others are cut",
                "use a share between the two",
            )
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            if self.share(middle, wanted.top) < wanted.share:
                low = middle
            else:
                high = middle
        return high
