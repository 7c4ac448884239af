"""A medium that many machines share: whose word moves a blob away, and who is believed."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from ownerserve.store.format.seal import Keys
from ownerserve.store.tiers.agreement import KEY_PRINT
from ownerserve.store.tiers.backend import put
from ownerserve.store.tiers.blobs import Blobs, DirectoryBlobs
from ownerserve.store.tiers.remote import RemoteTier, record_key
from ownerserve.store.tiers.suspects import BAD_BLOBS_OF_THESE, KEPT_S, READS_JUDGED_BY
from tests.support.store.media import SickReader, SteppingClock, StuckReader

BLOBS = 20


@pytest.fixture
def clock() -> SteppingClock:
    return SteppingClock(1_700_000_000.0)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    return tmp_path / "shared"


@pytest.fixture
def node(shared, clock):
    def make(machine: bytes, blobs: Blobs | None = None) -> RemoteTier:
        blobs = blobs or DirectoryBlobs(shared)
        return RemoteTier("remote", blobs, clock=clock, keys=Keys(b"k" * 32), machine=machine)

    return make


def damage(shared: Path, id_: bytes, at: int = 9000) -> None:
    path = shared / record_key(id_)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def moved(shared: Path) -> list[str]:
    return sorted(path.name for path in shared.glob("quarantine/*"))


@pytest.mark.parametrize("sickness", [SickReader, StuckReader])
def test_a_sick_machine_moves_no_good_blob_away(node, samples, shared, sickness):
    good = node(b"good")
    for number in range(BLOBS):
        put(good, samples.meta(number), samples.payload(number))
    sick = node(b"sick", sickness(shared, random.Random(5)))
    for _ in range(3):
        for number in range(BLOBS):
            assert samples.read(sick, number) == "corrupt"
    assert [samples.read(good, n) for n in range(BLOBS)] == [
        [samples.payload(n)] for n in range(BLOBS)
    ]
    assert moved(shared) == []
    assert sick.counters["quarantined"] == 0


def test_two_sick_machines_do_not_agree(node, samples, shared):
    good = node(b"good")
    for number in range(BLOBS):
        put(good, samples.meta(number), samples.payload(number))
    for seed in range(2):
        sick = node(b"sick%d" % seed, SickReader(shared, random.Random(seed)))
        for number in range(BLOBS):
            samples.read(sick, number)
    assert [samples.read(good, n) for n in range(BLOBS)] == [
        [samples.payload(n)] for n in range(BLOBS)
    ]


def test_what_two_machines_read_badly_is_moved_and_can_be_written_anew(node, samples, shared):
    first, second = node(b"first"), node(b"second")
    for number in range(2):
        put(first, samples.meta(number), samples.payload(number))
    ids = [samples.meta(number).id for number in range(2)]
    (shared / record_key(ids[0])).write_bytes((shared / record_key(ids[1])).read_bytes())
    os.truncate(shared / record_key(ids[1]), 9000)
    for number in range(2):
        assert samples.read(first, number) == "corrupt"
        assert samples.read(first, number) == "corrupt"  # its own word twice is one word
    assert moved(shared) == []
    assert [samples.read(second, number) for number in range(2)] == ["corrupt", "corrupt"]
    assert moved(shared) == sorted(id_.hex() for id_ in ids)
    assert samples.read(first, 0) == "absent"
    assert list(shared.glob("suspects/*/*")) == []
    put(second, samples.meta(0), samples.payload(0))
    assert samples.read(first, 0) == [samples.payload(0)]


def test_two_tiers_of_one_machine_are_one_word(node, samples, shared):
    one, other = node(b""), node(b"")  # "": the name that this machine has
    put(one, samples.meta(1), samples.payload(1))
    damage(shared, samples.meta(1).id)
    assert samples.read(one, 1) == samples.read(other, 1) == "corrupt"
    assert moved(shared) == []


def test_a_read_that_slips_once_is_served_from_the_second(node, samples, shared):
    class Slips(StuckReader):
        def get_into(self, key: str, offset: int, into: memoryview) -> int:
            count = super().get_into(key, offset, into)
            self.sick = self.sick and not key.startswith("records/")
            return count

    tier = node(b"one", Slips(shared, random.Random(1)))
    put(node(b"two"), samples.meta(1), samples.payload(1))
    assert samples.read(tier, 1) == [samples.payload(1)]
    assert tier.counters["reread"] == 1
    assert list(shared.glob("suspects/*/*")) == []


def test_a_machine_that_alone_finds_many_blobs_bad_stops_judging_until_it_reads_well(
    node, samples, shared
):
    writer, blobs = node(b"writer"), StuckReader(shared, random.Random(0))
    sick = node(b"sick", blobs)
    for number in range(BLOBS):
        put(writer, samples.meta(number), samples.payload(number))
    for number in range(BLOBS):
        samples.read(sick, number)
    assert sick.suspects.itself
    assert len(list(shared.glob("suspects/*/*"))) == BAD_BLOBS_OF_THESE
    blobs.sick = False  # mended: what it read badly is out of its last reads by and by
    for read in range(READS_JUDGED_BY):
        assert samples.read(sick, read % BLOBS) == [samples.payload(read % BLOBS)]
    assert not sick.suspects.itself
    damage(shared, samples.meta(7).id)
    assert samples.read(sick, 7) == samples.read(writer, 7) == "corrupt"
    assert moved(shared) == [samples.meta(7).id.hex()]


def test_a_damaged_medium_is_cleared_and_no_machine_suspects_itself(node, samples, shared):
    """What others found bad too is no reason to suspect oneself."""
    first, second = node(b"first"), node(b"second")
    for number in range(2 * BAD_BLOBS_OF_THESE):
        put(first, samples.meta(number), samples.payload(number))
        damage(shared, samples.meta(number).id)
    for number in range(2 * BAD_BLOBS_OF_THESE):
        one, other = (first, second) if number % 2 else (second, first)
        assert samples.read(one, number) == "corrupt"
        assert samples.read(other, number) == "corrupt"
        for _ in range(READS_JUDGED_BY // 2):
            other.suspects.verified()
            one.suspects.verified()
    assert len(moved(shared)) == 2 * BAD_BLOBS_OF_THESE
    assert not first.suspects.itself
    assert not second.suspects.itself


def test_what_read_badly_is_not_found_here_for_a_while(node, samples, shared, clock):
    tier, other = node(b"one"), node(b"two")
    put(tier, samples.meta(1), samples.payload(1))
    id_ = samples.meta(1).id
    damage(shared, id_)
    samples.read(tier, 1)
    assert not tier.find([id_])
    assert other.find([id_])
    clock.step(-86_400)  # a clock set back hides nothing for a day
    assert tier.find([id_])


def test_old_accusations_and_quarantine_go(node, samples, shared, clock):
    first, second = node(b"first"), node(b"second")
    for number in range(2):
        put(first, samples.meta(number), samples.payload(number))
        damage(shared, samples.meta(number).id)
    samples.read(first, 0)
    samples.read(second, 0)
    samples.read(first, 1)
    assert len(moved(shared)) == len(list(shared.glob("suspects/*/*"))) == 1
    clock.step(shared.stat().st_mtime + KEPT_S + 3600 - clock.now())
    first.expire()
    assert moved(shared) == []
    assert list(shared.glob("suspects/*/*")) == []


def test_a_purge_takes_what_was_held_against_a_tenants_blob(node, samples, shared):
    tier, tenant = node(b"one"), b"t" * 32
    put(tier, samples.meta(1, tenant=tenant), samples.payload(1))
    damage(shared, samples.meta(1).id)
    samples.read(tier, 1)
    assert list(shared.glob("suspects/*/*"))
    tier.purge(tenant)
    assert [path for path in shared.rglob("*") if path.is_file()] == [shared / KEY_PRINT]


def test_a_blob_under_anothers_name_is_removed_alone(node, samples, shared):
    tier = node(b"one")
    for number in range(2):
        put(tier, samples.meta(number), samples.payload(number))
    paths = [shared / record_key(samples.meta(number).id) for number in range(2)]
    paths[0].write_bytes(paths[1].read_bytes())
    assert set(tier.find([samples.meta(n).id for n in range(2)])) == {samples.meta(1).id}
    tier.remove([samples.meta(0).id])
    assert not paths[0].exists()
    assert samples.read(tier, 1) == [samples.payload(1)]
