"""The store under a node: priced when written, looked into by boundary, tidied on a timer."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from ownerserve.kv.clock import ManualClock
from ownerserve.kv.ids import TurnId
from ownerserve.kv.messages import Tier
from ownerserve.kv.prefix import hash_prefix, pack
from ownerserve.kv.units import MIB
from ownerserve.node.storage import backing as storage_backing
from ownerserve.node.storage.backing import (
    MORE_AFTER_S,
    Backing,
    ListedPart,
    NodeTiers,
    Upkeep,
    open_backing,
)
from ownerserve.node.storage.limits import StoreLimits
from ownerserve.node.storage.media import open_remote, write_policy
from ownerserve.node.vocabulary.events import PeerPrefix
from ownerserve.node.vocabulary.records import Cell, Inside, RecordNames
from ownerserve.plan.cost.events import Loaded
from ownerserve.store.disk.tier import DiskOptions, DiskTier
from ownerserve.store.format.model import (
    Meta,
    MissReason,
    ReadHit,
    ReadMiss,
    ReadOutcome,
    Want,
    WriteDone,
)
from ownerserve.store.service.runtime import READERS
from ownerserve.store.tiers.backend import Reservation, put
from ownerserve.store.tiers.memory import MemoryTier
from ownerserve.store.tiers.policy import KindLimits, TierLimits, by_utility, split
from tests.support.node.node_driver import IDENTITY, LAYOUT, B
from tests.support.waits import until

NAMES = RecordNames(IDENTITY, LAYOUT, engine="toy/1", blocks=4)
DIGESTS = hash_prefix(pack(range(16 * B)), B)
KEPT = TierLimits(KindLimits(8 * MIB, 100.0), KindLimits(8 * MIB, 10.0))


def write(tiers: NodeTiers, meta: Meta, *, record_value_ms: float | None = None) -> None:
    reserved = tiers.reserve(meta, 32 * meta.units)
    assert isinstance(reserved, Reservation), reserved
    reserved.payload[:] = bytes(32 * meta.units)
    if record_value_ms is not None:
        tiers.record_value_ms[meta.id] = record_value_ms
    [outcome] = tiers.commit([reserved])
    assert isinstance(outcome, WriteDone)


def test_a_record_is_priced_when_it_is_written(tmp_path: Path) -> None:
    clock = ManualClock(1000.0)
    tiers = NodeTiers([MemoryTier(clock, split(MIB), order=by_utility), DiskTier(tmp_path, clock)])
    meta = NAMES.range_meta("main", Cell(0, 4), DIGESTS)
    write(tiers, meta, record_value_ms=12.5)
    assert [t.find([meta.id])[meta.id].restore_cost_ms for t in tiers.tiers] == [12.5, 12.5]
    assert not tiers.record_value_ms, "said once"
    tiers.close()


def test_a_store_on_disk_holds_what_it_is_told_to(tmp_path: Path) -> None:
    backing = open_backing(tmp_path, 0, limits=StoreLimits(disk_bytes=MIB, point_share=0.5))
    assert backing is not None
    [disk] = backing.tiers.tiers
    assert isinstance(disk, DiskTier)
    assert disk.limits.range.capacity_bytes == disk.limits.point.capacity_bytes == MIB // 2
    assert backing.sizes[Tier.DISK] == MIB
    backing.close()


def test_what_is_worth_least_makes_room(tmp_path: Path) -> None:
    """Three records of 8 KiB, room for two on disk: the oldest stays, it is worth most."""
    clock = ManualClock(1000.0)
    limits = TierLimits(KindLimits(20_000, None), KindLimits(20_000, None))
    tiers = NodeTiers([DiskTier(tmp_path, clock, options=DiskOptions(limits=limits))])
    metas = [NAMES.range_meta("main", Cell(4 * n, 4 * n + 4), DIGESTS) for n in range(3)]
    for meta, record_value_ms in zip(metas, (90.0, 5.0, 40.0), strict=True):
        write(tiers, meta, record_value_ms=record_value_ms)
        clock.advance(1.0)
    held = tiers.find([meta.id for meta in metas])
    assert [meta.id in held for meta in metas] == [True, False, True]
    tiers.close()


def test_a_branch_finds_the_record_it_shares_in_part(tmp_path: Path) -> None:
    tiers = NodeTiers([DiskTier(tmp_path, ManualClock(1000.0))])
    whole = NAMES.range_meta("main", Cell(4, 8), DIGESTS)
    write(tiers, NAMES.range_meta("main", Cell(0, 4), DIGESTS))
    write(tiers, whole)
    branch = hash_prefix(pack([*range(6 * B), *range(900, 900 + 3 * B)]), B)
    ids = [NAMES.range_id("main", Cell(0, 4), branch)]
    found = tiers.look(ids, tuple(reversed(branch)))
    assert set(found) == {*ids, whole.id}
    part = found[whole.id]
    assert isinstance(part, ListedPart) and (part.units, part.boundary) == (2, branch[5])
    inside = Inside(part.meta, part.units, part.boundary)
    assert NAMES.shared_cell(inside, branch) == Cell(4, 6)
    assert tiers.nearest(found) == {ids[0]: Tier.DISK, whole.id: Tier.DISK}
    assert tiers.look([], tuple(hash_prefix(pack(range(700, 700 + B)), B))) == {}
    tiers.close()


def test_a_branch_is_found_in_host_memory_where_there_is_no_disk() -> None:
    clock = ManualClock(1000.0)
    tiers = NodeTiers([MemoryTier(clock, split(MIB))])
    whole = NAMES.range_meta("main", Cell(4, 8), DIGESTS)
    write(tiers, whole)
    branch = hash_prefix(pack([*range(6 * B), *range(900, 900 + 3 * B)]), B)
    part = tiers.look([], tuple(reversed(branch)))[whole.id]
    assert isinstance(part, ListedPart) and (part.units, part.boundary) == (2, branch[5])
    tiers.remove([whole.id])
    assert tiers.look([], tuple(reversed(branch))) == {}
    tiers.close()


def test_the_deepest_boundary_wins_in_whatever_tier_it_is(tmp_path: Path) -> None:
    clock = ManualClock(1000.0)
    memory, disk = MemoryTier(clock, split(MIB)), DiskTier(tmp_path, clock)
    short, long = (NAMES.range_meta("main", Cell(0, n), DIGESTS) for n in (3, 4))
    for tier, meta in ((memory, short), (disk, long)):
        assert isinstance(put(tier, meta, bytes(32 * meta.units)), WriteDone)
    tiers = NodeTiers([memory, disk])
    branch = hash_prefix(pack([*range(3 * B), *range(900, 900 + 3 * B)]), B)
    found = tiers.look([], tuple(reversed(branch)))
    assert {id_: part.units for id_, part in found.items() if isinstance(part, ListedPart)} == {
        short.id: 3,
        long.id: 3,
    }
    assert tiers.nearest(found) == {short.id: Tier.HOST, long.id: Tier.DISK}
    tiers.close()


@pytest.mark.parametrize("medium", ["memory", "disk"])
def test_a_branch_of_another_tenant_is_neither_found_nor_in_the_way(
    tmp_path: Path, medium: str
) -> None:
    """The other tenant shares more of the prefix; its record must not hide one's own."""
    clock = ManualClock(1000.0)
    tier = MemoryTier(clock, split(MIB)) if medium == "memory" else DiskTier(tmp_path, clock)
    tiers = NodeTiers([tier])
    mine, other = (NAMES.of(bytes([n]) * 32) for n in (1, 2))
    own, foreign = mine.range_meta("main", Cell(0, 4), DIGESTS), Cell(4, 8)
    write(tiers, own)
    write(tiers, other.range_meta("main", foreign, DIGESTS))
    branch = hash_prefix(pack([*range(6 * B), *range(900, 900 + 3 * B)]), B)
    deepest_first = tuple(reversed(branch))
    assert set(tiers.look([], deepest_first, tenant=mine.tenant)) == {own.id}
    assert tiers.look([], deepest_first) == {}, "what belongs to nobody"
    assert tiers.look([], deepest_first, tenant=bytes([3]) * 32) == {}
    tiers.close()


