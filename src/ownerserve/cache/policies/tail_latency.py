"""TailLatency is tail-latency-aware LRU: first goes what can go without making the slow turns
slower.
"""

from __future__ import annotations

from typing import ClassVar

from ownerserve.cache.policies.base import Candidate, EvictionPolicy, Key

BUDGET_TOKENS = 4096
"""A turn that prefills no more than this meets its time to first token."""

EXPECTED_NEW_TOKENS = 758
"""The median turn of the Claude-Code sessions adds this much by itself."""


class TailLatency(EvictionPolicy):
    """T-LRU (arXiv 2510.15152): a conversation's tail may shrink as long as the next turn's
    uncached tokens, new ones included, stay within the budget; such tails go first, in LRU order.
    """

    name: ClassVar[str] = "tail-latency"

    def __init__(
        self,
        *,
        budget_tokens: int = BUDGET_TOKENS,
        expected_new_tokens: int = EXPECTED_NEW_TOKENS,
    ) -> None:
        self._spare_tokens = budget_tokens - expected_new_tokens

    def key(self, candidate: Candidate) -> Key:
        """Return the candidate's place in the order; the lowest goes first."""
        hurts = candidate.trimmed_tokens >= self._spare_tokens
        return (float(hurts), candidate.heat.last_s)
