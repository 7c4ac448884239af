"""This module measures the speed of a store on this machine's medium. Used by `ownerserve store
bench` and benchmarks/.
"""

from __future__ import annotations

import os
import random
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

import msgspec

from ownerserve.kv.units import GIB, KIB, MIB
from ownerserve.store.disk.tier import DiskOptions, DiskTier
from ownerserve.store.format.model import ArtifactKind, Meta, ReadHit, Want
from ownerserve.store.index.reader import Change, IndexEntry
from ownerserve.store.index.writer import IndexWriter
from ownerserve.store.service.runtime import WallClock
from ownerserve.store.tiers.backend import Reservation
from ownerserve.store.tiers.policy import KindLimits, TierLimits

OPTIONS = DiskOptions(limits=TierLimits(KindLimits(64 * GIB), KindLimits(GIB)))
GROUP_BYTES = 32 * MIB


class Measured(msgspec.Struct, frozen=True):
    """A measured figure is the median over rounds, with the best one and the process's CPU seconds
    for the lot.
    """

    metric: str
    unit: str
    value: float
    best: float
    cpu_s: float


def bench_meta(number: int, tenant: bytes = b"") -> Meta:
    """Return a record's meta by number."""
    id_ = number.to_bytes(32, "little")
    return Meta(id_, ArtifactKind.RANGE, "csa_main", id_, 0, 1024, tenant=tenant, precision="fp8")


def _rounds(metric: str, unit: str, *, rounds: int, once: Callable[[], float]) -> Measured:
    before = resource.getrusage(resource.RUSAGE_SELF)
    values = [once() for _ in range(rounds)]
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    best = max(values) if "/s" in unit else min(values)
    return Measured(metric, unit, median(values), best, cpu_s)


