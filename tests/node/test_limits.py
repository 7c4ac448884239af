"""What a store may hold, for how long, and what it may write: said to any opener, kept on disk."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ownerserve.engines.vllm.settings import decode
from ownerserve.kv.clock import ManualClock
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.units import GIB, KIB, MIB
from ownerserve.node.storage.backing import Upkeep, open_backing
from ownerserve.node.storage.limits import StoreLimits
from ownerserve.store.disk.tier import DiskOptions, DiskTier
from ownerserve.store.format.model import RefusalReason, Want, WriteDone, WriteRefused
from ownerserve.store.tiers.backend import put
from ownerserve.store.tiers.policy import KindLimits, TierLimits, WriteBudget
from tests.support.store.samples import Samples

CAPACITY = 64 * MIB
HOT = 24


def on_disk(directory: Path) -> int:
    """Bytes that the file system has given to the store's files."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return sum(path.stat().st_blocks * 512 for path in files)


@pytest.mark.slow
def test_ten_turnovers_with_hot_records_take_a_quarter_more_than_the_capacity(tmp_path) -> None:
    """What is read all the time pins its segments; the open segment is preallocated."""
    clock, limits = ManualClock(1.7e9), StoreLimits(disk_bytes=CAPACITY)
    tier = DiskTier(tmp_path, clock, options=limits.on_disk())
    upkeep, most = Upkeep([tier], limits.upkeep_s), 0
    for number in range(10 * CAPACITY // MIB):
        meta = Samples.meta(number)
        assert isinstance(put(tier, meta, Samples.payload(number, MIB - 64 * KIB)), WriteDone)
        is_hot = number % 10 == 0 and number < 10 * HOT
        tier.price({meta.id: 1e6 if is_hot else 1.0})
        for hot in range(0, min(number + 1, 10 * HOT), 10) if number % 10 == 0 else ():
            tier.read([Want(Samples.meta(hot).id, 0, 1)])
        clock.advance(1.0)
        if number % 60 == 0:
            upkeep.run_once()
        if number % 5 == 0:
            most = max(most, on_disk(tmp_path))
    assert most <= 1.25 * CAPACITY
    assert len(tier.find([Samples.meta(10 * n).id for n in range(HOT)])) == HOT
    assert upkeep.counts["segments_compacted"] > 0
    tier.close()


def test_a_store_made_for_more_room_keeps_to_less(tmp_path) -> None:
    """Its segments were of 256 MiB; the open one is not preallocated so any more."""
    clock = ManualClock(1.7e9)
    DiskTier(tmp_path, clock, options=StoreLimits().on_disk()).close()
    tier = DiskTier(tmp_path, clock, options=StoreLimits(disk_bytes=CAPACITY).on_disk())
    put(tier, Samples.meta(1), Samples.payload(1))
    assert on_disk(tmp_path) <= CAPACITY / 4
    tier.close()
    tier = DiskTier(tmp_path, clock, options=StoreLimits().on_disk())
    assert Samples.read(tier, 1) == [Samples.payload(1)]
    tier.close()


def test_compaction_counts_against_the_write_budget(tmp_path) -> None:
    clock, budget = ManualClock(1.7e9), WriteBudget(1e6, 4 * MIB)
    limits = TierLimits(KindLimits(64 * MIB), KindLimits(MIB))
    options = DiskOptions(limits=limits, segment_bytes=MIB, write_budget=budget)
    tier = DiskTier(tmp_path, clock, options=options)
    for number in range(14):
        put(tier, Samples.meta(number), Samples.payload(number, 200_000))
    tier.remove([Samples.meta(number).id for number in range(13) if number not in (0, 5)])
    spent = tier.core.counters["stored_bytes"]
    assert budget.admit(4 * MIB - spent, clock.now())
    Upkeep([tier], 0.0).run_once()
    copied = tier.core.counters["compacted_bytes"]
    assert copied > 0
    assert not budget.admit(4 * MIB - spent - copied + 1, clock.now())
    assert budget.admit(4 * MIB - spent - copied, clock.now())
    tier.close()


def test_every_limit_reaches_the_tiers(tmp_path) -> None:
    limits = StoreLimits(
        disk_bytes=GIB, range_ttl_s=100.0, point_ttl_s=0.0, disk_bytes_per_day=300 * MIB
    )
    backing = open_backing(tmp_path, 64 * MIB, limits=limits)
    assert backing is not None
    memory, disk = backing.tiers.tiers
    for tier, capacity in ((memory, 64 * MIB), (disk, GIB)):
        assert tier.limits.capacity_bytes == capacity
        assert (tier.limits.range.ttl_s, tier.limits.point.ttl_s) == (100.0, None)
    assert backing.upkeep.every_s == 60.0
    assert "store-upkeep" in {thread.name for thread in threading.enumerate()}
    for number in range(5):
        last = put(disk, Samples.meta(number), Samples.payload(number, 64 * MIB))
    assert last == WriteRefused(RefusalReason.WRITE_BUDGET, Samples.meta(4).id)
    backing.close()


def test_vllms_settings_are_limits() -> None:
    assert decode({"store": "x"}).store_limits(0.3) == StoreLimits(point_share=0.3)
    given = {
        "store": "x",
        "store_bytes": GIB,
        "store_bytes_per_day": 5 * GIB,
        "store_upkeep_s": 7.0,
        "range_ttl_s": 10.0,
        "point_ttl_s": 5.0,
    }
    assert decode(given).store_limits(0.5) == StoreLimits(
        disk_bytes=GIB,
        point_share=0.5,
        range_ttl_s=10.0,
        point_ttl_s=5.0,
        disk_bytes_per_day=5 * GIB,
        upkeep_s=7.0,
    )


@pytest.mark.parametrize(
    "field", ["disk_bytes", "range_ttl_s", "point_ttl_s", "disk_bytes_per_day", "upkeep_s"]
)
def test_a_limit_below_nothing_is_refused(field: str) -> None:
    with pytest.raises(InvalidInput, match="use "):
        StoreLimits(**{field: -1})
