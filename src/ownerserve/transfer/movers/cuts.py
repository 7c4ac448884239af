"""Cuts of a read: where each stretch of bytes comes from and goes to, made once for the whole read.

    source   |----- a -----|-- b --|------- c -------|       the peer's runs
    goal     |-- p --|-------- q --------|---- r ----|       this process's
    stretch  |   1   |  2  |   3   |  4  |     5     |       in one run of each, and in one chunk
    chunk    |        0         |         1          |       chunk_bytes each, but for the last

Source and goal need not be cut alike, only be of as many bytes. All is numpy's: 4,096 runs cost
some 100 us.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from ownerserve.transfer.vocabulary import Runs

_LAST_ADDRESS = 1 << 62
_LAST_BYTE = 1 << 63
_FIRST = np.zeros(1, np.int64)


class Cuts(msgspec.Struct, frozen=True, eq=False):
    """`Cuts` are the stretches of a read: int64 [n, 2], an address and its bytes each, on both
    sides (so that C sees arrays of `struct iovec`). Chunk k is stretches [chunks[k],
    chunks[k + 1])."""

    goals: NDArray[np.int64]
    sources: NDArray[np.int64]
    chunks: tuple[int, ...]

    def landings(self) -> list[list[tuple[int, int]]]:
        """Return for each chunk where its bytes lie in the goal, (address, bytes) each: stretches
        that touch are one."""
        begins, lengths = self.goals[:, 0], self.goals[:, 1]
        if len(begins) <= 1:
            return [[(int(begins[0]), int(lengths[0]))]] if len(begins) else []
        apart = np.empty(len(begins), np.bool_)
        np.not_equal(begins[1:], begins[:-1] + lengths[:-1], out=apart[1:])
        apart[list(self.chunks[:-1])] = True
        at = np.flatnonzero(apart)
        sums = np.add.reduceat(lengths, at)
        landed = list(zip(begins[at].tolist(), sums.tolist(), strict=True))
        if len(self.chunks) == 2:
            return [landed]
        edges = [*np.searchsorted(at, self.chunks[:-1]).tolist(), len(landed)]
        return [landed[first:end] for first, end in pairwise(edges)]


class UnfitSource(msgspec.Struct, frozen=True):
    """The source's runs are no place from which the goal can be filled: a forged address or length,
    or another number of bytes than the goal has."""


def _begins(runs: Runs) -> NDArray[np.int64]:
    """Return how many bytes come before each run, and before the end."""
    return np.concatenate((_FIRST, np.cumsum(runs.lengths)))


def _is_sound(runs: Runs) -> bool:
    """Tell whether all runs are within the addresses that there are."""
    if runs.addresses.shape != runs.lengths.shape or runs.addresses.ndim != 1:
        return False
    if not len(runs.lengths):
        return True
    numbers = (runs.addresses, runs.lengths)
    if any(side.min() < 0 or side.max() > _LAST_ADDRESS for side in numbers):
        return False
    return len(runs.lengths) * int(runs.lengths.max()) < _LAST_BYTE


def cut(goal: Runs, source: Runs, *, chunk_bytes: int) -> Cuts | UnfitSource:
    """Return the stretches by which `goal` is filled from `source`, in the order of the bytes."""
    if not _is_sound(source):
        return UnfitSource()
    total = goal.bytes
    if total <= chunk_bytes and np.array_equal(goal.lengths, source.lengths):
        count = len(goal.lengths)
        return Cuts(
            goals=_vectors(goal.addresses, goal.lengths),
            sources=_vectors(source.addresses, source.lengths),
            chunks=(0, count) if count else (0,),
        )
    out = _begins(source)
    if total != int(out[-1]):
        return UnfitSource()
    if 0 < total <= chunk_bytes and len(goal.lengths) == 1:  # a landing takes all in one run
        return Cuts(
            goals=_vectors(goal.addresses[0] + out[:-1], source.lengths),
            sources=_vectors(source.addresses, source.lengths),
            chunks=(0, len(source.lengths)),
        )
    into = _begins(goal)
    limits = np.arange(0, total, chunk_bytes, dtype=np.int64)
    edges = np.concatenate((into, out, limits))
    edges.sort(kind="stable")  # three sorted ones: merged
    edges = edges[np.concatenate((_FIRST, np.flatnonzero(np.diff(edges)) + 1))]
    begins, lengths = edges[:-1], np.diff(edges)
    own = np.searchsorted(into, begins, side="right") - 1
    theirs = np.searchsorted(out, begins, side="right") - 1
    chunks = np.searchsorted(begins, limits)
    return Cuts(
        goals=_vectors(goal.addresses[own] + (begins - into[own]), lengths),
        sources=_vectors(source.addresses[theirs] + (begins - out[theirs]), lengths),
        chunks=(*chunks.tolist(), len(lengths)),
    )


def _vectors(addresses: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    vectors = np.empty((len(lengths), 2), np.int64)
    vectors[:, 0], vectors[:, 1] = addresses, lengths
    return vectors
