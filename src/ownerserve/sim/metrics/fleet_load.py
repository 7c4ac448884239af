"""This module measures how evenly the fleet is loaded, how long bursts are, and what its memory
holds, over time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ownerserve.sim.metrics.counters import FleetCounters
from ownerserve.sim.metrics.rows import NO_WORKER
from ownerserve.sim.metrics.samples import Samples
from ownerserve.sim.metrics.spreads import Metric, ratio
from ownerserve.sim.metrics.tasks import Tasks

HEAT_COLUMNS = 400


def hotspot_index(table: NDArray[Any], workers: int) -> float | None:
    """Return the prompt tokens computed by the busiest worker over the mean of all: 1 is even."""
    prefilled = np.where(
        table["prefill_worker"] == NO_WORKER, table["worker"], table["prefill_worker"]
    )
    ran = prefilled != NO_WORKER
    tokens = np.bincount(prefilled[ran], table["computed_tokens"][ran], minlength=workers)
    return ratio(tokens.max(initial=0.0), tokens.sum() / workers)


def load_metrics(samples: Samples) -> dict[str, Metric]:
    """Return the indices of pending prefill; docs/metrics.md has the formulas."""
    pending = samples.column("pending_prefill_tokens").astype(np.float64)
    pending = pending[pending.any(axis=1)]  # a moment without a queue says nothing about queues
    total = float(pending.sum())
    peaks = float(pending.max(axis=1).sum()) if pending.size else 0.0
    return {
        "pending_hotspot_index": ratio(peaks * samples.workers, total),
        "interference_index": ratio(float((pending**2).sum()) * pending.size, total**2),
    }


def memory_metrics(sessions: Tasks, samples: Samples) -> dict[str, Metric]:
    """Return the device memory by the sessions that it is held for: those that are open, between
    their first arrival and their last end."""
    used = samples.column("hbm_used_bytes").astype(np.float64).sum(axis=1)
    starts, ends = np.sort(sessions.from_s), np.sort(sessions.until_s)
    times = samples.times_s()
    are_open = starts.searchsorted(times, "right") - ends.searchsorted(times, "right")
    at_starts = np.arange(1, len(starts) + 1) - ends.searchsorted(starts, "right")
    return {
        "hbm_bytes_per_session": ratio(float(used.sum()), float(are_open.sum())),
        "hbm_used_bytes_mean": float(used.mean()) if len(used) else None,
        "max_concurrent_sessions": int(at_starts.max(initial=0)),
    }


def heat_map(samples: Samples, counters: FleetCounters) -> dict[str, Metric]:
    """Return the pending prefill tokens by worker over time, and the moves across it (figure 10).

    At most HEAT_COLUMNS columns; each is the mean of the samples it stands for.
    """
    times, pending = samples.times_s(), samples.column("pending_prefill_tokens")
    width = max(1, -(-len(times) // HEAT_COLUMNS))
    starts = np.arange(0, len(times), width)
    rows: list[Metric] = []
    for worker in range(samples.workers):
        sums = np.add.reduceat(pending[:, worker], starts) if len(starts) else np.zeros(0)
        sizes = np.diff(np.append(starts, len(times)))
        rows.append([float(value) for value in sums / sizes])
    return {
        "times_s": [float(times[start]) for start in starts],
        "pending_prefill_tokens": rows,
        "moves": [
            {"at_s": move.landed_s, "source": move.source, "target": move.target}
            for move in counters.migrations
            if move.completed
        ],
    }
