"""The disk tier: what is put comes back, whole or in part; what is bad is a miss."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.units import MIB
from ownerserve.store.disk.maintain import collect
from ownerserve.store.disk.tier import DiskTier
from ownerserve.store.format.model import (
    AlreadyStored,
    ArtifactKind,
    MissReason,
    ReadHit,
    ReadMiss,
    RefusalReason,
    Want,
    WriteDone,
    WriteRefused,
)
from ownerserve.store.format.segment import segment_path
from ownerserve.store.index.reader import IndexFailed
from ownerserve.store.tiers.backend import Reservation, put
from ownerserve.store.tiers.buffers import BufferPool
from ownerserve.store.tiers.policy import KindLimits, TierLimits, WriteBudget


def damage(tier: DiskTier, id_: bytes, at: int, flip: int = 0xFF) -> None:
    """Flip bits of a stored record, `at` bytes from its start."""
    entry = tier.core.index.get(id_)
    assert entry is not None
    fd = os.open(segment_path(tier.core.home.directory, entry.segment), os.O_RDWR)
    try:
        (byte,) = os.pread(fd, 1, entry.offset + at)
        os.pwrite(fd, bytes([byte ^ flip]), entry.offset + at)
        os.fsync(fd)
    finally:
        os.close(fd)


def test_comes_back_after_reopen(open_disk, samples):
    tier = open_disk()
    for number in range(5):
        outcome = put(tier, samples.meta(number), samples.payload(number))
        assert isinstance(outcome, WriteDone)
    assert samples.read(tier, 3, 1) == [samples.payload(3), samples.payload(1)]
    tier.close()
    again = open_disk()
    assert samples.read(again, *range(5)) == [samples.payload(n) for n in range(5)]
    assert again.recovery.adopted == 0


def test_header_says_all_of_meta(open_disk, samples):
    tier = open_disk()
    meta = samples.meta(
        "all", ArtifactKind.POINT, tenant=bytes(range(32)), first_layer=2,
        exactness="approximate/bounded_replay",
    )  # fmt: skip
    put(tier, meta, samples.payload(1))
    tier.close()
    outcome = open_disk().read([Want(meta.id)])
    assert isinstance(outcome, ReadHit)
    assert outcome.parts[0].meta == meta


def test_part_of_a_long_record(open_disk, samples):
    """A branch shares 5 of 24 blocks: only the chunks that hold them are read and verified."""
    tier = open_disk(limits=TierLimits(KindLimits(64 * MIB), KindLimits(MIB)))
    unit = 300_000
    hashes = [bytes([n]) * 32 for n in range(23)]
    meta = samples.meta("long", units=24, end_token=24 * 128, boundaries=b"".join(hashes))
    payload = os.urandom(24 * unit)
    assert isinstance(put(tier, meta, payload), WriteDone)
    ((entry, units),) = tier.core.index.at_boundary(hashes[4])
    assert units == 5
    outcome = tier.read([Want(entry.meta.id, 2, units)])
    assert isinstance(outcome, ReadHit)
    assert outcome.parts[0].data == payload[2 * unit : 5 * unit]
    assert outcome.parts[0].meta.boundaries == meta.boundaries
    damage(tier, meta.id, 4096 + 6 * MIB)  # a chunk that the branch does not need
    assert isinstance(tier.read([Want(meta.id, 0, 5)]), ReadHit)
    assert tier.read([Want(meta.id, 20, 24)]) == ReadMiss(MissReason.CORRUPT, meta.id)


@pytest.mark.parametrize(("first", "end"), [(0, 5), (2, 2), (3, 2), (-1, 1)])
def test_units_that_do_not_exist(open_disk, samples, first, end):
    tier = open_disk()
    meta = samples.meta(1, units=4)
    put(tier, meta, samples.payload(1))
    assert tier.read([Want(meta.id, first, end)]) == ReadMiss(MissReason.BAD_RANGE, meta.id)


def test_all_components_or_none(open_disk, samples):
    tier = open_disk()
    for number in range(3):
        put(tier, samples.meta(number), samples.payload(number))
    assert samples.read(tier, 0, 1, "never stored", 2) == "absent"
    damage(tier, samples.meta(2).id, 4096 + 77)
    assert samples.read(tier, 0, 1, 2) == "corrupt"
    assert samples.read(tier, 0, 1) == [samples.payload(0), samples.payload(1)]


@pytest.mark.parametrize("at", [0, 9, 12, 40, 70, 200, 300, 359, 380, 4096, 4096 + 9_999])
@pytest.mark.parametrize("tenant", [b"", b"t" * 32])
def test_any_flipped_byte_is_a_miss_and_quarantined(open_disk, samples, at, tenant):
    tier = open_disk()
    meta = samples.meta(1, tenant=tenant)
    put(tier, meta, samples.payload(1))
    damage(tier, meta.id, at)
    assert samples.read(tier, 1) in ("corrupt", "other_format")
    if at != 9:  # a version of 65,281 may be a newer release's: left alone
        assert samples.read(tier, 1) == "absent"
        assert tier.core.counters["quarantined"] == 1
        assert isinstance(put(tier, meta, samples.payload(1)), WriteDone)
        assert samples.read(tier, 1) == [samples.payload(1)]


def test_forged_record_without_the_key_is_refused(open_disk, samples, tmp_path):
    """Someone who can write the disk plants bytes with a right xxh3 digest under a tenant's id."""
    tenant = b"t" * 32
    other = open_disk(tmp_path / "forge")
    put(other, samples.meta(1), b"forged" * 1000)
    entry = other.core.index.get(samples.meta(1).id)
    tier = open_disk()
    put(tier, samples.meta(1, tenant=tenant), samples.payload(1, 6000))
    target = tier.core.index.get(samples.meta(1).id)
    forged = segment_path(other.core.home.directory, entry.segment).read_bytes()
    record = forged[entry.offset : entry.offset + entry.stored_bytes]
    from ownerserve.store.format.header import RecordPlace, moved

    place = RecordPlace(tier.core.home.store_id, target.segment, target.offset, target.sequence)
    record = moved(record[:4096], place) + record[4096:]
    with segment_path(tier.core.home.directory, target.segment).open("r+b") as file:
        file.seek(target.offset)
        file.write(record)
    assert samples.read(tier, 1) == "corrupt"


