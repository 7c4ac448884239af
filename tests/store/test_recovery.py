"""Opening after a crash: what was acknowledged is there, what was torn is not, nothing is left."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from ownerserve.store.disk.scan import records
from ownerserve.store.disk.tier import DiskTier
from ownerserve.store.format import header as header_module
from ownerserve.store.format.header import BLOCK, decode
from ownerserve.store.format.model import RefusalReason, WriteDone, WriteRefused
from ownerserve.store.format.segment import Segment, segment_path
from ownerserve.store.index.reader import Change
from ownerserve.store.tiers.backend import put
from ownerserve.store.tiers.buffers import BufferPool

DECODE_1 = header_module.DECODERS[1]


def crash(tier: DiskTier, into: Path) -> Path:
    """The directory as a kill -9 leaves it now: the page cache survives, the process does not."""
    shutil.copytree(tier.core.home.directory, into)
    return into


def orphans(tier: DiskTier) -> set[tuple[int, int]]:
    """Records that stand in segments without an index row, and rows without a record."""
    home, index = tier.core.home, tier.core.index
    standing = {
        (number, item.place.offset)
        for number in home.segment_numbers()
        for item in records(
            Segment(segment_path(home.directory, number), os.O_RDONLY), BLOCK, home.store_id
        )
    }
    return standing ^ {(entry.segment, entry.offset) for entry in index.walk()}


@pytest.mark.parametrize("harm", ["deleted", "garbage", "another store's"])
def test_index_is_made_again_from_the_segments(open_disk, samples, tmp_path, harm):
    tier = open_disk()
    for number in range(20):
        put(tier, samples.meta(number), samples.payload(number, 200_000))
    tier.remove([samples.meta(number).id for number in range(5)])
    tier.close()
    index = tmp_path / "store" / "index.sqlite"
    if harm == "deleted":
        index.unlink()
    elif harm == "garbage":
        index.write_bytes(os.urandom(index.stat().st_size))
    else:
        other = open_disk(tmp_path / "other")
        other.close()
        shutil.copy(tmp_path / "other" / "index.sqlite", index)
    again = open_disk()
    assert again.recovery.index_rebuilt
    wanted = [samples.payload(n, 200_000) for n in range(5, 20)]
    assert samples.read(again, *range(5, 20)) == wanted
    assert all(samples.read(again, number) == "absent" for number in range(5))
    assert orphans(again) == set()


def test_rebuild_passes_over_a_damaged_header(open_disk, samples, tmp_path):
    tier = open_disk()
    for number in range(6):
        put(tier, samples.meta(number), samples.payload(number))
    entry = tier.core.index.get(samples.meta(2).id)
    tier.close()
    with segment_path(tmp_path / "store", 1).open("r+b") as file:
        file.seek(entry.offset + 100)
        file.write(b"\xff\xff")
    (tmp_path / "store" / "index.sqlite").unlink()
    again = open_disk()
    assert samples.read(again, 2) == "absent"
    assert samples.read(again, 0, 1, 3, 4, 5) == [samples.payload(n) for n in (0, 1, 3, 4, 5)]


def test_payload_that_looks_like_a_record_is_not_one(open_disk, samples, tmp_path):
    tier = open_disk()
    put(tier, samples.meta(1), samples.payload(1))
    stored = segment_path(tmp_path / "store", 1).read_bytes()[4096:20480]
    put(tier, samples.meta(2), stored)
    damaged = tier.core.index.get(samples.meta(2).id)
    tier.close()
    with segment_path(tmp_path / "store", 1).open("r+b") as file:
        file.seek(damaged.offset)
        file.write(bytes(16))
    (tmp_path / "store" / "index.sqlite").unlink()
    again = open_disk()
    assert again.recovery.adopted == 1
    assert samples.read(again, 1) == [samples.payload(1)]


def test_acknowledged_record_whose_index_row_was_lost(open_disk, samples, tmp_path):
    """Power loss may take the last index transactions, never what fdatasync had acknowledged."""
    tier = open_disk()
    put(tier, samples.meta(1), samples.payload(1))
    tier.close()
    index = tmp_path / "store" / "index.sqlite"
    old_index = index.read_bytes()
    tier = open_disk()
    put(tier, samples.meta(2), samples.payload(2))
    tier.close()
    index.write_bytes(old_index)
    again = open_disk()
    assert again.recovery.adopted == 1
    assert samples.read(again, 1, 2) == [samples.payload(1), samples.payload(2)]


def test_torn_tail_is_erased(open_disk, samples, tmp_path):
    tier = open_disk()
    put(tier, samples.meta(1), samples.payload(1))
    tier.close()
    index = tmp_path / "store" / "index.sqlite"
    old_index = index.read_bytes()
    tier = open_disk()
    put(tier, samples.meta(2), samples.payload(2))
    put(tier, samples.meta(3), samples.payload(3))
    torn = tier.core.index.get(samples.meta(2).id)
    tier.close()
    index.write_bytes(old_index)
    with segment_path(tmp_path / "store", 1).open("r+b") as file:
        file.seek(torn.offset + 8192)
        file.write(bytes(4096))
    again = open_disk()
    assert again.recovery.torn == 1
    assert samples.read(again, 2) == "absent"
    assert samples.read(again, 1, 3) == [samples.payload(1), samples.payload(3)]
    assert orphans(again) == set()
    assert isinstance(put(again, samples.meta(2), samples.payload(2)), WriteDone)
    assert samples.read(again, 2) == [samples.payload(2)]


def test_removal_cut_short_is_finished(open_disk, samples, tmp_path):
    tier = open_disk()
    put(tier, samples.meta(1), samples.payload(1))
    put(tier, samples.meta(2), samples.payload(2))
    entry = tier.core.index.get(samples.meta(1).id)
    tier.core.index.apply(Change(remove=[entry], doom=[entry.span]))
    again = open_disk(crash(tier, tmp_path / "crashed"))
    assert samples.read(again, 1) == "absent"
    assert samples.read(again, 2) == [samples.payload(2)]
    assert orphans(again) == set()
    assert again.core.index.doomed() == []


def test_compaction_cut_short_leaves_one_copy(open_disk, samples, tmp_path):
    tier = open_disk()
    for number in range(12):
        put(tier, samples.meta(number), samples.payload(number, 150_000))
    entries = list(tier.core.index.walk(segment=1))[:3]
    landing = BufferPool()
    drafts = [tier.core.reclaimer.copy_of(entry, tier.core.keys, landing) for entry in entries]
    tier.core.appender.append(drafts, tier.core.now_ms())  # died before the index heard of it
    again = open_disk(crash(tier, tmp_path / "crashed"))
    assert again.recovery.duplicates == 3
    assert orphans(again) == set()
    wanted = [samples.payload(n, 150_000) for n in range(12)]
    assert samples.read(again, *range(12)) == wanted


def test_reads_the_version_before(open_disk, samples, monkeypatch):
    """A decoder of an older version beside the present one: old records are read as they are."""

    def old(data: memoryview) -> header_module.RecordHeader:
        header_module.checked_body(data)
        return DECODE_1(data)

    monkeypatch.setitem(header_module.DECODERS, 0, old)
    with monkeypatch.context() as patch:
        patch.setattr(header_module, "VERSION", 0)
        tier = open_disk()
        put(tier, samples.meta(1), samples.payload(1))
    put(tier, samples.meta(2), samples.payload(2))
    assert samples.read(tier, 1, 2) == [samples.payload(1), samples.payload(2)]


def test_a_newer_versions_record_is_left_alone(open_disk, samples, monkeypatch):
    """After a rollback the newer release's records are misses, not corruption; it may come back."""
    tier = open_disk()
    with monkeypatch.context() as patch:
        patch.setitem(header_module.DECODERS, 2, DECODE_1)
        patch.setattr(header_module, "VERSION", 2)
        put(tier, samples.meta(1), samples.payload(1))
    assert samples.read(tier, 1) == "other_format"
    tier.close()
    tier = open_disk()
    assert tier.core.counters["quarantined"] == 0
    monkeypatch.setitem(header_module.DECODERS, 2, DECODE_1)
    assert samples.read(tier, 1) == [samples.payload(1)]


