"""The busy meter says which part of the last minute an engine computed. Pure.

An exponential mean: what was t seconds ago counts with exp(-t / BUSY_WINDOW_S), and from the
engine's beginning on only what has been. What is computed between two readings is taken to be
spread evenly over the time between them.
"""

from __future__ import annotations

from math import exp

BUSY_WINDOW_S = 60.0


class BusyMeter:
    """A busy meter is fed the seconds that one engine has computed in all, and owns the mean."""

    def __init__(self, now: float) -> None:
        self._began_s = self._read_s = now
        self._busy_s = 0.0
        self._mean = 0.0

    def read(self, busy_s: float, now: float) -> float:
        """Take in that the engine has computed for `busy_s` by `now`, and return its busy share, 0
        to 1; 0 before any time has passed."""
        passed_s = now - self._read_s
        if passed_s > 0.0:
            part = min(max(busy_s - self._busy_s, 0.0) / passed_s, 1.0)
            kept = exp(-passed_s / BUSY_WINDOW_S)
            self._mean = self._mean * kept + part * (1.0 - kept)
            self._read_s, self._busy_s = now, busy_s
        seen = 1.0 - exp(-(self._read_s - self._began_s) / BUSY_WINDOW_S)
        return min(self._mean / seen, 1.0) if seen > 0.0 else 0.0
