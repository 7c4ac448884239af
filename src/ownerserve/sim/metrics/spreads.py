"""This module states distributions in five numbers, and numbers as reports print them."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Metric: TypeAlias = "float | int | str | list[Metric] | dict[str, Metric] | None"
PERCENTILES = (50, 90, 95, 99)


def spread(values: NDArray[Any]) -> dict[str, Metric] | None:
    """Return mean, p50, p90, p95 and p99 (linear interpolation); None for no values."""
    if not len(values):
        return None
    cuts = np.percentile(values, PERCENTILES)
    named = {f"p{percent}": float(cut) for percent, cut in zip(PERCENTILES, cuts, strict=True)}
    return {"mean": float(np.mean(values)), **named}


def ratio(part: float, whole: float) -> float | None:
    """Return `part` / `whole`; None when there is no whole: a share of nothing is not zero."""
    return float(part) / float(whole) if whole else None


def known(metric: Metric) -> Metric:
    """Return the metric without what the run does not tell: names whose value is None are left
    out."""
    if isinstance(metric, dict):
        return {name: known(value) for name, value in metric.items() if value is not None}
    return metric


def rounded(metric: Metric) -> Metric:
    """Round floats to nine significant digits: what a summation's order can change is not a
    result."""
    if isinstance(metric, dict):
        return {name: rounded(value) for name, value in metric.items()}
    if isinstance(metric, list):
        return [rounded(value) for value in metric]
    return float(f"{metric:.9g}") if isinstance(metric, float) else metric
