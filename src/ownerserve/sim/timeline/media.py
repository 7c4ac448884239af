"""Media are drives and copy engines as queues: what moves over one is paid for in order. What many
share fairly is a link (links.py).

    take(n, now)    waits for what was taken before | n / bandwidth | latency -> done
                    `--------- in the queue -------'`- it is busy -'

Latency delays an answer and occupies nothing, so queued transfers overlap it. Owns when a medium is
free and how much went over it. Must never know what the bytes are, or read a clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.plan.cost.prices import Medium


class Pipe:
    """A pipe is one direction of one medium, first come, first served."""

    __slots__ = ("busy_s", "cut_until_s", "factor", "free_s", "medium", "moved_bytes", "name")

    def __init__(self, name: str, medium: Medium) -> None:
        self.name = name
        self.medium = medium
        self.free_s = 0.0
        self.busy_s = 0.0
        self.moved_bytes = 0
        self.factor = 1.0
        self.cut_until_s = 0.0

    def starts_s(self, now_s: float) -> float:
        """Return when a transfer that is asked for now would begin, in seconds."""
        return max(now_s, self.free_s, self.cut_until_s)

    def service_s(self, count: int) -> float:
        """Return how many seconds `count` bytes take once they have begun."""
        if not count:
            return 0.0
        return self.factor * self.medium.ms(count) / 1e3

    def take(self, count: int, now_s: float) -> float:
        """Move `count` bytes; returns when the last one is there. Nothing takes no time."""
        if not count:
            return now_s
        start_s = self.starts_s(now_s)
        busy_s = self.factor * count / self.medium.bytes_per_ms / 1e3
        self.free_s = start_s + busy_s
        self.busy_s += busy_s
        self.moved_bytes += count
        return self.free_s + self.factor * self.medium.latency_ms / 1e3

    def waiting_bytes(self, now_s: float) -> int:
        """Return the bytes asked for and not yet moved."""
        left_ms = 1e3 * max(0.0, self.free_s - now_s)
        return round(left_ms * self.medium.bytes_per_ms / self.factor)

    def slow(self, factor: float) -> None:
        """Let everything take `factor` times as long from the next transfer on; 1 mends it. Raises
        InvalidInput for a factor that is not above 0."""
        if factor <= 0.0:
            raise InvalidInput("slow", f"a factor of {factor:g}", "use more than 0; 1 is as new")
        self.factor = factor

    def cut(self, until_s: float) -> None:
        """Let nothing begin before `until_s`: what is asked for waits, what is under way
        arrives."""
        self.cut_until_s = max(self.cut_until_s, until_s)


Way = TypeVar("Way")


class Duplex(msgspec.Struct, Generic[Way], frozen=True):
    """A duplex is both directions of a medium, seen from one end: PCIe from the device, a NIC from
    its host."""

    out: Way
    back: Way


def duplex(name: str, medium: Medium) -> Duplex[Pipe]:
    """Make a medium that moves as much in both directions at once."""
    return Duplex(Pipe(f"{name}/out", medium), Pipe(f"{name}/back", medium))


def in_series(media: Iterable[Medium]) -> Medium:
    """Return the medium that takes as long as one load over several media, one after the other."""
    hops = tuple(media)
    per_byte = sum(1.0 / hop.bytes_per_ms for hop in hops)
    return Medium(sum(hop.latency_ms for hop in hops), 1.0 / per_byte)
