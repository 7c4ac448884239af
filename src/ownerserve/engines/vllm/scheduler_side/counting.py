"""Counters of several owners as one, since the start or since they were last taken. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping


class Counting:
    """Owns nothing but what was told."""

    def __init__(self, sources: Mapping[str, Callable[[], Mapping[str, int]]]) -> None:
        """`sources`: a prefix, and who counts what stands under it."""
        self._sources = sources
        self._told: dict[str, dict[str, int]] = {prefix: {} for prefix in sources}
        self._stirred = False

    def stir(self) -> None:
        """Something may have been counted."""
        self._stirred = True

    def totals(self) -> Counter[str]:
        """Since the start."""
        totals: Counter[str] = Counter()
        for prefix, source in self._sources.items():
            totals.update({f"{prefix}{name}": number for name, number in source().items()})
        return totals

    def take(self) -> dict[str, int]:
        """Since the last call. Asked every step; most steps stir nothing, and cost nothing."""
        taken: dict[str, int] = {}
        if self._stirred:
            self._stirred = False
            for prefix, source in self._sources.items():
                told = self._told[prefix]
                for name, number in source().items():
                    if number != (before := told.get(name, 0)):
                        told[name] = number
                        taken[prefix + name] = number - before
        return taken
