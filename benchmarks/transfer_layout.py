"""Layouts of transfer: how long descriptors of a prefix take, and two layouts converted in flight.

    python benchmarks/transfer_layout.py [--rounds N] [--only WORD]

Descriptors: runs of a whole prefix from the block ids; contiguous blocks, or those of a pool twice
as large in any order. CPU time of the thread, medians.

In flight: a prefix goes from one layout's pool into another's by the frame's rows, each where it
goes, as movers read, beside memcpy of as many bytes in the same round:

    shm         both are mapped here: a memmove for each row, as `movers/shm.py` copies
    readv       process_vm_readv of the rows

Both are compared with the source byte by byte, before anything is timed. No process has two layouts
to convert between: the pools, stages and landings of workers all have the frame's own (`slots`).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ownerserve.kv.frame import DENSE, MLA, PayloadPart, PayloadSection
from ownerserve.transfer.layout.arrays import Pool
from ownerserve.transfer.layout.joining import CopyList, join
from ownerserve.transfer.layout.known import LAYOUTS
from ownerserve.transfer.layout.places import RegionPlaces
from ownerserve.transfer.vocabulary import FramePiece
from result import Row, report, smaller_is_better

LIBC = ctypes.CDLL(None, use_errno=True)
MOVE = ctypes.PyDLL(None).memmove
MOVE.argtypes, MOVE.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
MOST_VECTORS = 1024
GOAL_MS, GOAL = 5.0, 0.5
ORDERS = ("contiguous", "fragmented")


def attention(layers: int, unit: int, heads: int, dim: int = 128) -> PayloadSection:
    shape = (layers, unit, heads, dim)
    return PayloadSection(
        DENSE, tuple(PayloadPart(name, shape, "bfloat16") for name in ("keys", "values"))
    )


def latent(layers: int, unit: int) -> PayloadSection:
    return PayloadSection(MLA, (PayloadPart("latent", (layers, unit, 576), "bfloat16"),))


class Prefix(NamedTuple):
    name: str
    section: PayloadSection
    block: int
    tokens: int


MLA_64 = Prefix("MLA, 61 layers, block 64", latent(61, 64), 64, 131_072)
MLA_16 = Prefix("MLA, 61 layers, block 16", latent(61, 16), 16, 131_072)
QWEN = Prefix("Qwen3-30B-A3B, block 16", attention(48, 32, 4), 16, 100_000)
SHARD = Prefix("70B, TP8 shard, block 16", attention(80, 32, 1), 16, 100_000)
DESCRIBED = (
    (MLA_64, "paged_rows"),
    (MLA_16, "paged_rows"),
    (QWEN, "slots"),
    (QWEN, "split"),
    (SHARD, "slots"),
    (SHARD, "split"),
)
CONVERTED = (
    (QWEN._replace(tokens=1_024), "interleaved", "slots"),
    (QWEN._replace(tokens=1_024), "slots", "interleaved"),
    (QWEN._replace(tokens=1_024), "combined", "split"),
    (QWEN._replace(tokens=1_024), "headwise", "combined"),
    (SHARD._replace(tokens=4_096), "interleaved", "slots"),
    (SHARD._replace(tokens=4_096), "slots", "interleaved"),
    (SHARD._replace(tokens=4_096), "combined", "split"),
    (SHARD._replace(tokens=4_096), "headwise", "combined"),
    (MLA_64._replace(tokens=2_048), "paged_rows", "slots"),
    (MLA_16._replace(tokens=2_048, section=latent(61, 64)), "paged_rows", "slots"),
)


class Side:
    """A pool of one layout, twice as large as the prefix, and the prefix's blocks in it."""

    def __init__(self, prefix: Prefix, layout: str, order: str, *, seed: int) -> None:
        unit = prefix.section.parts[0].shape[1]
        self.units = prefix.tokens // unit
        count = self.units * (1 if layout == "slots" else unit // prefix.block)
        pool = Pool(prefix.section, 2 * count, prefix.block, 0)
        size = LAYOUTS[layout](pool).bytes
        self._memory: NDArray[np.uint8] | None = None
        address = 1 << 40
        if prefix.tokens <= 4_096:
            self._memory = np.full(size + 4096, seed, np.uint8)
            self._memory[::4093] = np.arange(len(self._memory[::4093])) % 251
            address = -(-self._memory.ctypes.data // 4096) * 4096
        self.places = RegionPlaces(LAYOUTS[layout](msgspec.structs.replace(pool, address=address)))
        ids = list(range(2 * count))
        if order == "fragmented":
            random.Random(seed).shuffle(ids)
        self.table = [np.array(ids[:count], np.int64)]

    def taken(self, piece: FramePiece) -> bytes:
        runs = self.places.runs(piece, self.table)
        each = zip(runs.addresses.tolist(), runs.lengths.tolist(), strict=True)
        return b"".join(ctypes.string_at(at, size) for at, size in each)


def median_s(call: Callable[[], object], rounds: int) -> float:
    found = []
    for _ in range(rounds + 1):
        began = time.thread_time()
        call()
        found.append(time.thread_time() - began)
    return statistics.median(found[1:])  # the first one makes templates and maps memory


def described(prefix: Prefix, layout: str, *, rounds: int) -> list[Row]:
    rows = []
    for order in ORDERS:
        side = Side(prefix, layout, order, seed=7)
        piece = FramePiece(b"", 0, side.units, 0, prefix.section.layers)
        spent = median_s(lambda s=side, p=piece: s.places.runs(p, s.table), rounds)
        count = len(side.places.runs(piece, side.table).lengths)
        what = f"{prefix.name}, {prefix.tokens:,} tokens, {layout}, {order}"
        goal = f"<= {GOAL_MS:g}" if prefix.section.name == MLA else ""
        rows.append(
            smaller_is_better(
                f"{what}: {count:,} runs",
                "ms",
                1e3 * spent,
                other=GOAL_MS,
                other_name="goal",
                goal=goal,
            )
        )
        print(f"{what}: {count:,} runs in {1e3 * spent:.2f} ms", file=sys.stderr, flush=True)
    return rows


def vectors(addresses: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.ascontiguousarray(np.stack((addresses, lengths), axis=1))


def readv(local: NDArray[np.int64], remote: NDArray[np.int64], own: int, peer: int) -> None:
    """Read some vectors of this process itself into others of as many bytes."""
    got = LIBC.process_vm_readv(
        os.getpid(),
        ctypes.c_void_p(local.ctypes.data),
        ctypes.c_ulong(own),
        ctypes.c_void_p(remote.ctypes.data),
        ctypes.c_ulong(peer),
        ctypes.c_ulong(0),
    )
    if got < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Conversion:
    """A prefix between two pools, each way that there is."""

    def __init__(self, prefix: Prefix, source: str, goal: str, order: str) -> None:
        self.source = Side(prefix, source, order, seed=1)
        self.goal = Side(prefix, goal, order, seed=2)
        self.units, layers = self.source.units, prefix.section.layers
        self.piece = FramePiece(b"", 0, self.units, 0, layers)
        self.bytes = prefix.section.payload_bytes * self.units
        self._plain = np.ones((2, self.bytes), np.uint8)

    def memcpy(self) -> None:
        goal, source = self._plain
        ctypes.memmove(goal.ctypes.data, source.ctypes.data, self.bytes)

    def copies(self) -> Iterator[CopyList]:
        for unit in range(self.units):
            piece = msgspec.structs.replace(self.piece, first_unit=unit, end_unit=unit + 1)
            yield join(
                self.goal.places.runs(piece, self.goal.table),
                self.source.places.runs(piece, self.source.table),
            )

    def shm(self) -> None:
        for one in self.copies():
            sides = one.goal.tolist(), one.source.tolist(), one.lengths.tolist()
            for goal, source, length in zip(*sides, strict=True):
                MOVE(goal, source, length)

    def readv(self) -> None:
        for one in self.copies():
            local, remote = vectors(one.goal, one.lengths), vectors(one.source, one.lengths)
            for begin in range(0, len(local), MOST_VECTORS):
                some = slice(begin, begin + MOST_VECTORS)
                count = len(local[some])
                readv(local[some], remote[some], count, count)

    def check(self) -> None:
        expected = self.source.taken(self.piece)
        for way in (self.shm, self.readv):
            runs = self.goal.places.runs(self.piece, self.goal.table)
            for at, size in zip(runs.addresses.tolist(), runs.lengths.tolist(), strict=True):
                ctypes.memset(at, 0, size)
            way()
            if self.goal.taken(self.piece) != expected:
                raise AssertionError(f"{way.__name__} brought other bytes")


def converted(prefix: Prefix, source: str, goal: str, *, rounds: int) -> list[Row]:
    rows = []
    for order in ORDERS:
        case = Conversion(prefix, source, goal, order)
        case.check()
        spent: dict[str, list[float]] = {}
        for _ in range(rounds):
            for way in (case.memcpy, case.shm, case.readv):
                began = time.thread_time()
                way()
                spent.setdefault(way.__name__, []).append(time.thread_time() - began)
        plain = spent.pop("memcpy")
        rate = case.bytes / 1e9
        for name, times in spent.items():
            own, ratio = (
                statistics.median(times),
                [c / t for c, t in zip(plain, times, strict=True)],
            )
            what = f"{prefix.name}, {source} to {goal}, {order} ({rate * 1e3:.0f} MB): {name}"
            share = statistics.median(ratio)
            copy = statistics.median(plain)
            rows.append(Row(what, "GB/s", rate / own, rate / copy, "memcpy", share, f">= {GOAL}"))
            print(
                f"{what}: {rate / own:.1f} of {rate / copy:.1f} GB/s, {share:.2f}"
                f" ({min(ratio):.2f} to {max(ratio):.2f})",
                file=sys.stderr,
                flush=True,
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="shapes whose name has this word")
    options = parser.parse_args()
    rows = list[Row]()
    for prefix, layout in DESCRIBED:
        if options.only in prefix.name:
            rows += described(prefix, layout, rounds=options.rounds)
    for prefix, source, goal in CONVERTED:
        if options.only in prefix.name:
            rows += converted(prefix, source, goal, rounds=options.rounds)
    report("transfer_layout", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
