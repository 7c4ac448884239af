"""This module defines what an eviction policy sees and says.

A policy only orders. It never frees, and it can't protect: what a running turn needs is locked by
the tree, and everything else can go (invariant 7). Its keys may only rise while nothing happens to
a candidate: the evictor keeps them in a lazy heap and asks again before it believes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple, Protocol

Key = tuple[float, ...]
"""The lowest goes first."""


class UseHeat(Protocol):
    """Heat is how a place in the tree was used. `refs` counts live soft references of sessions."""

    last_s: float
    born_s: float
    uses: int
    priority: int
    refs: int
    inflation: float

    @property
    def anchors(self) -> Mapping[str, object] | None:
        """Return the sessions that stand there, by id; None when there are none."""
        ...


class Candidate(Protocol):
    """A candidate is something that could go: an interval's tail, or (`is_point`) a snapshot. Valid
    in the call.

    `lost_tokens` must be computed again if it goes, `freed_bytes` are won by that, `position` is
    where it ends and `trimmed_tokens` what was lost behind it since its last use. `is_backed`: a
    lower tier has a copy, it need not be computed again.
    """

    @property
    def heat(self) -> UseHeat:
        """`heat` is how often and when the state was used."""
        ...

    @property
    def is_point(self) -> bool:
        """`is_point` tells point state from a range block."""
        ...

    @property
    def position(self) -> int:
        """`position` is where the state ends, in tokens."""
        ...

    @property
    def lost_tokens(self) -> int:
        """`lost_tokens` would have to be computed again, were it evicted."""
        ...

    @property
    def freed_bytes(self) -> int:
        """`freed_bytes` would become free, were it evicted."""
        ...

    @property
    def trimmed_tokens(self) -> int:
        """`trimmed_tokens` of the branch were evicted before."""
        ...

    @property
    def is_backed(self) -> bool:
        """`is_backed` tells whether a tier below has the state too."""
        ...


class PolicyPrices(NamedTuple):
    """Prices are what measured costs say to an order: ratios only, so that keys of before still
    compare.

    At position `context_tokens` a token takes twice as long to compute as at 0; bringing a byte
    back from a copy takes as long as computing `reload_tokens_per_byte` tokens at position 0.
    """

    context_tokens: float
    reload_tokens_per_byte: float | None = None


class EvictionPolicy:
    """EvictionPolicy is the base of all policies: an order without memory needs only `key`."""

    name: ClassVar[str]
    pins_idle_sessions: ClassVar[bool] = False
    """True only in the pinned-slot baseline: an idle session keeps its hard lock."""

    def key(self, candidate: Candidate) -> Key:
        """Return the candidate's place in the order, now; the lowest goes first."""
        raise NotImplementedError

    def touched(self, heat: UseHeat) -> None:
        """Note that a turn came back to this place."""

    def reprice(self, prices: PolicyPrices) -> None:
        """Note what costs were measured; most policies know none."""

    def evicted(self, key: Key) -> None:
        """Note that a candidate with this key went."""
