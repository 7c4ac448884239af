"""Prices say what a pass and a load take, as plain numbers, and how wrong such numbers have been
lately.

The planner multiplies and adds one moment's `Prices`. Apart from the fits (plan.cost.model), so
that who only prices need not import numpy.

An error is *prequential*: each observation is first predicted with what was known before it, and
only then learnt from, so a fit can't flatter itself. It is kept as a factor, the same whichever
side one errs on: 2.0 means "off by a factor of two, up or down, on average".

A tier is no straight line (one SSD here reads 64 KiB at 0.5 GB/s and 1 MiB at 2.3), so every power
of four has its own ratio of observed to straight-line time, averaged in logarithms and forgotten
exponentially. Classes that were never seen take the ratio of the nearest one that was.

    ms │                        /      nodes: 4 KiB, 16 KiB, ... 4 GiB
       │              /────────/       between them linear, beyond the last proportional,
       │    ──────────                 never falling: more bytes never take less
       └──┬───┬───┬───┬───┬── bytes
"""

from __future__ import annotations

from enum import StrEnum
from itertools import pairwise
from math import exp, log

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.messages import Tier
from ownerserve.kv.units import KIB, MIB
from ownerserve.plan.inputs import Backlog

MEMORY_SAMPLES = 24
"""An error older than about this many observations no longer counts."""

TRUST_MIN_SAMPLES = 8
"""Below this many observations a default is used as it stands: it has no error of its own yet."""

UNTRUSTED_FACTOR = 1.5
"""From this mean error on, an estimate no longer decides by itself (plan.restore falls back).

Operator tables err by 1.1-1.2 against silicon and single decode steps by 1.25-1.4
(research/simulators-traces.md §4), a published transfer model by 10-21 (seed 002 §4.3.2): 1.5 lets
the first kind decide and stops the second.
"""


class EstimateSource(StrEnum):
    """An EstimateSource is where an estimate comes from: a data sheet's roofline, or this
    machine.
    """

    DEFAULT = "default"
    MEASURED = "measured"


class Estimate(msgspec.Struct, frozen=True):
    """An estimate is so many ms, by `source`, whose last `samples` observations it missed by
    `error_factor`."""

    ms: float
    source: EstimateSource
    samples: int
    error_factor: float

    @property
    def relative_error(self) -> float:
        """Return the error as a share: 0.1 is off by 10 %."""
        return self.error_factor - 1.0


class ErrorTrack(msgspec.Struct):
    """An error track is the exponentially forgotten mean of |ln(predicted / observed)|."""

    log_error: float = 0.0
    samples: int = 0

    def add(self, predicted_ms: float, observed_ms: float) -> None:
        """Count one prediction against what happened; both must be positive."""
        self.samples += 1
        weight = max(1.0 / self.samples, 1.0 / MEMORY_SAMPLES)
        self.log_error += weight * (abs(log(predicted_ms / observed_ms)) - self.log_error)

    @property
    def factor(self) -> float:
        """Return the factor by which predictions miss, 1 or more."""
        return exp(self.log_error)

    @property
    def is_trusted(self) -> bool:
        """Tell whether an estimate of this kind may decide: good lately, or not yet shown to be
        bad.
        """
        return self.samples < TRUST_MIN_SAMPLES or self.factor < UNTRUSTED_FACTOR

    def estimate(self, ms: float) -> Estimate:
        """Return `ms` as an estimate with this track's source and error."""
        source = EstimateSource.MEASURED if self.samples else EstimateSource.DEFAULT
        return Estimate(ms, source, self.samples, self.factor)


CLASSES = 11
NODE_BYTES = tuple(4096 << (2 * k) for k in range(CLASSES))
LINE_BYTES = (64 * KIB, 16 * MIB)
"""Between these a tier's line is drawn: a block's state, and a long session's."""
RATIO_WEIGHT = 0.15
"""Share of the newest observation in a class's ratio: half is forgotten after four."""


class Medium(msgspec.Struct, frozen=True):
    """A medium is a tier's straight line: what is assumed until it is measured."""

    latency_ms: float
    bytes_per_ms: float

    def __post_init__(self) -> None:
        if self.latency_ms < 0 or self.bytes_per_ms <= 0:
            raise InvalidInput(
                "medium", f"{self.latency_ms} ms, {self.bytes_per_ms} B/ms", "use positive values"
            )

    def ms(self, count: float) -> float:
        """Return the ms that loading `count` bytes takes."""
        return self.latency_ms + count / self.bytes_per_ms


class LoadTable(msgspec.Struct, frozen=True):
    """A load table is a tier's times as line segments: interval i holds counts below
    NODE_BYTES[i].
    """

    base_ms: tuple[float, ...]
    ms_per_byte: tuple[float, ...]

    def ms(self, count: int) -> float:
        """Return the ms that loading `count` bytes takes; nothing for none."""
        if count <= 0:
            return 0.0
        # Nodes are 4 ** k * 4096, so the bit length is the interval.
        i = (count.bit_length() - 11) >> 1
        if i < 0:
            i = 0
        elif i > CLASSES:
            i = CLASSES
        return self.base_ms[i] + self.ms_per_byte[i] * count

    def line(self) -> Medium:
        """Return one straight line, through a small and a large load."""
        small, large = LINE_BYTES
        rate = (large - small) / max(self.ms(large) - self.ms(small), 1e-9)
        return Medium(max(0.0, self.ms(small) - small / rate), rate)

    def scaled(self, factor: float) -> LoadTable:
        """Return the table of a tier that takes `factor` times as long."""
        return LoadTable(
            tuple(b * factor for b in self.base_ms), tuple(s * factor for s in self.ms_per_byte)
        )


