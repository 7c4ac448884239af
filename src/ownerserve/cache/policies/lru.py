"""Lru evicts what was used longest ago."""

from __future__ import annotations

from typing import ClassVar

from ownerserve.cache.policies.base import Candidate, EvictionPolicy, Key


class Lru(EvictionPolicy):
    """What was not used for longest goes first."""

    name: ClassVar[str] = "lru"

    def key(self, candidate: Candidate) -> Key:
        return (candidate.heat.last_s,)
