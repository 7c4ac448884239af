"""Shared media that answer wrongly, under a tiered store: never wrong bytes, and well again after.

The faults are at the port of the medium, over a real directory, a real S3 server, and Mooncake's
adapter over what was measured of it.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from threading import Event
from typing import Any

import pytest

from ownerserve.kv.units import MIB
from ownerserve.store.disk.tier import DiskOptions, DiskTier
from ownerserve.store.format.model import MissReason, ReadHit, ReadMiss, Want, WriteDone
from ownerserve.store.format.seal import Keys
from ownerserve.store.service.runtime import StoreService
from ownerserve.store.tiers.backend import put
from ownerserve.store.tiers.blobs import BlobInfo, Blobs, DirectoryBlobs
from ownerserve.store.tiers.memory import MemoryTier
from ownerserve.store.tiers.mooncake import MooncakeBlobs
from ownerserve.store.tiers.placement import (
    OnEviction,
    Placement,
    WriteBack,
    WritePolicy,
    WriteThrough,
)
from ownerserve.store.tiers.policy import KindLimits, TierLimits
from ownerserve.store.tiers.remote import RemoteTier
from ownerserve.store.tiers.tiered import TieredStore
from tests.support.store.media import FakeMooncake
from tests.support.store.samples import Samples

TOP = TierLimits(KindLimits(120_000), KindLimits(120_000))
LARGE = TierLimits(KindLimits(64 * MIB), KindLimits(64 * MIB))
RECORDS = 10
FAULTS = ("corrupt", "truncated", "late", "vanished", "duplicated", "lost", "full")


class FaultyBlobs:
    """A medium that does what `fault` says, on half of the calls.

    corrupt: one bit of an answer is another. truncated: an answer ends early. late: no answer in
    time. vanished: the blob is not there. duplicated: the last answer comes once more, and a write
    is sent twice. lost: the write is done and its answer is not heard. full: writes are refused.
    """

    def __init__(self, blobs: Blobs, dice: random.Random) -> None:
        self.blobs = blobs
        self.dice = dice
        self.fault = ""
        self.hits = 0
        self._last = b""

    def _strikes(self, *faults: str) -> bool:
        struck = self.fault in faults and self.dice.random() < 0.5
        self.hits += struck
        return struck

    def put(self, key: str, data: memoryview) -> None:
        self._write(self.blobs.put, key, data)

    def put_new(self, key: str, data: memoryview) -> None:
        self._write(self.blobs.put_new, key, data)

    def settle(self, key: str) -> None:
        self.blobs.settle(key)
        if self._strikes("late"):
            raise TimeoutError(errno.ETIMEDOUT, "no answer", key)

    def _write(self, write: Callable[[str, memoryview], None], key: str, data: memoryview) -> None:
        if self._strikes("full"):
            raise OSError(errno.ENOSPC, "no space", key)
        write(key, data)
        if self._strikes("duplicated"):
            write(key, data)
        if self._strikes("lost", "late"):
            raise TimeoutError(errno.ETIMEDOUT, "no answer", key)

    def get_into(self, key: str, offset: int, into: memoryview) -> int:
        if self._strikes("late"):
            raise TimeoutError(errno.ETIMEDOUT, "no answer", key)
        if self._strikes("vanished"):
            raise FileNotFoundError(errno.ENOENT, "gone", key)
        count = self.blobs.get_into(key, offset, into)
        answer = bytes(into[:count])
        if self._strikes("duplicated"):
            count = min(len(self._last), len(into))
            into[:count] = self._last[:count]
        if count and self._strikes("corrupt"):
            into[self.dice.randrange(count)] ^= 1 << self.dice.randrange(8)
        if count and self._strikes("truncated"):
            count = self.dice.randrange(count)
        self._last = answer
        return count

    def delete(self, key: str) -> None:
        if self._strikes("late"):
            raise TimeoutError(errno.ETIMEDOUT, "no answer", key)
        self.blobs.delete(key)

    def move(self, key: str, to: str) -> None:
        self.blobs.move(key, to)

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        return self.blobs.list(prefix)

    def tidy(self, before_s: float) -> int:
        return self.blobs.tidy(before_s)


def s3(request: pytest.FixtureRequest, prefix: str) -> Blobs:
    import boto3

    from ownerserve.store.tiers.s3 import S3Blobs

    endpoint = request.getfixturevalue("s3_endpoint")
    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="tiered")
    return S3Blobs("tiered", prefix, endpoint_url=endpoint)


@pytest.fixture(
    params=[
        "directory",
        "mooncake",
        pytest.param(
            "s3",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(find_spec("moto") is None, reason="needs moto and boto3"),
            ],
        ),
    ]
)
def medium(request: pytest.FixtureRequest, tmp_path: Any) -> Blobs:
    match request.param:
        case "directory":
            return DirectoryBlobs(tmp_path / "shared")
        case "mooncake":
            return MooncakeBlobs(FakeMooncake(), "test")
        case _:
            return s3(request, tmp_path.name)


def payload(number: int) -> bytes:
    return Samples.payload(number, 30_000)


@pytest.mark.parametrize("policy", [WriteThrough(), WriteBack(), OnEviction()])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_medium_that_answers_wrongly_gives_misses_and_is_well_again(
    medium: Blobs, clock: Any, fault: str, policy: WritePolicy
) -> None:
    dice = random.Random(f"{fault} {policy}")
    blobs = FaultyBlobs(medium, dice)
    remote = RemoteTier("remote", blobs, clock=clock, keys=Keys(b"k" * 32))
    store = TieredStore([MemoryTier(clock, TOP), remote], Placement(write=policy))
    put(store, Samples.meta("first"), payload(99))
    blobs.fault = fault
    for _ in range(60):
        clock.advance(61)
        number = dice.randrange(RECORDS)
        put(store, Samples.meta(number), payload(number))
        store.settle()
        wanted = dice.sample(range(RECORDS), 2)
        found = Samples.read(store, *wanted)
        if isinstance(found, list):
            assert found == [payload(n) for n in wanted]
    assert blobs.hits > 5
    blobs.fault = ""
    clock.advance(3600)
    for number in range(RECORDS):
        found = Samples.read(store, number)
        assert found in ([payload(number)], "absent"), number
        if found == "absent":
            assert isinstance(put(store, Samples.meta(number), payload(number)), WriteDone)
            assert Samples.read(store, number) == [payload(number)]
    assert remote.counters["quarantined"] == 0
    store.close()


def test_a_medium_that_never_answers_is_a_miss_at_the_deadline(tmp_path, clock, samples):
    answer = Event()

    class Silent(DirectoryBlobs):
        def get_into(self, key: str, offset: int, into: memoryview) -> int:
            answer.wait()
            return super().get_into(key, offset, into)

    remote = RemoteTier("remote", Silent(tmp_path / "shared"), clock=clock, keys=Keys(b"k" * 32))
    store = TieredStore([MemoryTier(clock, TOP), remote])
    service = StoreService(store, clock)
    want = Want(samples.meta(1).id)
    asked = service.submit_read([want], deadline_s=clock.now() + 1)
    found = service.submit_find([want.id], deadline_s=clock.now() + 1)
    clock.advance(2)
    assert service.poll(asked) == ReadMiss(MissReason.DEADLINE, want.id)
    assert service.poll(found) == {}
    answer.set()
    service.close()


# ---- disk full


CALLS = ("pwritev", "posix_fallocate", "fdatasync", "fsync", "ftruncate", "write", "rename", "link")


class FullDisk:
    """A disk that is full from the n-th of the calls that write on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: float = float("inf")
        self.calls = 0
        for name in CALLS:
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **more: Any) -> Any:
            self.calls += 1
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return call(*given, **more)

        return counted


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_a_disk_that_is_full_at_any_write_loses_nothing_acknowledged(
    tmp_path, clock, samples, monkeypatch, step
):
    def life(name: str, full: FullDisk, room: float) -> None:
        options = DiskOptions(limits=LARGE, segment_bytes=MIB)
        disk = DiskTier(tmp_path / name / "disk", clock, options=options)
        blobs = DirectoryBlobs(tmp_path / name / "shared")
        remote = RemoteTier("remote", blobs, clock=clock, keys=Keys(b"k" * 32))
        top = MemoryTier(clock, TOP)
        store = TieredStore([top, disk, remote], Placement(write=WriteThrough(1)))
        full.calls, full.left = 0, room
        kept = [
            number
            for number in range(4)
            if isinstance(put(store, samples.meta(number), payload(number)), WriteDone)
        ]
        put(remote, samples.meta("far"), payload(5))
        store.settle()
        full.left = float("inf")
        clock.advance(3600)
        for number in range(4):
            found = disk.read([Want(samples.meta(number).id)])
            if number in kept:
                assert isinstance(found, ReadHit)
            if isinstance(found, ReadHit):
                assert bytes(found.parts[0].data) == payload(number)
            put(store, samples.meta(number), payload(number))
            assert samples.read(disk, number) == [payload(number)]
        assert isinstance(put(remote, samples.meta("new"), payload(6)), WriteDone)
        assert samples.read(remote, "far") in ([payload(5)], "absent")
        store.close()

    full = FullDisk(monkeypatch)
    life("counted", full, float("inf"))
    calls = full.calls
    assert calls > 10
    for number in range(0, calls + 1, step):
        life(str(number), full, number)
