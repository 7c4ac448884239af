"""Priority orders by the caller's priority, then LRU."""

from __future__ import annotations

from typing import ClassVar

from ownerserve.cache.policies.base import Candidate, EvictionPolicy, Key


class Priority(EvictionPolicy):
    """Priority lets state of turns with a lower `priority` go first, however recent."""

    name: ClassVar[str] = "priority"

    def key(self, candidate: Candidate) -> Key:
        """Return the candidate's place in the order; the lowest goes first."""
        return (float(candidate.heat.priority), candidate.heat.last_s)
