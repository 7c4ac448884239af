"""What is moved: the same runs of a buffer on both sides, whoever moves them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

KIB, MIB = 1024, 1024 * 1024
BUFFER_BYTES = 256 * MIB


class Shape(NamedTuple):
    """`count` runs of `length` bytes each, in any order and apart from each other; or one."""

    name: str
    count: int
    length: int

    @property
    def bytes(self) -> int:
        return self.count * self.length

    def offsets(self) -> NDArray[np.int64]:
        """Where the runs begin in a buffer."""
        if self.count == 1:
            return np.zeros(1, np.int64)
        return np.random.default_rng(self.count).permutation(self.count) * (2 * self.length)

    def lengths(self) -> NDArray[np.int64]:
        return np.full(self.count, self.length, np.int64)


SHAPES = (
    Shape("1 MiB", 1, MIB),
    Shape("16 MiB", 1, 16 * MIB),
    Shape("256 MiB", 1, 256 * MIB),
    Shape("1,024 x 64 KiB", 1024, 64 * KIB),
    Shape("4,096 x 16 KiB", 4096, 16 * KIB),
)


def filled() -> NDArray[np.uint8]:
    """A buffer that is lent, each word of it another."""
    words = np.arange(BUFFER_BYTES // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return words.view(np.uint8)


def empty() -> NDArray[np.uint8]:
    """A buffer that is read into, each page of it touched."""
    return np.ones(BUFFER_BYTES, np.uint8)


def right(shape: Shape, goal: NDArray[np.uint8]) -> bool:
    """Whether the goal's runs hold what was lent, looked at in four words of each."""
    for at in shape.offsets().tolist():
        for word in (0, shape.length // 2, shape.length - 8):
            first = (at + word) // 8
            want = first * 0x9E3779B97F4A7C15 % 2**64
            if int(goal[at + word : at + word + 8].view(np.uint64)[0]) != want:
                return False
    return True
