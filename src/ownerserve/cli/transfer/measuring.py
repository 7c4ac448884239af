"""Measures how fast shapes come by each road, side by side: round after round, each road in turn.

    memcpy           the same runs, copied within this process: what memory allows
    memcpy, xxh3     and digested while they are hot: what one core allows who also checks
    a mover          one read after another, digested and checked, of another process's pool

A sample is as many reads of a shape as make SAMPLE_BYTES. CPU is this process's, of all its
threads, and the lending child's where there is one.
"""

from __future__ import annotations

import ctypes
import mmap
import select
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np

from ownerserve.cli.transfer.pool import BenchPool
from ownerserve.cli.transfer.shapes import TICKET, ReadShape
from ownerserve.kv.units import MIB
from ownerserve.report.transfer_table import RoadSpeed
from ownerserve.transfer.movers.digests import RunsMemory, Xxh3
from ownerserve.transfer.movers.port import Mover
from ownerserve.transfer.vocabulary import (
    Read,
    ReadFailed,
    ReadFailure,
    ReadLanded,
    ReadUnproven,
    Runs,
)

SAMPLE_BYTES = 64 * MIB
CHUNK_BYTES = 1 * MIB
READ_S = 60.0
"""Longer than any read of a test pool takes by a road on which bytes move."""

_move = ctypes.CDLL(None).memmove
_move.argtypes, _move.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None


class NotBrought(Exception):
    """A read ended with nothing: by which road, and why."""

    def __init__(self, road: str, reason: ReadFailure) -> None:
        super().__init__(f"{road}: {reason}")
        self.road, self.reason = road, reason


class Bringer(Protocol):
    """A `Bringer` brings shapes, one after another."""

    @property
    def name(self) -> str:
        """Return what the table calls it."""
        ...

    def bring(self, shape: ReadShape) -> None:
        """Bring all of the shape; returns when it is there. Raises NotBrought."""
        ...


class Goal:
    """A `Goal` is this process's memory that shapes are brought into, scattered as they lie in the
    pool. Owns it; its pages are there before anything is measured."""

    def __init__(self, size_bytes: int) -> None:
        self._bytes = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
        self._bytes[:: mmap.PAGESIZE] = 0
        self.address = int(self._bytes.ctypes.data)


class Memcpy:
    """`Memcpy` copies a shape's runs within this process, each by one memmove."""

    name = "memcpy"

    def __init__(self, source: BenchPool, goal: Goal) -> None:
        self._source, self._goal = source, goal

    def bring(self, shape: ReadShape) -> None:
        """Copy the runs."""
        size = shape.run_bytes
        for into, out in _pairs(shape, self._source, self._goal):
            _move(into, out, size)


class MemcpyDigested:
    """`MemcpyDigested` copies them CHUNK_BYTES at a time at most, and digests each while it is
    hot."""

    name = "memcpy, xxh3"

    def __init__(self, source: BenchPool, goal: Goal) -> None:
        self._source, self._goal = source, goal

    def bring(self, shape: ReadShape) -> None:
        """Copy and digest the runs."""
        memory, hasher = RunsMemory(shape.at(self._goal.address)), Xxh3().begin()
        for into, out in _pairs(shape, self._source, self._goal):
            for at in range(0, shape.run_bytes, CHUNK_BYTES):
                size = min(CHUNK_BYTES, shape.run_bytes - at)
                _move(into + at, out + at, size)
                hasher.update(memory.at(into + at, size))


def _pairs(shape: ReadShape, source: BenchPool, goal: Goal) -> list[tuple[int, int]]:
    into, out = shape.at(goal.address), shape.at(source.shared.address)
    return list(zip(into.addresses.tolist(), out.addresses.tolist(), strict=True))


