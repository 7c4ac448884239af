"""The refill gauge says what a worker's device costs to refill, for those who would send it more.

    share(n) = ms to bring back all that lies on the device
             / ms for which what would go next, if it took n tokens more, was idle

Under any order that lets go what was idle longest a device turns over once in that age, so this is
the part of the worker's time that refilling takes: 0 while there is room, above 1 where it can't
keep up. The real way back counts: a load where a tier below holds the state and that is quicker,
else computing it. What nobody will come back for costs nothing.

Pure. Owns the last answer, which is good for LOOK_EVERY_S: a look is bounded (cache.turnover), and
then costs a share of a step that can't be measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.turnover import Leaving, TurnoverLook
from ownerserve.kv.messages import Tier
from ownerserve.kv.specs import Coverage
from ownerserve.kv.wire.status import REFILL_SHARE_MAX, RefillShare
from ownerserve.node.ownership.inventory import BELOW, Inventory
from ownerserve.plan.cost.model import CostModel
from ownerserve.plan.cost.prices import LoadTable

LOOK_EVERY_S = 0.5
STATED_PARTS = (1 / 64, 1 / 16, 1 / 4, 1 / 2)
"""The sizes that are told, as parts of what the device holds: what is a lot differs by device. Less
than the first is told as much: a turn that ends leaves some blocks free for a moment."""


class RefillGauge:
    """A refill gauge reads one cache, what its node said of the tiers below, and measured
    prices."""

    def __init__(self, cache: HeteroCache, inventory: Inventory, costs: CostModel) -> None:
        self._turnover = cache.turnover
        self._inventory = inventory
        self._costs = costs
        layout = cache.layout
        slot_bytes = sum(c.slot_bytes for c in layout.components if c.coverage is Coverage.RANGE)
        self._token_bytes = slot_bytes / layout.block_tokens
        capacity = cache.occupancy.blocks.capacity * layout.block_tokens
        self._sizes = sorted({max(int(capacity * part), 1) for part in STATED_PARTS})
        self._told: tuple[RefillShare, ...] = ()
        self._until_s = float("-inf")

    def shares(self, now: float) -> tuple[RefillShare, ...]:
        """Return the refill share by size, as it was at most LOOK_EVERY_S ago. `now` is on the
        cache's clock."""
        if now >= self._until_s:
            self._told, self._until_s = self._measure(now), now + LOOK_EVERY_S
        return self._told

    def _measure(self, now: float) -> tuple[RefillShare, ...]:
        sizes = self._sizes
        look = self._turnover.look(sizes[-1])
        refill_s = self._refill_ms(look) / 1000.0
        return tuple(RefillShare(size, _share(refill_s, look.idle_s(size, now))) for size in sizes)

    def _refill_ms(self, look: TurnoverLook) -> float:
        """Return how long bringing back all that is held takes: what was looked at says by which
        way."""
        prices = self._costs.prices()
        prefill = prices.prefill
        loads = [(tier, prices.tiers[tier]) for tier in BELOW if tier in prices.tiers]
        computed_ms = prefill.b_ms * look.held_tokens + prefill.c_ms * look.held_positions
        seen_ms = back_ms = 0.0
        for one in look.leaving:
            anew_ms = prefill.ms(one.tokens, one.start) - prefill.a_ms
            if one.sessions:
                seen_ms += anew_ms
                back_ms += min(anew_ms, self._load_ms(one, loads))
            else:
                computed_ms -= anew_ms
        if seen_ms > 0.0:
            computed_ms *= back_ms / seen_ms
        return max(computed_ms, 0.0)

    def _load_ms(self, one: Leaving, loads: Sequence[tuple[Tier, LoadTable]]) -> float:
        """Return how long loading the stretch from below takes; infinite where no tier is known to
        hold it."""
        best_ms = float("inf")
        for tier, table in loads:
            if self._inventory.holds(one.sessions, tier, one.end):
                best_ms = min(best_ms, table.ms(int(one.tokens * self._token_bytes)))
        return best_ms


def _share(refill_s: float, idle_s: float) -> float:
    """Return the share, REFILL_SHARE_MAX at most, also where there is no room at all."""
    if refill_s >= idle_s * REFILL_SHARE_MAX:
        return REFILL_SHARE_MAX
    return refill_s / idle_s
