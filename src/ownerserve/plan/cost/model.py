"""The cost model is one worker's: defaults until measured, then what was measured.

Owns every coefficient that a price is made of. It does no I/O: a node feeds it observations, asks
for `prices()`, and keeps `dump()` on disk between runs.

Computing tokens takes t = a + b * new + c * new * (prefix + new / 2).

`a` is what a pass costs at all (weights are read once), `b` the matrix work of a token, `c` its
attention to each token before it: new tokens see prefix + new / 2 of them on average. The form is
seed 000's prefill cost and fits operator tables for dense, MoE and hybrid models
(research/simulators-traces.md §4).

Fitted online by least squares on *relative* residuals, with Huber weights against stragglers and
no coefficient below 0. Observations are kept by cell (powers of two of new x prefix), so that ten
thousand small turns do not wash out the one long prefill that tells b from c.

A decode step takes t = step + sequence * batch.

Observations are kept by batch size, the last few of each, and only their medians are looked at: a
step that waited for a busy machine moves nothing. The line through the medians has no negative
part. Where one batch size was seen, the default's shape says how its time is shared out.
"""

from __future__ import annotations

from math import exp, log
from statistics import median

import msgspec
import numpy as np
from numpy.typing import NDArray

from ownerserve.kv.errors import UNREADABLE, InvalidInput
from ownerserve.kv.messages import Tier
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

CELL_SAMPLES = 8
REFIT_EVERY = 8
HUBER_SIGMAS = 1.345
"""Beyond this many robust standard deviations an observation's pull is capped (95 % efficiency)."""
PRIOR_WEIGHT = 1e-3
"""What the default counts for beside one observation: it only decides what no observation does."""
MIN_SHARE = 0.01
"""A default says nothing against a term: each is taken to be at least this share of a pass."""
ROUNDS = 6

Floats = NDArray[np.float64]


class ComputeFit(msgspec.Struct):
    """A compute fit is one kind of pass (prefill or replay) as observed. Owns its observations and
    its error.
    """

    default: Coefficients
    fitted: Coefficients
    cells: dict[str, list[tuple[int, int, float]]] = msgspec.field(default_factory=dict)
    error: ErrorTrack = msgspec.field(default_factory=ErrorTrack)

    @classmethod
    def from_default(cls, default: Coefficients) -> ComputeFit:
        """Make a fit that has seen nothing."""
        return cls(default, default)

    def observe(self, new: int, prefix: int, ms: float) -> None:
        """Learn that `new` tokens after `prefix` took `ms` of compute, queueing not included."""
        if new <= 0 or prefix < 0 or ms <= 0:
            raise InvalidInput(
                "compute", f"{new} tokens after {prefix} in {ms} ms", "report positive values"
            )
        self.error.add(max(self.fitted.ms(new, prefix), 1e-9), ms)
        cell = self.cells.setdefault(f"{new.bit_length()}/{prefix.bit_length()}", [])
        cell.append((new, prefix, ms))
        del cell[:-CELL_SAMPLES]
        # Each early observation moves the fit a lot; later ones need not be solved for one by one.
        if self.error.samples <= REFIT_EVERY or self.error.samples % REFIT_EVERY == 0:
            self.fitted = fit([row for rows in self.cells.values() for row in rows], self.default)


def fit(rows: list[tuple[int, int, float]], default: Coefficients) -> Coefficients:
    """Return the coefficients that explain `rows` (new, prefix, ms) best, leaning on `default`'s
    shape.
    """
    observed = np.array(rows, dtype=np.float64)
    new, prefix, ms = observed[:, 0], observed[:, 1], observed[:, 2]
    terms = np.stack([np.ones_like(new), new, new * (prefix + 0.5 * new)], axis=1)
    shape = np.array([default.a_ms, default.b_ms, default.c_ms])
    shape = np.maximum(
        shape, MIN_SHARE * float(np.median(terms @ shape)) / np.median(terms, axis=0)
    )
    level = float(np.median(ms / (terms @ shape)))
    # In units of the scaled default every unknown is near 1 and every residual is relative.
    design = terms * (shape * level) / ms[:, None]
    weights = np.ones(len(rows))
    solution = np.ones(3)
    pull = np.full(3, np.sqrt(PRIOR_WEIGHT))
    for _ in range(ROUNDS):
        root = np.sqrt(weights)
        # The pull is relative to where the last round ended: it holds what nothing tells, and does
        # not keep a default that the observations say is far off.
        prior = np.diag(pull / np.maximum(solution, MIN_SHARE))
        lhs = np.concatenate([design * root[:, None], prior])
        solution = _solve_non_negative(lhs, np.concatenate([root, pull]))
        residual = np.abs(design @ solution - 1.0)
        sigma = 1.4826 * float(np.median(residual)) + 1e-6
        weights = np.minimum(1.0, HUBER_SIGMAS * sigma / np.maximum(residual, 1e-12))
    a, b, c = (solution * shape * level).tolist()
    return Coefficients(a, b, c)