def test_swapped_records_are_both_misses(open_disk, samples):
    tier = open_disk()
    for number in range(2):
        put(tier, samples.meta(number), samples.payload(number))
    a, b = (tier.core.index.get(samples.meta(n).id) for n in range(2))
    with segment_path(tier.core.home.directory, a.segment).open("r+b") as file:
        data = file.read()
        for source, target in ((a, b), (b, a)):
            file.seek(target.offset)
            file.write(data[source.offset : source.offset + source.stored_bytes])
    assert samples.read(tier, 0) == "corrupt"
    assert samples.read(tier, 1) == "corrupt"


def test_truncated_or_missing_segment_is_a_miss(open_disk, samples):
    tier = open_disk()
    put(tier, samples.meta(1), samples.payload(1, 50_000))
    put(tier, samples.meta(2), samples.payload(2, 50_000))
    path = segment_path(tier.core.home.directory, 1)
    os.truncate(path, tier.core.index.get(samples.meta(2).id).offset + 8192)
    assert samples.read(tier, 2) == "corrupt"
    assert samples.read(tier, 1) == [samples.payload(1, 50_000)]
    tier.close()
    path.unlink()
    again = open_disk()
    assert samples.read(again, 1) == "absent"
    assert again.recovery.lost == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", b"short"),
        ("tenant", b"short"),
        ("tenant", bytes(32)),  # zeros mean "no tenant" in a header
        ("component", "x" * 33),
        ("component", "a\0b"),
        ("first_token", 4096),
        ("units", 0),
        ("boundaries", b"x" * 31),
    ],
)
def test_what_no_header_can_hold_is_refused_with_its_name(open_disk, samples, field, value):
    with pytest.raises(InvalidInput, match=field if field != "first_token" else "tokens"):
        open_disk().reserve(samples.meta(1, **{field: value}), 100)


def test_sealed_is_immutable(open_disk, samples):
    tier = open_disk()
    meta = samples.meta(1)
    put(tier, meta, samples.payload(1))
    assert put(tier, meta, samples.payload("other")) == AlreadyStored(meta.id)
    assert samples.read(tier, 1) == [samples.payload(1)]


def test_abort_leaves_nothing(open_disk, samples):
    tier = open_disk()
    reserved = tier.reserve(samples.meta(1), 10_000)
    assert isinstance(reserved, Reservation)
    again = tier.reserve(samples.meta(1), 10_000)
    assert again == WriteRefused(RefusalReason.BUSY, samples.meta(1).id)
    tier.abort(reserved)
    with pytest.raises(ValueError, match="committed or aborted once"):
        tier.commit([reserved])
    assert samples.read(tier, 1) == "absent"
    assert isinstance(put(tier, samples.meta(1), samples.payload(1)), WriteDone)


def test_foreign_layout_is_refused(open_disk, samples):
    tier = open_disk()
    put(tier, samples.meta(1, descriptor=b"tp=2"), samples.payload(1))
    want = Want(samples.meta(1).id, descriptor=b"tp=4")
    assert tier.read([want]) == ReadMiss(MissReason.FOREIGN_LAYOUT, samples.meta(1).id)
    assert isinstance(tier.read([Want(samples.meta(1).id, descriptor=b"tp=2")]), ReadHit)


