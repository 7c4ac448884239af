"""Whole records, with right digests, that are not those of the place they lie in: none is served.

Whoever writes to the drive, or a drive that mixes up where it writes, leaves such records. Each
differs from the right one in one thing alone.
"""

from __future__ import annotations

import shutil

import msgspec
import pytest

from ownerserve.store.format.header import BLOCK, CHUNK, RecordPlace, decode, encode, moved
from ownerserve.store.format.model import ArtifactKind, WriteDone
from ownerserve.store.format.seal import Keys, SealKind, Xxh3Seal
from ownerserve.store.format.segment import segment_path
from ownerserve.store.format.verify import draft, record_room
from ownerserve.store.tiers.backend import put
from ownerserve.store.tiers.blobs import DirectoryBlobs
from ownerserve.store.tiers.remote import RemoteTier, record_key
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


def test_a_longer_record_is_not_taken_for_its_own_beginning(open_disk, samples, tmp_path):
    """Its first chunk is whole, and all that a read of the shorter one verifies."""
    tier, forge = open_disk(), open_disk(tmp_path / "forge")
    meta = samples.meta("x")
    put(tier, meta, samples.payload("x", CHUNK))
    put(forge, meta, samples.payload("y", 2 * CHUNK))
    planted, _ = record_of(forge, meta.id)
    record, entry = record_of(tier, meta.id)
    path = segment_path(tier.core.home.directory, entry.segment)
    with path.open("r+b") as file:
        file.seek(entry.offset)
        file.write(placed(tier, meta.id, planted)[: len(record)])
    assert samples.read(tier, "x") == "corrupt"


def test_another_artifacts_blob_under_this_name_is_a_miss(clock, samples, tmp_path):
    medium = DirectoryBlobs(tmp_path / "shared")
    tier = RemoteTier("remote", medium, clock=clock, keys=Keys(b"k" * 32))
    for name in "xy":
        put(tier, samples.meta(name), samples.payload(name))
    x, y = (tmp_path / "shared" / record_key(samples.meta(name).id) for name in "xy")
    shutil.copy(y, x)
    assert tier.find([samples.meta("x").id]) == {}
    assert samples.read(tier, "x") == "corrupt"
    assert samples.read(tier, "y") == [samples.payload("y")]


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


def test_what_is_behind_a_record_is_zeros_whatever_memory_held(samples):
    """A buffer that another tenant's record was in is used again for a shorter one."""
    meta, seal = samples.meta("short", tenant=b"b" * 32), Keys(b"k" * 32).for_write(b"b" * 32)
    head, total = record_room(meta, 100, seal)
    used = memoryview(bytearray(b"secret! " * (total // 8)))
    used[head : head + 100] = samples.payload("short", 100)
    draft(used, meta, 100, seal=seal, now_ms=0)
    assert total - head == BLOCK and not any(used[head + 100 :])


def test_a_record_of_another_tenant_is_a_miss(open_disk, samples, tmp_path):
    """Both are sealed with this fleet's key."""
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    tier = open_disk(key_file=key)
    other = open_disk(tmp_path / "other", key_file=key)
    mine, theirs = (samples.meta("x", tenant=letter * 32) for letter in (b"a", b"b"))
    put(tier, mine, samples.payload("mine"))
    put(other, theirs, samples.payload("theirs"))
    planted, _ = record_of(other, theirs.id)
    plant(tier, mine.id, placed(tier, mine.id, planted))
    assert samples.read(tier, "x") == "corrupt"


@pytest.mark.parametrize("field, value", [("first_token", 512), ("descriptor", b'{"block":256}')])
def test_a_header_that_was_written_anew_without_the_key_is_a_miss(open_disk, samples, field, value):
    tier = open_disk()
    meta = samples.meta("x", tenant=b"t" * 32)
    put(tier, meta, samples.payload("x"))
    record, _ = record_of(tier, meta.id)
    header = decode(record)
    forged = encode(
        msgspec.structs.replace(header, meta=msgspec.structs.replace(meta, **{field: value}))
    )
    plant(tier, meta.id, forged + record[len(forged) :])
    assert samples.read(tier, "x") == "corrupt"


def test_a_tenants_record_under_a_digest_that_needs_no_key_is_a_miss(open_disk, samples):
    tier = open_disk()
    meta = samples.meta("x", tenant=b"t" * 32)
    put(tier, meta, samples.payload("x"))
    record, _ = record_of(tier, meta.id)
    header, payload = decode(record), bytearray(samples.payload("forged"))
    tags = Xxh3Seal().close(memoryview(payload), header.salt)
    seal, mac = SealKind.XXH3, bytes(32)
    head = encode(msgspec.structs.replace(header, seal=seal, tags=tags, mac=mac))
    forged = head + bytes(payload)
    plant(tier, meta.id, forged + bytes(len(record) - len(forged)))
    assert samples.read(tier, "x") == "corrupt"


def test_each_tenant_has_a_key_of_its_own():
    keys = Keys(b"k" * 32)
    one, other = (keys.for_write(letter * 32) for letter in (b"a", b"b"))
    assert one.header_mac(b"the same") != other.header_mac(b"the same")


def test_no_two_chunks_are_encrypted_alike(open_disk, samples):
    """Neither of two records nor of one: each has a salt, each chunk its place in the nonce."""
    pytest.importorskip("cryptography")
    tier = open_disk(at_rest=SealKind.AES_GCM, segment_bytes=8 * CHUNK)
    payload, chunks = bytes(2 * CHUNK), set()
    for name in "ab":
        meta = samples.meta(name, tenant=b"t" * 32)
        assert isinstance(put(tier, meta, payload), WriteDone)
        record, entry = record_of(tier, meta.id)
        for at in range(entry.header_bytes, entry.header_bytes + 2 * CHUNK, CHUNK):
            chunks.add(record[at : at + 4096])
    assert len(chunks) == 4
    assert samples.read(tier, "a", "b") == [payload, payload]
