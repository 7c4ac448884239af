"""What a load from one tier takes: latency + bytes / bandwidth, corrected per size class.

A tier is no straight line (one SSD here reads 64 KiB at 0.5 GB/s and 1 MiB at 2.3), so every power
of four has its own ratio of observed to straight-line time, averaged in logarithms and forgotten
exponentially. Classes that were never seen take the ratio of the nearest one that was.

    ms │                        /      nodes: 4 KiB, 16 KiB, ... 4 GiB
       │              /────────/       between them linear, beyond the last proportional,
       │    ──────────                 never falling: more bytes never take less
       └──┬───┬───┬───┬───┬── bytes
"""

from __future__ import annotations

from itertools import pairwise
from math import exp, log

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.units import KIB, MIB
from ownerserve.plan.cost.estimate import ErrorTrack

CLASSES = 11
NODE_BYTES = tuple(4096 << (2 * k) for k in range(CLASSES))
LINE_BYTES = (64 * KIB, 16 * MIB)
"""Between these a tier's line is drawn: a block's state, and a long session's."""
RATIO_WEIGHT = 0.15
"""Share of the newest observation in a class's ratio: half is forgotten after four."""


class Medium(msgspec.Struct, frozen=True):
    """A tier's straight line: what is assumed until it is measured."""

    latency_ms: float
    bytes_per_ms: float

    def __post_init__(self) -> None:
        if self.latency_ms < 0 or self.bytes_per_ms <= 0:
            raise InvalidInput(
                "medium", f"{self.latency_ms} ms, {self.bytes_per_ms} B/ms", "use positive values"
            )

    def ms(self, count: float) -> float:
        return self.latency_ms + count / self.bytes_per_ms


class LoadTable(msgspec.Struct, frozen=True):
    """A tier's times as line segments: interval i holds counts below NODE_BYTES[i]."""

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
        """One straight line, through a small and a large load."""
        small, large = LINE_BYTES
        rate = (large - small) / max(self.ms(large) - self.ms(small), 1e-9)
        return Medium(max(0.0, self.ms(small) - small / rate), rate)

    def scaled(self, factor: float) -> LoadTable:
        """The table of a tier that takes `factor` times as long."""
        return LoadTable(
            tuple(b * factor for b in self.base_ms), tuple(s * factor for s in self.ms_per_byte)
        )


def size_class(count: int) -> int:
    """The node nearest to `count` bytes in logarithms."""
    exponent = (log(max(count, 1), 2) - 12.0) / 2.0
    return min(max(round(exponent), 0), CLASSES - 1)


class TierLoad(msgspec.Struct):
    """One tier's loads as they were observed. Owns its size classes and its error, nothing else."""

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
        """The present times as line segments."""
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
        """The class whose ratio stands for class k; k itself when nothing was ever seen."""
        seen = [j for j in range(CLASSES) if self.seen[j]]
        return min(seen, key=lambda j: (abs(j - k), j), default=k)
