"""The remote tier over a real Mooncake Store: a master in a process, a client here, TCP.

Optional: needs the extra [mooncake] (no torch, no GPU, no RDMA card). Its behaviour is what
`store/tiers/mooncake.py` says; `FakeMooncake` in test_contract.py stands in for it elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ownerserve.kv.units import MIB
from ownerserve.store.format.model import (
    AlreadyStored,
    MissReason,
    ReadHit,
    ReadMiss,
    RefusalReason,
    Want,
    WriteDone,
    WriteRefused,
)
from ownerserve.store.format.seal import Keys
from ownerserve.store.tiers.backend import put
from ownerserve.store.tiers.mooncake import MooncakeBlobs
from ownerserve.store.tiers.remote import RemoteTier, record_key
from tests.support.store.servers import MooncakeCluster
from tests.support.waits import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("mooncake") is None,
        reason="needs mooncake-transfer-engine-non-cuda (extra [mooncake])",
    ),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[MooncakeCluster]:
    standing = MooncakeCluster(tmp_path)
    yield standing
    standing.close()


@pytest.fixture
def tier(cluster: MooncakeCluster, clock: Any) -> RemoteTier:
    blobs = MooncakeBlobs(cluster.client, "test")
    return RemoteTier("mooncake", blobs, clock=clock, keys=Keys(b"k" * 32))


def test_a_full_pool_is_backpressure_and_what_was_stored_is_right(tier, samples):
    stored, refused = [], []
    for number in range(24):  # 96 MiB into 64
        outcome = put(tier, samples.meta(number), samples.payload(number, 4 * MIB))
        (stored if isinstance(outcome, WriteDone) else refused).append((number, outcome))
    assert refused, "the pool took more than it has"
    assert all(outcome.reason is RefusalReason.BUSY for _, outcome in refused)
    for number, _ in stored:  # the master may have evicted it: a miss, never other bytes
        assert samples.read(tier, number) in ([samples.payload(number, 4 * MIB)], "absent")
    assert samples.read(tier, stored[-1][0]) == [samples.payload(stored[-1][0], 4 * MIB)]


def test_put_of_a_standing_key_keeps_the_old_value(tier, cluster, samples):
    meta = samples.meta(1)
    first, second = tier.reserve(meta, 1000), tier.reserve(meta, 1000)
    first.payload[:], second.payload[:] = b"1" * 1000, b"2" * 1000
    assert isinstance(tier.commit([first])[0], WriteDone)
    assert tier.commit([second])[0] == AlreadyStored(meta.id)
    assert samples.read(tier, 1) == [b"1" * 1000]
    name = f"test/{record_key(meta.id)}"
    assert cluster.client.put(name, b"other") == 0  # it says yes, silently
    assert cluster.client.get(name) != b"other"


def test_a_leased_record_is_removed(tier, samples, cluster):
    put(tier, samples.meta(1), samples.payload(1))
    assert samples.read(tier, 1) == [samples.payload(1)]  # takes a lease
    assert cluster.client.remove(f"test/{record_key(samples.meta(1).id)}") == -706
    assert tier.remove([samples.meta(1).id]) == 1
    assert samples.read(tier, 1) == "absent"


def test_a_lost_master_is_misses_and_a_new_one_is_empty(tier, cluster, samples, clock):
    put(tier, samples.meta(1), samples.payload(1))
    cluster.kill_master()
    assert samples.read(tier, 1) == "io_error"  # not known to be absent
    refused = put(tier, samples.meta(2), samples.payload(2))
    assert refused == WriteRefused(RefusalReason.IO_ERROR, samples.meta(2).id)
    cluster.start()

    def works() -> bool:
        clock.advance(3600)
        return isinstance(put(tier, samples.meta(3), samples.payload(3)), WriteDone)

    until(works)
    assert samples.read(tier, 1) == "absent"
    assert samples.read(tier, 3) == [samples.payload(3)]


def test_parts_and_all_or_none(tier, samples):
    meta = samples.meta(1, units=4)
    put(tier, meta, samples.payload(1, 4 * MIB))
    outcome = tier.read([Want(meta.id, 2, 3)])
    assert isinstance(outcome, ReadHit)
    assert outcome.parts[0].data == samples.payload(1, 4 * MIB)[2 * MIB : 3 * MIB]
    both = tier.read([Want(meta.id), Want(samples.meta(2).id)])
    assert both == ReadMiss(MissReason.ABSENT, samples.meta(2).id)
