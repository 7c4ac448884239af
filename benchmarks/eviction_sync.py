"""What it costs that an eviction's transaction is synced before the holes are punched.

    python benchmarks/eviction_sync.py [--rounds N] [--folder DIR]

A full store takes records, so that each commit must evict first. In turns the index syncs that
transaction, as it does (a row that came back after a power cut would say of a hole that it is a
record), and does not, as before; the switch is this file's alone. Shown are medians of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ownerserve.kv.units import KIB, MIB
from ownerserve.store.disk.tier import DiskOptions, DiskTier
from ownerserve.store.format.model import ArtifactKind, Meta
from ownerserve.store.index import writer
from ownerserve.store.service.runtime import WallClock
from ownerserve.store.tiers.backend import Reservation
from ownerserve.store.tiers.policy import KindLimits, TierLimits
from result import Row, report, smaller_is_better

SHAPES = ((64 * KIB, 1), (64 * KIB, 8), (MIB, 1))
"""Bytes of a record, and records of a commit."""
COMMITS = 24
SYNCED = writer._sync_level


def meta(number: int) -> Meta:
    """The meta of artifact `number`."""
    digest = number.to_bytes(32, "little")
    return Meta(digest, ArtifactKind.RANGE, "kv", digest, 0, 1024)


class FullStore:
    """A store with room for `COMMITS` groups, which is full."""

    def __init__(self, folder: Path, payload_bytes: int, group: int) -> None:
        self._payload = bytes(payload_bytes)
        self._group = group
        room = COMMITS * group * (payload_bytes + 16 * KIB)
        limits = TierLimits(KindLimits(room), KindLimits(MIB))
        self.tier = DiskTier(folder, WallClock(), options=DiskOptions(limits=limits))
        self._next = 1
        for _ in range(2 * COMMITS):
            self.commit()

    def commit(self) -> None:
        """Store the next group; what is oldest goes for it."""
        rooms = []
        for number in range(self._next, self._next + self._group):
            room = self.tier.reserve(meta(number), len(self._payload))
            assert isinstance(room, Reservation)
            room.payload[:] = self._payload
            rooms.append(room)
        self._next += self._group
        self.tier.commit(rooms)

    def took_ms(self) -> float:
        """Milliseconds of one commit with its evictions, the mean of `COMMITS`."""
        started_s = time.perf_counter()
        for _ in range(COMMITS):
            self.commit()
        return (time.perf_counter() - started_s) * 1e3 / COMMITS


def span(values: Sequence[float]) -> tuple[float, float]:
    """The middle half."""
    low, _, high = statistics.quantiles(values, n=4)
    return low, high


def measure(folder: Path, payload_bytes: int, group: int, rounds: int) -> Row:
    """Both ways in turns, over two stores."""
    levels = {"synced": SYNCED, "not": lambda _: "NORMAL"}
    stores = {name: FullStore(folder / name, payload_bytes, group) for name in levels}
    took: dict[str, list[float]] = {name: [] for name in levels}
    for _ in range(rounds):
        for name, level in levels.items():
            writer._sync_level = level
            took[name].append(stores[name].took_ms())
    writer._sync_level = SYNCED
    for store in stores.values():
        assert store.tier.core.counters["evicted"] > COMMITS
        store.tier.close()
    row = smaller_is_better(
        f"commit of {group} x {payload_bytes // KIB} KiB that evicts as many",
        "ms",
        statistics.median(took["synced"]),
        other=statistics.median(took["not"]),
        other_name="not synced",
    )
    spans = {"ours_span": span(took["synced"]), "other_span": span(took["not"])}
    return Row(**{name: getattr(row, name) for name in row.__struct_fields__} | spans)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", type=Path, default=None, help="where; default: a temporary one")
    asked = parser.parse_args()
    rows = []
    for payload_bytes, group in SHAPES:
        with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
            rows.append(measure(Path(folder), payload_bytes, group, asked.rounds))
    report("eviction_sync", rows)


if __name__ == "__main__":
    main()
