"""The S3 tier against a real S3 server, through a proxy that does it harm."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.units import MIB
from ownerserve.store.format.model import (
    AlreadyStored,
    ArtifactKind,
    ReadHit,
    RefusalReason,
    Want,
    WriteDone,
    WriteRefused,
)
from ownerserve.store.format.seal import Keys
from ownerserve.store.tiers.agreement import KEY_PRINT
from ownerserve.store.tiers.backend import Reservation, put
from ownerserve.store.tiers.catalogue import catalogue_key
from ownerserve.store.tiers.policy import KindLimits, TierLimits
from ownerserve.store.tiers.remote import UNFINISHED_S, RemoteTier, record_key
from ownerserve.store.tiers.s3 import S3Blobs, S3Options
from tests.support.store.servers import SLOW_S, Fault, FaultProxy, fault_proxy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("moto") is None, reason="needs moto and boto3 (group dev)"),
]
IMPATIENT = S3Options(
    connect_timeout_s=1.0, read_timeout_s=SLOW_S / 2, attempts=1, part_bytes=5 * MIB
)
BUCKET = "faults"


@pytest.fixture(scope="module")
def proxy(s3_endpoint: str) -> Iterator[FaultProxy]:
    import boto3

    boto3.client("s3", endpoint_url=s3_endpoint).create_bucket(Bucket=BUCKET)
    with fault_proxy(s3_endpoint) as standing:
        yield standing


@pytest.fixture
def blobs(proxy: FaultProxy, tmp_path: Path) -> Iterator[S3Blobs]:
    proxy.fault, proxy.which = Fault.NONE, lambda method, path: True
    proxy.seen.clear()
    yield S3Blobs(BUCKET, tmp_path.name, endpoint_url=proxy.endpoint, options=IMPATIENT)
    proxy.fault = Fault.NONE


@pytest.fixture
def tier(blobs: S3Blobs, clock: Any) -> RemoteTier:
    return RemoteTier("s3", blobs, clock=clock, keys=Keys(b"k" * 32))


def records_only(method: str, path: str) -> bool:
    return "/records/" in path


@pytest.mark.parametrize("fault", [Fault.BUSY, Fault.BROKEN, Fault.SLOW])
def test_a_server_that_fails_refuses_writes_and_the_tier_recovers(
    tier, samples, clock, proxy, fault
):
    proxy.fault, proxy.which = fault, records_only
    outcome = put(tier, samples.meta(1), samples.payload(1))
    reason = RefusalReason.BUSY if fault is Fault.BUSY else RefusalReason.IO_ERROR
    assert outcome == WriteRefused(reason, samples.meta(1).id)
    assert samples.read(tier, 1) in ("io_error", "busy", "absent")
    proxy.fault = Fault.NONE
    clock.advance(3600)
    assert samples.read(tier, 1) == "absent"
    assert isinstance(put(tier, samples.meta(1), samples.payload(1)), WriteDone)
    assert samples.read(tier, 1) == [samples.payload(1)]


@pytest.mark.parametrize("fault", [Fault.BUSY, Fault.BROKEN, Fault.SLOW, Fault.CUT])
def test_a_read_that_fails_is_a_miss_and_no_quarantine(tier, samples, proxy, fault):
    put(tier, samples.meta(1), samples.payload(1, 200_000))
    proxy.fault = fault
    proxy.which = lambda method, path: records_only(method, path) and method == "GET"
    assert samples.read(tier, 1) in ("io_error", "busy")
    proxy.fault = Fault.NONE
    assert samples.read(tier, 1) == [samples.payload(1, 200_000)]
    assert tier.counters["quarantined"] == 0


def test_a_write_whose_answer_was_lost_is_there_the_next_time(tier, samples, clock, proxy):
    proxy.fault, proxy.which = Fault.LOST_ANSWER, records_only
    assert isinstance(put(tier, samples.meta(1), samples.payload(1)), WriteRefused)
    proxy.fault = Fault.NONE
    clock.advance(3600)
    assert put(tier, samples.meta(1), samples.payload(1)) == AlreadyStored(samples.meta(1).id)
    assert samples.read(tier, 1) == [samples.payload(1)]


def test_of_two_writers_one_wins(tier, samples):
    first = tier.reserve(samples.meta(1), 1000)
    second = tier.reserve(samples.meta(1), 1000)
    assert isinstance(first, Reservation)
    assert isinstance(second, Reservation)
    first.payload[:] = b"1" * 1000
    second.payload[:] = b"2" * 1000
    assert isinstance(tier.commit([first])[0], WriteDone)
    assert tier.commit([second])[0] == AlreadyStored(samples.meta(1).id)
    assert samples.read(tier, 1) == [b"1" * 1000]


def test_conditional_put_is_the_servers_word(blobs):
    blobs.put_new("once", memoryview(b"a"))
    with pytest.raises(FileExistsError):
        blobs.put_new("once", memoryview(b"b"))
    into = memoryview(bytearray(1))
    assert blobs.get_into("once", 0, into) == 1
    assert bytes(into) == b"a"


def uploads(endpoint: str) -> int:
    import boto3

    client = boto3.client("s3", endpoint_url=endpoint)
    return len(client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []))


def test_a_large_record_goes_in_parts_and_comes_back(tier, samples, blobs, proxy, s3_endpoint):
    payload = os.urandom(12 * MIB)
    assert isinstance(put(tier, samples.meta(1), payload), WriteDone)
    assert sum("partNumber=" in line for line in proxy.seen) == 3
    assert samples.read(tier, 1) == [payload]
    assert uploads(s3_endpoint) == 0


def test_parts_that_fail_leave_nothing(tier, samples, blobs, proxy, s3_endpoint):
    proxy.fault = Fault.BROKEN
    proxy.which = lambda method, path: "partNumber=2" in path
    outcome = put(tier, samples.meta(1), bytes(12 * MIB))
    assert outcome == WriteRefused(RefusalReason.IO_ERROR, samples.meta(1).id)
    assert uploads(s3_endpoint) == 0
    proxy.fault = Fault.NONE
    assert samples.read(tier, 1) == "absent"


def test_parts_of_a_killed_writer_are_tidied(tier, samples, blobs, clock, proxy, s3_endpoint):
    proxy.fault = Fault.BROKEN
    proxy.which = lambda method, path: "partNumber=2" in path or method == "DELETE"
    put(tier, samples.meta(1), bytes(12 * MIB))
    assert uploads(s3_endpoint) == 1  # the abort failed too, as after a kill -9
    proxy.fault = Fault.NONE
    assert blobs.tidy(0.0) == 0  # it may be somebody's at work (moto: all began in 2010)
    clock.advance(time.time() + UNFINISHED_S + 60 - clock.now())
    tier.expire()
    assert uploads(s3_endpoint) == 0


def test_least_useful_records_make_room(blobs, samples, clock):
    clock.advance(time.time() - clock.now())  # S3 keeps its own time
    limits = TierLimits(KindLimits(110_000, 3600.0), KindLimits(110_000, 3600.0))
    tier = RemoteTier("s3", blobs, clock=clock, keys=Keys(), limits=limits)
    for number, cost_ms in enumerate((50.0, 5.0, 500.0)):
        assert isinstance(
            put(tier, samples.meta(number), samples.payload(number, 30_000)), WriteDone
        )
        tier.price({samples.meta(number).id: cost_ms})
    # Another node, which never saw these records, goes by what the catalogue says.
    other = RemoteTier("s3", blobs, clock=clock, keys=Keys(), limits=limits)
    assert isinstance(put(other, samples.meta(9), samples.payload(9, 30_000)), WriteDone)
    assert samples.read(other, 1) == "absent"
    assert samples.read(other, 0, 2, 9) != "absent"
    assert sum(used.stored_bytes for used in other.usage().values()) <= 110_000


def test_what_is_used_stays(blobs, samples, clock):
    clock.advance(time.time() - clock.now())
    limits = TierLimits(KindLimits(70_000), KindLimits(70_000))
    tier = RemoteTier("s3", blobs, clock=clock, keys=Keys(), limits=limits)
    for number in range(2):
        put(tier, samples.meta(number), samples.payload(number, 30_000))
        tier.price({samples.meta(number).id: 10.0})
    for _ in range(3):
        assert samples.read(tier, 0) == [samples.payload(0, 30_000)]
    tier.expire()  # writes down what was used
    put(tier, samples.meta(2), samples.payload(2, 30_000))
    assert samples.read(tier, 1) == "absent"
    assert samples.read(tier, 0) == [samples.payload(0, 30_000)]


def test_an_entry_of_the_old_form_counts(blobs, tier, samples):
    """Before there was a worth, entries were empty: they are read as unpriced."""
    put(tier, samples.meta(1, ArtifactKind.POINT), samples.payload(1))
    size = tier.find([samples.meta(1).id])[samples.meta(1).id].stored_bytes
    blobs.put(catalogue_key(samples.meta(1, ArtifactKind.POINT), size), memoryview(b""))
    assert tier.usage()[b"", ArtifactKind.POINT].stored_bytes == size


def test_nothing_else_lies_in_the_bucket(tier, samples, blobs):
    put(tier, samples.meta(1), samples.payload(1))
    keys = {blob.key for blob in blobs.list("")}
    size = tier.find([samples.meta(1).id])[samples.meta(1).id].stored_bytes
    record = {record_key(samples.meta(1).id), catalogue_key(samples.meta(1), size)}
    assert keys == {KEY_PRINT, *record}
    assert tier.remove([samples.meta(1).id]) == 1
    assert {blob.key for blob in blobs.list("")} == {KEY_PRINT}


def test_one_unit_of_a_record_is_one_ranged_read(tier, samples, proxy):
    meta = samples.meta(1, units=4)
    put(tier, meta, os.urandom(8 * MIB))
    proxy.seen.clear()
    assert isinstance(tier.read([Want(meta.id, 1, 2)]), ReadHit)
    assert [line.split()[0] for line in proxy.seen] == ["GET", "GET"]  # header, chunks


def test_without_boto3_the_error_names_the_extra(monkeypatch):
    def none(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("ownerserve.store.tiers.s3.import_module", none)
    with pytest.raises(InvalidInput, match=r"ownerserve\[s3\]"):
        S3Blobs("bucket")
