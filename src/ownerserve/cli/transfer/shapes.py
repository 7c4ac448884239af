"""The shapes in which a test pool is read, the same on both sides of a measurement.

    16MiB         |=========|...............     one run, at the pool's begin
    1024x64KiB    |=|.|=|.|=|.|=|.|=|.|=|.|.     runs in no order, as much between them

A shape names itself in the piece that is asked for, so a lender needs no list of them.
"""

from __future__ import annotations

from math import gcd

import msgspec
import numpy as np

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.units import format_bytes, parse_bytes
from ownerserve.transfer.vocabulary import FramePiece, Runs

TICKET = 1
"""The only ticket of a test pool: it stands until the process ends."""
LEAST_RUN_BYTES, MOST_RUNS = 512, 1 << 20
_MARK = b"ownerserve test pool".ljust(24, b"\0")
_WRITE_IT = "write it like 16MiB or 1024x64KiB"


class ReadShape(msgspec.Struct, frozen=True):
    """A `ReadShape` is `runs` runs of `run_bytes` bytes each."""

    runs: int
    run_bytes: int

    def __str__(self) -> str:
        size = format_bytes(self.run_bytes)
        return size if self.runs == 1 else f"{self.runs:,} x {size}"

    @property
    def option(self) -> str:
        """Return the shape as `parse_shape` reads it."""
        return str(self.run_bytes) if self.runs == 1 else f"{self.runs}x{self.run_bytes}"

    @property
    def bytes(self) -> int:
        """Return the bytes of all runs."""
        return self.runs * self.run_bytes

    @property
    def span_bytes(self) -> int:
        """Return the bytes of a pool that holds the shape."""
        return self.run_bytes if self.runs == 1 else 2 * self.bytes

    def at(self, address: int) -> Runs:
        """Return where the shape lies in a pool that begins at `address`."""
        if self.runs == 1:
            return Runs(np.array([address], np.int64), np.array([self.run_bytes], np.int64))
        step = next(k for k in range(self.runs * 5 // 8 | 1, 2 * self.runs) if _cover(k, self.runs))
        places = np.arange(self.runs, dtype=np.int64) * step % self.runs
        lengths = np.full(self.runs, self.run_bytes, np.int64)
        return Runs(address + places * (2 * self.run_bytes), lengths)

    def piece(self) -> FramePiece:
        """Return what a reader asks for who wants the shape."""
        return FramePiece(_MARK + self.run_bytes.to_bytes(8, "little"), 0, self.runs, 0, 1)


def _cover(step: int, count: int) -> bool:
    """Tell whether steps of that many places come to each of `count` places once."""
    return gcd(step, count) == 1


def shape_of(piece: FramePiece, pool_bytes: int) -> ReadShape | None:
    """Return the shape that is asked for; None: it is none, or leaves the pool."""
    shape = ReadShape(piece.end_unit, int.from_bytes(piece.artifact[len(_MARK) :], "little"))
    is_sound = 0 < shape.runs <= MOST_RUNS and shape.run_bytes >= LEAST_RUN_BYTES
    return shape if is_sound and shape.span_bytes <= pool_bytes and shape.piece() == piece else None


def parse_shape(text: str, *, field: str) -> ReadShape:
    """Read a shape as people write it. Raises InvalidInput naming `field`."""
    count, cross, size = text.rpartition("x")
    if cross and not (count.isascii() and count.isdigit() and len(count) < 10):
        raise InvalidInput(field, f"{text[:80]!r} is no size", _WRITE_IT)
    runs = int(count) if cross else 1
    try:
        run_bytes = parse_bytes(size, field=field)
    except InvalidInput as error:
        raise InvalidInput(field, error.problem, _WRITE_IT) from None
    if not 0 < runs <= MOST_RUNS:
        raise InvalidInput(field, f"{runs:,} runs", f"read 1 to {MOST_RUNS:,}")
    if run_bytes < LEAST_RUN_BYTES:
        raise InvalidInput(field, f"runs of {run_bytes} bytes", f"read {LEAST_RUN_BYTES} or more")
    return ReadShape(runs, run_bytes)


USUAL = tuple(
    parse_shape(text, field="--size")
    for text in ("1MiB", "16MiB", "256MiB", "1024x64KiB", "4096x16KiB")
)
QUICK = tuple(parse_shape(text, field="--size") for text in ("1MiB", "16MiB", "256x16KiB"))
