"""One contract for every tier: memory, disk, shared directory, S3, Mooncake's shape, tiered."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerserve.kv.clock import ManualClock
from ownerserve.kv.errors import Corrupt
from ownerserve.kv.units import MIB
from ownerserve.store.disk.tier import DiskOptions, DiskTier
from ownerserve.store.format.header import CHUNK
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
from ownerserve.store.format.seal import Keys, SealKind
from ownerserve.store.tiers.backend import Reservation, TierBackend, put
from ownerserve.store.tiers.blobs import Backpressure, DirectoryBlobs
from ownerserve.store.tiers.memory import MemoryTier
from ownerserve.store.tiers.mooncake import MooncakeBlobs
from ownerserve.store.tiers.placement import OnEviction, Placement, WriteBack, WriteThrough
from ownerserve.store.tiers.policy import KindLimits, TierLimits
from ownerserve.store.tiers.remote import RemoteTier
from ownerserve.store.tiers.tiered import TieredStore
from tests.support.store.media import FakeMooncake
from tests.support.store.samples import Samples, bytes_held

LIMITS = TierLimits(KindLimits(4 * MIB, 3600.0), KindLimits(2 * MIB, 60.0))
TENANT = b"t" * 32
POLICIES = {"tiered": OnEviction(), "write-back": WriteBack(), "write-through": WriteThrough()}


def s3(endpoint: str, prefix: str) -> Any:
    import boto3

    from ownerserve.store.tiers.s3 import S3Blobs

    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="artifacts")
    return S3Blobs("artifacts", prefix, endpoint_url=endpoint)


NEEDS = {"encrypted": "cryptography", "s3": "moto", "mooncake-real": "mooncake"}
ABSENT = [name for name, module in NEEDS.items() if find_spec(module) is None]
TIERS = ["memory", "disk", "encrypted", "directory", "s3", "mooncake", "mooncake-real"]
TIERS += ["tiered", "write-back", "write-through"]
TIERS = [name for name in TIERS if name not in ABSENT]
REMOTE = ("directory", "s3", "mooncake", "mooncake-real")
OWN_ROOM = [name for name in TIERS if name not in REMOTE]
LISTING = [name for name in TIERS if not name.startswith("mooncake")]  # Mooncake Store can't list
ONE_COPY = [name for name in LISTING if name != "write-through"]


@pytest.mark.skipif(not ABSENT, reason="the whole contract ran")
def test_what_did_not_run():
    pytest.skip(f"tiers not tested for want of {[NEEDS[name] for name in ABSENT]}: {ABSENT}")


@pytest.fixture(params=TIERS)
def tier(
    request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock
) -> Iterator[TierBackend]:
    made = make(request, tmp_path, clock)
    yield made
    made.close()


def make(request: pytest.FixtureRequest, root: Path, clock: ManualClock) -> TierBackend:
    keys = Keys(b"k" * 32)
    options = DiskOptions(limits=LIMITS, segment_bytes=MIB)

    def remote(blobs: Any) -> RemoteTier:
        return RemoteTier(request.param, blobs, clock=clock, keys=keys, limits=LIMITS)

    match request.param:
        case "memory":
            return MemoryTier(clock, LIMITS)
        case "disk":
            return DiskTier(root / "disk", clock, options=options)
        case "encrypted":
            sealed = DiskOptions(limits=LIMITS, segment_bytes=MIB, at_rest=SealKind.AES_GCM)
            return DiskTier(root / "disk", clock, options=sealed)
        case "directory":
            return remote(DirectoryBlobs(root / "shared"))
        case "s3":
            return remote(s3(request.getfixturevalue("s3_endpoint"), root.name))
        case "mooncake":
            return remote(MooncakeBlobs(FakeMooncake(), "test"))
        case "mooncake-real":
            cluster = request.getfixturevalue("mooncake_cluster")
            return remote(MooncakeBlobs(cluster.client, root.name))
        case policy:
            memory = MemoryTier(clock, TierLimits(KindLimits(MIB), KindLimits(MIB)))
            disk = DiskTier(root / "disk", clock, options=options)
            return TieredStore([memory, disk], Placement(write=POLICIES[policy]))


def test_bytes_come_back(tier, samples):
    for number, size in enumerate((1, 4095, 4096, 4097, 1_000_000)):
        meta = samples.meta(number, tenant=TENANT if number % 2 else b"")
        assert isinstance(put(tier, meta, samples.payload(number, size)), WriteDone)
        outcome = tier.read([Want(meta.id)])
        assert isinstance(outcome, ReadHit)
        assert outcome.parts[0].data == samples.payload(number, size)
        assert outcome.parts[0].meta == meta
    assert samples.read(tier, 4, 0, 2) == [samples.payload(n, (1, 0, 4096, 0, 10**6)[n])
                                           for n in (4, 0, 2)]  # fmt: skip


def test_part_of_a_record(tier, samples):
    meta = samples.meta("parts", units=7, tenant=TENANT)
    payload = os.urandom(7 * 200_001)
    assert isinstance(put(tier, meta, payload), WriteDone)
    for first, end in ((0, 1), (2, 6), (6, 7), (0, 7)):
        outcome = tier.read([Want(meta.id, first, end)])
        assert isinstance(outcome, ReadHit)
        assert outcome.parts[0].data == payload[first * 200_001 : end * 200_001]
    assert tier.read([Want(meta.id, 0, 8)]) == ReadMiss(MissReason.BAD_RANGE, meta.id)


def test_all_or_none(tier, samples):
    put(tier, samples.meta(1), samples.payload(1))
    outcome = tier.read([Want(samples.meta(1).id), Want(samples.meta(2).id)])
    assert outcome == ReadMiss(MissReason.ABSENT, samples.meta(2).id)


def test_abort_before_commit(tier, samples):
    reserved = tier.reserve(samples.meta(1), 100)
    assert isinstance(reserved, Reservation)
    reserved.payload[:] = bytes(100)
    tier.abort(reserved)
    assert samples.read(tier, 1) == "absent"
    assert isinstance(put(tier, samples.meta(1), samples.payload(1)), WriteDone)


def test_sealed_stays(tier, samples):
    meta = samples.meta(1)
    put(tier, meta, samples.payload(1))
    assert put(tier, meta, samples.payload(9)) == AlreadyStored(meta.id)
    assert samples.read(tier, 1) == [samples.payload(1)]


def test_layout_is_taken_or_refused(tier, samples):
    put(tier, samples.meta(1, descriptor=b"a"), samples.payload(1))
    id_ = samples.meta(1).id
    assert tier.read([Want(id_, descriptor=b"b")]) == ReadMiss(MissReason.FOREIGN_LAYOUT, id_)
    assert isinstance(tier.read([Want(id_, descriptor=b"a")]), ReadHit)


def test_find_says_what_there_is(tier, samples):
    put(tier, samples.meta(1), samples.payload(1))
    found = tier.find([samples.meta(1).id, samples.meta(2).id])
    assert set(found) == {samples.meta(1).id}
    record = found[samples.meta(1).id]
    assert record.payload_bytes == 10_000
    assert record.stored_bytes >= 10_000
    assert record.meta.component == "csa_main"


def test_removed_is_gone(tier, samples):
    for number in range(3):
        put(tier, samples.meta(number), samples.payload(number))
    assert tier.remove([samples.meta(0).id, samples.meta(7).id]) == 1
    assert samples.read(tier, 0) == "absent"
    assert samples.read(tier, 1, 2) == [samples.payload(1), samples.payload(2)]


@pytest.mark.parametrize("tier", ONE_COPY, indirect=True)
def test_purge_takes_one_tenant(tier, samples):
    put(tier, samples.meta(1, tenant=TENANT), samples.payload(1))
    put(tier, samples.meta(2, tenant=b"u" * 32), samples.payload(2))
    put(tier, samples.meta(3), samples.payload(3))
    assert tier.purge(TENANT) == 1
    assert samples.read(tier, 1) == "absent"
    assert samples.read(tier, 2, 3) == [samples.payload(2), samples.payload(3)]
    assert {tenant for tenant, _ in tier.usage()} == {b"u" * 32, b""}


@pytest.mark.parametrize("tier", ONE_COPY, indirect=True)
def test_usage_by_tenant_and_kind(tier, samples):
    put(tier, samples.meta(1), samples.payload(1))
    put(tier, samples.meta(2, ArtifactKind.POINT), samples.payload(2))
    put(tier, samples.meta(3, ArtifactKind.POINT), samples.payload(3))
    usage = tier.usage()
    assert usage[b"", ArtifactKind.RANGE].records == 1
    assert usage[b"", ArtifactKind.POINT].records == 2
    assert (
        usage[b"", ArtifactKind.POINT].stored_bytes
        == 2 * usage[b"", ArtifactKind.RANGE].stored_bytes
    )


@pytest.mark.parametrize("size", [0, -1])
def test_no_record_without_bytes(tier, samples, size):
    outcome = tier.reserve(samples.meta(1), size)
    assert outcome == WriteRefused(RefusalReason.TOO_LARGE, samples.meta(1).id)


@pytest.mark.parametrize("tier", OWN_ROOM, indirect=True)
def test_room_is_reserved_before_it_is_written(tier, samples):
    """More than the tier holds in open reservations is refused, not written and regretted."""
    held = []
    for number in range(12):
        outcome = tier.reserve(samples.meta(number), 900_000)
        if isinstance(outcome, WriteRefused):
            assert outcome.reason in (RefusalReason.NO_SPACE, RefusalReason.BUSY)
            break
        held.append(outcome)
    assert 1 <= len(held) < 12
    for reserved in held:
        tier.abort(reserved)
    assert isinstance(tier.reserve(samples.meta(99), 900_000), Reservation)


def test_memory_that_flips_a_bit_is_a_miss(clock, samples):
    tier = MemoryTier(clock, LIMITS)
    put(tier, samples.meta(1), samples.payload(1))
    bytes_held(tier, samples.meta(1).id)[500] ^= 1
    assert samples.read(tier, 1) == "corrupt"
    assert samples.read(tier, 1) == "absent"


@given(at=st.integers(0, 3 * CHUNK - 1), low=st.integers(0, 3 * CHUNK), size=st.integers(1, CHUNK))
@settings(max_examples=60, deadline=None)
def test_what_is_held_is_verified_range_by_range(at, low, size):
    """A flipped bit is found by each range that shares a chunk with it, and by no other."""
    tier = MemoryTier(ManualClock(), TierLimits(KindLimits(8 * MIB), KindLimits(8 * MIB)))
    meta, payload = Samples().meta(1), random.Random(at).randbytes(3 * CHUNK)
    put(tier, meta, payload)
    bytes_held(tier, meta.id)[at] ^= 1
    high = min(low + size, len(payload))
    (held,) = tier.hold([Want(meta.id)])
    shares = low < high and low // CHUNK <= at // CHUNK <= (high - 1) // CHUNK
    with pytest.raises(Corrupt) if shares else nullcontext():
        held.check(low, high)
    assert (tier.hold([Want(meta.id)]) is None) == shares
    assert tier.counters["quarantined"] == shares


def test_what_is_not_held_as_it_is_wanted_is_read_instead(clock, samples):
    tier = MemoryTier(clock, LIMITS)
    put(tier, samples.meta(1), samples.payload(1))
    good = samples.meta(1).id
    for want in (Want(b"?" * 32), Want(good, descriptor=b"other"), Want(good, first_unit=9)):
        assert tier.hold([Want(good), want]) is None
    assert tier.counters["hit"] == 0


def test_a_tenants_blob_needs_the_key(clock, samples, tmp_path):
    def tier(key: bytes) -> RemoteTier:
        blobs = DirectoryBlobs(tmp_path / "shared")
        return RemoteTier("directory", blobs, clock=clock, keys=Keys(key or None))

    put(tier(b"k" * 32), samples.meta(1, tenant=TENANT), samples.payload(1))
    assert samples.read(tier(b""), 1) == "no_key"
    assert samples.read(tier(b"k" * 32), 1) == [samples.payload(1)]
    assert samples.read(tier(b"x" * 32), 1) == "no_key"


def test_mooncake_full_is_backpressure(clock, samples):
    client = FakeMooncake()
    tier = RemoteTier("mooncake", MooncakeBlobs(client, "ns"), clock=clock, keys=Keys())
    client.full = True
    refused = put(tier, samples.meta(1), samples.payload(1))
    assert refused == WriteRefused(RefusalReason.BUSY, samples.meta(1).id)
    client.full = False
    assert isinstance(put(tier, samples.meta(1), samples.payload(1)), WriteDone)
    client.held.clear()  # its master restarted
    assert samples.read(tier, 1) == "absent"
    assert Backpressure.__mro__[1].__name__ == "CapacityExceeded"


@pytest.mark.skipif("encrypted" in ABSENT, reason="needs cryptography")
def test_encrypted_store_shows_no_plaintext(clock, samples, tmp_path):
    options = DiskOptions(limits=LIMITS, segment_bytes=MIB, at_rest=SealKind.AES_GCM)
    tier = DiskTier(tmp_path / "store", clock, options=options)
    put(tier, samples.meta(1, tenant=TENANT), b"plaintext" * 10_000)
    assert samples.read(tier, 1) == [b"plaintext" * 10_000]
    tier.close()
    stored = b"".join(path.read_bytes() for path in (tmp_path / "store/segments").iterdir())
    assert b"plaintext" not in stored


def test_evicted_from_memory_comes_back_from_disk(clock, samples, tmp_path):
    options = DiskOptions(limits=LIMITS, segment_bytes=MIB)
    disk = DiskTier(tmp_path / "disk", clock, options=options)
    memory = MemoryTier(clock, TierLimits(KindLimits(MIB), KindLimits(MIB)))
    store = TieredStore([memory, disk])
    for number in range(5):
        clock.advance(1)
        put(store, samples.meta(number), samples.payload(number, 400_000))
    assert store.settle() == 3
    assert samples.read(store, 0, 4) == [samples.payload(n, 400_000) for n in (0, 4)]
    assert store.counters["hit_disk"] == 1
    samples.read(store, 0)  # read twice further down: worth a place on top
    assert store.settle() >= 1
    assert samples.read(memory, 0) == [samples.payload(0, 400_000)]
    store.close()


def test_spilled_session_survives_the_process(clock, samples, tmp_path):
    options = DiskOptions(limits=LIMITS, segment_bytes=MIB)

    def store() -> TieredStore:
        disk = DiskTier(tmp_path / "disk", clock, options=options)
        return TieredStore([MemoryTier(clock, LIMITS), disk], Placement(write=WriteBack(1)))

    first = store()
    put(first, samples.meta(1), samples.payload(1))
    put(first, samples.meta(2, ArtifactKind.POINT), samples.payload(2))
    assert first.settle() == 2
    first.close()
    again = store()
    assert samples.read(again, 1, 2) == [samples.payload(1), samples.payload(2)]
    again.close()


def test_what_is_cheap_to_make_again_is_not_written_down(clock, samples, tmp_path):
    options = DiskOptions(limits=LIMITS, segment_bytes=MIB)
    memory = MemoryTier(clock, LIMITS)
    disk = DiskTier(tmp_path / "disk", clock, options=options)
    worth = Placement(write=WriteBack(1), range_ms_per_mib=100, point_ms_per_mib=1000)
    store = TieredStore([memory, disk], worth)
    ids = []
    for number, kind in enumerate((ArtifactKind.RANGE, ArtifactKind.RANGE, ArtifactKind.POINT)):
        put(store, samples.meta(number, kind), samples.payload(number, 500_000))
        ids.append(samples.meta(number, kind).id)
    store.price({ids[0]: 10.0, ids[1]: 80.0, ids[2]: 80.0})
    assert store.settle() == 1
    assert samples.read(disk, 1) == [samples.payload(1, 500_000)]
    assert disk.find(ids).keys() == {ids[1]}
    store.close()


def test_disk_gives_up_what_is_cheapest_to_make_again(clock, samples, tmp_path):
    options = DiskOptions(limits=TierLimits(KindLimits(MIB), KindLimits(MIB)), segment_bytes=MIB)
    disk = DiskTier(tmp_path / "disk", clock, options=options)
    for number in range(3):
        put(disk, samples.meta(number), samples.payload(number, 300_000))
    disk.price({samples.meta(n).id: cost for n, cost in enumerate((50.0, 5.0, 500.0))})
    put(disk, samples.meta(9), samples.payload(9, 300_000))
    assert samples.read(disk, 1) == "absent"
    assert samples.read(disk, 0, 2, 9) != "absent"
    disk.close()


def test_bad_copy_on_top_is_covered_by_the_one_below(clock, samples, tmp_path):
    options = DiskOptions(limits=LIMITS, segment_bytes=MIB)
    memory = MemoryTier(clock, LIMITS)
    disk = DiskTier(tmp_path / "disk", clock, options=options)
    store = TieredStore([memory, disk], Placement(write=WriteBack(1)))
    put(store, samples.meta(1), samples.payload(1))
    assert store.settle() == 1
    bytes_held(memory, samples.meta(1).id)[500] ^= 1
    assert samples.read(store, 1) == [samples.payload(1)]
    assert store.counters["hit_disk"] == 1
    store.close()
