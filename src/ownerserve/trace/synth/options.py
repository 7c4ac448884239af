"""The options are what can be swept in every generated workload."""

from __future__ import annotations

import msgspec
import numpy as np

from ownerserve.kv.errors import InvalidInput
from ownerserve.trace.synth.draw import zipf_weights

MIN_BLOCK, MAX_BLOCK = 16, 4096


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """These options describe one generated trace.

    `skew`: Zipf exponent of session length (of document popularity in longdoc); 0 adds none to what
    the workload has of itself. `tool_time`: factor on all think times. `reuse`: share of re-use
    that is kept: at 0 no turn finds its history and no session another's head. `arrivals_per_s`:
    sessions, as a Poisson process. `max_input_tokens`: longest prompt.
    """

    sessions: int = 100
    seed: int = 0
    skew: float = 0.0
    tool_time: float = 1.0
    reuse: float = 1.0
    arrivals_per_s: float = 0.1
    block_tokens: int = 64
    max_input_tokens: int = 1_000_000

    def check(self) -> None:
        """Raise InvalidInput naming the first option out of range."""
        for field, holds, mend in (
            ("sessions", self.sessions >= 1, "use 1 or more"),
            ("seed", self.seed >= 0, "use 0 or more"),
            ("skew", 0 <= self.skew <= 3, "use 0 to 3"),
            ("tool_time", self.tool_time >= 0, "use 0 or more"),
            ("reuse", 0 <= self.reuse <= 1, "use 0 to 1"),
            ("arrivals_per_s", self.arrivals_per_s > 0, "use more than 0"),
            (
                "block_tokens",
                MIN_BLOCK <= self.block_tokens <= MAX_BLOCK,
                f"use {MIN_BLOCK} to {MAX_BLOCK}",
            ),
            ("max_input_tokens", self.max_input_tokens >= 1024, "use 1024 or more"),
        ):
            if not holds:
                raise InvalidInput(field, f"{getattr(self, field)} is out of range", mend)


class Plan:
    """A plan is what is decided over all sessions before any is made: arrivals and weights."""

    def __init__(self, options: Options) -> None:
        # Stream 0 is the plan's; session n has stream n + 1, so that fewer sessions are a prefix
        # of more, but for their weights.
        rng = stream(options.seed, 0)
        gaps_s = rng.exponential(1 / options.arrivals_per_s, options.sessions)
        self.start_s = [round(float(at), 3) for at in np.cumsum(gaps_s) - gaps_s[0]]
        weights = zipf_weights(options.sessions, options.skew)
        self.weight = [float(w) for w in weights[rng.permutation(options.sessions)]]


def stream(seed: int, number: int) -> np.random.Generator:
    """Return random generator `number` of a seed."""
    return np.random.Generator(np.random.PCG64([seed, number]))
