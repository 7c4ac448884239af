"""This module compares two policies over several draws of sessions: by how much one is ahead, and
how surely.

Owns the arithmetic and what it takes for a verdict. Draws are paired: in each both saw the same
sessions, so what is averaged is the ratio (its logarithm), with Student's 95 % interval. One draw
is no sample: above the knee a fleet is chaotic, and a constant changed by 2 % moved one by 7 %.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, inf, log, sqrt
from statistics import fmean, stdev

import msgspec

from ownerserve.report.page import Verdict

T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Two-sided, by degrees of freedom from 1 on."""
LEVEL = 0.03
"""Ratios this close to 1 are level: what two fleets differ by that decide alike."""


class Compared(msgspec.Struct, frozen=True):
    """A comparison is ours over theirs: the mean ratio and its interval over `draws`."""

    ratio: float
    low: float
    high: float
    draws: int

    def __str__(self) -> str:
        return f"{self.ratio:.2f}x ({self.low:.2f} to {self.high:.2f})"


def compared(ours: Sequence[float], theirs: Sequence[float]) -> Compared:
    """Compare draw by draw; one in which either is 0 has no ratio and is left out."""
    logs = [log(a / b) for a, b in zip(ours, theirs, strict=True) if a > 0 and b > 0]
    if not logs:
        return Compared(1.0, 0.0, inf, 0)
    middle, draws = fmean(logs), len(logs)
    off = inf if draws < 2 else T_95[min(draws - 2, len(T_95) - 1)] * stdev(logs) / sqrt(draws)
    return Compared(exp(middle), exp(middle - off), exp(min(middle + off, 700.0)), draws)


def more(one: Compared) -> Verdict:
    """Return the verdict that ours is more: it holds where the interval lies above 1, and fails
    where all of it is level or below."""
    if one.low > 1:
        return Verdict.HOLDS
    return Verdict.FAILS if one.high <= 1 + LEVEL else Verdict.NOT_SHOWN


def as_much(one: Compared) -> Verdict:
    """Return the verdict that ours is no less, but for what counts as level."""
    if one.low >= 1 - LEVEL:
        return Verdict.HOLDS
    return Verdict.FAILS if one.high < 1 - LEVEL else Verdict.NOT_SHOWN


def at_no_cost(one: Compared) -> Verdict:
    """Return the verdict that a measure which is taken costs nothing. Where it was never taken both
    runs are one run, and nothing is shown."""
    return Verdict.NOT_SHOWN if one.low == one.high == 1 else as_much(one)


def inverse(one: Compared) -> Compared:
    """Return theirs over ours: for what is better when it is less."""
    return Compared(1 / one.ratio, 1 / one.high, 1 / one.low if one.low else inf, one.draws)


def over(cells: Mapping[str, Verdict]) -> Verdict:
    """Return one verdict over several loads or traces: it holds in a range where it holds in
    some."""
    said = set(cells.values())
    if len(said) == 1:
        return said.pop()
    if Verdict.HOLDS in said:
        return Verdict.IN_RANGE
    return Verdict.FAILS if Verdict.FAILS in said else Verdict.NOT_SHOWN
