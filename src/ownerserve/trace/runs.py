"""This module calculates with run-length block ids. Cost is in runs, never in blocks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from ownerserve.trace.model import Run, Runs


def encode(ids: Iterable[int]) -> Runs:
    """Return ids as runs: [1, 2, 3, 7] -> ((1, 3), (7, 1))."""
    runs: list[Run] = []
    iterator = iter(ids)
    first = next(iterator, None)
    if first is None:
        return ()
    end = first + 1
    for block in iterator:
        if block != end:
            runs.append((first, end - first))
            first = block
        end = block + 1
    runs.append((first, end - first))
    return tuple(runs)


def expand(runs: Runs) -> Iterator[int]:
    """Yield the ids of runs: ((1, 3), (7, 1)) -> 1, 2, 3, 7. For consumers that need each block; no
    statistic does."""
    for first, count in runs:
        yield from range(first, first + count)


def blocks(runs: Runs) -> int:
    """Return how many blocks the runs cover."""
    return sum([count for _, count in runs])


def take(runs: Runs, count: int) -> Runs:
    """Return the first `count` blocks (all, when there are fewer)."""
    taken: list[Run] = []
    for first, length in runs:
        if length >= count:
            if count > 0:
                taken.append((first, count))
            break
        taken.append((first, length))
        count -= length
    return tuple(taken)


def drop(runs: Runs, count: int) -> Runs:
    """Return what is left after the first `count` blocks."""
    for index, (first, length) in enumerate(runs):
        if length > count:
            return ((first + count, length - count), *runs[index + 1 :])
        count -= length
    return ()


def concat(left: Runs, right: Runs) -> Runs:
    """Return `left` then `right`, joined where the ids continue."""
    if left and right and left[-1][0] + left[-1][1] == right[0][0]:
        joined = (left[-1][0], left[-1][1] + right[0][1])
        return (*left[:-1], joined, *right[1:])
    return left + right


def common_prefix(left: Runs, right: Runs) -> int:
    """Return how many blocks both begin with."""
    shared = 0
    for (first_l, count_l), (first_r, count_r) in zip(left, right, strict=False):
        if first_l != first_r:
            break
        shared += min(count_l, count_r)
        if count_l != count_r:
            # With chained ids the longer run may go on in the other's next run only if that run
            # continues it, which `encode` and `concat` never leave split.
            break
    return shared


class IntervalSet:
    """The set holds block ids as sorted, disjoint, non-touching intervals [start, end)."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, runs: Runs) -> None:
        """Insert all ids of `runs`."""
        starts, ends = self._starts, self._ends
        for start, count in runs:
            end = start + count
            low, high = bisect_left(ends, start), bisect_right(starts, end)
            if low < high:
                start, end = min(start, starts[low]), max(end, ends[high - 1])
            starts[low:high] = [start]
            ends[low:high] = [end]

    def prefix(self, runs: Runs) -> int:
        """Return how many of the first blocks of `runs` are in the set, without a gap."""
        held = 0
        for first, count in runs:
            index = bisect_right(self._starts, first) - 1
            found = min(count, self._ends[index] - first) if index >= 0 else 0
            if found <= 0:
                break
            held += found
            if found < count:
                break
        return held

    def intervals(self) -> Iterator[tuple[int, int]]:
        """Yield all [start, end), ascending."""
        return zip(self._starts, self._ends, strict=True)


def covered_at_least(sets: Sequence[IntervalSet], threshold: int) -> IntervalSet:
    """Return the ids that are in at least `threshold` of the sets: one sweep over interval ends."""
    change: dict[int, int] = {}
    for intervals in sets:
        for start, end in intervals.intervals():
            change[start] = change.get(start, 0) + 1
            change[end] = change.get(end, 0) - 1
    widely = IntervalSet()
    depth = 0
    for at, following in pairwise(sorted(change)):
        depth += change[at]
        if depth >= threshold:
            widely.add(((at, following - at),))
    return widely
