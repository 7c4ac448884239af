"""What computing tokens takes: t = a + b * new + c * new * (prefix + new / 2).

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

from statistics import median

import msgspec
import numpy as np
from numpy.typing import NDArray

from ownerserve.kv.errors import InvalidInput
from ownerserve.plan.cost.prices import Coefficients, ErrorTrack

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
    """One kind of pass (prefill or replay) as observed. Owns its observations and its error."""

    default: Coefficients
    fitted: Coefficients
    cells: dict[str, list[tuple[int, int, float]]] = msgspec.field(default_factory=dict)
    error: ErrorTrack = msgspec.field(default_factory=ErrorTrack)

    @classmethod
    def from_default(cls, default: Coefficients) -> ComputeFit:
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
    """The coefficients that explain `rows` (new, prefix, ms) best, leaning on `default`'s shape."""
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
    """Least squares with every unknown >= 0, by dropping the most negative one at a time."""
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
    """A decode step of a batch takes `step_ms` + `sequence_ms` for each sequence in it."""

    step_ms: float
    sequence_ms: float

    def ms(self, batch: int) -> float:
        return self.step_ms + self.sequence_ms * batch


ASSUMED = StepTimes(10.0, 1.0)
"""A small CPU's order of magnitude."""


class StepFit(msgspec.Struct):
    """Decode steps as observed. Owns its observations."""

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
        """The present line; the default until something was observed."""
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
    """Least squares of relative residuals through (batch, ms, samples)."""
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
