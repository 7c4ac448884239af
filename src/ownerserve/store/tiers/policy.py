"""The policy says what a tier gives up, and to whom it says no. Pure: catalogue rows and `now` in,
choices out.

Range and point artifacts live by separate rules: global KV is reused over days, point state within
minutes (V4.1 report), so each kind has its own share, TTL and LRU, and never evicts the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.units import GIB
from ownerserve.store.format.model import ArtifactKind, Listed, RefusalReason


class KindLimits(msgspec.Struct, frozen=True):
    """A kind's limits are its share of a tier, and how long a record stays untouched; None: for
    ever.
    """

    capacity_bytes: int
    ttl_s: float | None = None


class TierLimits(msgspec.Struct, frozen=True):
    """A tier's limits are its rules for both kinds. A tenant's quota counts both."""

    range: KindLimits = KindLimits(64 * GIB, 72 * 3600.0)
    point: KindLimits = KindLimits(16 * GIB, 3600.0)
    tenant_quota_bytes: int | None = None

    def of(self, kind: ArtifactKind) -> KindLimits:
        """Return the limits of one kind."""
        return self.range if kind is ArtifactKind.RANGE else self.point

    @property
    def capacity_bytes(self) -> int:
        """Return the bytes of both kinds together."""
        return self.range.capacity_bytes + self.point.capacity_bytes


DISK_BYTES = TierLimits().capacity_bytes
POINT_SHARE = 0.2
"""What a store on disk holds, and of any tier for points, where nothing else is said."""


def split(capacity_bytes: int, point_share: float = POINT_SHARE) -> TierLimits:
    """Return the limits for a tier of `capacity_bytes`, `point_share` of it for point artifacts.
    Raises InvalidInput for a share that is none.
    """
    if not 0 <= point_share <= 1:
        raise InvalidInput("point_share", f"{point_share}", "use a share from 0 to 1")
    point = int(capacity_bytes * point_share)
    standard = TierLimits()
    return TierLimits(
        KindLimits(capacity_bytes - point, standard.range.ttl_s),
        KindLimits(point, standard.point.ttl_s),
    )


Order = Callable[[Listed], float]
"""Eviction order: the lowest goes first."""


def by_age(record: Listed) -> float:
    """Order records by age: the least recently touched goes first."""
    return record.touched_s


def by_utility(record: Listed) -> float:
    """Order records by what they save: first goes the cheapest to bring back for the room it takes,
    by milliseconds saved, by use, for each byte.

    GreedyDual-Size's H = cost / size (Cao & Irani 1997) with the use count as frequency; age comes
    in because only the oldest records are candidates.
    """
    return (1 + record.reuse_count) * record.restore_cost_ms / record.stored_bytes


class ExpectedUse(msgspec.Struct, frozen=True):
    """Expected use says how soon an artifact that is not used is taken for dead, by kind: half its
    uses fade in that time. Global KV is reused over days, point state within minutes (V4.1's
    report).
    """

    range_half_life_s: float = 24 * 3600.0
    point_half_life_s: float = 600.0

    def order(self, now_s: float) -> Order:
        """Return an order by utility where there is no list by recency: restore ms x expected uses,
        for each byte.

        A record without a price counts as 1 ms, so that among such the uses decide.
        """

        def utility(record: Listed) -> float:
            ranged = record.meta.kind is ArtifactKind.RANGE
            half_life_s = self.range_half_life_s if ranged else self.point_half_life_s
            idle_s = max(0.0, now_s - record.touched_s)
            expected = (1 + record.reuse_count) * math.exp2(-idle_s / half_life_s)
            return (record.restore_cost_ms or 1.0) * expected / record.stored_bytes

        return utility


class Need(NamedTuple):
    """A need is the room asked for by one record."""

    tenant: bytes
    kind: ArtifactKind
    stored_bytes: int


class Shortfall(NamedTuple):
    """A shortfall is what must go first: `kind_bytes` of the kind, of which `tenant_bytes` of the
    tenant.
    """

    kind_bytes: int
    tenant_bytes: int


class Taken(NamedTuple):
    """Taken counts the bytes standing and reserved: of the kind, of the tenant, of the tenant in
    that kind.
    """

    kind_bytes: int
    tenant_bytes: int
    tenant_kind_bytes: int


def shortfall(need: Need, taken: Taken, limits: TierLimits) -> Shortfall | RefusalReason:
    """Return how much must be evicted for `need`; a refusal when no eviction could make room."""
    capacity = limits.of(need.kind).capacity_bytes
    if need.stored_bytes > capacity:
        return RefusalReason.NO_SPACE
    over = 0
    quota = limits.tenant_quota_bytes
    if quota is not None and need.tenant:
        over = max(0, taken.tenant_bytes + need.stored_bytes - quota)
        if over > taken.tenant_kind_bytes:
            return RefusalReason.QUOTA
    return Shortfall(max(over, taken.kind_bytes + need.stored_bytes - capacity), over)


def choose(
    candidates: Iterable[Listed],
    need_bytes: int,
    *,
    order: Order = by_age,
    pinned: frozenset[bytes] = frozenset(),
) -> Sequence[Listed]:
    """Return the first in `order`, `pinned` ones left out, that together free `need_bytes`; none
    when they can't.
    """
    chosen, freed = [], 0
    for record in sorted(candidates, key=order):
        if freed >= need_bytes:
            break
        if record.meta.id not in pinned:
            chosen.append(record)
            freed += record.stored_bytes
    return chosen if freed >= need_bytes else ()


class WriteBudget:
    """A write budget is a token bucket of bytes a day: an SSD lives by the bytes written to it.

    `burst_bytes` may go at once. `admit` says no without side effects; `spend` is called for what
    was written, compaction included, so write amplification counts against the budget.
    """

    def __init__(self, bytes_per_day: float, burst_bytes: float) -> None:
        if bytes_per_day <= 0 or burst_bytes <= 0:
            raise InvalidInput("write_budget", "not positive", "leave it out for no limit")
        self._per_s = bytes_per_day / 86400.0
        self._burst = burst_bytes
        self._level = burst_bytes
        self._at_s: float | None = None

    def _refill(self, now_s: float) -> None:
        if self._at_s is not None:
            grown = self._level + max(0.0, now_s - self._at_s) * self._per_s
            self._level = min(self._burst, grown)
        self._at_s = now_s

    def admit(self, count: int, now_s: float) -> bool:
        """Tell whether there is budget for `count` bytes now."""
        self._refill(now_s)
        return count <= self._level

    def spend(self, count: int, now_s: float) -> None:
        """Note that `count` bytes were written."""
        self._refill(now_s)
        self._level -= count
