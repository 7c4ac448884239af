"""Copies of records and who answers for them: old ones, rotten ones, those that no index knows."""

from __future__ import annotations

import errno
import os

import pytest

from ownerserve.kv.errors import Corrupt
from ownerserve.kv.units import MIB
from ownerserve.store.disk.maintain import collect
from ownerserve.store.format.header import BLOCK, CHUNK
from ownerserve.store.format.model import ReadHit, Want, WriteDone, WriteRefused
from ownerserve.store.format.seal import Keys
from ownerserve.store.format.segment import segment_path
from ownerserve.store.format.verify import open_header
from ownerserve.store.tiers.backend import put
from ownerserve.store.tiers.blobs import DirectoryBlobs
from ownerserve.store.tiers.buffers import BufferPool
from ownerserve.store.tiers.memory import MemoryTier
from ownerserve.store.tiers.policy import KindLimits, TierLimits
from ownerserve.store.tiers.remote import RemoteTier

TENANT = b"t" * 32


def on_disk(tier) -> bytes:
    folder = tier.core.home.directory / "segments"
    return b"".join(path.read_bytes() for path in sorted(folder.iterdir()))


def rotten(tier, id_) -> None:
    """Flip a bit of a record's payload where it lies."""
    entry = tier.core.index.get(id_)
    path = segment_path(tier.core.home.directory, entry.segment)
    with path.open("r+b") as file:
        file.seek(entry.offset + entry.header_bytes + 100)
        (byte,) = file.read(1)
        file.seek(entry.offset + entry.header_bytes + 100)
        file.write(bytes([byte ^ 1]))


def test_a_purge_takes_copies_that_the_index_does_not_know(open_disk, samples):
    """As a compaction leaves them whose index transaction failed."""
    tier = open_disk()
    secret = b"the tenant's secret state" * 400
    meta = samples.meta("x", tenant=TENANT)
    put(tier, meta, secret)
    entry = tier.core.index.get(meta.id)
    copy = tier.core.reclaimer.copy_of(entry, tier.core.keys, BufferPool())
    tier.core.appender.append([copy], tier.core.now_ms())
    assert on_disk(tier).count(b"the tenant's secret state") == 800
    assert tier.purge(TENANT) == 2
    assert b"tenant's secret" not in on_disk(tier)


def test_a_bad_read_of_a_former_copy_does_not_touch_the_present_one(open_disk, samples):
    """The reader looked the record up, then it was removed and stored again; then it read badly."""
    tier = open_disk()
    meta = samples.meta("x")
    put(tier, meta, samples.payload("x"))
    former = tier.core.index.get(meta.id)
    tier.remove([meta.id])
    put(tier, meta, samples.payload("x"))
    before = dict(tier.usage())
    tier.core.quarantine(former, "read as zeros")
    assert samples.read(tier, "x") == [samples.payload("x")]
    assert tier.core.index.quarantined() == []
    assert tier.usage() == before


def sparse_store(open_disk, samples, alive=1):
    """Two full segments and the open one, `alive` records alive in each."""
    tier = open_disk()
    for segment in range(3):
        for number in range(5 if segment < 2 else 2):
            name = (segment, number)
            put(tier, samples.meta(name), samples.payload(name, 200_000))
    gone = [(s, n) for s in range(3) for n in range(alive, 5)]
    tier.remove([samples.meta(name).id for name in gone])
    assert [entry.segment for entry in tier.core.index.walk()][::alive] == [1, 2, 3]
    return tier


def test_a_compaction_leaves_the_open_segment_alone(open_disk, samples):
    """Else it would copy the same records behind themselves at each pass."""
    tier = sparse_store(open_disk, samples)
    done = collect(tier.core, BufferPool(), share=0.9)
    assert (done.segments_compacted, done.segments_dropped) == (2, 0)
    assert tier.core.home.segment_numbers() == [3]
    assert collect(tier.core, BufferPool(), share=0.9).bytes_copied == 0
    wanted = [(segment, 0) for segment in range(3)]
    assert samples.read(tier, *wanted) == [samples.payload(n, 200_000) for n in wanted]


def test_a_compaction_does_not_carry_a_rotten_record_on(open_disk, samples):
    tier = sparse_store(open_disk, samples)
    rotten(tier, samples.meta((0, 0)).id)
    collect(tier.core, BufferPool(), share=0.9)
    assert tier.core.counters["quarantined"] == 1
    assert samples.read(tier, (0, 0)) == "absent"
    assert samples.read(tier, (1, 0)) == [samples.payload((1, 0), 200_000)]


@pytest.mark.parametrize("found_by", ["a read", "the compaction"])
def test_what_is_put_aside_stands_for_its_week(open_disk, samples, clock, found_by):
    """Compaction dropped its segment, bytes and mention of it."""
    tier = sparse_store(open_disk, samples)
    put(tier, samples.meta("beside"), samples.payload("beside"))
    bad = samples.meta((0, 0)).id
    place = tier.core.index.get(bad)
    rotten(tier, bad)
    if found_by == "a read":
        assert samples.read(tier, (0, 0)) == "corrupt"
    for _ in range(2):
        collect(tier.core, BufferPool(), share=0.9)
        clock.advance(3 * 86400.0)
    assert 1 in tier.core.home.segment_numbers()
    (kept,) = tier.core.index.quarantined()
    assert (kept.id, kept.span.offset) == (bad, place.offset)
    data = segment_path(tier.core.home.directory, 1).read_bytes()[place.offset :]
    assert samples.payload((0, 0), 200_000)[1000:2000] in data[: place.stored_bytes]
    tier.close()
    tier = open_disk()
    assert [one.id for one in tier.core.index.quarantined()] == [bad]
    clock.advance(2 * 86400.0)
    assert collect(tier.core, BufferPool(), share=0.9).quarantine_released == 1
    assert 1 not in tier.core.home.segment_numbers()


