"""Reads from another process of this host, by each mover, beside memcpy of the same runs.

    python benchmarks/transfer_local.py [--rounds N] [--only WORD] [--pages huge]

A forked process lends a pool; this one reads it by `readv` and by `shm`. In each round memcpy, both
movers without a digest, copy and then digest on one core, and both movers with that digest take
turns, over another part of both pools each round, so that nothing comes from a cache (but what it
may keep of 256 MiB). CPU time of the process, its mover's thread included; medians. `whole` is one
call for all of a read: the shipped movers make calls of 1 MiB. Blocks are of vLLM's sizes, 1,024
tokens, layer by layer, in equal layouts: fragmented in any order, contiguous a run for each layer.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import mmap
import os
import random
import select
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ownerserve.kv.regions import SharedMemory
from ownerserve.kv.units import KIB, MIB
from ownerserve.transfer.movers.digests import (
    Digests,
    Hasher,
    KeyedBlake3,
    RunsMemory,
    Xxh3,
    digest_of,
)
from ownerserve.transfer.movers.one_sided import CHUNK_BYTES, OneSidedMover
from ownerserve.transfer.movers.peers import own_name
from ownerserve.transfer.movers.process_name import ProcessName
from ownerserve.transfer.movers.readv import readv_mover
from ownerserve.transfer.movers.shm import shm_mover
from ownerserve.transfer.vocabulary import FramePiece, Read, ReadLanded, Runs
from result import Row, report

POOL_BYTES = 512 * MIB
FAR_S = 1e12
KEY = b"k" * 32
IDLE_S = 2.0

_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Lending(msgspec.Struct):
    """Who lends, and what: memory that is shared, and at `private` as much in huge pages."""

    name: ProcessName
    shared: SharedMemory
    private: int


class NoHasher:
    """A hasher that looks at nothing: what moving alone costs."""

    def update(self, data: memoryview, /) -> object:
        return None

    def digest(self) -> bytes:
        return b""


class NoDigests:
    """No digest: for this benchmark alone."""

    def begin(self) -> Hasher:
        return NoHasher()


Pairs = tuple[list[tuple[int, int]], list[tuple[int, int]]]
"""(offset in the pool, bytes) of each run of the source, and of the goal, run by run as long."""


class Both(NamedTuple):
    """The runs of a read."""

    source: Runs
    goal: Runs


class Case(NamedTuple):
    """One shape of read; `runs` says where it lies in a round. `reads`: it is one run, asked for in
    that many pieces at once, as a turn's state is."""

    name: str
    size: int
    runs: Callable[[int], Pairs]
    reads: int = 1

    def pieces(self, pairs: Pairs) -> list[Pairs]:
        """Cut the read in its pieces."""
        if self.reads == 1:
            return [pairs]
        (source, size), (goal, _) = pairs[0][0], pairs[1][0]
        one = size // self.reads
        return [([(source + n * one, one)], [(goal + n * one, one)]) for n in range(self.reads)]


def contiguous(size: int, reads: int = 1) -> Case:
    def runs(number: int) -> Pairs:
        at = number * size % POOL_BYTES
        return [(at, size)], [(at, size)]

    asked = f" in {reads} reads at once" if reads > 1 else ""
    return Case(f"{size // MIB} MiB{asked}", size, runs, reads)