def test_what_one_node_keeps_in_a_shared_directory_another_finds_there(tmp_path: Path) -> None:
    shared = str(tmp_path / "shared")
    meta = NAMES.range_meta("main", Cell(0, 4), DIGESTS)
    one = open_backing(tmp_path / "one", MIB, remote=shared)
    assert one is not None
    write(one.tiers, meta)
    assert one.tiers.nearest([meta.id]) == {meta.id: Tier.HOST}
    one.close()
    two = open_backing(tmp_path / "two", MIB, remote=shared)
    assert two is not None
    assert set(two.tiers.look([meta.id], ())) == {meta.id}
    assert two.tiers.nearest([meta.id]) == {meta.id: Tier.REMOTE}
    hit = two.tiers.read([Want(meta.id)])
    assert isinstance(hit, ReadHit) and hit.parts[0].data == bytes(32 * meta.units)
    assert two.tiers.timings[0].tier is Tier.REMOTE
    two.close()


def test_written_through_to_disk_what_makes_room_goes_to_the_shared_directory(
    tmp_path: Path,
) -> None:
    clock = ManualClock(1000.0)
    limits = TierLimits(KindLimits(20_000, None), KindLimits(20_000, None))
    disk = DiskTier(tmp_path / "own", clock, options=DiskOptions(limits=limits))
    remote = open_remote(str(tmp_path / "shared"), clock)
    tiers = NodeTiers([disk, remote], write_policy("write-through:disk", ("disk", "remote")))
    metas = [NAMES.range_meta("main", Cell(4 * n, 4 * n + 4), DIGESTS) for n in range(4)]
    for meta in metas:
        write(tiers, meta)
        clock.advance(1.0)
    assert len(disk.find([meta.id for meta in metas])) == 2
    assert tiers.settle() == 2
    assert len(remote.find([meta.id for meta in metas])) == 2
    assert len(tiers.find([meta.id for meta in metas])) == 4
    tiers.close()


