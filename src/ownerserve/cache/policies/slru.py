"""Slru is segmented LRU: what was used once goes before what was used again."""

from __future__ import annotations

from typing import ClassVar

from ownerserve.cache.policies.base import Candidate, EvictionPolicy, Key

USES_TO_BE_PROTECTED = 2


class Slru(EvictionPolicy):
    """Slru keeps a probationary and a protected segment, LRU in each (Karedla, Love, Wherry,
    Caching Strategies to Improve Disk System Performance, 1994).
    """

    name: ClassVar[str] = "slru"

    def key(self, candidate: Candidate) -> Key:
        """Return the candidate's place in the order; the lowest goes first."""
        heat = candidate.heat
        return (float(heat.uses >= USES_TO_BE_PROTECTED), heat.last_s)