def scattered(count: int, length: int, name: str = "") -> Case:
    slots = POOL_BYTES // length
    order = random.Random(count).sample(range(slots), slots)

    def runs(number: int) -> Pairs:
        first = number * count
        ours = [order[(first + n) % slots] * length for n in range(count)]
        theirs = [order[(first + n + slots // 2) % slots] * length for n in range(count)]
        return [(at, length) for at in theirs], [(at, length) for at in ours]

    name = name or f"{count:,} x {length // KIB} KiB scattered"
    return Case(name, count * length, runs)


def layered(name: str, layers: int, block_bytes: int, *, blocks: int = 64) -> list[Case]:
    """A sequence's blocks in every layer: one after another, and in any order."""
    stretch = blocks * block_bytes

    def runs(number: int) -> Pairs:
        places = POOL_BYTES // stretch
        at = [(number * layers + layer) * 2 % places * stretch for layer in range(layers)]
        return [(begin, stretch) for begin in at], [(begin, stretch) for begin in at]

    in_order = Case(f"{name}, contiguous", layers * stretch, runs)
    return [in_order, scattered(layers * blocks, block_bytes, f"{name}, fragmented")]


CASES = (
    contiguous(MIB),
    contiguous(16 * MIB, 16),
    contiguous(16 * MIB),
    contiguous(256 * MIB),
    scattered(1024, 64 * KIB),
    scattered(4096, 16 * KIB),
    *layered("Qwen3-30B-A3B, block 16", 48, 16 * 4 * 2 * 128 * 2),
    *layered("70B, TP8 shard, block 16", 80, 16 * 1 * 2 * 128 * 2),
    *layered("MLA latent, block 16", 61, 16 * 576 * 2),
)


def runs_at(base: int, pairs: Sequence[tuple[int, int]]) -> Runs:
    table = np.array(pairs, np.int64)
    return Runs(table[:, 0] + base, table[:, 1].copy())


def huge(size: int) -> NDArray[np.uint8]:
    """Private memory in huge pages, where the kernel gives them to who asks."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def fill(pool: NDArray[np.uint8]) -> None:
    pool.view(np.uint64)[:] = np.arange(POOL_BYTES // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F)


def lend(theirs: socket.socket) -> None:
    """Lend both pools until the other side closes."""
    descriptor = os.memfd_create("transfer-local", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(descriptor, POOL_BYTES)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    pool = np.frombuffer(mmap.mmap(descriptor, POOL_BYTES), np.uint8)
    private = huge(POOL_BYTES)
    fill(pool)
    fill(private)
    name = f"/proc/{os.getpid()}/fd/{descriptor}"
    shared = SharedMemory(name, int(pool.ctypes.data), POOL_BYTES)
    theirs.sendall(msgspec.json.encode(Lending(own_name(), shared, int(private.ctypes.data))))
    theirs.recv(1)


class Bench:
    """The reading process: a goal of the pool's size, and the movers. With `pages` huge all memory
    is private and in huge pages, and only `readv` reads it."""

    def __init__(self, lending: Lending, pages: str) -> None:
        self.lending = lending
        self.pages = pages
        self.number = 0
        # what memcpy and the digests are compared on: the same memory, mapped by hand
        if pages == "huge":
            self.goal, self.mapped, self.source = (
                huge(POOL_BYTES),
                huge(POOL_BYTES),
                lending.private,
            )
            fill(self.mapped)
        else:
            self.goal = np.frombuffer(mmap.mmap(-1, POOL_BYTES), np.uint8)
            peer = os.open(lending.shared.name, os.O_RDONLY)
            self.mapped = np.frombuffer(mmap.mmap(peer, POOL_BYTES, prot=mmap.PROT_READ), np.uint8)
            self.source = lending.shared.address
            os.close(peer)
        self.goal[:] = 1
        self.base = int(self.goal.ctypes.data)
        self.mapped[:: 4 * KIB].sum()

    def movers(self, digests: Digests, chunk_bytes: int = CHUNK_BYTES) -> dict[str, OneSidedMover]:
        name, shared = self.lending.name, self.lending.shared
        made = {
            "readv": readv_mover(name, digests, chunk_bytes=chunk_bytes),
        }
        if self.pages != "huge":
            made["shm"] = shm_mover(name, shared, digests=digests, chunk_bytes=chunk_bytes)
        for mover in made.values():  # pages are mapped once, as for a pool that is read often
            digest = self.digest_of([(0, POOL_BYTES)], digests)
            self.read(mover, [self.both(([(0, POOL_BYTES)], [(0, POOL_BYTES)]))], [digest])
        return made

    def digest_of(self, source: Sequence[tuple[int, int]], digests: Digests) -> bytes:
        return digest_of(runs_at(int(self.mapped.ctypes.data), source), digests)

    def read(self, mover: OneSidedMover, asked: Sequence[Both], digests: Sequence[bytes]) -> None:
        """Read by the mover, and wait for the ends."""
        piece = FramePiece(bytes(32), 0, 1, 0, 1)
        for one, digest in zip(asked, digests, strict=True):
            self.number += 1
            mover.start(Read(self.number, 1, piece, one.goal, one.source, digest, FAR_S))
        left = len(asked)
        while left:
            select.select([mover.fileno()], [], [])
            ends = mover.ended()
            assert all(isinstance(end, ReadLanded) for end in ends), ends
            left -= len(ends)

    def memcpy(self, pairs: Pairs) -> None:
        source = int(self.mapped.ctypes.data)
        for (theirs, length), (ours, _) in zip(*pairs, strict=True):
            _memmove(self.base + ours, source + theirs, length)

    def copy_then_digest(self, pairs: Pairs, goal: Runs, digests: Digests) -> None:
        self.memcpy(pairs)
        memory, hasher = RunsMemory(goal), digests.begin()
        for ours, length in pairs[1]:
            hasher.update(memory.at(self.base + ours, length))
        hasher.digest()

    def both(self, pairs: Pairs) -> Both:
        """The runs of a read, as a layout hands them over: arrays."""
        return Both(runs_at(self.source, pairs[0]), runs_at(self.base, pairs[1]))


DIGESTS: dict[str, Digests] = {
    "": NoDigests(),
    "whole": NoDigests(),
    "xxh3": Xxh3(),
    "blake3": KeyedBlake3(KEY),
}
CHUNKS = {"whole": POOL_BYTES}


def cpu_s(call: Callable[[], None]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def measured(
    bench: Bench,
    case: Case,
    movers: dict[str, dict[str, OneSidedMover]],
    *,
    rounds: int,
) -> dict[str, list[float]]:
    """CPU seconds of each way, round by round; all take turns within a round."""
    took: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        pairs = case.runs(number)
        asked = case.pieces(pairs)
        runs, goal = [bench.both(one) for one in asked], bench.both(pairs).goal
        said = {name: [bench.digest_of(one[0], made) for one in asked]
                for name, made in DIGESTS.items()}  # fmt: skip
        ways: list[tuple[str, Callable[[], None]]] = [
            ("memcpy", lambda p=pairs: bench.memcpy(p)),
            ("copy + xxh3", lambda p=pairs, g=goal: bench.copy_then_digest(p, g, Xxh3())),
            (
                "copy + blake3",
                lambda p=pairs, g=goal: bench.copy_then_digest(p, g, KeyedBlake3(KEY)),
            ),
        ]
        for digest, group in movers.items():
            ways += [
                (f"{name} {digest}".strip(),
                 lambda m=mover, r=runs, d=said[digest]: bench.read(m, r, d))
                for name, mover in group.items()
            ]  # fmt: skip
        random.Random(number).shuffle(ways)
        for name, call in ways:
            spent_s = cpu_s(call)
            if number:  # the first round maps memory
                took.setdefault(name, []).append(spent_s)
    return took


BESIDE = {
    "shm": ("memcpy", ">= 0.8 at 256 MiB"),
    "shm whole": ("memcpy", ">= 0.8"),
    "readv": ("memcpy", ""),
    "readv whole": ("memcpy", ""),
    "shm xxh3": ("copy + xxh3", ">= 0.9"),
    "readv xxh3": ("copy + xxh3", ">= 0.9"),
    "shm blake3": ("copy + blake3", ""),
    "readv blake3": ("copy + blake3", ""),
}


def rows_of(case: Case, took: dict[str, list[float]]) -> list[Row]:
    rows = []
    for way, (other, goal) in BESIDE.items():
        if way not in took:
            continue
        own, theirs = statistics.median(took[way]), statistics.median(took[other])
        ratio = statistics.median(b / a for a, b in zip(took[way], took[other], strict=True))
        rate = case.size / 1e9
        wanted = goal if way != "shm whole" or case.size == 256 * MIB else ""
        rows.append(
            Row(f"{case.name}: {way}", "GB/s", rate / own, rate / theirs, other, ratio, wanted)
        )
    told = ", ".join(f"{row.metric.split(': ')[1]} {row.ratio:.2f}" for row in rows)
    print(f"{case.name}: {told}", file=sys.stderr, flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="cases whose name has this word")
    parser.add_argument("--pages", choices=("plain", "huge"), default="plain")
    options = parser.parse_args()
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        lend(theirs)
        os._exit(0)
    theirs.close()
    bench = Bench(msgspec.json.decode(ours.recv(1 << 16), type=Lending), options.pages)
    movers = {
        name: bench.movers(made, CHUNKS.get(name, CHUNK_BYTES)) for name, made in DIGESTS.items()
    }
    rows: list[Row] = []
    for case in CASES:
        if options.only in case.name:
            rows += rows_of(case, measured(bench, case, movers, rounds=options.rounds))
    began = time.process_time()
    time.sleep(IDLE_S)
    idle = (time.process_time() - began) / IDLE_S
    rows.append(Row("idle movers", "cores", idle, None, "", None, "0"))
    for group in movers.values():
        for mover in group.values():
            mover.close()
    ours.close()
    os.wait()
    report("transfer_local", rows, others={"pages": options.pages})
    return 0


if __name__ == "__main__":
    sys.exit(main())
