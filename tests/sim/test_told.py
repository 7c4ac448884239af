"""What simulated workers say that they hold reaches the router, and turns go by it."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.messages import PlacementAction, Tier
from ownerserve.kv.units import GIB
from ownerserve.kv.wire.inventory import Lost
from ownerserve.node.ownership.inventory import Held
from ownerserve.router.messages import Gone, Reported
from ownerserve.router.state import RouterState
from ownerserve.sim.config.setup import Links, SimSetup, Tiers
from ownerserve.sim.fleet.fleet import SimFleet
from ownerserve.sim.fleet.told import ResidencyNews
from ownerserve.sim.metrics.rows import ACTIONS, SERVED
from ownerserve.sim.timeline.heap import Heap
from tests.support.sim.fleet_driver import MIB, agents, ready, run, setup

DISKS = Tiers(disk_bytes=256 * GIB)
FAST_DISK = Links(disk_gb_s=40.0)
"""Else computing again is cheaper on an H200 (docs/simulator.md)."""
RESTORE = list(ACTIONS).index(PlacementAction.TAIL_RECOMPUTE)


def small(**changes: object) -> SimSetup:
    """Two workers, each with room for about two sessions, and a disk that pays."""
    return setup(workers=2, kv_bytes=1000 * MIB, tiers=DISKS, links=FAST_DISK, **changes)


def told_and_cached(fleet: SimFleet) -> tuple[int, int]:
    """Turns that were sent to load from a tier, and those of them that found all but a little."""
    table = fleet.rows.table()
    sent = table[(table["action"] == RESTORE) & np.isin(table["mode"], SERVED)]
    return len(sent), int((sent["cached_tokens"] > 0).sum())


def test_a_turn_is_sent_to_load_what_its_worker_holds_below_the_device() -> None:
    fleet = run(ready(agents(10, 6, seed=5), small()))
    sent, found = told_and_cached(fleet)
    assert sent > 5
    assert found >= 0.9 * sent
    for worker in fleet.workers:
        inventory = worker.machine.node.inventory
        inventory.check()
        assert any(word.tier == Tier.DISK.value for word in inventory)


def test_cut_the_wire_and_nobody_is() -> None:
    with patch.object(ResidencyNews, "join", lambda self, worker: None):
        fleet = run(ready(agents(10, 6, seed=5), small()))
    assert told_and_cached(fleet) == (0, 0)


@pytest.mark.parametrize("tiers", [Tiers(), DISKS])
@pytest.mark.parametrize("news_ms", [0.0, 50.0, 500.0])
def test_each_word_is_heard_so_long_after_it_was_said(news_ms: float, tiers: Tiers) -> None:
    wanted = msgspec.structs.replace(small(news_ms=news_ms), tiers=tiers)
    said: Counter[tuple[float, str, str]] = Counter()
    heard: Counter[tuple[float, str, str]] = Counter()
    handle = RouterState.handle

    def hears(router: RouterState, event: Any, now: float) -> Any:
        if isinstance(event, Gone | Reported) and event.prefix_hash is None:
            assert event.session is not None
            heard[round(now - news_ms / 1e3, 6), event.session, event.tier.value] += 1
        return handle(router, event, now)

    with patch.object(RouterState, "handle", hears):
        built = ready(agents(10, 6, seed=5), wanted)
        heap = built.heap
        for worker in built.fleet.workers:
            worker.machine.node.inventory.watch(partial(_note, said, heap))
        run(built)
    ended = {key for key in said if key[0] >= heap.now - news_ms / 1e3 - 1e-6}
    assert len(said) > 100
    assert heard == Counter({key: n for key, n in said.items() if key not in ended})


def _note(said: Counter[tuple[float, str, str]], heap: Heap, word: Held | Lost) -> None:
    said[round(heap.now, 6), word.session, word.tier] += 1


def test_without_news_the_router_hears_of_no_loss() -> None:
    fleet = run(ready(agents(10, 6, seed=5), small(news_ms=None)))
    assert told_and_cached(fleet) == (0, 0)


@pytest.mark.parametrize("news_ms", [-1.0, float("nan"), float("inf")])
def test_a_delay_that_is_none_is_refused_by_name(news_ms: float) -> None:
    with pytest.raises(InvalidInput, match="news_ms"):
        SimSetup(news_ms=news_ms)


def test_the_next_life_of_a_worker_tells_what_its_disk_holds() -> None:
    built = ready(agents(10, 6, seed=5), small())
    fleet, heap = built.fleet, built.heap
    fleet.begin()
    heap.run(until_s=8.0)
    worker = fleet.workers[0]
    before = _on_disk(fleet)
    assert before
    fleet.down(worker, heap.now)
    heap.run(until_s=8.5)
    fleet.back(worker, heap.now)
    heap.run(until_s=9.0)
    after = _on_disk(fleet)
    assert before.keys() <= after.keys()
    run_on = [session for session in before if before[session] <= after[session]]
    assert len(run_on) == len(before)
    while fleet.is_busy:
        heap.run_some(1000)
    fleet.check()


def _on_disk(fleet: SimFleet) -> dict[str, int]:
    words = fleet.workers[0].machine.node.inventory
    return {word.session: word.tokens for word in words if word.tier == Tier.DISK.value}


@pytest.mark.parametrize("tiers", [Tiers(), DISKS])
def test_equal_runs_are_told_equal_things(tiers: Tiers) -> None:
    wanted = msgspec.structs.replace(small(), tiers=tiers)
    tables = [run(ready(agents(6, 4, seed=2), wanted)).rows.table() for _ in range(2)]
    assert tables[0].tobytes() == tables[1].tobytes()
