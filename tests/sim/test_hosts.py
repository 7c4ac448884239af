"""What workers of one host share: its link to memory, its NIC, its drive. Closed forms, an
independent solver, and whole runs."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import TurnId
from ownerserve.kv.messages import Tier
from ownerserve.plan.cost.prices import Medium
from ownerserve.sim.build import geometry_of, pace_of
from ownerserve.sim.config.faults import read_faults
from ownerserve.sim.config.setup import Links, SimSetup, Tiers
from ownerserve.sim.metrics.summary import digest
from ownerserve.sim.run import Result, simulate
from ownerserve.sim.timeline.heap import Heap
from ownerserve.sim.timeline.links import Link, Stream, linked, stream
from ownerserve.sim.worker.host import Host, hosts_of
from ownerserve.sim.workload import Open, WorkloadShape
from tests.support.sim.fleet_driver import BACK, MIB, agents, all_back_at_once, ready, run, setup
from tests.support.sim.sim_node_driver import SimNodeDriver, host

TRACE = agents()
LONG = 512
A_GB = 10**9
ONLY_BYTES = Links(nic_ms=0.0, disk_ms=0.0)


def hosts(workers: int, per_host: int, heap: Heap, links: Links = ONLY_BYTES) -> list[Host]:
    return hosts_of(SimSetup(workers=workers, workers_per_host=per_host, links=links), heap)


def ends_of(heap: Heap, streams: list[Stream]) -> list[float]:
    heap.run()
    assert None not in [one.ended_s for one in streams]
    return [one.ended_s or 0.0 for one in streams]


def link_of(one: Host) -> Link:
    assert one.memory_link is not None
    return one.memory_link.back


def test_so_many_workers_stand_on_a_host_and_the_last_may_have_fewer() -> None:
    made = hosts(5, 2, Heap())
    same = [one is other for one, other in pairwise(made)]
    assert same == [True, False, True, False]
    alone = hosts(2, 1, Heap())
    assert alone[0] is not alone[1] and alone[0].memory_link is None and alone[0].drive is None


@pytest.mark.parametrize("count", [1, 2, 8])
def test_workers_that_restore_at_once_each_get_their_part_of_the_hosts_link(count: int) -> None:
    """k real nodes bring equal state from host memory: each copy takes k times as long, and so
    each worker measures it."""
    heap = Heap()
    shared = linked("h0 memory", Medium(0.0, 50e6), heap)
    drivers = [SimNodeDriver((host(),), heap=heap, shared=shared) for _ in range(count)]
    prompts = [driver.fresh(LONG) for driver in drivers]
    for driver, ids in zip(drivers, prompts, strict=True):
        driver.turn("a", ids)
    drivers[0].rest()
    stored = drivers[0].store.counters["kept_bytes"]
    turns: list[TurnId] = []
    spec_ms = drivers[0].node.state.costs.load(Tier.HOST, stored).ms
    for driver, ids in zip(drivers, prompts, strict=True):
        driver.forget_device()
        turns.append(driver.arrive("a", ids + driver.fresh(8)))
    began_s = heap.now
    while any(turn not in driver.started for driver, turn in zip(drivers, turns, strict=True)):
        due_s = heap.next_s()
        assert due_s is not None, "nothing will ever start them"
        heap.run(due_s)
    # Each reads its own memory at 50 GB/s; then all share the link, and end together.
    expected_s = stored / 50e9 + count * stored / 50e9 + 3 * drivers[0].store.lookup_s
    assert heap.now - began_s == pytest.approx(expected_s, rel=0.02)
    measured_ms = drivers[0].node.state.costs.load(Tier.HOST, stored).ms
    if count == 1:
        assert measured_ms == pytest.approx(spec_ms, rel=0.05)
    else:
        assert 1.2 * spec_ms < measured_ms < 1.05e3 * expected_s
    for driver in drivers:
        driver.check()


def test_two_that_leave_a_host_share_its_nic_and_one_that_stays_does_not_reach_it() -> None:
    heap = Heap()
    made = hosts(8, 2, heap, Links(nic_ms=0.0, nic_gb_s=10.0, pcie_gb_s=40.0))
    away = [made[0].way_to(made[2], between=()), made[1].way_to(made[4], between=())]
    inside = made[0].way_to(made[1], between=(Link("switch", Medium(0.0, 1.0), heap),))
    streams = [stream(way, A_GB, 0.0) for way in (*away, inside)]
    assert [one.rate for one in streams] == pytest.approx([5e6, 5e6, 40e6])
    assert ends_of(heap, streams) == pytest.approx([0.2, 0.2, 0.025 + 0.05e-3])
    assert made[0].nic.out.moved_bytes == 2 * A_GB


def test_workers_of_two_hosts_do_not_meet() -> None:
    heap = Heap()
    made = hosts(4, 2, heap)
    streams = [stream((link_of(one),), A_GB, 0.0) for one in (made[0], made[2])]
    assert [one.rate for one in streams] == pytest.approx([51.2e6] * 2)


def test_a_slow_drive_slows_all_that_is_under_way_and_mends() -> None:
    heap = Heap()
    drive = linked("h0 drive", Medium(0.0, 1e6), heap)
    streams = [stream((drive.back,), 500_000_000, 0.0) for _ in range(2)]
    heap.at(0.5, lambda now: drive.back.slow(4.0))
    heap.at(1.5, lambda now: drive.back.slow(1.0))
    # 0.5 s whole, 1 s at a quarter, what is left whole: 0.5 + 0.25 + 0.25 GB
    assert ends_of(heap, streams) == pytest.approx([1.75, 1.75])
    with pytest.raises(InvalidInput):
        drive.back.slow(0.0)


# -- against a solver that raises all rates together -------------------------------------------

COURSES = st.lists(
    st.tuples(
        st.sampled_from(["restore", "spill", "read", "write", "send", "remote"]),
        st.integers(0, 5),  # the worker
        st.integers(0, 5),  # whom it sends to
        st.integers(1, 40),  # MB
        st.integers(0, 20),  # ms until it begins
    ),
    min_size=1,
    max_size=10,
)
SPEEDS = st.tuples(*[st.integers(1, 60)] * 5)


def filled(streams: list[Stream]) -> list[Fraction]:
    """Every rate grows alike until a link is full, which stops all that it carries: the max-min
    fair rates, by their definition and in exact numbers."""
    links = {link for one in streams for link in one.links}
    left = {link: Fraction(link.bytes_per_ms) for link in links}
    rates = {one: Fraction(0) for one in streams}
    growing = set(streams)
    while growing:
        used = {link: sum(link in one.links for one in growing) for link in links}
        step = min(left[link] / count for link, count in used.items() if count)
        for link, count in used.items():
            left[link] -= step * count
        for one in growing:
            rates[one] += step
        growing = {one for one in growing if all(left[link] > 0 for link in one.links)}
    return [rates[one] for one in streams]


@given(st.integers(2, 4), SPEEDS, COURSES)
def test_hosts_share_max_min_fairly(
    per_host: int,
    speeds: tuple[int, ...],
    courses: list[tuple[str, int, int, int, int]],
) -> None:
    """Whatever goes over hosts' links, NICs, drives and a remote tier: at every instant the rates
    are the solver's, no link is above its own, and no byte is lost or made."""
    nic, pcie, drive, far, switch_gb_s = speeds
    heap = Heap()
    links = Links(nic_gb_s=nic, pcie_gb_s=pcie, disk_gb_s=drive, nic_ms=0.0, disk_ms=0.0)
    made = hosts(6, per_host, heap, links)
    store = linked("remote", Medium(0.0, far * 1e6), heap)
    switch = Link("switch", Medium(0.0, switch_gb_s * 1e6), heap)
    streams: list[Stream] = []

    def way(kind: str, worker: int, target: int) -> tuple[Link, ...]:
        here = made[worker]
        assert here.memory_link is not None and here.drive is not None
        return {
            "restore": (here.memory_link.back,),
            "spill": (here.memory_link.out,),
            "read": (here.drive.back,),
            "write": (here.drive.out,),
            "send": here.way_to(made[target], between=(switch,)),
            "remote": (store.back, here.nic.back),
        }[kind]

    def begin(over: tuple[Link, ...], count: int, now: float) -> None:
        streams.append(stream(over, count, now))

    for kind, worker, target, mb, at_ms in courses:
        if kind != "send" or worker != target:
            heap.at(at_ms / 1e3, partial(begin, way(kind, worker, target), mb * 10**6))
    while heap.next_s() is not None:
        heap.run_some(1)
        moving = [one for one in streams if one.rate > 0]
        assert [one.rate for one in moving] == pytest.approx([float(r) for r in filled(moving)])
        for link in {link for one in moving for link in one.links}:
            assert sum(one.rate for one in link.streams) <= link.bytes_per_ms * (1 + 1e-9)
    for link in {link for one in streams for link in one.links}:
        assert link.moved_bytes == sum(one.count for one in streams if link in one.links)
    assert all(one.ended_s is not None for one in streams)