def test_format_1_header_never_changes(samples):
    """Bytes written by the first release, field by field (docs/format.md)."""
    meta = samples.meta(1, tenant=b"t" * 32, first_layer=3, units=2,
                        boundaries=b"b" * 32)  # fmt: skip
    made = header_module.RecordHeader(
        meta, header_module.RecordPlace(b"s" * 16, 7, 8192, 42), 2, 10_000, 1_700_000_000_000,
        b"d" * 32, mac=b"m" * 32,
    )  # fmt: skip
    data = header_module.encode(made)
    assert decode(data) == made
    assert len(data) == 4096
    assert data[:8] == b"OwnSRec\n"
    assert data[8:20].hex() == "010001000102" + "0000" + (360 + 13 + 64).to_bytes(4, "little").hex()
    assert data[24:64] == (
        b"s" * 16 + (7).to_bytes(4, "little") + (2).to_bytes(4, "little")
        + (8192).to_bytes(8, "little") + (42).to_bytes(8, "little")
    )  # fmt: skip
    assert data[64:96] == meta.id
    assert data[128:160] == b"t" * 32
    assert data[176:192] == bytes(16)
    assert data[200:208] == (10_000).to_bytes(8, "little")
    assert data[232:264] == b"csa_main".ljust(32, b"\0")
    assert data[328:360] == b"m" * 32
    assert data[360:] == (b'{"block":128}' + b"d" * 32 + b"b" * 32).ljust(4096 - 360, b"\0")


