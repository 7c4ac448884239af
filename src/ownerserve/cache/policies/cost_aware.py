"""CostAware is the default order: cheapest to bring back first, aged by GreedyDual."""

from __future__ import annotations

from typing import ClassVar

from ownerserve.cache.policies.base import Candidate, EvictionPolicy, Key, PolicyPrices, UseHeat

MS_PER_TOKEN = 0.1
"""Prefill of one token at position 0; only ratios matter until measured costs are given."""

CONTEXT_TOKENS = 65_536.0
"""At this position attention costs as much as all else: a token then takes twice as long."""

REUSE_OF_REFERENCED = 8.0
"""A session within its TTL comes back this much more likely than a finished conversation: in the
Claude-Code sessions 93 % of the gaps between turns are under five minutes."""

LOAD_SHARE = 0.1
"""Loading a spilled copy against computing it again, until measured costs are given."""


class CostAware(EvictionPolicy):
    """CostAware lets the lowest expected reuse x restore cost per byte go first, told apart by what
    can differ.

    Tails of intervals: every block costs about the same per byte, so expected reuse decides: what
    fewer live sessions refer to, then what was used longest ago, then what is cheaper to compute.

    Point state: one snapshot stands for anything from a block to a whole prompt, so cost decides:
    GreedyDual-Size-Frequency, H = clock + expected reuse x restore cost / bytes. `clock` rises to
    the key of whatever goes, so that what was once dear still ages (Cherkasova, Improving WWW
    Proxies Performance with Greedy-Dual-Size-Frequency Caching, 1998). A snapshot that is no
    restorable point by itself costs nothing to lose and so goes first.

    One order by H for both re-prefilled 3 to 18 % more than plain LRU where only tails compete
    (docs/evidence/cache.md): a tail that was dear once outlived sessions that came back.
    """

    name: ClassVar[str] = "cost"

    def __init__(
        self, *, ms_per_token: float = MS_PER_TOKEN, context_tokens: float = CONTEXT_TOKENS
    ) -> None:
        self._ms_per_token = ms_per_token
        self.prices = PolicyPrices(context_tokens)
        self._clock = 0.0

    def reprice(self, prices: PolicyPrices) -> None:
        """Take new prices; entries that were made under the former ones are corrected as they come
        up.
        """
        self.prices = prices

    def key(self, candidate: Candidate) -> Key:
        """Return the candidate's place in the order; the lowest goes first."""
        heat = candidate.heat
        if not candidate.is_point:
            # Negative, so that a tail never moves the clock of point state; rises with refs.
            return (-1.0 / (1 + heat.refs), heat.last_s, self._value(candidate))
        return (heat.inflation + self._value(candidate), heat.last_s)

    def _value(self, candidate: Candidate) -> float:
        """Return the expected milliseconds won per byte kept."""
        heat, lost = candidate.heat, candidate.lost_tokens
        if not lost:
            return 0.0
        freed, prices = candidate.freed_bytes, self.prices
        again = lost * (1.0 + candidate.position / prices.context_tokens)
        if candidate.is_backed:
            per_byte = prices.reload_tokens_per_byte
            again = again * LOAD_SHARE if per_byte is None else min(again, freed * per_byte)
        reuse = heat.uses * (REUSE_OF_REFERENCED if heat.refs else 1.0)
        return reuse * again * self._ms_per_token / freed

    def touched(self, heat: UseHeat) -> None:
        """Note that a turn came back to this place."""
        heat.inflation = self._clock

    def evicted(self, key: Key) -> None:
        """Note that a candidate with this key went."""
        self._clock = max(self._clock, key[0])