def test_one_writer(open_disk, samples, tmp_path):
    open_disk()
    with pytest.raises(InvalidInput, match="is written by process"):
        open_disk()


def test_kinds_evict_only_their_own(open_disk, samples, clock):
    tier = open_disk()
    for number in range(30):
        clock.advance(1)
        kind = ArtifactKind.POINT if number % 2 else ArtifactKind.RANGE
        put(tier, samples.meta(number, kind), samples.payload(number, 400_000))
    used = tier.usage()
    assert used[b"", ArtifactKind.POINT].stored_bytes <= 2 * MIB
    assert used[b"", ArtifactKind.RANGE].records == 15
    assert samples.read(tier, 1) == "absent"
    assert samples.read(tier, 0, 28, 29) != "absent"


def test_eviction_gives_back_space_on_disk(open_disk, samples):
    tier = open_disk()
    for number in range(16):
        put(tier, samples.meta(number), samples.payload(number, 900_000))
    segments = tier.core.home.directory / "segments"
    on_disk = sum(path.stat().st_blocks * 512 for path in segments.iterdir())
    assert on_disk <= 10 * MIB


def test_recently_used_stays(open_disk, samples, clock):
    tier = open_disk()
    for number in range(12):
        clock.advance(10)
        put(tier, samples.meta(number), samples.payload(number, 900_000))
        assert samples.read(tier, 0) == [samples.payload(0, 900_000)]
    assert samples.read(tier, 1) == "absent"


def test_point_artifacts_expire_first(open_disk, samples, clock):
    tier = open_disk()
    put(tier, samples.meta(1), samples.payload(1))
    put(tier, samples.meta(2, ArtifactKind.POINT), samples.payload(2))
    clock.advance(61)
    assert tier.expire() == 1
    assert samples.read(tier, 2) == "absent"
    assert samples.read(tier, 1) == [samples.payload(1)]


def test_tenant_quota_evicts_the_tenants_own(open_disk, samples, clock):
    limits = TierLimits(KindLimits(8 * MIB), KindLimits(MIB), tenant_quota_bytes=MIB)
    tier = open_disk(limits=limits)
    put(tier, samples.meta("mine", tenant=b"a" * 32), samples.payload("mine", 500_000))
    for number in range(3):
        clock.advance(1)
        put(tier, samples.meta(number, tenant=b"b" * 32), samples.payload(number, 500_000))
    assert samples.read(tier, "mine") == [samples.payload("mine", 500_000)]
    assert samples.read(tier, 0) == "absent"
    assert tier.usage()[b"b" * 32, ArtifactKind.RANGE].stored_bytes <= MIB
    big = tier.reserve(samples.meta("big", tenant=b"b" * 32), 2 * MIB)
    assert big == WriteRefused(RefusalReason.QUOTA, samples.meta("big").id)


def test_write_budget(open_disk, samples, clock):
    tier = open_disk(write_budget=WriteBudget(86400.0 * 10_000, 30_000))
    assert isinstance(put(tier, samples.meta(1), samples.payload(1)), WriteDone)
    assert isinstance(put(tier, samples.meta(2), samples.payload(2, 2_000)), WriteDone)
    refused = put(tier, samples.meta(3), samples.payload(3))
    assert refused == WriteRefused(RefusalReason.WRITE_BUDGET, samples.meta(3).id)
    clock.advance(2)
    assert isinstance(put(tier, samples.meta(3), samples.payload(3)), WriteDone)


def test_purge_leaves_no_trace_on_disk(open_disk, samples):
    tier = open_disk()
    secret = b"the tenant's secret state" * 400
    put(tier, samples.meta(0), samples.payload(0))
    put(tier, samples.meta(1, tenant=b"t" * 32), secret)
    put(tier, samples.meta(2, tenant=b"t" * 32), secret)
    damage(tier, samples.meta(2).id, 5000)
    assert samples.read(tier, 2) == "corrupt"
    assert tier.purge(b"t" * 32) == 1
    stored = b"".join(p.read_bytes() for p in (tier.core.home.directory / "segments").iterdir())
    assert b"tenant's secret" not in stored
    assert samples.read(tier, 0) == [samples.payload(0)]
    assert samples.read(tier, 1) == "absent"


def test_compaction_moves_what_lives(open_disk, samples):
    tier = open_disk()
    for number in range(40):
        put(tier, samples.meta(number, tenant=b"t" * 32), samples.payload(number, 100_000))
    gone = [number for number in range(40) if number % 9]
    assert tier.remove([samples.meta(number).id for number in gone]) == len(gone)
    before = len(tier.core.home.segment_numbers())
    done = collect(tier.core, BufferPool())
    assert done.segments_compacted >= 2
    assert len(tier.core.home.segment_numbers()) < before
    kept = [number for number in range(40) if number % 9 == 0]
    assert samples.read(tier, *kept) == [samples.payload(n, 100_000) for n in kept]
    tier.close()
    assert samples.read(open_disk(), *kept) == [samples.payload(n, 100_000) for n in kept]


