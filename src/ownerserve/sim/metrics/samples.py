"""The samples are the load of every worker over time, at a fixed period that doubles when the
series grows too long.

Owns the series behind the heat map, the hotspot and interference indices and memory per session.
Must never decide when a sample is taken: the fleet's heap does.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

MOST_SAMPLES = 4_096


class WorkerSample(msgspec.Struct, frozen=True, gc=False):
    """A sample is one worker's load now. `busy_s`: how long it computed since the run began."""

    pending_prefill_tokens: int
    running_sequences: int
    hbm_used_bytes: int
    busy_s: float


class Samples:
    """The samples hold every worker's load at each instant; one that is down counts with zeros.

    `period_s` is what the next sample should be taken after; it may grow.
    """

    def __init__(self, workers: int, period_s: float, *, most: int = MOST_SAMPLES) -> None:
        self.workers = workers
        self.period_s = period_s
        self._most = most
        self._times = array("d")
        self._columns = {
            name: array("d" if name == "busy_s" else "q") for name in WorkerSample.__struct_fields__
        }

    def __len__(self) -> int:
        return len(self._times)

    def add(self, now_s: float, fleet: Sequence[WorkerSample]) -> None:
        """Add the load of all workers at `now_s`."""
        self._times.append(now_s)
        readings = zip(*map(msgspec.structs.astuple, fleet), strict=True)
        for column, values in zip(self._columns.values(), readings, strict=True):
            column.extend(values)
        if len(self._times) > self._most:
            self._halve()

    def _halve(self) -> None:
        """Drop every second sample (never the last: there is an odd number of them) and take them
        half as often. Memory stays bounded, the spacing even."""
        self.period_s *= 2
        self._times = self._times[::2]
        for name, column in self._columns.items():
            kept = np.asarray(column).reshape(-1, self.workers)[::2]
            self._columns[name] = array(column.typecode, kept.tobytes())

    def times_s(self) -> NDArray[np.float64]:
        """Return when the samples were taken, in seconds."""
        return np.array(self._times)

    def column(self, name: str) -> NDArray[Any]:
        """Return a field of WorkerSample as (samples, workers)."""
        return np.array(self._columns[name]).reshape(-1, self.workers)
