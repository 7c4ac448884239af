"""An SSD's log: holes, compaction, write amplification; and a tier's room over it."""

from __future__ import annotations

import random

import msgspec
import pytest

from ownerserve.kv.messages import Tier
from ownerserve.kv.units import MIB
from ownerserve.plan.cost.prices import Medium
from ownerserve.sim.storage.segments import Segments
from ownerserve.sim.storage.tier import UPKEEP_S, SimTier, TierPlan
from ownerserve.store.format.model import ArtifactKind, Listed, Meta, RefusalReason
from ownerserve.store.tiers.policy import KindLimits, TierLimits, split

SEGMENT = 1000


def id_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


def meta_of(number: int, *, kind: ArtifactKind = ArtifactKind.RANGE, tenant: bytes = b"") -> Meta:
    return Meta(id_of(number), kind, "kv", id_of(number), 0, 8, tenant=tenant)


def plan_of(limits: TierLimits, tier: Tier = Tier.DISK) -> TierPlan:
    medium = Medium(0.1, 1e6)
    return TierPlan(tier=tier, limits=limits, read=medium, write=medium, segment_bytes=4 * MIB)


def test_a_segment_without_records_is_a_file_less() -> None:
    log = Segments(SEGMENT)
    for number in range(10):
        log.append(id_of(number), 250)
    assert log.occupied_bytes == 2500
    for number in range(4):
        log.remove(id_of(number))
    assert log.occupied_bytes == 1500 and log.written_bytes == 2500


def test_sparse_segments_are_written_again_once_there_are_two() -> None:
    log = Segments(SEGMENT)
    for number in range(40):
        log.append(id_of(number), 100)
    for number in range(9):
        log.remove(id_of(number))
    assert log.compact() == 0, "one alone would only be moved"
    for number in range(10, 19):
        log.remove(id_of(number))
    assert log.compact() == 200
    assert log.written_bytes == 4200 and log.occupied_bytes == 2200
    log.remove(id_of(9))
    log.remove(id_of(19))


def test_a_log_under_random_writes_stays_sound() -> None:
    draw, log, alive = random.Random(7), Segments(SEGMENT), dict[int, int]()
    for number in range(4000):
        size = draw.choice((40, 100, 300))
        log.append(id_of(number), size)
        alive[number] = size
        while sum(alive.values()) > 8000:
            gone = draw.choice(sorted(alive))
            del alive[gone]
            log.remove(id_of(gone))
        if number % 50 == 0:
            log.compact()
    assert sum(alive.values()) <= log.occupied_bytes <= 5 * 8000
    assert 1.0 <= log.written_bytes / log.appended_bytes < 1.5


def fill(tier: SimTier, numbers: range, now_s: float, size: int = MIB) -> list[RefusalReason]:
    refused = []
    for number in numbers:
        got = tier.reserve(meta_of(number), size, now_s)
        if isinstance(got, RefusalReason):
            refused.append(got)
        else:
            tier.commit(id_of(number), 1.0, now_s)
    tier.check()
    return refused


def test_what_is_worth_least_goes_for_more() -> None:
    tier = SimTier(plan_of(split(20 * MIB)))
    assert not fill(tier, range(10), 0.0)
    for _ in range(3):
        tier.touch(id_of(0), 1.0)
    fill(tier, range(10, 30), 2.0)
    assert tier.get(id_of(0)) is not None and tier.get(id_of(1)) is None
    assert tier.counters["evicted"] > 10 and tier.used_bytes <= 16 * MIB
    assert tier.segments is not None and tier.segments.appended_bytes > 30 * MIB


def test_point_state_never_evicts_ranges() -> None:
    tier = SimTier(plan_of(split(20 * MIB)))
    fill(tier, range(12), 0.0)
    before = tier.records
    for number in range(100, 110):
        got = tier.reserve(meta_of(number, kind=ArtifactKind.POINT), MIB, 1.0)
        assert not isinstance(got, RefusalReason)
        tier.commit(id_of(number), 1.0, 1.0)
    tier.check()
    assert all(tier.get(id_of(number)) is not None for number in range(12))
    assert tier.records == before + 3, "a fifth of the room, less headers"


def test_a_record_too_large_is_refused() -> None:
    tier = SimTier(plan_of(split(20 * MIB)))
    assert fill(tier, range(1), 0.0, 17 * MIB) == [RefusalReason.NO_SPACE]


def test_what_is_being_written_takes_room_and_is_not_read() -> None:
    tier = SimTier(plan_of(split(20 * MIB), Tier.HOST))
    got = tier.reserve(meta_of(1), MIB, 0.0)
    assert isinstance(got, tuple) and isinstance(got[0], Listed)
    assert tier.get(id_of(1)) is None and tier.used_bytes == MIB
    assert tier.reserve(meta_of(1), MIB, 0.0) is RefusalReason.BUSY
    tier.check()
    tier.forget_coming(id_of(1))
    assert tier.used_bytes == 0
    tier.check()


def test_what_nobody_reads_expires() -> None:
    tier = SimTier(plan_of(TierLimits(KindLimits(64 * MIB, 100.0), KindLimits(MIB, 10.0))))
    fill(tier, range(4), 0.0)
    tier.touch(id_of(0), 90.0)
    fill(tier, range(4, 5), 101.0 + UPKEEP_S)
    assert tier.get(id_of(0)) is not None
    assert [tier.get(id_of(number)) for number in (1, 2, 3)] == [None] * 3
    assert tier.counters["expired"] == 3


def test_a_boundary_finds_the_record_around_it() -> None:
    tier = SimTier(plan_of(split(20 * MIB)))
    inner = b"".join(id_of(number) for number in (101, 102, 103))
    for number, name in ((1, "main"), (2, "index")):
        meta = msgspec.structs.replace(
            meta_of(number), component=name, units=4, boundaries=inner, prefix_hash=id_of(104)
        )
        assert isinstance(tier.reserve(meta, MIB, 0.0), tuple)
        tier.commit(id_of(number), 1.0, 0.0)
    found = tier.at_boundary(id_of(102))
    assert [(meta.component, units) for meta, units in found] == [("main", 2), ("index", 2)]
    assert [units for _, units in tier.at_boundary(id_of(104))] == [4, 4]
    assert tier.at_boundary(id_of(999)) == []
    tier.remove(id_of(1))
    assert [meta.component for meta, _ in tier.at_boundary(id_of(102))] == ["index"]
    tier.remove(id_of(2))
    assert tier.at_boundary(id_of(102)) == []


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.REMOTE])
def test_only_drives_have_logs(tier: Tier) -> None:
    made = SimTier(plan_of(split(MIB), tier))
    assert made.segments is None and made.is_volatile is (tier is Tier.HOST)
