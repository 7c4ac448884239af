"""Lfu evicts what was used least often."""

from __future__ import annotations

from typing import ClassVar

from ownerserve.cache.policies.base import Candidate, EvictionPolicy, Key


class Lfu(EvictionPolicy):
    """Lfu lets what the fewest turns came back to go first; among equals the least recent."""

    name: ClassVar[str] = "lfu"

    def key(self, candidate: Candidate) -> Key:
        """Return the candidate's place in the order; the lowest goes first."""
        return (float(candidate.heat.uses), candidate.heat.last_s)