# -- whole runs --------------------------------------------------------------------------------

PCIE_GB_S = 20.0


def gone_cold(per_host: int, gb_s: float = PCIE_GB_S) -> SimSetup:
    return SimSetup(
        policy="round_robin",
        workers=4,
        workers_per_host=per_host,
        kv_bytes=5 << 30,
        abilities="hf",
        links=Links(pcie_gb_s=gb_s),
        tiers=Tiers(host_bytes=64 << 30),
        shape=WorkloadShape(mode=Open()),
    )


def restored(per_host: int, gb_s: float = PCIE_GB_S) -> Result:
    result = simulate(all_back_at_once(), gone_cold(per_host, gb_s))
    table = result.rows.table()
    late = table[table["arrived_s"] >= 100.0]
    assert len(late) == BACK and (late["restored_tokens"] > 0).all()
    return result


def loads_ms(result: Result) -> np.ndarray[Any, Any]:
    """How long each restore's bytes were on their way."""
    table = result.rows.table()
    return np.asarray(table[table["arrived_s"] >= 100.0]["restore_load_ms"])


def ttft_s(result: Result) -> float:
    table = result.rows.table()
    late = table[table["arrived_s"] >= 100.0]
    return float(np.mean(late["first_token_s"] - late["arrived_s"]))


