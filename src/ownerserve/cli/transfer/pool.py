"""The test pool: memory with known bytes that `transfer serve` and `transfer bench` lend.

It is a memfd: no name in /dev/shm, and gone with its process, however that ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import numpy as np

from ownerserve.cli.transfer.shapes import TICKET, ReadShape, shape_of
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.regions import SharedMemory
from ownerserve.kv.units import MIB, format_bytes
from ownerserve.transfer.movers.digests import Xxh3, digest_of
from ownerserve.transfer.vocabulary import FramePiece, Runs

_SLICE_BYTES = 8 * MIB
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def check_memory(size_bytes: int, *, field: str) -> None:
    """Raise InvalidInput naming `field` where so much memory can't be had without swapping."""
    told = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free_bytes = int(told["MemAvailable"].split()[0]) * 1024
    if size_bytes > free_bytes:
        problem = f"needs {format_bytes(size_bytes)} of memory, {format_bytes(free_bytes)} are free"
        raise InvalidInput(field, problem, "ask for less")


class BenchPool:
    """A `BenchPool` is a Lender (transfer.movers.port) of its own memory, in any shape that fits.
    Owns the memory, which ends with the process."""

    def __init__(self, size_bytes: int) -> None:
        descriptor = os.memfd_create("ownerserve-bench", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._bytes = np.frombuffer(mmap.mmap(descriptor, size_bytes), np.uint8)
        address = int(self._bytes.ctypes.data)
        name = f"/proc/{os.getpid()}/fd/{descriptor}"
        self.shared = SharedMemory(name, address, size_bytes)
        for begin in range(0, size_bytes, _SLICE_BYTES):
            end = min(begin + _SLICE_BYTES, size_bytes)
            words = np.arange(begin // 8, -(-end // 8), dtype=np.uint64) * _MULTIPLIER
            self._bytes[begin:end] = words.view(np.uint8)[: end - begin]

    def runs(self, ticket: int, piece: FramePiece) -> Runs | None:
        """Return where the piece lies; None: it is no shape that fits into the pool."""
        shape = shape_of(piece, self.shared.bytes) if ticket == TICKET else None
        return None if shape is None else shape.at(self.shared.address)

    def stands(self, ticket: int) -> bool:
        """Tell that the one ticket stands."""
        return ticket == TICKET

    def digest(self, shape: ReadShape) -> bytes:
        """Return the xxh3 of the shape's bytes."""
        return digest_of(shape.at(self.shared.address), Xxh3())
