"""SessionReference is the order of SGLang's session radix cache: what no session refers to goes
first.
"""

from __future__ import annotations

from typing import ClassVar

from ownerserve.cache.policies.base import Candidate, EvictionPolicy, Key


class SessionReference(EvictionPolicy):
    """SessionReference orders by (referenced, number of references, LRU), as sglang PR #27058.
    Referenced state is still evictable, so it can't deadlock. Ours drops a reference at its TTL;
    there it stays.
    """

    name: ClassVar[str] = "session-reference"

    def key(self, candidate: Candidate) -> Key:
        """Return the candidate's place in the order; the lowest goes first."""
        heat = candidate.heat
        return (float(heat.refs > 0), float(heat.refs), heat.last_s)
