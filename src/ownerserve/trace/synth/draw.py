"""This module draws from distributions given as tables of percentiles, and puts skew in."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

PERCENTILES = (0.0, 0.01, 0.10, 0.25, 0.50, 0.75, 0.90, 0.99, 0.999, 1.0)


class Quantiles:
    """The quantiles give a distribution by its values at PERCENTILES; between them it is geometric.

    Measured tables go in as they were measured, so a generator's calibration can be read and
    compared with a trace. Zeros are drawn as `floor` and below.
    """

    __slots__ = ("_values",)

    def __init__(self, *values: float) -> None:
        if len(values) != len(PERCENTILES) or list(values) != sorted(values):
            raise ValueError(f"need {len(PERCENTILES)} ascending values, got {values}")
        self._values = values

    def at(self, u: float) -> float:
        """Return the value at percentile `u` in [0, 1)."""
        upper = min(bisect_right(PERCENTILES, u), len(PERCENTILES) - 1)
        low, high = self._values[upper - 1], self._values[upper]
        start, end = PERCENTILES[upper - 1], PERCENTILES[upper]
        part = (u - start) / (end - start)
        if low <= 0:
            return low + (high - low) * part
        return float(low * (high / low) ** part)

    def tokens(self, u: float) -> int:
        """Return the value at `u` as a count."""
        return round(self.at(u))

    def seconds(self, u: float) -> float:
        """Return the value at `u` to the millisecond: what a trace can hold without noise in its
        last digits."""
        return round(self.at(u), 3)


def zipf_weights(count: int, alpha: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the weights of ranks 1..count, proportional to rank ** -alpha, with mean 1."""
    weights = np.arange(1, count + 1, dtype=np.float64) ** -alpha
    normal: np.ndarray[tuple[int], np.dtype[np.float64]] = weights / weights.mean()
    return normal


class Draws:
    """The draws are uniform numbers of one session's generator, drawn in bulk: one at a time costs
    10x."""

    __slots__ = ("_at", "_pool", "_rng")
    _BULK = 256

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._pool: list[float] = []
        self._at = 0

    def next(self) -> float:
        """Return the next number in [0, 1)."""
        if self._at == len(self._pool):
            self._pool = self._rng.random(self._BULK).tolist()
            self._at = 0
        value = self._pool[self._at]
        self._at += 1
        return value

    def below(self, chance: float) -> bool:
        """Return True with probability `chance`."""
        return self.next() < chance
