"""Adaptive checkpoints where, as observed, a restore is worth the write.

    p* = argmin over p of   alpha * SSDWrite(p) + beta * RestoreLatency(p) + gamma * GPURecompute(p)

(seed 000 §2.6.7.) Two kinds of restore are told apart, because they want different things.

**Turn ends.** The same few boundaries are resumed again and again. A checkpoint there costs
alpha * s (s bytes) and is used q times on average (observed resumes at a turn end / turn ends).
Each use saves recomputing d = min(distance to the last checkpoint, R) tokens and costs one load:

    write it  iff  q * ((beta + gamma) * k * d - beta * l) > alpha * s

with k ms a token, l ms a load and R the exact replay length (infinite with recurrent state).

**Interior.** Branches fall anywhere. With rho of them per produced token (observed), a checkpoint
every p tokens and a branch uniform within a period, in tokens:

    SSDWrite = s / p     E[recompute] = p / 2  (p <= R),   R - R^2 / 2p  (p > R)

    J(p) = alpha * s / p + rho * ((beta + gamma) * k * E[recompute] + beta * l * min(p, R) / p)

For p <= R the only terms in p are alpha * s / p and rho * (beta + gamma) * k * p / 2, so

    p0 = sqrt(2 * alpha * s / (rho * (beta + gamma) * k))

is the minimum there. For p > R, J is a constant + K / p, monotone: its minimum is at R or at
infinity. So p* is p0 (at most R), or no interior checkpoint at all; both are priced, on boundaries.
"""

from __future__ import annotations

from math import floor, inf, sqrt
from typing import ClassVar

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.plan.swa.checkpoints import CheckpointPolicy, Produced, Resumed, Reuse, TurnSpan

MEMORY_TURNS = 256.0
"""Observations older than about this many turns no longer count."""
PRIOR_TURNS = 4.0
PRIOR_END_RESUMES = 2.0
"""Before anything is seen: every second turn end is resumed from below the device."""


class Weights(msgspec.Struct, frozen=True):
    """Weights are alpha (cost of a written byte), beta (of a ms of latency), gamma (of a ms of
    GPU).

    The default alpha takes a GiB of SSD writes to be worth 200 ms: a drive that endures one full
    write a day for five years, shared by the turns of an hour, at the price of the GPU beside it.
    """

    write_per_byte: float = 200.0 / 2**30
    latency: float = 1.0
    gpu: float = 1.0


class Economics(msgspec.Struct, frozen=True):
    """Economics describe one model on one worker: bytes of a checkpoint, ms of a token and of a
    checkpoint's load, exact replay length (None: recurrent).
    """

    point_bytes: int
    ms_per_token: float
    load_ms: float
    replay_tokens: int | None

    @property
    def reach(self) -> float:
        """Return R, in tokens: no restore recomputes more than this."""
        return inf if self.replay_tokens is None else float(self.replay_tokens)


def interior_cost(
    period: float, economics: Economics, weights: Weights, *, block_tokens: int, rate: float
) -> float:
    """Return J(p) per produced token, exactly: branches fall on boundaries, `rate` of them a
    token.
    """
    reach, b = economics.reach, block_tokens
    recompute_price = (weights.latency + weights.gpu) * economics.ms_per_token
    if period == inf:
        return rate * recompute_price * reach if rate else 0.0
    places = round(period / b)
    near = places if reach == inf else min(places, -int(-reach // b))
    # Distances 0, B, ... (near-1)B go back to a checkpoint, the rest replays R from nothing.
    tokens = b * near * (near - 1) / 2.0 + (places - near) * (0.0 if reach == inf else reach)
    load = weights.latency * economics.load_ms * near
    write = weights.write_per_byte * economics.point_bytes / period
    return write + rate * (recompute_price * tokens + load) / places


def best_period(economics: Economics, weights: Weights, *, block_tokens: int, rate: float) -> float:
    """Return p* on boundaries; infinite where no interior checkpoint pays."""
    price = rate * (weights.latency + weights.gpu) * economics.ms_per_token
    if price <= 0.0:
        return inf
    p0 = sqrt(2.0 * weights.write_per_byte * economics.point_bytes / price)
    blocks = max(1, floor(min(p0, max(economics.reach, block_tokens)) / block_tokens))
    near = [blocks * block_tokens, (blocks + 1) * block_tokens, inf]
    return min(
        near,
        key=lambda p: interior_cost(p, economics, weights, block_tokens=block_tokens, rate=rate),
    )


class Adaptive(CheckpointPolicy):
    """The adaptive policy checkpoints turn ends that pay, and every p* tokens between them."""

    name: ClassVar[str] = "adaptive"

    def __init__(self, economics: Economics, weights: Weights | None = None) -> None:
        if economics.point_bytes < 0 or economics.ms_per_token <= 0:
            raise InvalidInput("economics", "a token takes no time", "give measured values")
        self.economics = economics
        self._weights = weights or Weights()
        self._turns = PRIOR_TURNS
        self._end_resumes = PRIOR_END_RESUMES
        self._tokens = 0.0
        self._branches = 0.0

    def reprice(self, economics: Economics) -> None:
        """Take newly measured costs; what was observed of reuse stays."""
        self.economics = economics

    @property
    def resumes_per_turn_end(self) -> float:
        """Return q: how often a turn end is resumed from below the device."""
        return self._end_resumes / self._turns

    @property
    def branches_per_token(self) -> float:
        """Return rho: how often a produced token is branched at."""
        return self._branches / self._tokens if self._tokens else 0.0

    def period(self, block_tokens: int) -> float:
        """Return p* at present, in tokens."""
        return best_period(
            self.economics,
            self._weights,
            block_tokens=block_tokens,
            rate=self.branches_per_token,
        )

    def observe(self, event: Reuse) -> None:
        """Learn from what happened; what is older than MEMORY_TURNS counts less and less."""
        if isinstance(event, Produced):
            keep = 1.0 - 1.0 / MEMORY_TURNS
            self._turns = self._turns * keep + 1.0
            self._end_resumes *= keep
            self._tokens = self._tokens * keep + (event.turn.end - event.turn.start)
            self._branches *= keep
        elif isinstance(event, Resumed):
            self._end_resumes += 1.0
        else:
            self._branches += 1.0

    def checkpoints(self, turn: TurnSpan) -> tuple[int, ...]:
        """Return the boundaries in (start, end] whose point state is written, ascending."""
        period = self.period(turn.block_tokens)
        chosen = set() if period == inf else set(turn.grid(int(period)))
        for at in turn.turn_ends():
            last = max((p for p in chosen if p < at), default=turn.start)
            if at not in chosen and self._pays(at - last):
                chosen.add(at)
        return tuple(sorted(chosen))

    def _pays(self, distance: int) -> bool:
        """Tell whether a turn-end checkpoint is worth its write, `distance` tokens after the
        last.
        """
        e, w = self.economics, self._weights
        recompute = (w.latency + w.gpu) * e.ms_per_token * min(distance, e.reach)
        saved = recompute - w.latency * e.load_ms
        return self.resumes_per_turn_end * saved > w.write_per_byte * e.point_bytes
