"""What computing tokens takes: t = a + b * new + c * new * (prefix + new / 2).

`a` is what a pass costs at all (weights are read once), `b` the matrix work of a token, `c` its
attention to each token before it: new tokens see prefix + new / 2 of them on average. The form is
seed 000's prefill cost and fits operator tables for dense, MoE and hybrid models
(research/simulators-traces.md §4).

Fitted online by least squares on *relative* residuals, with Huber weights against stragglers and
no coefficient below 0. Observations are kept by cell (powers of two of new x prefix), so that ten
thousand small turns do not wash out the one long prefill that tells b from c.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from ownerserve.kv.errors import InvalidInput
from ownerserve.plan.cost.estimate import ErrorTrack
from ownerserve.plan.cost.prices import Coefficients

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
