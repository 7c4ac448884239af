"""How long idle sessions are left alone: their own gaps, and when that says to copy them. Pure."""

from __future__ import annotations

from ownerserve.cache.outcomes import DEFAULT_TTL_S
from ownerserve.kv.ids import SessionId
from ownerserve.node.settings import NodeSettings
from ownerserve.node.worth import Worth
from ownerserve.plan.gaps import GapCosts, GapStats, plan_gap
from ownerserve.plan.inputs import Abilities

MIN_GAPS = 3
"""Below this a session's next gap is anybody's guess."""
SPILL_AFTER_S = 0.25
"""For sessions whose gaps are not known: longer than the quickest tool, shorter than most."""


class Gaps:
    """Gap statistics by session, and the spill time that follows from them."""

    def __init__(self, worth: Worth, abilities: Abilities, settings: NodeSettings) -> None:
        self._worth = worth
        self._abilities = abilities
        self._settings = settings
        self._stats: dict[SessionId, GapStats] = {}

    def observe(self, session_id: SessionId, gap_s: float) -> None:
        """The session came back after `gap_s`."""
        self._stats.setdefault(session_id, GapStats()).observe(max(0.0, gap_s))

    def known(self, session_id: SessionId) -> GapStats | None:
        """The session's gaps, once there are enough of them."""
        stats = self._stats.get(session_id)
        return stats if stats is not None and stats.count >= MIN_GAPS else None

    def forget(self, session_id: SessionId) -> None:
        """The session was not seen for long."""
        self._stats.pop(session_id, None)

    def spill_after_s(self, session_id: SessionId, depth: int) -> float:
        """Seconds after its turn's end at which a session of `depth` blocks is copied.

        A session that is expected back before a copy pays is copied when its soft reference ends,
        or when room is short.
        """
        if self._settings.spill_after_s is not None:
            return self._settings.spill_after_s
        stats = self.known(session_id)
        if stats is None:
            return SPILL_AFTER_S
        load_ms = self._worth.load_ms(depth)
        # Writing is priced as loading: nobody waits for it, and it is the same bytes.
        price = self._settings.hold_ms_per_s
        costs = GapCosts(hold_ms_per_s=price, spill_ms=load_ms, load_ms=load_ms)
        after_s = plan_gap(stats.gap(), costs, self._abilities).spill_after_s
        return DEFAULT_TTL_S if after_s is None else after_s
