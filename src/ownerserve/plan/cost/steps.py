"""What a decode step takes: t = step + sequence * batch.

Observations are kept by batch size, the last few of each, and only their medians are looked at: a
step that waited for a busy machine moves nothing. The line through the medians has no negative
part. Where one batch size was seen, the default's shape says how its time is shared out.
"""

from __future__ import annotations

from statistics import median

import msgspec

from ownerserve.kv.errors import InvalidInput

CELL_SAMPLES = 31
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
        del cell[:-CELL_SAMPLES]

    def times(self) -> StepTimes:
        """The present line; the default until something was observed."""
        seen = [(batch, median(cell), len(cell)) for batch, cell in sorted(self.cells.items())]
        if not seen:
            return self.default
        if len(seen) == 1:
            batch, ms, _ = seen[0]
            level = ms / self.default.ms(batch)
            return StepTimes(self.default.step_ms * level, self.default.sequence_ms * level)
        return _line(seen)


def _cell_of(batch: int) -> int:
    if batch <= EXACT_BATCHES:
        return batch
    grain = 1 << (batch.bit_length() - 4)
    return batch - batch % grain + grain // 2


def _line(seen: list[tuple[int, float, int]]) -> StepTimes:
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
