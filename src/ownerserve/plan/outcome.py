"""The planner answers with one way back, its price by term, and why it was taken.

    now ──── queue ────┬─ load ─┬──────── recompute ────────┬─ stall ─┐ first token
        loads run here │        │ and here, where the engine │         │
        when there is  │ no compute                          │ no compute
        space for them │ can begin yet                       │ left

The four terms add up to the time until the first token; what of loading fits beside the queue or
the compute is `hidden_ms` and costs nothing. Nothing is counted twice.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from ownerserve.kv.messages import RestoreAction, Tier
from ownerserve.plan.inputs import Exactness


class Step(msgspec.Struct, frozen=True, gc=False):
    """A step is one action on tokens [start, end). `tier` and `bytes` are a load's; `ms` its own
    time."""

    action: RestoreAction
    start: int
    end: int
    ms: float
    tier: Tier | None = None
    bytes: int = 0


class Terms(msgspec.Struct, frozen=True, gc=False):
    """Terms are a price by term, as the module's picture has them.

    `hbm_ms` is lambda times the device memory that the plan newly occupies: no time, but what that
    memory would have saved others.
    """

    queue_ms: float
    load_ms: float
    recompute_ms: float
    stall_ms: float
    hbm_ms: float
    hidden_ms: float

    @property
    def ttft_ms(self) -> float:
        """Return the ms until the first token."""
        return self.queue_ms + self.load_ms + self.recompute_ms + self.stall_ms

    @property
    def total_ms(self) -> float:
        """Return the ms that the planner minimises."""
        return self.ttft_ms + self.hbm_ms


class Priced(msgspec.Struct, frozen=True, gc=False):
    """A priced way is one offered way back: range state of [0, position) kept, window state exact
    from there.

    `computed_from` is where compute begins: at `position`, or before it in a replay.
    `checkpoint` is the position whose point state is loaded or used, None when none is.
    """

    position: int
    computed_from: int
    checkpoint: int | None
    exactness: Exactness
    terms: Terms
    steps: tuple[Step, ...]
    computed_tokens: int
    moved_bytes: int
    new_hbm_bytes: int

    @property
    def name(self) -> str:
        """Return the option's actions, in order and once each: "load_global + replay + prefill"."""
        return " + ".join(dict.fromkeys(str(step.action) for step in self.steps))


class Basis(StrEnum):
    """A basis is what decided: the prices, plain observables because the prices could not be
    trusted, or that a dearer way was due to be tried so that its price can be found wrong."""

    COST = "cost"
    OBSERVABLES = "observables"
    TRIAL = "trial"


class RestorePlan(msgspec.Struct, frozen=True, gc=False):
    """A restore plan is the chosen way back, and what it saves against computing all of it."""

    chosen: Priced
    basis: Basis
    prefill_ttft_ms: float

    @property
    def reuse_benefit_ms(self) -> float:
        """Return seed 000 A2: C_prefill - C_load - C_recompute - C_stall: time alone. Never below 0
        by choice, but for a way that is taken because it needs less memory that is dear.
        """
        return self.prefill_ttft_ms - self.chosen.terms.ttft_ms


class Why(StrEnum):
    """Why says why an action was not offered at a point; its values are metric labels."""

    ENGINE_CANNOT_REPLAY = "engine_cannot_replay"
    RECURRENT_HAS_NO_REPLAY = "recurrent_has_no_replay"
    POINT_STATE_MISSING = "point_state_missing"
    RANGE_STATE_MISSING = "range_state_missing"
    ONE_HIT_LENGTH = "one_hit_length"
    LAST_TOKEN_IS_COMPUTED = "last_token_is_computed"
    APPROXIMATE_NOT_ASKED = "approximate_not_asked"
    NO_MEDIUM = "no_medium"


class NotOffered(msgspec.Struct, frozen=True):
    """A NotOffered says that `action` at `position` was not offered because of `why`."""

    position: int
    action: RestoreAction
    why: Why


class Explanation(msgspec.Struct, frozen=True):
    """An explanation is a plan with everything it was chosen from, cheapest first, and what was not
    offered.
    """

    plan: RestorePlan
    alternatives: tuple[Priced, ...]
    not_offered: tuple[NotOffered, ...]
