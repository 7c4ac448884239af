"""Fifo evicts what came first."""

from __future__ import annotations

from typing import ClassVar

from ownerserve.cache.policies.base import Candidate, EvictionPolicy, Key


class Fifo(EvictionPolicy):
    """Fifo lets what came first go first, used or not."""

    name: ClassVar[str] = "fifo"

    def key(self, candidate: Candidate) -> Key:
        """Return the candidate's place in the order; the lowest goes first."""
        return (candidate.heat.born_s,)
