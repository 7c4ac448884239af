"""Run-length arithmetic against the same thing done block by block."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ownerserve.trace.runs import (
    IntervalSet,
    blocks,
    common_prefix,
    concat,
    covered_at_least,
    drop,
    encode,
    expand,
    take,
)
from tests.support.examples import examples

ids = st.lists(st.integers(0, 30), max_size=20, unique=True)
many_ids = st.lists(ids, max_size=8)


@settings(max_examples=examples(50))
@given(ids, st.integers(0, 25))
def test_cutting_and_joining(blocks_: list[int], at: int) -> None:
    runs = encode(blocks_)
    assert list(expand(runs)) == blocks_
    assert blocks(runs) == len(blocks_)
    assert list(expand(take(runs, at))) == blocks_[:at]
    assert list(expand(drop(runs, at))) == blocks_[at:]
    assert concat(take(runs, at), drop(runs, at)) == runs


@settings(max_examples=examples(50))
@given(ids, ids, ids)
def test_common_prefix(head: list[int], left: list[int], right: list[int]) -> None:
    one, two = head + left, head + right
    same = 0
    while same < min(len(one), len(two)) and one[same] == two[same]:
        same += 1
    assert common_prefix(encode(one), encode(two)) == same


@settings(max_examples=examples(50))
@given(many_ids, ids)
def test_a_set_of_intervals_is_a_set(added: list[list[int]], asked: list[int]) -> None:
    intervals, reference = IntervalSet(), set[int]()
    for blocks_ in added:
        intervals.add(encode(blocks_))
        reference.update(blocks_)
    held = 0
    while held < len(asked) and asked[held] in reference:
        held += 1
    assert intervals.prefix(encode(asked)) == held
    covered = [n for start, end in intervals.intervals() for n in range(start, end)]
    assert covered == sorted(reference)


@settings(max_examples=examples(50))
@given(many_ids, st.integers(1, 4))
def test_widely_covered_ids(sets: list[list[int]], threshold: int) -> None:
    intervals = []
    for blocks_ in sets:
        intervals.append(IntervalSet())
        intervals[-1].add(encode(blocks_))
    widely = covered_at_least(intervals, threshold)
    found = {n for start, end in widely.intervals() for n in range(start, end)}
    assert found == {n for n in range(31) if sum(n in s for s in sets) >= threshold}