@pytest.mark.parametrize("call", ["pwritev", "fdatasync", "posix_fallocate"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_failing_medium_refuses_and_comes_back(
    open_disk, samples, clock, monkeypatch, caplog, call, code
):
    tier = open_disk()
    put(tier, samples.meta(0), samples.payload(0))

    def fail(*_args: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        for number in range(1, 4):
            clock.advance(100)
            refused = put(tier, samples.meta(number), samples.payload(number, 400_000))
            if not (call == "posix_fallocate" and number < 3):  # the open segment has room
                assert refused == WriteRefused(RefusalReason.IO_ERROR, samples.meta(number).id)
        assert samples.read(tier, 0) == [samples.payload(0)]
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "writes stop" in warnings[0].message
    clock.advance(100)
    assert isinstance(put(tier, samples.meta(9), samples.payload(9)), WriteDone)
    assert samples.read(tier, 0, 9) == [samples.payload(0), samples.payload(9)]
    tier.close()
    assert orphans(open_disk()) == set()


def test_short_write_is_finished(open_disk, samples, monkeypatch):
    tier = open_disk()
    real = os.pwritev

    def short(fd: int, views: list[memoryview], offset: int) -> int:
        return real(fd, [views[0][:8192]], offset)  # 8 KiB of what was asked

    monkeypatch.setattr(os, "pwritev", short)
    assert isinstance(put(tier, samples.meta(1), samples.payload(1, 100_000)), WriteDone)
    assert samples.read(tier, 1) == [samples.payload(1, 100_000)]


def test_a_store_is_made_by_writes_that_take_one_byte_each(tmp_path, monkeypatch, clock):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:1]))
    DiskTier(tmp_path / "new", clock).close()
    monkeypatch.undo()
    tier = DiskTier(tmp_path / "new", clock)
    assert len((tmp_path / "new" / "KEY").read_bytes()) == 32
    tier.close()


def test_read_error_is_a_miss_and_no_quarantine(open_disk, samples, monkeypatch):
    tier = open_disk()
    put(tier, samples.meta(1), samples.payload(1))

    def fail(*_args: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        assert samples.read(tier, 1) == "io_error"
    assert samples.read(tier, 1) == [samples.payload(1)]
