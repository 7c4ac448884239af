"""Simulated time goes forward, and calls at one instant keep their order."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ownerserve.kv.errors import InvariantViolated
from ownerserve.sim.timeline.heap import Heap


def test_calls_happen_in_order_of_time_then_of_asking() -> None:
    heap, seen = Heap(), []
    for when_s, name in ((2.0, "b"), (1.0, "a"), (2.0, "c")):
        heap.at(when_s, lambda now, name=name: seen.append((now, name)))  # type: ignore[misc]
    heap.run()
    assert seen == [(1.0, "a"), (2.0, "b"), (2.0, "c")]
    assert heap.now == 2.0 and heap.events == 3


def test_what_is_cancelled_does_not_happen_and_moves_no_time() -> None:
    heap, seen = Heap(), []
    heap.at(1.0, seen.append).cancel()
    kept = heap.at(5.0, seen.append)
    heap.run(until_s=2.0)
    assert seen == [] and heap.now == 0.0  # the call behind the cancelled one is not due
    heap.run(until_s=5.0)
    kept.cancel()  # it has happened: no error
    assert seen == [5.0]


def test_a_call_may_ask_for_now_but_not_for_the_past() -> None:
    heap, seen = Heap(), []
    heap.at(1.0, lambda now: heap.at(now, seen.append))
    heap.run()
    assert seen == [1.0]
    with pytest.raises(InvariantViolated):
        heap.at(0.5, seen.append)


def test_stop_leaves_the_rest_for_the_next_run() -> None:
    heap, seen = Heap(), []
    heap.at(1.0, lambda now: heap.stop())
    heap.at(2.0, seen.append)
    heap.run_some(10)
    assert heap.now == 1.0 and seen == []
    heap.run()
    assert seen == [2.0]
    heap.at(3.0, lambda now: heap.stop())
    heap.at(4.0, seen.append)
    heap.run()
    assert heap.now == 3.0


@given(st.lists(st.integers(0, 5), max_size=20), st.lists(st.integers(0, 5), max_size=20))
def test_what_it_begins_with_happens_as_if_asked_for_first(far: list[int], near: list[int]) -> None:
    heard: list[list[tuple[float, str]]] = [[], []]
    heaps = [Heap(), Heap()]

    def call(log: list[tuple[float, str]], name: str, now: float) -> None:
        log.append((now, name))

    calls = [[(float(at), partial(call, log, f"far {n}")) for n, at in enumerate(far)]
             for log in heard]  # fmt: skip
    heaps[0].begin_with(calls[0])
    for when_s, far_call in calls[1]:
        heaps[1].at(when_s, far_call)
    for heap, log in zip(heaps, heard, strict=True):
        for number, at in enumerate(near):
            heap.at(float(at), partial(call, log, f"near {number}"))
        heap.run(until_s=2.0)
        heap.run()
    assert heard[0] == heard[1] and len(heard[0]) == len(far) + len(near)
    assert heaps[0].next_s() is None


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=30), st.integers(1, 7))
def test_run_some_in_parts_is_run_at_once(wanted: list[tuple[float, bool]], count: int) -> None:
    heard: list[list[tuple[float, int]]] = [[], []]
    heaps = [Heap(), Heap()]
    for heap, log in zip(heaps, heard, strict=True):
        for number, (when_s, is_kept) in enumerate(wanted):

            def call(number: int, log: list[tuple[float, int]], now: float) -> None:
                log.append((now, number))

            entry = heap.at(when_s, partial(call, number, log))
            if not is_kept:
                entry.cancel()
    heaps[0].run()
    while heaps[1].next_s() is not None:
        heaps[1].run_some(count)
    assert heard[0] == heard[1]
    expected = [(when_s, number) for number, (when_s, is_kept) in enumerate(wanted) if is_kept]
    assert heard[0] == sorted(expected)
