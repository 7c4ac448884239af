"""What may happen while a commit is writing: it holds no lock that others wait for."""

from __future__ import annotations

import os
from threading import Event, Thread

import pytest

from ownerserve.kv.units import MIB
from ownerserve.store.format.model import RefusalReason, WriteDone, WriteRefused
from ownerserve.store.tiers.backend import Reservation, put
from ownerserve.store.tiers.policy import KindLimits, TierLimits

ROOMY = TierLimits(KindLimits(64 * MIB), KindLimits(MIB))


class Commit:
    """A commit on a thread of its own, held up at its `at`-th fdatasync."""

    def __init__(self, tier, reserved, monkeypatch, at: int = 1) -> None:
        self.reached, self.go_on = Event(), Event()
        calls: list[int] = []
        self.outcomes: tuple[object, ...] = ()
        real = os.fdatasync

        def held(fd: int) -> None:
            calls.append(fd)
            if len(calls) == at:
                self.reached.set()
                assert self.go_on.wait(20)
            real(fd)

        monkeypatch.setattr(os, "fdatasync", held)
        self._thread = Thread(target=lambda: self._run(tier, reserved))
        self._thread.start()
        assert self.reached.wait(20)

    def _run(self, tier, reserved) -> None:
        self.outcomes = tier.commit(reserved)

    def finish(self) -> tuple[object, ...]:
        self.go_on.set()
        self._thread.join(20)
        return self.outcomes


def reserve(tier, samples, number: int, size: int = 10_000) -> Reservation:
    item = tier.reserve(samples.meta(number), size)
    assert isinstance(item, Reservation)
    item.payload[:] = samples.payload(number, size)
    return item


def test_reserve_and_read_go_on_and_the_same_artifact_is_busy(open_disk, samples, monkeypatch):
    tier = open_disk()
    put(tier, samples.meta(0), samples.payload(0))
    commit = Commit(tier, [reserve(tier, samples, 1)], monkeypatch)
    assert samples.read(tier, 0) == [samples.payload(0)]
    assert samples.read(tier, 1) == "absent"
    assert tier.reserve(samples.meta(1), 10_000) == WriteRefused(
        RefusalReason.BUSY, samples.meta(1).id
    )
    following = reserve(tier, samples, 2)
    (outcome,) = commit.finish()
    assert isinstance(outcome, WriteDone)
    tier.commit([following])
    assert samples.read(tier, 1, 2) == [samples.payload(1), samples.payload(2)]


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_segment_that_is_being_written_is_not_dropped(open_disk, samples, monkeypatch, at):
    """Its older records are all evicted meanwhile; the commit rolls on to further segments.

    Syncs: 1 the segment that was open, now full; 2 and 3 the next one's header, its records.
    """
    tier = open_disk(limits=ROOMY)
    for number in range(3):
        put(tier, samples.meta(number), samples.payload(number))
    fresh = [reserve(tier, samples, number, 300_000) for number in range(10, 20)]
    commit = Commit(tier, fresh, monkeypatch, at)
    evict = Thread(target=lambda: tier.remove([samples.meta(n).id for n in range(3)]))
    evict.start()
    evict.join(20)
    assert not evict.is_alive()
    assert all(isinstance(outcome, WriteDone) for outcome in commit.finish())
    wanted = [samples.payload(n, 300_000) for n in range(10, 20)]
    assert samples.read(tier, *range(10, 20)) == wanted
    tier.close()
    assert samples.read(open_disk(limits=ROOMY), *range(10, 20)) == wanted


def test_a_purge_waits_for_the_commit(open_disk, samples, monkeypatch):
    """Else it would erase, as forgotten, what is about to be acknowledged."""
    tenant = b"t" * 32
    tier = open_disk()
    item = tier.reserve(samples.meta(1, tenant=tenant), 1000)
    item.payload[:] = samples.payload(1, 1000)
    commit = Commit(tier, [item], monkeypatch)
    purged: list[int] = []
    purge = Thread(target=lambda: purged.append(tier.purge(tenant)))
    purge.start()
    purge.join(0.2)
    assert purged == []
    (outcome,) = commit.finish()
    purge.join(20)
    assert isinstance(outcome, WriteDone)
    assert purged == [1]
    assert samples.read(tier, 1) == "absent"
    assert tier.usage() == {}


@pytest.mark.parametrize("size", [100_000, 3 * MIB])
def test_a_large_group_is_written_aside_and_reads_back(open_disk, samples, size):
    tier = open_disk(limits=ROOMY, segment_bytes=32 * MIB)
    count = 24 * MIB // size
    outcomes = tier.commit([reserve(tier, samples, number, size) for number in range(count)])
    assert all(isinstance(outcome, WriteDone) for outcome in outcomes)
    for number in range(count):
        assert samples.read(tier, number) == [samples.payload(number, size)]


@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
def test_a_large_group_that_fails_is_refused_and_leaves_nothing(
    open_disk, samples, clock, monkeypatch, call
):
    tier = open_disk(limits=ROOMY, segment_bytes=32 * MIB)
    put(tier, samples.meta(0), samples.payload(0))
    reserved = [reserve(tier, samples, number, MIB) for number in range(1, 21)]
    real, calls = getattr(os, call), []

    def failing(*args):
        calls.append(1)
        if call == "fdatasync" or len(calls) == 2:
            raise OSError(5, "Input/output error")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        outcomes = tier.commit(reserved)
    assert {outcome.reason for outcome in outcomes} == {RefusalReason.IO_ERROR}
    clock.advance(100)
    again = [reserve(tier, samples, number, MIB) for number in range(1, 21)]
    assert all(isinstance(outcome, WriteDone) for outcome in tier.commit(again))
    tier.close()
    tier = open_disk(limits=ROOMY, segment_bytes=32 * MIB)
    assert samples.read(tier, 0, 20) == [samples.payload(0), samples.payload(20, MIB)]
    assert {entry.meta.id for entry in tier.core.index.walk()} == {
        samples.meta(number).id for number in range(21)
    }
