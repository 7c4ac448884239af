"""How long idle sessions are left alone: their own gaps, and when that says to copy them. Pure."""

from __future__ import annotations

from ownerserve.cache.outcomes import DEFAULT_TTL_S
from ownerserve.kv.ids import SessionId
from ownerserve.node.retention.record_value import Worth
from ownerserve.node.vocabulary.settings import NodeSettings
from ownerserve.plan.gaps import Gap, GapCosts, GapStats, plan_gap, prefetch_after_s
from ownerserve.plan.inputs import Abilities

MIN_GAPS = 3
"""Below this a session's next gap is anybody's guess."""
PLANS_KEPT = 4096
"""Instants by rounded gap and load time; begun anew when there are more."""
SHARES = (0.1, 0.25, 0.5, 0.75)
"""A prefetch is timed to be done just as one of these shares of the gaps end."""
SPILL_AFTER_S = 0.25
"""For sessions whose gaps are not known: longer than the quickest tool, shorter than most."""


Plans = dict[tuple[Gap, float], float | None]
"""Seconds after a turn's end, by the session's gaps and what a load takes in ms."""


class Gaps:
    """Gap statistics by session, and the spill time that follows from them."""

    def __init__(self, worth: Worth, abilities: Abilities, settings: NodeSettings) -> None:
        self._worth = worth
        self._abilities = abilities
        self._settings = settings
        self._stats: dict[SessionId, GapStats] = {}
        self._spill_after: Plans = {}
        self._prefetch_after: Plans = {}

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
        key = (stats.gap().rounded(), _two_digits(self._worth.load_ms(depth)))
        if key not in self._spill_after:
            gap, load_ms = key
            # Writing is priced as loading: nobody waits for it, and it is the same bytes.
            plan = plan_gap(gap, self._costs(load_ms, load_ms), self._abilities)
            _keep(self._spill_after, key, plan.spill_after_s)
        after_s = self._spill_after[key]
        return DEFAULT_TTL_S if after_s is None else after_s

    def prefetch_after_s(self, session_id: SessionId, load_ms: float) -> float | None:
        """Seconds after its turn's end at which to bring back what is gone by then and takes
        `load_ms`; None when loading on demand is as good, or its gaps are not known."""
        stats = self.known(session_id)
        if stats is None:
            return None
        key = (stats.gap().rounded(), _two_digits(load_ms))
        if key not in self._prefetch_after:
            gap, load_ms = key
            _keep(
                self._prefetch_after, key, prefetch_after_s(gap, self._costs(0.0, load_ms), SHARES)
            )
        return self._prefetch_after[key]

    def _costs(self, spill_ms: float, load_ms: float) -> GapCosts:
        price = self._settings.hold_ms_per_s
        return GapCosts(hold_ms_per_s=price, spill_ms=spill_ms, load_ms=load_ms)


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")


def _keep(plans: Plans, key: tuple[Gap, float], after_s: float | None) -> None:
    if len(plans) >= PLANS_KEPT:
        plans.clear()
    plans[key] = after_s
