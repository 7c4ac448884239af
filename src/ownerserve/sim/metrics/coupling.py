"""This module measures dispatch coupling (seed 002 §2.3, §5.4): Little's law of the turns in the
system."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ownerserve.sim.metrics.spreads import Metric, ratio


def coupling(table: NDArray[Any]) -> dict[str, Metric]:
    """Return the terms of the law: Lambda `sessions_per_s`, N `turns_per_session`, W `turn_s`
    (arrival to end), L* = Lambda N W `turns_in_system`, W'(L*) `turn_s_per_turn`, Lambda N W'
    `gain`, 1 / (1 - gain) `amplification`.

    W' is the slope of a least-squares line through (turns in the system that a turn finds at its
    arrival, its W). It is a lower bound where queues outlast the run. `amplification` is None from
    a gain of 1 on: there the law has no stable point near L*. All None for fewer than two turns.
    """
    names = ("sessions_per_s", "turns_per_session", "turn_s", "turns_in_system")
    span = float(table["done_s"].max() - table["arrived_s"].min()) if len(table) else 0.0
    if len(table) < 2 or span <= 0:
        return dict.fromkeys((*names, "turn_s_per_turn", "gain", "amplification"))
    sessions = len(np.unique(table["session"]))
    took = table["done_s"] - table["arrived_s"]
    found = _found(table["arrived_s"], table["done_s"])
    slope = _slope(found, took)
    gain = None if slope is None else len(table) / span * slope
    return {
        "sessions_per_s": sessions / span,
        "turns_per_session": len(table) / sessions,
        "turn_s": float(took.mean()),
        "turns_in_system": float(took.sum()) / span,
        "turn_s_per_turn": slope,
        "gain": gain,
        "amplification": None if gain is None or gain >= 1 else 1 / (1 - gain),
    }


def _found(arrived_s: NDArray[Any], done_s: NDArray[Any]) -> NDArray[np.float64]:
    """Return how many turns are in the system when each arrives, itself not counted."""
    before = np.searchsorted(np.sort(arrived_s), arrived_s, side="left")
    gone = np.searchsorted(np.sort(done_s), arrived_s, side="right")
    found: NDArray[np.float64] = np.maximum(before - gone, 0).astype(np.float64)
    return found


def _slope(x: NDArray[np.float64], y: NDArray[np.float64]) -> float | None:
    """Return the slope of a least-squares line; None when x never varies."""
    off = x - x.mean()
    return ratio(float(off @ (y - y.mean())), float(off @ off))