def test_gc_of_a_medium_that_fails_is_counted_and_done_next_time(open_disk, samples, monkeypatch):
    """Before: an UnboundLocalError, of the upkeep of a store whose folder had gone."""
    tier = open_disk()
    assert isinstance(put(tier, samples.meta(1), samples.payload(1)), WriteDone)

    def fail() -> None:
        raise IndexFailed("disk I/O error")

    with monkeypatch.context() as broken:
        broken.setattr(tier.core.index, "segments", fail)
        done = collect(tier.core, BufferPool())
    assert done.segments_compacted == 0 and tier.core.counters["io_errors"] == 1
    assert samples.read(tier, 1) == [samples.payload(1)]


def test_record_larger_than_a_segment(open_disk, samples):
    tier = open_disk()
    payload = samples.payload("big", 3 * MIB)
    put(tier, samples.meta(1), samples.payload(1))
    assert isinstance(put(tier, samples.meta("big"), payload), WriteDone)
    put(tier, samples.meta(2), samples.payload(2))
    assert samples.read(tier, 1, "big", 2) == [samples.payload(1), payload, samples.payload(2)]


def test_reader_keeps_a_buffer_that_the_pool_wants_back(open_disk, samples):
    """Verified bytes stay what they were while anyone can see them."""
    tier = open_disk()
    for number in range(8):
        put(tier, samples.meta(number), samples.payload(number))
    outcome = tier.read([Want(samples.meta(0).id)])
    assert isinstance(outcome, ReadHit)
    kept = outcome.parts[0].data[100:200]
    del outcome
    for number in range(1, 8):
        samples.read(tier, number)
    assert kept == samples.payload(0)[100:200]


def test_spent_reservation_can_not_be_written_to(open_disk, samples):
    tier = open_disk()
    reserved = tier.reserve(samples.meta(1), 8)
    payload = reserved.payload
    payload[:] = b"original"
    tier.commit([reserved])
    with pytest.raises(ValueError, match="released"):
        payload[:] = b"tampered"


def test_many_in_one_commit(open_disk, samples):
    tier = open_disk()
    reserved = []
    for number in range(50):
        item = tier.reserve(samples.meta(number), 50_000)
        item.payload[:] = samples.payload(number, 50_000)
        reserved.append(item)
    assert all(isinstance(outcome, WriteDone) for outcome in tier.commit(reserved))
    wanted = [samples.payload(n, 50_000) for n in range(50)]
    assert samples.read(tier, *range(50)) == wanted
    assert len(tier.core.home.segment_numbers()) == 3


def test_what_was_spilled_together_is_one_read(open_disk, samples, monkeypatch):
    tier = open_disk()
    reserved = [tier.reserve(samples.meta(number), 20_000) for number in range(12)]
    for number, item in enumerate(reserved):
        item.payload[:] = samples.payload(number, 20_000)
    tier.commit(reserved)
    calls = []
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: calls.append(1) or real(*args))
    order = [7, 3, 11, 0, *range(4, 7), 1, 2, 8, 9, 10]
    assert samples.read(tier, *order) == [samples.payload(n, 20_000) for n in order]
    assert len(calls) == 1
    damage(tier, samples.meta(5).id, 4096 + 3)
    assert samples.read(tier, *order) == "corrupt"
    assert samples.read(tier, 5) == "absent"
    order.remove(5)
    assert samples.read(tier, *order) == [samples.payload(n, 20_000) for n in order]


def test_a_large_restore_reads_side_by_side(open_disk, samples):
    tier = open_disk(limits=TierLimits(KindLimits(64 * MIB), KindLimits(MIB)))
    for number in range(12):
        put(tier, samples.meta(number), samples.payload(number, 700_000))
    order = [number for number in range(12) if number % 3]
    wanted = [samples.payload(number, 700_000) for number in order]
    assert samples.read(tier, *order) == wanted
    damage(tier, samples.meta(4).id, 4096 + 600_000)
    assert samples.read(tier, *order) == "corrupt"
    entry = tier.core.index.get(samples.meta(10).id)
    os.truncate(segment_path(tier.core.home.directory, entry.segment), entry.offset + 8192)
    assert samples.read(tier, 8, 9, 10) == "corrupt"
    assert samples.read(tier, 8, 9) == [samples.payload(n, 700_000) for n in (8, 9)]


def test_import_pulls_in_no_engine(tmp_path: Path):
    code = (
        "import sys, ownerserve.store.disk.tier, ownerserve.store.tiers.policy\n"
        "bad = {'torch', 'vllm', 'asyncio', 'transformers'} & set(sys.modules)\n"
        "sys.exit(repr(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)