def _solve_non_negative(lhs: Floats, rhs: Floats) -> Floats:
    """Solve least squares with every unknown >= 0, by dropping the most negative one at a time."""
    gram, moment = lhs.T @ lhs, lhs.T @ rhs
    active = [0, 1, 2]
    solution = np.zeros(3)
    while active:
        # The pull keeps it regular: every unknown has at least its own row.
        found = np.linalg.solve(gram[np.ix_(active, active)], moment[active])
        if found.min() >= 0.0:
            solution[active] = found
            break
        active.pop(int(found.argmin()))
    return solution


STEP_CELL_SAMPLES = 31
"""Steps that are remembered of each batch size; their median stands up to fifteen stragglers."""
EXACT_BATCHES = 16
"""Batches up to this have a cell each; beyond, sizes within an eighth of each other share one."""


class StepTimes(msgspec.Struct, frozen=True):
    """Step times say what a decode step of a batch takes: `step_ms`, and `sequence_ms` for each
    sequence in it.
    """

    step_ms: float
    sequence_ms: float

    def ms(self, batch: int) -> float:
        """Return the ms that a step of `batch` sequences takes."""
        return self.step_ms + self.sequence_ms * batch


ASSUMED = StepTimes(10.0, 1.0)
"""A small CPU's order of magnitude."""


class StepFit(msgspec.Struct):
    """A step fit is decode steps as observed. Owns its observations."""

    default: StepTimes = ASSUMED
    cells: dict[int, list[float]] = msgspec.field(default_factory=dict)
    samples: int = 0

    def observe(self, batch: int, ms: float) -> None:
        """Learn that a step which decoded `batch` sequences and nothing else took `ms`."""
        if batch < 1 or ms <= 0.0:
            raise InvalidInput("step", f"batch {batch} in {ms} ms", "report positive values")
        self.samples += 1
        cell = self.cells.setdefault(_cell_of(batch), [])
        cell.append(ms)
        del cell[:-STEP_CELL_SAMPLES]

    def times(self) -> StepTimes:
        """Return the present line; the default until something was observed."""
        seen = [(batch, median(cell), len(cell)) for batch, cell in sorted(self.cells.items())]
        if not seen:
            return self.default
        if len(seen) == 1:
            batch, ms, _ = seen[0]
            level = ms / self.default.ms(batch)
            return StepTimes(self.default.step_ms * level, self.default.sequence_ms * level)
        return _line_through(seen)


def _cell_of(batch: int) -> int:
    if batch <= EXACT_BATCHES:
        return batch
    grain = 1 << (batch.bit_length() - 4)
    return batch - batch % grain + grain // 2


def _line_through(seen: list[tuple[int, float, int]]) -> StepTimes:
    """Fit a line through (batch, ms, samples) by least squares of relative residuals."""
    rows = [(samples / (ms * ms), batch, ms) for batch, ms, samples in seen]
    total = sum(weight for weight, _, _ in rows)
    mean_batch = sum(weight * batch for weight, batch, _ in rows) / total
    mean_ms = sum(weight * ms for weight, _, ms in rows) / total
    spread = sum(weight * (batch - mean_batch) ** 2 for weight, batch, _ in rows)
    slope = sum(w * (batch - mean_batch) * (ms - mean_ms) for w, batch, ms in rows) / spread
    if slope <= 0.0:
        return StepTimes(mean_ms, 0.0)
    start = mean_ms - slope * mean_batch
    if start < 0.0:
        top = sum(weight * batch * ms for weight, batch, ms in rows)
        return StepTimes(0.0, top / sum(weight * batch * batch for weight, batch, _ in rows))
    return StepTimes(start, slope)


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
        """Return where the defaults come from."""
        return self._state.label

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Return the tiers that can be priced."""
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
        """Return the line that tells what a decode step takes."""
        return self._state.steps.times()

    def prices(self) -> Prices:
        """Return the present prices; the same object until something was observed."""
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
        """Estimate what computing `new` tokens after `prefix` others again, below the write floor,
        takes.

        Until replays were seen it is priced as a prefill, which computes the same and writes more.
        """
        return self._replay.error.estimate(self._replay.fitted.ms(new, prefix))

    def queue(self, backlog: Backlog) -> Estimate:
        """Estimate how long the engine is busy with what stands before a new request."""
        return self._state.queue_error.estimate(self.prices().queue_ms(backlog))

    def sources(self) -> dict[str, EstimateSource]:
        """Return for each estimate whether it rests on measurements."""
        tracks = {PREFILL: self._state.prefill.error, REPLAY: self._replay.error}
        tracks |= {str(tier): load.error for tier, load in self._state.tiers.items()}
        return {name: track.estimate(0.0).source for name, track in tracks.items()}

    def dump(self) -> bytes:
        """Return everything learnt, as versioned JSON."""
        return msgspec.json.encode(self._state)

    @classmethod
    def restore(cls, document: bytes) -> CostModel:
        """Make a model from `dump()`. Raises InvalidInput when the document is damaged or newer."""
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
        """Take the prefill's present fit, not a data sheet, for a replay's first guess."""
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
        """Return a tier's present times, worked out once after each of its loads."""
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
    """Return the estimate that a dated observation makes a measured one; None when it is none that
    is told.
    """
    match seen:
        case Loaded(tier):
            return str(tier)
        case Prefilled():
            return PREFILL
        case Stepped():
            return STEP
        case _:
            return None
