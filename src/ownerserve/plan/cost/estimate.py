"""An estimate that knows how wrong its kind has been lately.

The error is *prequential*: each observation is first predicted with what was known before it, and
only then learnt from, so a fit can't flatter itself. It is kept as a factor, the same whichever
side one errs on: 2.0 means "off by a factor of two, up or down, on average".
"""

from __future__ import annotations

from enum import StrEnum
from math import exp, log

import msgspec

MEMORY_SAMPLES = 24
"""An error older than about this many observations no longer counts."""

TRUST_MIN_SAMPLES = 8
"""Below this many observations a default is used as it stands: it has no error of its own yet."""

UNTRUSTED_FACTOR = 1.5
"""From this mean error on, an estimate no longer decides by itself (plan.restore falls back).

Operator tables err by 1.1-1.2 against silicon and single decode steps by 1.25-1.4
(research/simulators-traces.md §4), a published transfer model by 10-21 (seed 002 §4.3.2): 1.5 lets
the first kind decide and stops the second.
"""


class EstimateSource(StrEnum):
    """Where an estimate comes from: a data sheet's roofline, or this machine."""

    DEFAULT = "default"
    MEASURED = "measured"


class Estimate(msgspec.Struct, frozen=True):
    """An estimate is so many ms, by `source`, whose last `samples` observations it missed by
    `error_factor`."""

    ms: float
    source: EstimateSource
    samples: int
    error_factor: float

    @property
    def relative_error(self) -> float:
        """The error as a share: 0.1 is off by 10 %."""
        return self.error_factor - 1.0


class ErrorTrack(msgspec.Struct):
    """The exponentially forgotten mean of |ln(predicted / observed)|."""

    log_error: float = 0.0
    samples: int = 0

    def add(self, predicted_ms: float, observed_ms: float) -> None:
        """Count one prediction against what happened; both must be positive."""
        self.samples += 1
        weight = max(1.0 / self.samples, 1.0 / MEMORY_SAMPLES)
        self.log_error += weight * (abs(log(predicted_ms / observed_ms)) - self.log_error)

    @property
    def factor(self) -> float:
        return exp(self.log_error)

    @property
    def is_trusted(self) -> bool:
        """Whether an estimate of this kind may decide: good lately, or not yet shown to be bad."""
        return self.samples < TRUST_MIN_SAMPLES or self.factor < UNTRUSTED_FACTOR

    def estimate(self, ms: float) -> Estimate:
        source = EstimateSource.MEASURED if self.samples else EstimateSource.DEFAULT
        return Estimate(ms, source, self.samples, self.factor)
