"""The cost model of one worker: defaults until measured, then what was measured.

Owns every coefficient that a price is made of. It does no I/O: a node feeds it observations, asks
for `prices()`, and keeps `dump()` on disk between runs.
"""

from __future__ import annotations

from math import exp, log

import msgspec

from ownerserve.kv.errors import UNREADABLE, InvalidInput
from ownerserve.kv.messages import Tier
from ownerserve.plan.cost.compute import ASSUMED, ComputeFit, StepFit, StepTimes
from ownerserve.plan.cost.events import Loaded, Observation, Prefilled, Replayed, Stepped, Waited
from ownerserve.plan.cost.prices import (
    PREFILL,
    QUEUE,
    REPLAY,
    STEP,
    TRUST_MIN_SAMPLES,
    Coefficients,
    ErrorTrack,
    Estimate,
    EstimateSource,
    LoadTable,
    Medium,
    Prices,
    TierLoad,
)
from ownerserve.plan.inputs import Backlog

VERSION = 1
QUEUE_WEIGHT = 0.1
RATIO_LIMITS = (0.05, 20.0)


class Defaults(msgspec.Struct, frozen=True):
    """Defaults are what is assumed before anything is measured (plan.cost.roofline makes one per
    GPU).

    `label` says where it comes from and travels with every estimate that still rests on it.
    """

    label: str
    prefill: Coefficients
    tiers: dict[Tier, Medium]
    step: StepTimes = ASSUMED


class _State(msgspec.Struct):
    """The model's state is everything that is persisted."""

    version: int
    label: str
    prefill: ComputeFit
    replay: ComputeFit
    tiers: dict[Tier, TierLoad]
    queue_log_ratio: float
    queue_error: ErrorTrack
    steps: StepFit = msgspec.field(default_factory=StepFit)
    measured_s: dict[str, float] = msgspec.field(default_factory=dict)


