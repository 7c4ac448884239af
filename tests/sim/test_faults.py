"""What breaks loses time and state, and no request; afterwards all is as before."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from ownerserve.cache.hetero import parts_of
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.messages import ExecutionMode
from ownerserve.sim.config.clients import ClientSettings
from ownerserve.sim.config.faults import Draw, Fault, FaultKind, draw, read_faults
from ownerserve.sim.config.setup import Links, SimSetup, Tiers
from ownerserve.sim.fleet.fleet import SimFleet
from ownerserve.sim.metrics.rows import MODES, NO_WORKER, SERVED
from ownerserve.sim.run import simulate
from ownerserve.sim.timeline.heap import Heap
from ownerserve.sim.workload import Capped, WorkloadShape
from tests.support.sim.fleet_driver import MIB, agents, all_back_at_once, ready, run, setup

TRACE = agents(10, 6, seed=5, most_output=200)


FAST_DISK = Links(disk_gb_s=40.0)
"""Else computing again is cheaper on an H200 (docs/simulator.md)."""


def spec(text: str, *, workers: int = 4, disks: int = 4) -> tuple[Fault, ...]:
    return read_faults(text, workers=workers, disks=disks, seed=7)


def held(fleet: SimFleet) -> dict[int, int]:
    """Blocks by worker."""
    return {worker.index: parts_of(worker.cache).tree.blocks for worker in fleet.workers}


# -- as data


def test_a_specification_is_read_part_by_part() -> None:
    assert spec("death:w3@600+120, slow_disk:1@300+60x10,directory@500+inf") == (
        Fault(kind=FaultKind.DEATH, at_s=600, lasts_s=120, worker=3),
        Fault(kind=FaultKind.SLOW_DISK, at_s=300, lasts_s=60, worker=1, factor=10),
        Fault(kind=FaultKind.DIRECTORY, at_s=500, lasts_s=float("inf")),
    )


@pytest.mark.parametrize(
    "text",
    [
        "death",
        "death:w3@600",
        "death:w9@1+1",
        "death@1+1",
        "flood:w1@1+1",
        "directory:w1@1+1",
        "link:w1@1.2.3+1",
        "link:w1@1+0",
        "slow_disk:w1@1+1x0",
    ],
)
def test_what_can_not_be_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidInput):
        spec(text)


def test_a_slow_disk_needs_a_disk() -> None:
    with pytest.raises(InvalidInput, match="no disk"):
        spec("slow_disk:w1@1+1x2", disks=0)
    assert FaultKind.SLOW_DISK not in {fault.kind for fault in spec("drawn:40@0+9", disks=0)}


def test_a_file_holds_the_same(tmp_path: object) -> None:
    from pathlib import Path

    path = Path(str(tmp_path)) / "faults.json"
    path.write_bytes(msgspec.json.encode(spec("death:w3@600+120,link:w1@5+6")))
    assert spec(str(path)) == spec("death:w3@600+120,link:w1@5+6")
    path.write_text('[{"kind": "death", "at_s": 1, "lasts_s": 1, "wroker": 1}]')
    with pytest.raises(InvalidInput, match="wroker"):
        spec(str(path))


def test_a_draw_is_the_seeds() -> None:
    wish = Draw(20, 5.0, 10.0)
    assert draw(wish, workers=3, seed=1) == draw(wish, workers=3, seed=1)
    assert draw(wish, workers=3, seed=1) != draw(wish, workers=3, seed=2)
    assert all(5.0 <= fault.at_s < 15.0 for fault in draw(wish, workers=3, seed=1))


# -- performed


def test_a_death_sends_what_had_not_begun_elsewhere_and_the_worker_comes_back_empty() -> None:
    wanted = setup("ear", faults=spec("death:w1@3+6"))
    built = ready(TRACE, wanted)
    fleet, heap = built.fleet, built.heap
    fleet.begin()
    heap.run(until_s=2.9999)
    assert held(fleet)[1] > 0
    heap.run(until_s=3.0)
    fleet.check()
    assert held(fleet)[1] == 0 and not fleet.workers[1].is_up
    heap.run(until_s=9.0)
    assert fleet.workers[1].is_up and fleet.workers[1].incarnation == 2
    while fleet.is_busy:
        heap.run_some(50)
        fleet.check()
    table = fleet.rows.table()
    assert len(table) == TRACE.request_count
    down = (table["routed_s"] > 3.0) & (table["routed_s"] < 9.0)
    assert down.any() and not (table["worker"][down] == 1).any()
    assert (table["worker"][table["routed_s"] > 9.0] == 1).any()  # service goes on there too
    failed = table[~np.isin(table["mode"], SERVED)]
    assert (failed["done_s"] == 3.0).all()  # only answers that had begun
    assert (failed["first_token_s"] <= 3.0).all()


def test_a_turn_that_waited_at_the_dead_is_served_by_another() -> None:
    crowd = setup("ear", workers=2, step_tokens=512, faults=spec("death:w0@0.05+60", workers=2))
    table = run(ready(TRACE, crowd)).rows.table()
    again = table[table["attempts"] > 1]
    assert len(again) and np.isin(again["mode"], SERVED).all() and (again["worker"] == 1).all()


def test_a_disk_outlives_its_worker() -> None:
    tiers = Tiers(disk_bytes=256 << 30)
    wanted = setup("sticky", workers=1, kv_bytes=1000 * MIB, tiers=tiers, links=FAST_DISK)
    faults = read_faults("death:w0@8+1", workers=1, disks=1, seed=0)
    broken = msgspec.structs.replace(wanted, faults=faults)
    table = run(ready(agents(4, 6), broken)).rows.table()
    after = table[table["routed_s"] > 9.0]
    assert (after["restored_tokens"] > 0).any()


def test_a_slow_disk_is_waited_for_and_mends() -> None:
    tiers = Tiers(disk_bytes=256 << 30)
    wanted = setup("sticky", workers=1, kv_bytes=1000 * MIB, tiers=tiers)
    built = ready(TRACE, wanted)
    faults = read_faults("slow_disk:w0@1+5x50,slow_disk:w0@2+2x9", workers=1, disks=1, seed=0)
    built = ready(TRACE, msgspec.structs.replace(wanted, faults=faults))
    fleet, heap, disk = built.fleet, built.heap, built.nodes.disks[0]
    fleet.begin()
    seen = []
    for until_s in (0.9, 1.5, 2.5, 4.5, 6.5):
        heap.run(until_s=until_s)
        seen.append(disk.reads.factor)
    assert seen == [1.0, 50.0, 50.0, 50.0, 1.0]
    assert disk.writes.factor == 1.0


def test_a_lost_link_delays_a_split_turn_or_has_it_computed_where_it_decodes() -> None:
    wanted = setup("static_pd_delta", transfer_s=5.0)
    calm = run(ready(TRACE, wanted)).rows.table()
    cut = msgspec.structs.replace(wanted, faults=spec("link:w2@2+20"))
    table = run(ready(TRACE, cut)).rows.table()
    assert np.isin(table["mode"], SERVED).all() and len(table) == len(calm)
    alone = table[table["mode"] != MODES.index(ExecutionMode.REMOTE_PREFILL)]
    assert len(alone) and (alone["worker"] == 2).all()
    assert (alone["prefill_worker"] == NO_WORKER).all()


@pytest.mark.parametrize("nic_gb_s", [12.5, 2.0])
@pytest.mark.parametrize(
    ("faults", "timeout_s"),
    [("", None), ("death:w0@1+2", None), ("death:w1@5+2,death:w0@9+1", None), ("", 0.8), ("", 1.8)],
)
def test_each_byte_that_crosses_is_in_the_row_of_the_turn_it_crossed_for(
    nic_gb_s: float, faults: str, timeout_s: float | None
) -> None:
    """Also of a prompt whose worker dies amid it, and of one whose client hangs up."""
    wanted = setup(
        "static_pd_delta",
        kv_bytes=0,
        links=Links(nic_gb_s=nic_gb_s),
        faults=spec(faults, disks=0) if faults else (),
        clients=ClientSettings(timeout_s=timeout_s),
    )
    fleet = run(ready(all_back_at_once(), wanted))
    crossed = sum(worker.host.nic.out.moved_bytes for worker in fleet.workers)
    assert fleet.rows.table()["network_bytes"].sum() == crossed > 0


def test_the_directory_comes_back_empty_under_a_later_term_and_learns_again() -> None:
    wanted = setup("ownerserve", faults=spec("directory@3+2"))
    built = ready(TRACE, wanted)
    fleet, heap = built.fleet, built.heap
    ownership = fleet.ownership
    before = ownership.state.term
    fleet.begin()
    heap.run(until_s=2.9)
    assert ownership.state.counts().sessions > 0
    heap.run(until_s=5.0)
    assert ownership.state.term > before and ownership.state.counts().sessions == 0
    run_on(fleet, built.heap)
    assert len(fleet.rows) == TRACE.request_count


def run_on(fleet: SimFleet, heap: Heap) -> None:
    while fleet.is_busy:
        heap.run_some(200)
    fleet.check()


POLICIES = ("ownerserve", "ear", "static_pd_delta", "least_load")


@examples(max_examples=12, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(POLICIES), st.booleans())
def test_whatever_breaks_every_request_ends_once(seed: int, policy: str, tiered: bool) -> None:
    tiers = Tiers(host_bytes=1 << 30, disk_bytes=64 << 30) if tiered else Tiers()
    wish = Draw(8, 0.0, 40.0, tuple(k for k in FaultKind if tiered or k != "slow_disk"))
    faults = draw(wish, workers=4, seed=seed)
    wanted = setup(policy, kv_bytes=1200 * MIB, tiers=tiers, faults=faults)
    fleet = run(ready(TRACE, wanted), check_every=301)
    assert sorted(fleet.rows.table()["number"]) == list(range(TRACE.request_count))


def test_books_are_whole_while_a_transfer_and_a_turn_in_line_are_open() -> None:
    """Room that a transfer has reserved is no restore's that was forgotten."""
    tiers = Tiers(host_bytes=1 << 30, disk_bytes=64 << 30)
    faults = draw(Draw(8, 0.0, 40.0), workers=4, seed=3)
    wanted = setup("static_pd_delta", kv_bytes=1200 * MIB, tiers=tiers, faults=faults)
    run(ready(TRACE, wanted), check_every=7)


def test_faults_are_part_of_what_is_repeated() -> None:
    wanted = SimSetup(
        workers=3, running=8, kv_bytes=1500 * MIB, shape=WorkloadShape(mode=Capped(6)),
        faults=spec("drawn:6@0+30", workers=3, disks=0),
    )  # fmt: skip
    first, second = simulate(TRACE, wanted), simulate(TRACE, wanted)
    assert first.metrics == second.metrics
    assert first.rows.table().tobytes() == second.rows.table().tobytes()