class DiskBench:
    """A disk bench writes and reads a store in `directory` with `total_bytes` of records of
    `payload_bytes`.
    """

    def __init__(self, directory: Path, payload_bytes: int, total_bytes: int) -> None:
        self.payload_bytes = payload_bytes
        self.count = max(2, total_bytes // payload_bytes)
        self.tier = DiskTier(directory, WallClock(), options=OPTIONS)
        self._written = 0
        self._dice = random.Random(0)
        self.payload = os.urandom(payload_bytes)
        self.label = f"{payload_bytes // MIB} MiB" if payload_bytes >= MIB else (
            f"{payload_bytes // KIB} KiB"
        )  # fmt: skip

    def _fill(self) -> list[Reservation]:
        """Reserve and fill a group of 32 MiB."""
        held = []
        for _ in range(max(1, GROUP_BYTES // self.payload_bytes)):
            item = self.tier.reserve(bench_meta(self._written), self.payload_bytes)
            assert isinstance(item, Reservation)
            item.payload[:] = self.payload
            held.append(item)
            self._written += 1
        return held

    @property
    def _groups(self) -> int:
        return max(1, self.count * self.payload_bytes // GROUP_BYTES)

    def _rate(self, records: int, started: float) -> float:
        return records * self.payload_bytes / 1e6 / (time.perf_counter() - started)

    def write_round(self) -> float:
        """Return MB/s of one round: reserve, fill, digest, append, one fdatasync for each 32
        MiB.
        """
        before, started = self._written, time.perf_counter()
        for _ in range(self._groups):
            self.tier.commit(self._fill())
        return self._rate(self._written - before, started)

    def stream_round(self) -> float:
        """Return MB/s of a round like `write_round`; the next group is filled while one is
        committed.
        """
        before, started = self._written, time.perf_counter()
        with ThreadPoolExecutor(1) as pool:
            flying = None
            for _ in range(self._groups):
                held = self._fill()
                if flying is not None:
                    flying.result()
                flying = pool.submit(self.tier.commit, held)
        return self._rate(self._written - before, started)

    def read_round(self, threads: int) -> float:
        """Return MB/s of verified random reads, `threads` at once."""
        numbers = [self._dice.randrange(self._written) for _ in range(self.count)]

        def some(mine: Sequence[int]) -> None:
            for number in mine:
                assert isinstance(self.tier.read([Want(number.to_bytes(32, "little"))]), ReadHit)

        with ThreadPoolExecutor(threads) as pool:
            started = time.perf_counter()
            list(pool.map(some, [numbers[n::threads] for n in range(threads)]))
            took_s = time.perf_counter() - started
        return self.count * self.payload_bytes / 1e6 / took_s

    def gather_round(self) -> float:
        """Return MB/s of restores of 16 records each that lie anywhere."""
        wanted = [
            [Want(n.to_bytes(32, "little")) for n in self._dice.sample(range(self._written), 16)]
            for _ in range(max(1, self.count // 16))
        ]
        started = time.perf_counter()
        for wants in wanted:
            assert isinstance(self.tier.read(wants), ReadHit)
        return self._rate(16 * len(wanted), started)

    def restore_round(self) -> float:
        """Return MB/s of restores: 16 records that were spilled together, by one read each time."""
        numbers = range(0, self._written - 16, max(16, 16 * self._written // (4 * self.count)))
        wanted = [[Want(n.to_bytes(32, "little")) for n in range(at, at + 16)] for at in numbers]
        started = time.perf_counter()
        for wants in wanted:
            assert isinstance(self.tier.read(wants), ReadHit)
        return len(wanted) * 16 * self.payload_bytes / 1e6 / (time.perf_counter() - started)

    def run(self, rounds: int, threads: Sequence[int] = (1, 4)) -> list[Measured]:
        """Run write rounds, then read rounds; returns their figures."""
        name = self.label
        found = [_rounds(f"durable write {name}", "MB/s", rounds=rounds, once=self.write_round)]
        found += [
            _rounds(
                f"verified read {name} x{count}",
                "MB/s",
                rounds=rounds,
                once=partial(self.read_round, count),
            )
            for count in threads
        ]
        if self.payload_bytes <= MIB:
            for where, once in (("neighbours", self.restore_round), ("", self.gather_round)):
                metric = f"verified restore of 16 x {name} {where}".rstrip()
                found.append(_rounds(metric, "MB/s", rounds=rounds, once=once))
        return found


def bench_entry(number: int) -> IndexEntry:
    """Return an index row by number."""
    size = 64 * KIB + 4096
    return IndexEntry(
        meta=bench_meta(number),
        sequence=number + 1,
        segment=1,
        offset=number * size,
        header_bytes=4096,
        stored_bytes=size,
        payload_bytes=64 * KIB,
        touched_ms=number,
    )


def measure_index(directory: Path, rows: int, rounds: int) -> list[Measured]:
    """Measure the insert rate in groups of 100, the cached hit, and cold keys in batches of 256."""
    index = IndexWriter(directory / "index.sqlite", bytes(16))
    written = 0

    def insert() -> float:
        nonlocal written
        groups = [[bench_entry(written + at + n) for n in range(100)] for at in range(0, rows, 100)]
        written += rows
        started = time.perf_counter()
        for group in groups:
            index.apply(Change(add=group))
        return rows / (time.perf_counter() - started)

    def hit() -> float:
        keys = [n.to_bytes(32, "little") for n in range(written - 1000, written)]
        get = index.get
        started = time.perf_counter()
        for key in keys:
            get(key)
        return (time.perf_counter() - started) / len(keys) * 1e6

    def batch(*, cold: bool) -> float:
        numbers = random.Random(1).sample(range(written), min(written, 25_600))
        keys = [n.to_bytes(32, "little") for n in numbers]
        for key in keys if cold else ():
            index.forget(key)
        started = time.perf_counter()
        for at in range(0, len(keys), 256):
            index.get_many(keys[at : at + 256])
        return (time.perf_counter() - started) / len(keys) * 1e6

    found = [
        _rounds("index rows, groups of 100", "rows/s", rounds=rounds, once=insert),
        _rounds("index hit in memory", "us", rounds=rounds, once=hit),
        _rounds(
            "index key from SQLite, batches of 256",
            "us",
            rounds=rounds,
            once=partial(batch, cold=True),
        ),
        _rounds(
            "index key in memory, batches of 256",
            "us",
            rounds=rounds,
            once=partial(batch, cold=False),
        ),
    ]
    index.close()
    return found