def size_class(count: int) -> int:
    """Return the number of the node nearest to `count` bytes in logarithms."""
    exponent = (log(max(count, 1), 2) - 12.0) / 2.0
    return min(max(round(exponent), 0), CLASSES - 1)


class TierLoad(msgspec.Struct):
    """A tier load is one tier's loads as they were observed. Owns its size classes and its error,
    nothing else.
    """

    medium: Medium
    log_ratio: list[float] = msgspec.field(default_factory=lambda: [0.0] * CLASSES)
    seen: list[int] = msgspec.field(default_factory=lambda: [0] * CLASSES)
    error: ErrorTrack = msgspec.field(default_factory=ErrorTrack)

    def observe(self, count: int, ms: float) -> None:
        """Learn that `count` bytes took `ms`, waiting for earlier loads not included."""
        if count <= 0 or ms <= 0:
            raise InvalidInput("load", f"{count} bytes in {ms} ms", "report positive values")
        self.error.add(self.table().ms(count), ms)
        k = size_class(count)
        self.seen[k] += 1
        weight = max(1.0 / self.seen[k], RATIO_WEIGHT)
        self.log_ratio[k] += weight * (log(ms / self.medium.ms(count)) - self.log_ratio[k])

    def table(self) -> LoadTable:
        """Return the present times as line segments."""
        nodes: list[float] = []
        for k, count in enumerate(NODE_BYTES):
            ms = self.medium.ms(count) * exp(self.log_ratio[self._nearest_seen(k)])
            nodes.append(max(ms, nodes[-1]) if nodes else ms)
        base, slope = [nodes[0]], [0.0]
        for (n0, t0), (n1, t1) in pairwise(zip(NODE_BYTES, nodes, strict=True)):
            slope.append((t1 - t0) / (n1 - n0))
            base.append(t0 - slope[-1] * n0)
        base.append(0.0)
        slope.append(nodes[-1] / NODE_BYTES[-1])
        return LoadTable(tuple(base), tuple(slope))

    def _nearest_seen(self, k: int) -> int:
        """Return the class whose ratio stands for class k; k itself when nothing was ever seen."""
        seen = [j for j in range(CLASSES) if self.seen[j]]
        return min(seen, key=lambda j: (abs(j - k), j), default=k)


PREFILL, REPLAY, QUEUE, STEP = "prefill", "replay", "queue", "step"
"""Names of the estimates that are no tier, beside the tiers' own names."""


class Coefficients(msgspec.Struct, frozen=True):
    """Coefficients are the three numbers of a pass, in ms: t = a + b * new + c * new * (prefix +
    new / 2).
    """

    a_ms: float
    b_ms: float
    c_ms: float

    def ms(self, new: int, prefix: int) -> float:
        """Return the ms that `new` tokens after `prefix` others take to compute; nothing for
        none."""
        if new <= 0:
            return 0.0
        return self.a_ms + new * (self.b_ms + self.c_ms * (prefix + 0.5 * new))

    def scaled(self, factor: float) -> Coefficients:
        """Return the numbers of a pass that takes `factor` times as long."""
        return Coefficients(self.a_ms * factor, self.b_ms * factor, self.c_ms * factor)


class Prices(msgspec.Struct, frozen=True):
    """Prices are a frozen copy of what a cost model knows (made by CostModel.prices).

    `untrusted` names each estimate whose recent error is too large to decide by itself, with its
    error factor.
    """

    tiers: dict[Tier, LoadTable]
    prefill: Coefficients
    replay: Coefficients
    queue_ratio: float
    untrusted: dict[str, float]
    measured_s: dict[str, float] = {}
    """When each estimate was last measured, seconds since 1970; what is missing is assumed."""

    def queue_ms(self, backlog: Backlog) -> float:
        """Return the ms that the engine is busy with what stands before a new request."""
        fixed = self.prefill.a_ms * backlog.requests
        token_ms = self.prefill.b_ms + self.prefill.c_ms * backlog.context_tokens
        return self.queue_ratio * (fixed + token_ms * backlog.prefill_tokens)

    def scaled(self, name: str, factor: float) -> Prices:
        """Return the prices if the estimate `name` were off by `factor`: a what-if, trusted
        throughout.
        """
        tiers, prefill, replay, queue = self.tiers, self.prefill, self.replay, self.queue_ratio
        if name == PREFILL:
            prefill = prefill.scaled(factor)
            # The queue is priced with the prefill's coefficients but has a ratio of its own.
            queue = queue / factor
        elif name == REPLAY:
            replay = replay.scaled(factor)
        elif name == QUEUE:
            queue = queue * factor
        else:
            tiers = {t: table.scaled(factor) if t == name else table for t, table in tiers.items()}
        return Prices(tiers, prefill, replay, queue, {})
