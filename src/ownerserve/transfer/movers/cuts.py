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
        breaks = np.flatnonzero(begins[1:] != begins[:-1] + lengths[:-1]) + 1
        chunks = np.array(self.chunks[:-1], np.int64)
        at = np.union1d(breaks, chunks)
        if not len(at):
            return []
        sums = np.add.reduceat(lengths, at)
        landed = list(zip(begins[at].tolist(), sums.tolist(), strict=True))
        edges = [*np.searchsorted(at, chunks).tolist(), len(landed)]
        return [landed[first:end] for first, end in pairwise(edges)]


class UnfitSource(msgspec.Struct, frozen=True):
    """The source's runs are no place from which the goal can be filled: a forged address or length,
    or another number of bytes than the goal has."""


def _begins(runs: Runs) -> NDArray[np.int64]:
    """Return how many bytes come before each run, and before the end."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(runs.lengths)))


def _is_sound(runs: Runs) -> bool:
    """Tell whether all runs are within the addresses that there are."""
    if runs.addresses.shape != runs.lengths.shape or runs.addresses.ndim != 1:
        return False
    numbers = (runs.addresses, runs.lengths)
    if any(np.any(side < 0) or np.any(side > _LAST_ADDRESS) for side in numbers):
        return False
    return float(runs.lengths.sum(dtype=np.float64)) < _LAST_ADDRESS


def cut(goal: Runs, source: Runs, *, chunk_bytes: int) -> Cuts | UnfitSource:
    """Return the stretches by which `goal` is filled from `source`, in the order of the bytes."""
    if not _is_sound(source):
        return UnfitSource()
    into, out = _begins(goal), _begins(source)
    total = int(into[-1])
    if total != int(out[-1]):
        return UnfitSource()
    limits = np.arange(0, total, chunk_bytes, dtype=np.int64)
    ends = np.array([total], np.int64)
    edges = np.unique(np.concatenate((into, out, limits, ends)))
    begins, lengths = edges[:-1], np.diff(edges)
    own = np.searchsorted(into, begins, side="right") - 1
    theirs = np.searchsorted(out, begins, side="right") - 1
    chunks = np.searchsorted(begins, limits)
    return Cuts(
        goals=_vectors(goal.addresses[own] + (begins - into[own]), lengths),
        sources=_vectors(source.addresses[theirs] + (begins - out[theirs]), lengths),
        chunks=(*chunks.tolist(), len(lengths)),
    )


def _vectors(addresses: NDArray[np.signedinteger], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    vectors = np.empty((len(lengths), 2), np.int64)
    vectors[:, 0], vectors[:, 1] = addresses, lengths
    return vectors
