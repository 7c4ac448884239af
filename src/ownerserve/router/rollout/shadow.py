"""A shadow is a policy that decides beside the one whose decisions are carried out, about the same
turns at the same moment, and does nothing.

It sees what is: the sessions, copies and loads that the live policy's decisions made. What the
fleet would be like had the shadow decided from the first turn on, nobody knows: each comparison is
about this one turn, from where the live policy has brought the fleet. So a live policy that
scatters sessions leaves the shadow few good places, and the regret of a turn is a lower bound of
what an owner would have spared it.

    regret_ms = price of what was done - price of what the shadow would have done

Both by one price list, OwnerServe's (pricing.py), whether or not the policies price; negative where
the live policy did better by it. Owns its counts.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from ownerserve.router.decision import BesideDecision, Decision, DispatchReason, RoutingRequest
from ownerserve.router.fleet import Candidates
from ownerserve.router.policies.base import RoutingPolicy, TunedPolicy
from ownerserve.router.pricing import PlacementPricer
from ownerserve.router.settings import Settings


class ShadowCounts:
    """These counts say what came of one shadow's comparisons; a reason is always the shadow's."""

    def __init__(self) -> None:
        self.agreed: Counter[DispatchReason] = Counter()
        """Turns that it would have run at the same worker by the same action."""
        self.differed: Counter[DispatchReason] = Counter()
        self.regret_ms: defaultdict[DispatchReason, float] = defaultdict(float)
        """What its choice was cheaper, where it was."""
        self.gain_ms: defaultdict[DispatchReason, float] = defaultdict(float)
        """What the live choice was cheaper, where that was."""
        self.live_cached_tokens = self.shadow_cached_tokens = 0
        """Prompt tokens that each expected not to be computed."""

    @property
    def compared(self) -> int:
        """How many turns it has decided about."""
        return self.agreed.total() + self.differed.total()

    def take(self, live: Decision, own: BesideDecision) -> None:
        """Count one comparison."""
        is_same = own.worker is live.worker and own.action is live.action
        (self.agreed if is_same else self.differed)[own.reason] += 1
        if own.regret_ms > 0.0:
            self.regret_ms[own.reason] += own.regret_ms
        elif own.regret_ms < 0.0:
            self.gain_ms[own.reason] -= own.regret_ms
        self.live_cached_tokens += live.cached_tokens
        self.shadow_cached_tokens += own.cached_tokens


class Shadow:
    """A shadow decides by `policy`, called `name`, and counts in `counts` what came of it."""

    def __init__(
        self, name: str, policy: RoutingPolicy, *, settings: Settings, counts: ShadowCounts
    ) -> None:
        self.name = name
        self.counts = counts
        self._policy = policy
        self._pricer = PlacementPricer(settings)

    def tune(self, settings: Settings) -> None:
        """Decide and price from now on by `settings`."""
        if isinstance(self._policy, TunedPolicy):
            self._policy.tune(settings)
        self._pricer = PlacementPricer(settings)

    def judge(
        self, live: Decision, request: RoutingRequest, candidates: Candidates
    ) -> BesideDecision:
        """Decide about the request beside `live`, count how they differ, and say so."""
        own = self._policy.decide(request, candidates)
        beside = BesideDecision(
            self.name, own.worker, own.action, own.reason, own.cached_tokens,
            self._price_ms(live, request) - self._price_ms(own, request),
        )  # fmt: skip
        self.counts.take(live, beside)
        return beside

    def _price_ms(self, decision: Decision, request: RoutingRequest) -> float:
        """Return what carrying the decision out is expected to cost, in ms."""
        worker, source, prefill = decision.worker, decision.source, decision.prefill
        if prefill is not None:
            return self._pricer.apart(request, worker, prefill).total_ms
        if source is not None:
            brought = self._pricer.bring(request, worker, action=decision.action, source=source)
            return brought.total_ms
        return self._pricer.local(request, worker).total_ms
