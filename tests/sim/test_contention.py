"""What workers share and how unlike they are: incast and the switch against closed forms, paces by
worker."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ownerserve.kv.errors import InvalidInput
from ownerserve.plan.cost.prices import Medium
from ownerserve.sim.config.setup import Links
from ownerserve.sim.metrics.summary import digest
from ownerserve.sim.run import Result, simulate
from ownerserve.sim.timeline.heap import Heap
from ownerserve.sim.timeline.links import Link, Stream, linked, stream
from ownerserve.sim.timeline.media import Pipe
from tests.support.sim.fleet_driver import agents, setup

TRACE = agents()
BYTES, A_MS = 12_000, 1_000.0
NIC = Medium(0.0, A_MS)
ONE_S = BYTES / A_MS / 1e3
SENDERS = 5


def ends_of(heap: Heap, streams: list[Stream]) -> list[float]:
    """When each of the streams has arrived, in seconds."""
    heap.run()
    assert None not in [one.ended_s for one in streams]
    return [one.ended_s or 0.0 for one in streams]


def test_an_incast_of_equals_is_there_all_at_once() -> None:
    """N at once to one: each gets 1 / N of its NIC, and all end when the last byte has come."""
    heap = Heap()
    target = linked("target", NIC, heap)
    links = [(linked(f"{n}", NIC, heap).out, target.back) for n in range(SENDERS)]
    streams = [stream(one, BYTES, 0.0) for one in links]
    assert [one.rate for one in streams] == pytest.approx([A_MS / SENDERS] * SENDERS)
    assert ends_of(heap, streams) == pytest.approx([SENDERS * ONE_S] * SENDERS)


def test_an_incast_of_several_sizes_ends_by_size() -> None:
    """The k-th smallest of N ends when k smallest are whole and the others as far: the sum of all
    min(size, its own) over the NIC."""
    heap = Heap()
    target = linked("target", NIC, heap)
    sizes = [(n + 1) * BYTES for n in reversed(range(SENDERS))]
    streams = [stream((linked("", NIC, heap).out, target.back), size, 0.0) for size in sizes]
    closed = [sum(min(other, size) for other in sizes) / A_MS / 1e3 for size in sizes]
    assert ends_of(heap, streams) == pytest.approx(closed)


def test_one_that_comes_later_halves_what_is_left() -> None:
    heap = Heap()
    nic = linked("nic", NIC, heap)
    streams = [stream((nic.out,), BYTES, 0.0)]
    heap.at(ONE_S / 2, lambda now: streams.append(stream((nic.out,), BYTES, now)))
    assert ends_of(heap, streams) == pytest.approx([1.5 * ONE_S, 2.0 * ONE_S])


@pytest.mark.parametrize("times", [0.5, 2.0, 10.0])
def test_pairs_that_share_a_switch_have_it_together(times: float) -> None:
    """N pairs at once: bounded by the switch where it is less than N NICs, else by each NIC."""
    heap = Heap()
    switch = Link("switch", Medium(0.0, times * A_MS), heap)
    pairs = [
        (linked("a", NIC, heap).out, switch, linked("b", NIC, heap).back) for _ in range(SENDERS)
    ]
    ends = ends_of(heap, [stream(pair, BYTES, 0.0) for pair in pairs])
    assert ends == pytest.approx([max(ONE_S, SENDERS * ONE_S / times)] * SENDERS)


def test_what_is_bound_elsewhere_leaves_its_part_to_others() -> None:
    """Two over one NIC, one of them also over a link of a quarter: the other gets three."""
    heap = Heap()
    nic, slow = linked("nic", NIC, heap), linked("slow", Medium(0.0, A_MS / 4), heap)
    bound, free = stream((nic.out, slow.back), BYTES, 0.0), stream((nic.out,), BYTES, 0.0)
    assert (bound.rate, free.rate) == pytest.approx((A_MS / 4, 3 * A_MS / 4))
    assert ends_of(heap, [bound, free]) == pytest.approx([4 * ONE_S, 4 / 3 * ONE_S])


def test_apart_from_each_other_they_do_not_meet() -> None:
    """As over a queue, to the digit: bytes / bandwidth, then latency."""
    heap, medium = Heap(), Medium(2.0, 12.5e6)
    links = [linked(f"{n}", medium, heap) for n in range(2)]
    streams = [stream((link.out,), 987_654_321, 0.1) for link in links]
    queued = [Pipe("", medium).take(987_654_321, 0.1) for _ in links]
    assert ends_of(heap, streams) == queued


def test_nothing_begins_on_a_cut_link_and_what_is_under_way_arrives() -> None:
    heap = Heap()
    nic = linked("nic", NIC, heap)
    streams = [stream((nic.out,), BYTES, 0.0)]
    nic.out.cut(1.0)
    streams.append(stream((nic.out,), BYTES, 0.0))
    heap.at(0.5, lambda now: nic.out.cut(2.0))
    assert nic.out.starts_s(0.0) == 1.0
    assert ends_of(heap, streams) == pytest.approx([ONE_S, 2.0 + ONE_S])


COURSES = st.lists(
    st.tuples(
        st.floats(0.0, 0.05),  # when it begins
        st.integers(1, 40_000),  # bytes
        st.frozensets(st.integers(0, 4), min_size=1, max_size=3),  # its links
        st.none() | st.floats(0.0, 0.05),  # when it is given up
    ),
    min_size=1,
    max_size=9,
)


@given(st.lists(st.floats(1.0, 1e4), min_size=5, max_size=5), COURSES)
def test_rates_are_max_min_fair_and_bytes_are_neither_lost_nor_made(
    speeds: list[float], courses: list[tuple[float, int, frozenset[int], float | None]]
) -> None:
    """At every instant each stream has a link that is full and over which nobody is faster: no rate
    could be raised without lowering one as low. What links moved is what streams did."""
    heap = Heap()
    links = [Link(f"{n}", Medium(0.0, speed), heap) for n, speed in enumerate(speeds)]
    streams: list[Stream] = []
    given_up: dict[Stream, int] = {}

    def begin(count: int, over: frozenset[int], after_s: float | None, now: float) -> None:
        one = stream([links[n] for n in sorted(over)], count, now)
        streams.append(one)
        if after_s is not None:
            heap.at(now + after_s, partial(end, one))

    def end(one: Stream, now: float) -> None:
        if one.ended_s is None:
            given_up[one] = one.give_up(now)

    for at_s, count, over, after_s in courses:
        heap.at(at_s, partial(begin, count, over, after_s))
    while heap.next_s() is not None:
        heap.run_some(1)
        for link in links:
            assert sum(one.rate for one in link.streams) <= link.medium.bytes_per_ms * (1 + EPSILON)
        for one in {one for link in links for one in link.streams}:
            assert any(is_its_bound(link, one) for link in one.links)
    moved = {one: given_up.get(one, one.count) for one in streams}
    assert all(one.ended_s is not None for one in streams if one not in given_up)
    assert all(0 <= count <= one.count for one, count in moved.items())
    for link in links:
        assert link.moved_bytes == sum(moved[one] for one in streams if link in one.links)
        assert not link.streams


EPSILON = 1e-9


def is_its_bound(link: Link, one: Stream) -> bool:
    """Whether the link is full, and nothing over it is faster than this."""
    rates = [other.rate for other in link.streams]
    full = sum(rates) >= link.medium.bytes_per_ms * (1 - EPSILON)
    return full and one.rate >= max(rates) * (1 - EPSILON)


def network_s(result: Result) -> float:
    table = result.rows.table()
    moved = table[table["network_bytes"] > 0]
    assert len(moved)
    return float(np.mean(moved["first_token_s"] - moved["arrived_s"]))


def test_a_narrow_switch_slows_what_moves_and_a_wide_one_nothing() -> None:
    def ran(gb_s: float) -> Result:
        return simulate(TRACE, setup("static_pd_delta", links=Links(switch_gb_s=gb_s)))

    free, wide, narrow = ran(0.0), ran(1e9), ran(0.5)
    assert digest(wide.metrics) == digest(free.metrics)
    assert network_s(narrow) > network_s(free)


def step_s(result: Result, worker: int) -> float:
    """Mean time of an answer's token at the worker."""
    table = result.rows.table()
    here = table[(table["worker"] == worker) & (table["output_tokens"] > 1)]
    took = (here["done_s"] - here["first_token_s"]) / (here["output_tokens"] - 1)
    return float(np.mean(took))


def test_a_straggler_is_slow_alone() -> None:
    even = simulate(TRACE, setup("round_robin"))
    uneven = simulate(TRACE, setup("round_robin", step_factors=(1.0, 4.0)))
    assert step_s(uneven, 1) > 3.0 * step_s(even, 1)
    assert step_s(uneven, 0) < 1.5 * step_s(even, 0)
    same = simulate(TRACE, setup("round_robin", step_factors=(1.0, 1.0)))
    assert digest(same.metrics) == digest(even.metrics)


@pytest.mark.parametrize("factors", [(), (0.0,), (1.0, float("inf"))])
def test_factors_that_are_none_are_refused(factors: tuple[float, ...]) -> None:
    with pytest.raises(InvalidInput, match="step_factors"):
        setup(step_factors=factors)


def test_a_switch_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidInput, match="switch_gb_s"):
        setup(links=Links(switch_gb_s=-1.0))