def test_a_fleet_whose_workers_share_a_hosts_link_restores_in_its_closed_form() -> None:
    """Two turns a worker, four workers, one after the other on each: n bytes take n / (2 p) out of
    memory, which is a worker's own, and k n / p over the link that k share."""
    alone, two, four = restored(1), restored(2), restored(4)
    table = alone.rows.table()
    tokens = set(table[table["arrived_s"] >= 100.0]["restored_tokens"])
    [count] = tokens
    n = int(count) * geometry_of(pace_of(alone.setup.pace)).bytes_per_token
    part_ms = n / (PCIE_GB_S * 1e6)
    for result, sharing in ((alone, 1), (two, 2), (four, 4)):
        assert loads_ms(result) == pytest.approx((0.5 + sharing) * part_ms, rel=0.01)
    assert ttft_s(alone) < ttft_s(two) < ttft_s(four)
    wide = restored(4, 4 * PCIE_GB_S)
    assert loads_ms(wide) == pytest.approx((0.5 / 4 + 1) * part_ms, rel=0.01)
    assert digest(restored(4).metrics) == digest(four.metrics)


@pytest.mark.parametrize("policy", ["ownerserve", "static_pd_delta"])
def test_a_fleet_on_hosts_keeps_its_books_under_faults(policy: str) -> None:
    """Deaths, slow drives and cut NICs of hosts with all tiers; every book is checked on the
    way."""
    tiers = Tiers(host_bytes=2 << 30, disk_bytes=64 << 30, remote_bytes=64 << 30)
    faults = read_faults(
        "death:w1@3+4,slow_disk:w0@2+6x20,slow_disk:w1@3+2x5,link:w2@5+3",
        workers=4,
        disks=4,
        seed=0,
    )
    wanted = setup(policy, kv_bytes=1000 * MIB, tiers=tiers, workers_per_host=2, faults=faults)
    fleet = run(ready(TRACE, wanted), check_every=200)
    assert len(fleet.rows)


def test_what_breaks_on_a_host_breaks_for_all_its_workers() -> None:
    tiers = Tiers(disk_bytes=64 << 30)
    faults = read_faults(
        "slow_disk:w0@1+5x50,slow_disk:w1@2+2x90,link:w0@1+1", workers=4, disks=4, seed=0
    )
    wanted = setup("sticky", tiers=tiers, workers_per_host=2, faults=faults)
    built = ready(TRACE, wanted)
    fleet, disks = built.fleet, built.nodes.disks
    fleet.begin()
    seen = []
    for until_s in (0.9, 1.5, 2.5, 4.5, 6.5):
        built.heap.run(until_s=until_s)
        assert disks[0].reads is disks[1].reads and disks[0].reads is not disks[2].reads
        seen.append(disks[1].reads.factor)
    assert seen == [1.0, 50.0, 90.0, 50.0, 1.0] and disks[2].reads.factor == 1.0
    assert fleet.workers[1].host.nic.out.cut_until_s == pytest.approx(2.0)
    assert fleet.workers[2].host.nic.out.cut_until_s == 0.0


def test_no_worker_on_a_host_is_refused() -> None:
    with pytest.raises(InvalidInput, match="workers_per_host"):
        setup(workers_per_host=0)