class MoverReading:
    """`MoverReading` brings by a mover. Owns the numbers of its reads.

    `base` is where the peer's pool begins, for roads that read by address. `digests` are what the
    peer said of each shape: of one without, the lender tells with the bytes (tcp).
    """

    def __init__(
        self, mover: Mover, goal: Goal, *, base: int | None, digests: Mapping[ReadShape, bytes]
    ) -> None:
        self.name = mover.name
        self._mover, self._goal = mover, goal
        self._base, self._digests = base, digests
        self._numbers = count(1)
        self._poll = select.poll()
        self._poll.register(mover.fileno(), select.POLLIN)

    def bring(self, shape: ReadShape) -> None:
        """Have the mover bring the shape, and wait for it."""
        read = Read(
            number=next(self._numbers),
            ticket=TICKET,
            piece=shape.piece(),
            goal=self._goal_of(shape),
            source=None if self._base is None else shape.at(self._base),
            digest=self._digests.get(shape, b""),
            deadline_s=time.monotonic() + READ_S,
        )
        self._mover.start(read)
        while not (ended := self._mover.ended()):
            self._poll.poll()
        match ended[0]:
            case ReadLanded():
                return
            case ReadFailed(_, reason) | ReadUnproven(_, reason):
                raise NotBrought(self.name, reason)

    def _goal_of(self, shape: ReadShape) -> Runs:
        return shape.at(self._goal.address)


class Bench(NamedTuple):
    """What is measured: each shape by each contender, the first of which is memcpy. `lender_pid`
    is the lending process's, 0 where it is on another host."""

    shapes: Sequence[ReadShape]
    contenders: Sequence[Bringer]
    rounds: int
    lender_pid: int

    @property
    def steps(self) -> int:
        """Count how often `run` says that it got on."""
        return len(self.shapes) * len(self.contenders) * (self.rounds + 1)

    def run(self, advance: Callable[[], None]) -> list[RoadSpeed]:
        """Measure; `advance` is called after each sample. Raises NotBrought."""
        speeds: list[RoadSpeed] = []
        for shape in self.shapes:
            samples = self._samples(shape, advance)
            memcpy_gb_s = statistics.median(one.gb_s for one in samples[0])
            for contender, taken in zip(self.contenders, samples, strict=True):
                rates = [one.gb_s for one in taken]
                speed = RoadSpeed(
                    shape=str(shape),
                    bytes=shape.bytes,
                    road=contender.name,
                    gb_s=statistics.median(rates),
                    slowest_gb_s=min(rates),
                    fastest_gb_s=max(rates),
                    cpu_s_per_gb=statistics.median(one.cpu_s_per_gb for one in taken),
                    of_memcpy=statistics.median(rates) / memcpy_gb_s,
                )
                speeds.append(speed)
        return speeds

    def _samples(self, shape: ReadShape, advance: Callable[[], None]) -> list[list[_Sample]]:
        """Return each contender's samples. Before them each brings the shape once: what is made
        at first use is made then."""
        samples: list[list[_Sample]] = [[] for _ in self.contenders]
        for contender in self.contenders:
            contender.bring(shape)
            advance()
        for round_ in range(self.rounds):
            for turn in range(len(self.contenders)):
                at = (turn + round_) % len(self.contenders)
                samples[at].append(self._sample(shape, self.contenders[at]))
                advance()
        return samples

    def _sample(self, shape: ReadShape, contender: Bringer) -> _Sample:
        reads = max(1, SAMPLE_BYTES // shape.bytes)
        begun_s, begun_cpu_s = time.perf_counter(), self._cpu_s()
        for _ in range(reads):
            contender.bring(shape)
        took_s, cpu_s = time.perf_counter() - begun_s, self._cpu_s() - begun_cpu_s
        gigabytes = reads * shape.bytes / 1e9
        return _Sample(gigabytes / took_s, cpu_s / gigabytes)

    def _cpu_s(self) -> float:
        lender_s = time.clock_gettime(_cpu_clock(self.lender_pid)) if self.lender_pid else 0.0
        return time.process_time() + lender_s


class _Sample(NamedTuple):
    gb_s: float
    cpu_s_per_gb: float


def _cpu_clock(pid: int) -> int:
    """Return the clock of all CPU time of a process (clock_getcpuclockid)."""
    return (~pid << 3) | 2
