"""What an operator says of a worker's own store: how much it holds, how long, what it may write.

One struct for every opener: the hf worker, the vLLM connector, the tier of vLLM's own connector.
"""

from __future__ import annotations

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.units import MIB
from ownerserve.store.disk.tier import DiskOptions
from ownerserve.store.tiers.policy import (
    DISK_BYTES,
    POINT_SHARE,
    KindLimits,
    TierLimits,
    WriteBudget,
    split,
)

_TIER = TierLimits()
UPKEEP_S = 60.0
LEAST_BURST_BYTES = 256 * MIB
"""What a write budget lets go at once is an hour's worth, and no less than a large record."""


class StoreLimits(msgspec.Struct, frozen=True, kw_only=True):
    """`StoreLimits` are an operator's limits of a worker's own tiers.

    disk_bytes          most bytes of records on disk
    point_share         share of host memory and disk that is for point state, 0 to 1
    range_ttl_s         how long range state stays that nobody reads; 0: for ever
    point_ttl_s         the same of point state
    disk_bytes_per_day  most bytes that are written to the disk in a day, compaction included; 0: no
                        limit
    upkeep_s            seconds between two passes that expire and compact; 0: never
    """

    disk_bytes: int = DISK_BYTES
    point_share: float = POINT_SHARE
    range_ttl_s: float = _TIER.range.ttl_s or 0.0
    point_ttl_s: float = _TIER.point.ttl_s or 0.0
    disk_bytes_per_day: int = 0
    upkeep_s: float = UPKEEP_S

    def __post_init__(self) -> None:
        if self.disk_bytes < 1:
            raise InvalidInput("store capacity", f"{self.disk_bytes} bytes", "use 1 or more")
        for field in ("range_ttl_s", "point_ttl_s", "disk_bytes_per_day", "upkeep_s"):
            if not getattr(self, field) >= 0:
                raise InvalidInput(f"store {field}", f"{getattr(self, field):g}", "use 0 or more")

    def of(self, capacity_bytes: int) -> TierLimits:
        """Return the limits of a tier that holds `capacity_bytes`."""
        sizes = split(capacity_bytes, self.point_share)
        return TierLimits(
            KindLimits(sizes.range.capacity_bytes, self.range_ttl_s or None),
            KindLimits(sizes.point.capacity_bytes, self.point_ttl_s or None),
        )

    def on_disk(self) -> DiskOptions:
        """Return how the store is opened; each call has a write budget of its own."""
        a_day = self.disk_bytes_per_day
        budget = WriteBudget(a_day, max(a_day / 24, LEAST_BURST_BYTES)) if a_day else None
        return DiskOptions(limits=self.of(self.disk_bytes), write_budget=budget)


STANDARD = StoreLimits()
"""The limits where nothing is said."""