# ---- upkeep


def test_a_pass_drops_what_is_past_its_ttl(tmp_path: Path) -> None:
    clock = ManualClock(1000.0)
    tier = DiskTier(tmp_path, clock, options=DiskOptions(limits=KEPT))
    tiers = NodeTiers([tier])
    write(tiers, NAMES.range_meta("main", Cell(0, 4), DIGESTS))
    write(tiers, NAMES.point_meta("swa", 4, DIGESTS))
    upkeep = Upkeep(tiers.tiers, 0.0)
    clock.advance(20.0)
    upkeep.run_once()
    assert (upkeep.counts["passes"], upkeep.counts["expired"]) == (1, 1), "the point state"
    clock.advance(100.0)
    upkeep.run_once()
    assert upkeep.counts["expired"] == 2
    assert not tiers.usage()
    tiers.close()


@pytest.mark.parametrize("medium", ["memory", "disk"])
def test_a_pass_is_bounded_and_the_next_one_comes_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, medium: str
) -> None:
    """Five records are past their time and a pass takes two: the worker stops behind a pass."""
    monkeypatch.setattr(storage_backing, "EXPIRE_AT_ONCE", 2)
    clock = ManualClock(1000.0)
    tier: DiskTier | MemoryTier = (
        DiskTier(tmp_path, clock, options=DiskOptions(limits=KEPT))
        if medium == "disk"
        else MemoryTier(clock, KEPT)
    )
    tiers = NodeTiers([tier])
    for depth in range(1, 6):
        write(tiers, NAMES.point_meta("swa", depth, DIGESTS))
    upkeep = Upkeep(tiers.tiers, 60.0)
    clock.advance(20.0)
    passes = [(upkeep.run_once(), upkeep.counts["expired"]) for _ in range(4)]
    assert passes == [(MORE_AFTER_S, 2), (MORE_AFTER_S, 4), (60.0, 5), (60.0, 5)]
    tiers.close()


def test_it_runs_on_its_own_thread_and_ends_with_the_store(tmp_path: Path) -> None:
    backing = open_backing(tmp_path, MIB, limits=StoreLimits(upkeep_s=0.01))
    assert backing is not None
    until(lambda: backing.upkeep.counts["passes"] >= 3)
    assert "store-upkeep" in {thread.name for thread in threading.enumerate()}
    backing.close()
    assert "store-upkeep" not in {thread.name for thread in threading.enumerate()}


def test_an_interval_of_0_is_never(tmp_path: Path) -> None:
    backing = open_backing(tmp_path, 0, limits=StoreLimits(upkeep_s=0))
    assert isinstance(backing, Backing)
    assert "store-upkeep" not in {thread.name for thread in threading.enumerate()}
    backing.close()


def test_a_pass_that_fails_is_counted_and_the_next_one_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(Upkeep, "run_once", broken)
    with caplog.at_level(logging.ERROR, logger="ownerserve.node"):
        backing = open_backing(tmp_path, 0, limits=StoreLimits(upkeep_s=0.01))
        assert backing is not None
        until(lambda: backing.upkeep.counts["failed"] >= 2)
        backing.close()
    assert "upkeep failed" in caplog.text


class WaitingPeers:
    """Peers that are said to hold everything, and give a miss when they may."""

    def __init__(self) -> None:
        self.timings: deque[Loaded] = deque()
        self.may = threading.Semaphore(0)
        self.begun: list[tuple[Want, ...]] = []

    def look(self, prefix: PeerPrefix) -> Mapping[bytes, float]:
        return {}

    def has(self, ids: Sequence[bytes]) -> frozenset[bytes]:
        return frozenset(ids)

    def read(self, wants: Sequence[Want], of: Sequence[Want] = ()) -> ReadOutcome:
        self.begun.append(tuple(wants))
        self.may.acquire()
        return ReadMiss(MissReason.ABSENT, b"")

    def expect(
        self,
        wants: Sequence[Want],
        turn_id: TurnId,
        computed: Sequence[Sequence[Want]],
    ) -> None: ...

    def give_up(self, wants: Sequence[Want]) -> None: ...

    def call_off(self, turn_id: TurnId) -> None: ...


@pytest.mark.parametrize("brings", [1, 3])
def test_so_many_turns_wait_for_peers_at_once_beside_the_store_s_reads(brings: int) -> None:
    backing, peers = open_backing(None, MIB), WaitingPeers()
    assert backing is not None
    backing.add_peers(peers, brings)
    asked = READERS + brings + 2
    try:
        for number in range(asked):
            backing.service.submit_read([Want(bytes([number]) * 32, 0, None)])
        until(lambda: len(peers.begun) == READERS + brings, what="all threads wait")
        peers.may.release()
        until(lambda: len(peers.begun) == READERS + brings + 1, what="one is free for the next")
    finally:
        peers.may.release(asked)
        backing.close()
