"""Lru evicts what was used longest ago."""

from __future__ import annotations

from typing import ClassVar

from ownerserve.cache.policies.base import Candidate, EvictionPolicy, Key


class Lru(EvictionPolicy):
    """Lru lets what was not used for longest go first."""

    name: ClassVar[str] = "lru"

    def key(self, candidate: Candidate) -> Key:
        """Return the candidate's place in the order; the lowest goes first."""
        return (candidate.heat.last_s,)
