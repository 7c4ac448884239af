"""Counters of several owners as one, since the start or since they were last taken. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping


class Counting:
    """Owns nothing but what was told."""

    def __init__(self, sources: Mapping[str, Callable[[], Mapping[str, int]]]) -> None:
        """`sources`: a prefix, and who counts what stands under it."""
        self._sources = sources
        self._told: Counter[str] = Counter()
        self._told_events = 0

    def totals(self) -> Counter[str]:
        """Since the start."""
        totals: Counter[str] = Counter()
        for prefix, source in self._sources.items():
            totals.update({f"{prefix}{name}": number for name, number in source().items()})
        return totals

    def take(self) -> Counter[str]:
        """Since the last call. Asked every step, and mostly nothing was counted: that is cheap."""
        events = sum(sum(source().values()) for source in self._sources.values())
        if events == self._told_events:
            return Counter()
        self._told_events = events
        totals = self.totals()
        taken, self._told = totals - self._told, totals
        return taken
