"""Pipes: order, latency, faults."""

from __future__ import annotations

import pytest

from ownerserve.kv.errors import InvalidInput
from ownerserve.plan.cost.prices import Medium
from ownerserve.sim.timeline.media import Pipe, duplex, in_series

LINK = Medium(2.0, 1000.0)  # 2 ms, then 1 MB/s


def test_transfers_queue_and_latency_overlaps() -> None:
    pipe = Pipe("link", LINK)
    assert pipe.take(1000, 0.0) == pytest.approx(0.003)
    assert pipe.take(1000, 0.0) == pytest.approx(0.004), "the second waits for a ms, not for three"
    assert pipe.take(1000, 1.0) == pytest.approx(1.003)
    assert pipe.busy_s == pytest.approx(0.003) and pipe.moved_bytes == 3000


def test_nothing_takes_no_time() -> None:
    pipe = Pipe("link", LINK)
    assert pipe.take(0, 5.0) == 5.0 and pipe.free_s == 0.0 and pipe.service_s(0) == 0.0


def test_what_waits_is_known() -> None:
    pipe = Pipe("link", LINK)
    pipe.take(10_000, 0.0)
    assert pipe.waiting_bytes(0.0) == 10_000
    assert pipe.waiting_bytes(0.004) == 6_000
    assert pipe.waiting_bytes(1.0) == 0
    assert pipe.starts_s(0.0) == pytest.approx(0.01)


def test_a_slow_medium_takes_longer_and_mends() -> None:
    pipe = Pipe("disk", LINK)
    pipe.slow(4.0)
    assert pipe.take(1000, 0.0) == pytest.approx(0.012) == pytest.approx(pipe.service_s(1000))
    assert pipe.waiting_bytes(0.0) == 1000
    pipe.slow(1.0)
    assert pipe.take(1000, 1.0) == pytest.approx(1.003)
    with pytest.raises(InvalidInput):
        pipe.slow(0.0)


def test_a_cut_medium_begins_nothing() -> None:
    pipe = Pipe("nic", LINK)
    under_way = pipe.take(1000, 0.0)
    pipe.cut(10.0)
    assert under_way == pytest.approx(0.003)
    assert pipe.take(1000, 0.0) == pytest.approx(10.003)
    pipe.cut(5.0)
    assert pipe.starts_s(0.0) > 10.0, "a shorter cut ends no longer one"


def test_both_directions_of_a_link_are_their_own() -> None:
    link = duplex("nic", LINK)
    assert link.out.take(5000, 0.0) == link.back.take(5000, 0.0)


def test_one_load_after_another_adds_up() -> None:
    both = in_series((LINK, Medium(1.0, 500.0)))
    assert both.ms(1000) == pytest.approx(LINK.ms(1000) + 1.0 + 2.0)