def test_what_moved_out_of_a_segment_that_stands_leaves_no_copy(open_disk, samples):
    """Else it would come back with the next index that is made anew."""
    tier = sparse_store(open_disk, samples, alive=2)
    rotten(tier, samples.meta((0, 0)).id)
    beside = samples.meta((0, 1))
    collect(tier.core, BufferPool(), share=0.9)
    assert 1 in tier.core.home.segment_numbers()
    assert tier.core.index.get(beside.id).segment > 1
    data = samples.payload((0, 1), 200_000)
    assert on_disk(tier).count(data) == 1
    tier.remove([beside.id])
    assert data not in on_disk(tier)


@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
def test_a_segment_that_failed_takes_no_more_records(open_disk, samples, clock, monkeypatch, call):
    """After a failed sync the kernel may have dropped what it held, and a later one says nothing of
    it.
    """
    tier = open_disk()
    put(tier, samples.meta(0), samples.payload(0))

    def fail(*_args: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        assert isinstance(put(tier, samples.meta(1), samples.payload(1)), WriteRefused)
    clock.advance(100)
    assert isinstance(put(tier, samples.meta(2), samples.payload(2)), WriteDone)
    places = [tier.core.index.get(samples.meta(number).id).segment for number in (0, 2)]
    assert places == [1, 2]


def test_part_of_a_record_is_verified_by_its_own_chunks(open_disk, samples):
    """Chunks of other bytes each: the digests of the first do not fit those behind."""
    tier = open_disk(limits=TierLimits(KindLimits(64 * MIB), KindLimits(MIB)))
    meta = samples.meta("long", units=4, end_token=4 * 256)
    payload = b"".join(samples.payload(number, CHUNK) for number in range(4))
    put(tier, meta, payload)
    found = tier.read([Want(meta.id, 2, 4)])
    assert isinstance(found, ReadHit)
    assert found.parts[0].data == payload[2 * CHUNK :]
    assert tier.core.counters["quarantined"] == 0


def test_a_victim_of_the_tenants_quota_makes_room_once(clock, samples):
    """What the tenant gives up for its quota is not counted again for the room of all."""
    limits = TierLimits(KindLimits(10_000), KindLimits(MIB), tenant_quota_bytes=6000)
    tier = MemoryTier(clock, limits)
    for name, whose, size in (
        ("own 1", TENANT, 2000),
        ("own 2", TENANT, 2000),
        ("other 1", b"", 3000),
        ("other 2", b"", 3000),
        ("own 3", TENANT, 4000),
    ):
        clock.advance(1)
        said = put(tier, samples.meta(name, tenant=whose), samples.payload(name, size))
        assert isinstance(said, WriteDone)
    assert sum(used.stored_bytes for used in tier.usage().values()) <= 10_000
    assert samples.read(tier, "own 3") == [samples.payload("own 3", 4000)]


def test_every_bit_of_a_shared_records_header_counts(open_disk, samples):
    """It bears no MAC: its CRC says whether it is as it was written."""
    tier = open_disk()
    put(tier, samples.meta("x"), samples.payload("x"))
    entry = tier.core.index.get(samples.meta("x").id)
    path = segment_path(tier.core.home.directory, entry.segment)
    head = path.read_bytes()[entry.offset : entry.offset + BLOCK]
    open_header(memoryview(head), Keys())
    used = len(head.rstrip(b"\0"))
    assert used > 360
    for bit in range(8 * used):
        harmed = bytearray(head)
        harmed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt):
            open_header(memoryview(harmed), Keys())


def test_a_record_with_a_harmed_header_is_a_miss(open_disk, samples):
    """Its precision says something else: nothing that the index could be compared with."""
    tier = open_disk()
    meta = samples.meta("x")
    put(tier, meta, samples.payload("x"))
    entry = tier.core.index.get(meta.id)
    path = segment_path(tier.core.home.directory, entry.segment)
    data = path.read_bytes()
    at = data.index(meta.precision.encode(), entry.offset)
    path.write_bytes(data[:at] + b"F" + data[at + 1 :])
    assert samples.read(tier, "x") == "corrupt"


class Unlisting(DirectoryBlobs):
    """A medium that takes no catalogue entries."""

    def put(self, key: str, data: memoryview) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), key)


def test_a_shared_record_that_can_not_be_listed_is_not_written(clock, samples, tmp_path):
    """Nobody could purge it."""
    tier = RemoteTier("remote", Unlisting(tmp_path), clock=clock, keys=Keys(b"k" * 32))
    assert isinstance(put(tier, samples.meta("x"), samples.payload("x")), WriteRefused)
    assert [path for path in tmp_path.glob("records/**/*") if path.is_file()] == []
