"""One moment's prices as plain numbers: what the planner multiplies and adds.

Apart from the fits (plan.cost.compute), so that who only prices need not import numpy.
"""

from __future__ import annotations

import msgspec

from ownerserve.kv.messages import Tier
from ownerserve.plan.cost.load import LoadTable
from ownerserve.plan.inputs import Backlog

PREFILL, REPLAY, QUEUE, STEP = "prefill", "replay", "queue", "step"
"""Names of the estimates that are no tier, beside the tiers' own names."""


class Coefficients(msgspec.Struct, frozen=True):
    """The three numbers of a pass, in ms: t = a + b * new + c * new * (prefix + new / 2)."""

    a_ms: float
    b_ms: float
    c_ms: float

    def ms(self, new: int, prefix: int) -> float:
        """Return the ms that `new` tokens after `prefix` others take to compute; nothing for
        none."""
        if new <= 0:
            return 0.0
        return self.a_ms + new * (self.b_ms + self.c_ms * (prefix + 0.5 * new))

    def scaled(self, factor: float) -> Coefficients:
        return Coefficients(self.a_ms * factor, self.b_ms * factor, self.c_ms * factor)


class Prices(msgspec.Struct, frozen=True):
    """A frozen copy of what a cost model knows (made by CostModel.prices).

    `untrusted` names each estimate whose recent error is too large to decide by itself, with its
    error factor.
    """

    tiers: dict[Tier, LoadTable]
    prefill: Coefficients
    replay: Coefficients
    queue_ratio: float
    untrusted: dict[str, float]
    measured_s: dict[str, float] = {}
    """When each estimate was last measured, seconds since 1970; what is missing is assumed."""

    def queue_ms(self, backlog: Backlog) -> float:
        """Return the ms that the engine is busy with what stands before a new request."""
        fixed = self.prefill.a_ms * backlog.requests
        token_ms = self.prefill.b_ms + self.prefill.c_ms * backlog.context_tokens
        return self.queue_ratio * (fixed + token_ms * backlog.prefill_tokens)

    def scaled(self, name: str, factor: float) -> Prices:
        """The prices if the estimate `name` were off by `factor`: a what-if, trusted throughout."""
        tiers, prefill, replay, queue = self.tiers, self.prefill, self.replay, self.queue_ratio
        if name == PREFILL:
            prefill = prefill.scaled(factor)
            # The queue is priced with the prefill's coefficients but has a ratio of its own.
            queue = queue / factor
        elif name == REPLAY:
            replay = replay.scaled(factor)
        elif name == QUEUE:
            queue = queue * factor
        else:
            tiers = {t: table.scaled(factor) if t == name else table for t, table in tiers.items()}
        return Prices(tiers, prefill, replay, queue, {})
