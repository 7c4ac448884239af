"""This module fits a pace's coefficients to measured steps: least squares on relative residuals.

Relative, so that a decode step of 5 ms counts as much as a prefill of 2 s; no coefficient below 0,
so that nothing is cheaper for being longer. With six unknowns every subset can be tried: the best
that has no negative one is the exact answer, and no iteration can fail to end.

Owns no number. Must never know where rows came from: an operator table, an engine's log or a
user's own measurements are the same to it.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ownerserve.kv.errors import InvalidInput

Floats = NDArray[np.float64]

MIN_STEPS = 8
COLUMNS = "new, prefix (or weighted), decode_context, batch, ms"


class MeasuredStep(msgspec.Struct, frozen=True, gc=False):
    """A measured step has pace.Pace.step_ms's arguments, and the ms that it took."""

    new: int
    weighted: float
    decode_context: int
    batch: int
    ms: float


class Fitted(msgspec.Struct, frozen=True, gc=False):
    """A fit has a pace's coefficients, in ms, and their relative errors at the steps they were
    fitted to."""

    a_ms: float
    b_ms: float
    c_ms: float
    d_ms: float
    e_ms: float
    experts_ms: float
    expert_share: float
    median_error: float
    p90_error: float

    def errors(self, steps: Sequence[MeasuredStep]) -> Floats:
        """Return the relative error at each of `steps`, positive where the fit is too slow."""
        times = np.array([self.a_ms, self.b_ms, self.c_ms, self.d_ms, self.e_ms, self.experts_ms])
        wrong: Floats = _relative(steps, self.expert_share) @ times - 1.0
        return wrong


def fit_steps(steps: Sequence[MeasuredStep], *, expert_share: float = 0.0) -> Fitted:
    """Return the coefficients that explain `steps` best. `expert_share`: top_k / experts of a
    mixture, 0 for a dense model, whose last coefficient is then 0.

    Raises InvalidInput where the steps cannot tell prefill from decode.
    """
    _check(steps, expert_share)
    design = _relative(steps, expert_share)
    times = _solve_non_negative(design)
    wrong = np.abs(design @ times - 1.0)
    a, b, c, d, e, experts = times.tolist()
    return Fitted(
        a,
        b,
        c,
        d,
        e,
        experts,
        expert_share,
        float(np.median(wrong)),
        float(np.quantile(wrong, 0.9)),
    )


def read_steps(path: Path) -> list[MeasuredStep]:
    """Read measured steps from a CSV with a heading, or a JSON list of objects.

    Columns: new, decode_context, batch, ms, and either prefix (of the one prompt that computed) or
    weighted (the sum of new * (prefix + new / 2) over several). Raises InvalidInput naming the row.
    """
    try:
        text = path.read_text()
        rows = (
            _json_rows(text) if path.suffix == ".json" else list(csv.DictReader(text.split("\n")))
        )
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise InvalidInput(str(path), str(error), f"pass rows of {COLUMNS}") from error
    return [_step(row, f"{path.name}: row {number}") for number, row in enumerate(rows, 1)]


def _json_rows(text: str) -> list[dict[str, Any]]:
    return msgspec.json.decode(text, type=list[dict[str, Any]])


def _step(row: dict[str, Any], where: str) -> MeasuredStep:
    def number(name: str) -> float:
        try:
            value = float(row[name])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidInput(
                f"{where}: {name}", f"{row.get(name)!r} is no number", f"give {COLUMNS}"
            ) from error
        if not 0.0 <= value < float("inf"):
            raise InvalidInput(f"{where}: {name}", f"{value}", "use 0 or more")
        return value

    new = number("new")
    if row.get("weighted") not in (None, ""):
        weighted = number("weighted")
    else:
        weighted = new * (number("prefix") + new / 2.0)
    return MeasuredStep(
        int(new), weighted, int(number("decode_context")), int(number("batch")), number("ms")
    )


def _check(steps: Sequence[MeasuredStep], expert_share: float) -> None:
    if not 0.0 <= expert_share < 1.0:
        raise InvalidInput("expert_share", f"{expert_share}", "use top_k / experts, below 1")
    if len(steps) < MIN_STEPS:
        raise InvalidInput("steps", f"{len(steps)} of them", f"measure {MIN_STEPS} or more")
    for number, step in enumerate(steps, 1):
        if step.ms <= 0 or step.new + step.batch <= 0:
            raise InvalidInput(
                f"steps: row {number}", f"{step}", "give steps that compute something and take time"
            )
    kinds = {"prefill (new > 0)": "new", "decode (batch > 0)": "batch"}
    for kind, field in kinds.items():
        if len({getattr(step, field) for step in steps} - {0}) < 2:
            raise InvalidInput("steps", f"no two sizes of {kind}", "measure steps of several sizes")


def _relative(steps: Sequence[MeasuredStep], expert_share: float) -> Floats:
    """Return each step's terms as shares of the time it took: a perfect fit sums to 1 in every
    row."""
    rows = np.array([msgspec.structs.astuple(step) for step in steps], dtype=np.float64)
    new, weighted, context, batch, ms = rows.T
    experts = 1.0 - (1.0 - expert_share) ** (new + batch)
    terms = np.stack([np.ones_like(new), new, weighted, context, batch, experts], axis=1)
    found: Floats = terms / ms[:, None]
    return found


def _solve_non_negative(design: Floats) -> Floats:
    """Solve design @ x = 1 with x >= 0 by least squares: the best of all subsets of unknowns."""
    # In units of its largest entry every column is of the same size: ms and 1e-7 ms a pair.
    scale = np.abs(design).max(axis=0)
    used = [i for i in range(design.shape[1]) if scale[i] > 0]
    scaled = design / np.where(scale > 0, scale, 1.0)
    ones = np.ones(len(design))
    best, least = np.zeros(design.shape[1]), float(len(design))
    for count in range(1, len(used) + 1):
        for subset in combinations(used, count):
            part = scaled[:, subset]
            found, *_ = np.linalg.lstsq(part, ones, rcond=None)
            left = float(((part @ found - ones) ** 2).sum())
            if found.min() >= 0.0 and left < least:
                best, least = np.zeros(design.shape[1]), left
                best[list(subset)] = found
    solved: Floats = best / np.where(scale > 0, scale, 1.0)
    return solved
