"""Whole records, with right digests, that are not those of the place they lie in: none is served.

Whoever writes to the drive, or a drive that mixes up where it writes, leaves such records. Each
differs from the right one in one thing alone.
"""

from __future__ import annotations

import msgspec
import pytest

from ownerserve.store.format.header import BLOCK, RecordPlace, decode, moved
from ownerserve.store.format.model import ArtifactKind, WriteDone
from ownerserve.store.format.segment import segment_path
from ownerserve.store.tiers.backend import put
from tests.support.store.samples import digest

OTHERWISE = {
    "id": digest("another id"),
    "component": "swa",
    "prefix_hash": digest("another prefix"),
    "kind": ArtifactKind.POINT,
}


def record_of(tier, id_):
    """The record's bytes, as they lie on the drive, and where that is."""
    entry = tier.core.index.get(id_)
    path = segment_path(tier.core.home.directory, entry.segment)
    return path.read_bytes()[entry.offset : entry.offset + entry.stored_bytes], entry


def plant(tier, id_, record):
    """Write `record` where that of `id_` lies."""
    _, entry = record_of(tier, id_)
    assert len(record) == entry.stored_bytes
    with segment_path(tier.core.home.directory, entry.segment).open("r+b") as file:
        file.seek(entry.offset)
        file.write(record)


def placed(tier, id_, record):
    """`record` as if it had been written where that of `id_` lies."""
    _, entry = record_of(tier, id_)
    place = RecordPlace(tier.core.home.store_id, entry.segment, entry.offset, entry.sequence)
    head = decode(record).header_bytes
    return moved(record[:head], place) + record[head:]


@pytest.mark.parametrize("field", OTHERWISE)
def test_a_record_that_differs_in_one_field_is_a_miss(open_disk, samples, tmp_path, field):
    tier, forge = open_disk(), open_disk(tmp_path / "forge")
    meta = samples.meta("x")
    other = msgspec.structs.replace(meta, **{field: OTHERWISE[field]})
    assert isinstance(put(tier, meta, samples.payload("x")), WriteDone)
    assert isinstance(put(forge, other, samples.payload("y")), WriteDone)
    planted, _ = record_of(forge, other.id)
    plant(tier, meta.id, placed(tier, meta.id, planted))
    assert samples.read(tier, "x") == "corrupt"


def test_a_record_of_another_length_is_a_miss(open_disk, samples, tmp_path):
    tier, forge = open_disk(), open_disk(tmp_path / "forge")
    meta = samples.meta("x")
    put(tier, meta, samples.payload("x", 9000))
    put(forge, meta, samples.payload("x", 9500))  # as many blocks
    planted, _ = record_of(forge, meta.id)
    plant(tier, meta.id, placed(tier, meta.id, planted))
    assert samples.read(tier, "x") == "corrupt"


@pytest.mark.parametrize("tenant", [b"", b"t" * 32])
def test_a_former_record_of_the_same_artifact_at_another_place_is_a_miss(
    open_disk, samples, tenant
):
    """It is the artifact that is asked for, sealed by this store; and it is not what was kept."""
    tier = open_disk()
    meta = samples.meta("x", tenant=tenant)
    put(tier, meta, samples.payload("former"))
    former, before = record_of(tier, meta.id)
    assert tier.remove([meta.id]) == 1
    put(tier, samples.meta("between"), samples.payload("between"))
    put(tier, meta, samples.payload("present"))
    _, now = record_of(tier, meta.id)
    assert (now.segment, now.offset) != (before.segment, before.offset)
    plant(tier, meta.id, former)
    assert samples.read(tier, "x") == "corrupt"


def test_another_stores_record_at_the_same_place_is_a_miss(open_disk, samples, tmp_path):
    tier, other = open_disk(), open_disk(tmp_path / "other")
    meta = samples.meta("x")
    for one, payload in ((tier, "ours"), (other, "theirs")):
        put(one, meta, samples.payload(payload))
    theirs, there = record_of(other, meta.id)
    _, here = record_of(tier, meta.id)
    assert (there.segment, there.offset) == (here.segment, here.offset)
    plant(tier, meta.id, theirs)
    assert samples.read(tier, "x") == "corrupt"


def test_what_is_behind_a_record_is_zeros_whatever_memory_held(open_disk, samples):
    """A buffer that another tenant's record was in is used again for a shorter one."""
    tier = open_disk()
    long, short = samples.meta("long", tenant=b"a" * 32), samples.meta("short", tenant=b"b" * 32)
    put(tier, long, b"a tenant's secret " * 2000)
    put(tier, short, samples.payload("short", 100))
    record, entry = record_of(tier, short.id)
    padding = record[entry.header_bytes + 100 :]
    assert len(padding) == BLOCK - 100 and not any(padding)