class CostModel:
    """The cost model takes observations and gives prices."""

    def __init__(self, defaults: Defaults) -> None:
        self._state = _State(
            version=VERSION,
            label=defaults.label,
            prefill=ComputeFit.from_default(defaults.prefill),
            replay=ComputeFit.from_default(defaults.prefill),
            tiers={tier: TierLoad(medium) for tier, medium in defaults.tiers.items()},
            queue_log_ratio=0.0,
            queue_error=ErrorTrack(),
            steps=StepFit(defaults.step),
        )
        self._prices: Prices | None = None
        self._tables: dict[Tier, LoadTable] = {}

    @property
    def label(self) -> str:
        """Where the defaults come from."""
        return self._state.label

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers that can be priced."""
        return tuple(self._state.tiers)

    def observe(self, seen: Observation, at_s: float | None = None) -> None:
        """Learn from one measured load, pass, step or wait. `at_s`: when, in seconds since 1970;
        None: estimates that rest on it bear no date."""
        self._prices = None
        if at_s is not None and (name := _estimate_of(seen)) is not None:
            self._state.measured_s[name] = at_s
        match seen:
            case Loaded(tier, count, ms):
                self._tables.pop(tier, None)
                self._tier(tier).observe(count, ms)
            case Prefilled(new, prefix, ms):
                self._state.prefill.observe(new, prefix, ms)
            case Replayed(new, prefix, ms):
                self._adopt_prefill_as_replay_default()
                self._state.replay.observe(new, prefix, ms)
            case Stepped(batch, ms):
                self._state.steps.observe(batch, ms)
            case Waited(backlog, ms):
                self._observe_wait(backlog, ms)

    def steps(self) -> StepTimes:
        """The line that tells what a decode step takes."""
        return self._state.steps.times()

    def prices(self) -> Prices:
        """The present prices; the same object until something was observed."""
        if self._prices is None:
            state = self._state
            tracks = {PREFILL: state.prefill.error, REPLAY: self._replay.error}
            tracks |= {QUEUE: state.queue_error}
            tracks |= {str(tier): load.error for tier, load in state.tiers.items()}
            self._prices = Prices(
                tiers={tier: self._table(tier) for tier in state.tiers},
                prefill=state.prefill.fitted,
                replay=self._replay.fitted,
                queue_ratio=exp(state.queue_log_ratio),
                measured_s=dict(state.measured_s),
                untrusted={n: track.factor for n, track in tracks.items() if not track.is_trusted},
            )
        return self._prices

    def load(self, tier: Tier, count: int) -> Estimate:
        """Estimate what loading `count` bytes from `tier` takes once it has begun."""
        return self._tier(tier).error.estimate(self._table(tier).ms(count))

    def prefill(self, new: int, prefix: int) -> Estimate:
        """Estimate what computing `new` tokens after `prefix` others takes."""
        fit = self._state.prefill
        return fit.error.estimate(fit.fitted.ms(new, prefix))

    def replay(self, new: int, prefix: int) -> Estimate:
        """What computing them again below the write floor takes.

        Until replays were seen it is priced as a prefill, which computes the same and writes more.
        """
        return self._replay.error.estimate(self._replay.fitted.ms(new, prefix))

    def queue(self, backlog: Backlog) -> Estimate:
        """Estimate how long the engine is busy with what stands before a new request."""
        return self._state.queue_error.estimate(self.prices().queue_ms(backlog))

    def sources(self) -> dict[str, EstimateSource]:
        """Which estimates rest on measurements."""
        tracks = {PREFILL: self._state.prefill.error, REPLAY: self._replay.error}
        tracks |= {str(tier): load.error for tier, load in self._state.tiers.items()}
        return {name: track.estimate(0.0).source for name, track in tracks.items()}

    def dump(self) -> bytes:
        """Everything learnt, as versioned JSON."""
        return msgspec.json.encode(self._state)

    @classmethod
    def restore(cls, document: bytes) -> CostModel:
        """A model from `dump()`. Raises InvalidInput when the document is damaged or newer."""
        field, mend = "cost model", "delete the file; it is measured anew"
        try:
            state = msgspec.json.decode(document, type=_State)
        except UNREADABLE as error:
            raise InvalidInput(field, str(error), mend) from error
        if state.version != VERSION:
            problem = f"version {state.version}, this build reads {VERSION}"
            raise InvalidInput(field, problem, mend)
        model = cls.__new__(cls)
        model._state = state  # noqa: SLF001 - made by hand, without the constructor
        model._prices, model._tables = None, {}  # noqa: SLF001
        return model

    @property
    def _replay(self) -> ComputeFit:
        replay = self._state.replay
        return replay if replay.error.samples >= TRUST_MIN_SAMPLES else self._state.prefill

    def _adopt_prefill_as_replay_default(self) -> None:
        """A replay's first guess is the prefill's present fit, not a data sheet."""
        if self._state.replay.error.samples == 0:
            self._state.replay = ComputeFit.from_default(self._state.prefill.fitted)

    def _observe_wait(self, backlog: Backlog, ms: float) -> None:
        predicted = self.prices().queue_ms(backlog)
        if predicted <= 0.0 or ms <= 0.0:
            return
        self._state.queue_error.add(predicted, ms)
        low, high = (log(limit) for limit in RATIO_LIMITS)
        moved = self._state.queue_log_ratio + QUEUE_WEIGHT * log(ms / predicted)
        self._state.queue_log_ratio = min(max(moved, low), high)
        self._prices = None

    def _table(self, tier: Tier) -> LoadTable:
        """A tier's present times, worked out once after each of its loads."""
        table = self._tables.get(tier)
        if table is None:
            table = self._tables[tier] = self._tier(tier).table()
        return table

    def _tier(self, tier: Tier) -> TierLoad:
        if tier not in self._state.tiers:
            known = ", ".join(self._state.tiers)
            raise InvalidInput("tier", f"{tier!r} has no cost", f"use one of {known}")
        return self._state.tiers[tier]


def _estimate_of(seen: Observation) -> str | None:
    """The estimate that a dated observation makes a measured one; None: none that is told."""
    match seen:
        case Loaded(tier):
            return str(tier)
        case Prefilled():
            return PREFILL
        case Stepped():
            return STEP
        case _:
            return None
