"""Histograms count what the gateway measures of turns by bucket: times in seconds, tokens, and
places in line."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

TOKEN_BUCKETS = (0, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
PLACE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """A histogram counts values by bucket; `counts` has one more entry than `edges` (the rest)."""

    def __init__(self, edges: Sequence[float] = BUCKETS_S) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.edges, value)] += 1
        self.sum += value
