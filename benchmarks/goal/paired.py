"""By how much one configuration is ahead of another over draws, each run several times with
perturbations that mean nothing: a paired bootstrap.

    draw 0     ours / theirs under perturbation 0, 1, 2      one ratio each (its logarithm)
    draw 1     ...

Both of a pair saw the same sessions under the same perturbation. Draws are drawn anew with
replacement, and within each its perturbations: sessions and a run's own chaos are in the interval.
Pure; the same values give the same interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from ownerserve.sim.suites.draws import Compared

RESAMPLES = 4_000
SEED = 19
LEVELS = (2.5, 97.5)
FEWEST_DRAWS = 3
"""Of fewer no interval is known."""


def paired(
    ours: Sequence[Sequence[float]],
    theirs: Sequence[Sequence[float]],
    *,
    resamples: int = RESAMPLES,
) -> Compared:
    """Return the mean ratio of ours to theirs and its 95 % interval; values are by draw, then by
    perturbation. A draw in which a value is 0 has no ratio and is left out."""
    logs = [
        np.log(np.array(a) / np.array(b))
        for a, b in zip(ours, theirs, strict=True)
        if len(a) == len(b) > 0 and min(a) > 0 and min(b) > 0
    ]
    if not logs:
        return Compared(1.0, 0.0, inf, 0)
    middle = float(np.exp(np.mean([one.mean() for one in logs])))
    if len(logs) < FEWEST_DRAWS:
        return Compared(middle, 0.0, inf, len(logs))
    rng = np.random.Generator(np.random.PCG64(SEED))
    means = np.empty(resamples)
    for at in range(resamples):
        chosen = rng.integers(0, len(logs), len(logs))
        means[at] = np.mean(
            [logs[n][rng.integers(0, len(logs[n]), len(logs[n]))].mean() for n in chosen]
        )
    low, high = np.exp(np.percentile(means, LEVELS))
    return Compared(middle, float(low), float(high), len(logs))
