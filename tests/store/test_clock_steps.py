"""The wall clock set back and forth: what is stored stays right, nothing waits for the old time."""

from __future__ import annotations

import os
import random

import pytest

from ownerserve.kv.units import MIB
from ownerserve.store.disk.tier import DiskOptions, DiskTier
from ownerserve.store.format.model import ReadHit, Want, WriteDone
from ownerserve.store.format.seal import Keys
from ownerserve.store.tiers.backend import put
from ownerserve.store.tiers.blobs import DirectoryBlobs
from ownerserve.store.tiers.health import MAX_PAUSE_S, Health
from ownerserve.store.tiers.memory import MemoryTier
from ownerserve.store.tiers.placement import OnEviction, Placement, WriteBack, WriteThrough
from ownerserve.store.tiers.policy import KindLimits, TierLimits, WriteBudget
from ownerserve.store.tiers.remote import RemoteTier
from ownerserve.store.tiers.tiered import TieredStore
from tests.support.store.media import SteppingClock
from tests.support.store.samples import Samples

YEAR_S = 365 * 86_400.0
SMALL = TierLimits(KindLimits(MIB, 3600.0), KindLimits(MIB, 3600.0))
LARGE = TierLimits(KindLimits(64 * MIB), KindLimits(64 * MIB))


def test_a_pause_ends_though_the_clock_was_set_back():
    health = Health("medium")
    health.failed("full", 1e9)
    assert not health.writable(1e9)
    assert health.writable(1e9 + MAX_PAUSE_S)
    assert health.writable(1e9 - YEAR_S)


def test_a_write_budget_owes_nothing_for_time_that_was_taken_back():
    budget = WriteBudget(86_400.0, 1000.0)
    assert budget.admit(1000, 1e9)
    assert budget.admit(1000, 1e9 - YEAR_S)
    budget.spend(1000, 1e9 - YEAR_S)
    assert not budget.admit(1, 1e9 - YEAR_S)
    assert budget.admit(10, 1e9 - YEAR_S + 11)


def test_a_listing_from_the_future_is_listed_anew(tmp_path):
    clock, blobs = SteppingClock(1.7e9), DirectoryBlobs(tmp_path)
    room = TierLimits(KindLimits(40_000), KindLimits(40_000))
    one, two = (
        RemoteTier("remote", blobs, clock=clock, keys=Keys(), limits=room) for _ in range(2)
    )
    put(one, Samples.meta(0), Samples.payload(0))
    clock.step(-YEAR_S)
    put(two, Samples.meta(1), Samples.payload(1))
    put(two, Samples.meta(2), Samples.payload(2))
    put(one, Samples.meta(3), Samples.payload(3))  # by what stands now, not by the old listing
    assert sum(used.stored_bytes for used in two.usage().values()) <= 40_000 + 20_000
    assert one.counters["evicted"] >= 1


@pytest.mark.parametrize("policy", [OnEviction(), WriteBack(), WriteThrough()])
def test_a_store_lives_through_a_clock_that_is_set(tmp_path, policy):
    clock, dice = SteppingClock(1.7e9), random.Random(4)
    options = DiskOptions(limits=SMALL, segment_bytes=MIB, write_budget=WriteBudget(1e12, 1e8))
    blobs = DirectoryBlobs(tmp_path / "shared")
    store = TieredStore(
        [
            MemoryTier(clock, SMALL),
            DiskTier(tmp_path / "disk", clock, options=options),
            RemoteTier("remote", blobs, clock=clock, keys=Keys(b"k" * 32), limits=LARGE),
        ],
        Placement(write=policy),
    )
    truth: dict[int, bytes] = {}
    hits = 0
    for _ in range(400):
        number = dice.randrange(16)
        match dice.randrange(6):
            case 0:
                clock.step(dice.choice((-YEAR_S, YEAR_S, -3601.0, 3601.0, -0.5, 10.0)))
            case 1:
                store.settle()
            case 2:
                store.expire()
            case 3 | 4:
                payload = os.urandom(60_000)
                outcome = put(store, Samples.meta(number), payload)
                if isinstance(outcome, WriteDone):
                    # One that expired on top only may stand below: sealed, the first bytes count.
                    store.remove([Samples.meta(number).id])
                    truth[number] = payload
                    assert isinstance(put(store, Samples.meta(number), payload), WriteDone)
            case _:
                found = store.read([Want(Samples.meta(number).id)])
                if isinstance(found, ReadHit):
                    assert bytes(found.parts[0].data) == truth[number]
                    hits += 1
    assert hits > 20
    store.close()
