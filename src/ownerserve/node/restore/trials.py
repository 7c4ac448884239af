"""Trials keep prices from staying wrong: a way priced a little dearer is tried now and then. Pure.

A load that is never begun is never measured, nor is the short pass that follows it: a price that
once came out too high would stay so. So each turn that computes what could be loaded saves up a
small share of its time, and once that pays what loading is said to cost more, a turn loads. What
trials cost is thus TRIAL_SHARE of such turns' time at most, by the prices at hand, and what was far
too dear is hardly ever tried.
"""

from __future__ import annotations

from ownerserve.node.restore import sources
from ownerserve.plan.cost.prices import Prices
from ownerserve.plan.inputs import RestoreQuery
from ownerserve.plan.outcome import Basis, RestorePlan
from ownerserve.plan.restore import Planner

TRIAL_SHARE = 1 / 32


class Trials:
    """`Trials` owns what turns that compute have saved up, in ms of predicted time."""

    def __init__(self) -> None:
        self._saved_ms = 0.0

    def plan(self, planner: Planner, query: RestoreQuery, prices: Prices) -> RestorePlan:
        """Return the planner's way, or one that loads where that is due to be tried."""
        plan = planner.plan(query, prices)
        if sources.is_loading(plan.chosen):
            return plan
        dearer = planner.deeper(query, prices, than=plan.chosen.position)
        if dearer is None or not sources.is_loading(dearer):
            return plan
        total_ms = plan.chosen.terms.total_ms
        extra_ms = max(0.0, dearer.terms.total_ms - total_ms)
        self._saved_ms += TRIAL_SHARE * total_ms
        if extra_ms > self._saved_ms:
            return plan
        self._saved_ms -= extra_ms
        return RestorePlan(dearer, Basis.TRIAL, plan.prefill_ttft_ms)
