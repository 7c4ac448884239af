"""Cuts of a read: stretches that are in one run of each side and in one chunk."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerserve.transfer.movers.cuts import Cuts, UnfitSource, cut
from ownerserve.transfer.movers.digests import RunsMemory, Xxh3, digest_of
from tests.support.transfer.reading import runs_of

LENGTHS = st.lists(st.integers(0, 40), max_size=12)


def laid_out(lengths: list[int], base: int) -> list[tuple[int, int]]:
    """Runs of those lengths with a byte between, the last one first."""
    at, found = base, []
    for length in reversed(lengths):
        found.append((at, length))
        at += length + 1
    return found[::-1]


def one_by_one(runs: list[tuple[int, int]]) -> list[int]:
    """The address of each byte, in the order of the bytes."""
    return [address + n for address, length in runs for n in range(length)]


def of_vectors(vectors: np.ndarray) -> list[int]:
    return one_by_one([(int(address), int(length)) for address, length in vectors])


@settings(max_examples=50)
@given(goal=LENGTHS, source=LENGTHS, chunk=st.integers(1, 50))
def test_each_byte_goes_where_it_would_go_alone(
    goal: list[int], source: list[int], chunk: int
) -> None:
    goal.append(max(0, sum(source) - sum(goal)))
    source.append(max(0, sum(goal) - sum(source)))
    into, out = laid_out(goal, 1000), laid_out(source, 50_000)
    cuts = cut(runs_of(into), runs_of(out), chunk_bytes=chunk)
    assert isinstance(cuts, Cuts)
    assert of_vectors(cuts.goals) == one_by_one(into)
    assert of_vectors(cuts.sources) == one_by_one(out)
    assert (cuts.goals[:, 1] == cuts.sources[:, 1]).all()
    landings = cuts.landings()
    assert [n for landed in landings for n in one_by_one(landed)] == one_by_one(into)
    sizes = [sum(length for _, length in landed) for landed in landings]
    assert all(size == chunk for size in sizes[:-1])
    assert sum(sizes) == sum(goal)
    for place, landed in enumerate(landings):
        first, end = cuts.chunks[place], cuts.chunks[place + 1]
        assert int(cuts.goals[first:end, 1].sum()) == sum(length for _, length in landed)


@settings(max_examples=50)
@given(source=LENGTHS.filter(any), chunk=st.integers(1, 50))
def test_one_run_takes_what_lies_scattered(source: list[int], chunk: int) -> None:
    """As a landing does: slots in any order, one behind another."""
    out = laid_out(source, 50_000)
    cuts = cut(runs_of([(1000, sum(source))]), runs_of(out), chunk_bytes=chunk)
    assert isinstance(cuts, Cuts)
    assert of_vectors(cuts.goals) == list(range(1000, 1000 + sum(source)))
    assert of_vectors(cuts.sources) == one_by_one(out)
    landed = [place for each in cuts.landings() for place in one_by_one(each)]
    assert landed == list(range(1000, 1000 + sum(source)))
    assert isinstance(
        cut(runs_of([(0, sum(source) + 1)]), runs_of(out), chunk_bytes=99), UnfitSource
    )


def test_what_touches_in_the_goal_is_one_to_the_digest() -> None:
    cuts = cut(runs_of([(0, 300)]), runs_of([(900, 100), (500, 200)]), chunk_bytes=256)
    assert isinstance(cuts, Cuts)
    assert cuts.landings() == [[(0, 256)], [(256, 44)]]


def test_another_number_of_bytes_and_forged_runs_are_misfits() -> None:
    goal = runs_of([(0, 100)])
    for forged in ([(0, 99)], [(-1, 100)], [(0, -100), (0, 200)], [(1 << 62, 100), (0, 1 << 62)]):
        assert isinstance(cut(goal, runs_of(forged), chunk_bytes=10), UnfitSource)


def test_a_digest_of_runs_is_that_of_their_bytes_in_order() -> None:
    memory = np.arange(4096, dtype=np.uint16).view(np.uint8)
    base = int(memory.ctypes.data)
    runs = runs_of([(base + 5000, 700), (base + 10, 0), (base + 3, 90)])
    hasher = Xxh3().begin()
    hasher.update(memoryview(memory[5000:5700].tobytes() + memory[3:93].tobytes()))
    assert digest_of(runs, Xxh3()) == hasher.digest()
    assert digest_of(runs_of([]), Xxh3()) == Xxh3().begin().digest()
    assert bytes(RunsMemory(runs).at(base + 10, 5)) == memory[10:15].tobytes()
