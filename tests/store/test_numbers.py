"""Sequence and segment numbers are given once, whatever a power loss takes of the index.

The index runs without an fsync at each commit: a power loss takes its last transactions, back to
the last checkpoint, and nothing of what the segments had synced, punched holes included.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ownerserve.kv.units import MIB
from ownerserve.store.disk.recover import discard_index
from ownerserve.store.disk.tier import DiskTier
from ownerserve.store.format.header import BLOCK, decode, moved
from ownerserve.store.format.model import WriteDone, WriteRefused
from ownerserve.store.format.segment import segment_path
from ownerserve.store.index.writer import IndexWriter
from ownerserve.store.tiers.backend import put
from ownerserve.store.tiers.buffers import BufferPool
from tests.store.test_recovery import crash, orphans

ROUNDS = 20


def synced_index(directory: Path) -> bytes:
    """The index as the last checkpoint left it, which a clean close makes."""
    assert not (directory / "index.sqlite-wal").exists()
    return (directory / "index.sqlite").read_bytes()


def power_loss(tier: DiskTier, into: Path, index: bytes) -> Path:
    """The directory as a power loss now leaves it: the segments, and the index as it was synced."""
    crash(tier, into)
    for path in into.glob("index.sqlite*"):
        path.unlink()
    (into / "index.sqlite").write_bytes(index)
    return into


@pytest.mark.parametrize("rounds", [5, pytest.param(ROUNDS, marks=pytest.mark.slow)])
def test_a_record_stored_again_outlives_the_removal_that_the_index_forgot(
    open_disk, samples, tmp_path, rounds
):
    """Store X, close, remove X, kill -9, store X again, power loss: X was acknowledged."""
    kept = 0
    for number in range(rounds):
        home = tmp_path / f"life {number}"
        tier = open_disk(home)
        for other in range(number):
            put(tier, samples.meta(other), samples.payload(other))
        put(tier, samples.meta("x"), samples.payload("x", 1000 * (number + 1)))
        tier.close()
        index = synced_index(home)
        tier = open_disk(home)
        assert tier.remove([samples.meta("x").id]) == 1
        tier = open_disk(crash(tier, tmp_path / f"killed {number}"))
        again = samples.payload("x", 1000 * (number + 1))
        assert isinstance(put(tier, samples.meta("x"), again), WriteDone)
        tier = open_disk(power_loss(tier, tmp_path / f"dark {number}", index))
        kept += samples.read(tier, "x") == [again]
        assert orphans(tier) == set()
    assert kept == rounds


def test_another_record_with_the_removed_ones_number_does_not_keep_the_store_shut(
    open_disk, samples, tmp_path
):
    tier = open_disk()
    put(tier, samples.meta("removed"), samples.payload("removed"))
    tier.close()
    index = synced_index(tmp_path / "store")
    tier = open_disk()
    tier.remove([samples.meta("removed").id])
    tier = open_disk(crash(tier, tmp_path / "killed"))
    put(tier, samples.meta("new"), samples.payload("new"))
    tier = open_disk(power_loss(tier, tmp_path / "dark", index))
    assert samples.read(tier, "new") == [samples.payload("new")]
    assert samples.read(tier, "removed") in ("absent", "corrupt")


def test_a_quarantined_records_number_is_not_given_again(open_disk, samples, tmp_path):
    """Its bytes still stand in a segment: with the index lost both are found."""
    tier = open_disk()
    put(tier, samples.meta("x"), samples.payload("x"))
    entry = tier.core.index.get(samples.meta("x").id)
    tier.core.quarantine(entry, "seen bad")
    tier.close()
    with segment_path(tmp_path / "store", entry.segment).open("r+b") as file:
        file.seek(entry.offset + entry.header_bytes)
        file.write(b"other bytes")
    tier = open_disk()
    put(tier, samples.meta("x"), samples.payload("x"))
    put(tier, samples.meta("y"), samples.payload("y"))
    assert tier.core.index.get(samples.meta("x").id).sequence > entry.sequence
    discard_index(tier.core.home)
    again = open_disk(crash(tier, tmp_path / "killed"))
    assert samples.read(again, "x", "y") == [samples.payload("x"), samples.payload("y")]


def renumbered(path: Path, offset: int, sequence: int) -> None:
    """Give the record at `offset` another number, as a store of an older release may bear it."""
    with path.open("r+b") as file:
        file.seek(offset)
        head = file.read(BLOCK)
        place = decode(head).place
        file.seek(offset)
        file.write(moved(head, type(place)(place.store_id, place.segment, offset, sequence)))


@pytest.mark.parametrize("bad", ["first", "second", "neither"])
@pytest.mark.parametrize("numbers", [(7, 7), (7, 8), (8, 7)])
@pytest.mark.parametrize("segments", ["the last one", "one before the last"])
def test_of_two_copies_the_one_that_verifies_stays(
    open_disk, samples, tmp_path, bad, numbers, segments
):
    """Copies of one record with the same number, and a bad one with the higher."""
    tier = open_disk()
    put(tier, samples.meta("x"), samples.payload("x"))
    first = tier.core.index.get(samples.meta("x").id)
    tier.core.quarantine(first, "to be stored twice")
    put(tier, samples.meta("x"), samples.payload("x"))
    second = tier.core.index.get(samples.meta("x").id)
    if segments == "one before the last":
        for number in range(3):
            put(tier, samples.meta(number), samples.payload(number, 400_000))
    home = crash(tier, tmp_path / "killed")
    for entry, number, name in ((first, numbers[0], "first"), (second, numbers[1], "second")):
        path = segment_path(home, entry.segment)
        renumbered(path, entry.offset, number)
        if bad == name:
            with path.open("r+b") as file:
                file.seek(entry.offset + entry.header_bytes)
                file.write(b"other bytes")
    for path in home.glob("index.sqlite*"):
        path.unlink()
    again = open_disk(home)
    assert samples.read(again, "x") == [samples.payload("x")]
    assert orphans(again) == set()
    if bad == "neither" and numbers != (7, 7):
        younger = second if numbers == (7, 8) else first
        assert again.core.index.get(samples.meta("x").id).offset == younger.offset


def test_two_records_of_one_number_are_both_found(open_disk, samples, tmp_path):
    tier = open_disk()
    for name in "abc":
        put(tier, samples.meta(name), samples.payload(name))
    places = [tier.core.index.get(samples.meta(name).id) for name in "abc"]
    home = crash(tier, tmp_path / "killed")
    for entry in places:
        renumbered(segment_path(home, 1), entry.offset, 5)
    for path in home.glob("index.sqlite*"):
        path.unlink()
    again = open_disk(home)
    wanted = [samples.payload(name) for name in "abc"]
    assert samples.read(again, *"abc") == wanted
    put(again, samples.meta("d"), samples.payload("d"))
    assert samples.read(again, *"abcd") == [*wanted, samples.payload("d")]
    assert len({entry.sequence for entry in again.core.index.walk()}) == 4


def test_a_dropped_segments_number_is_not_given_again(open_disk, samples, tmp_path, monkeypatch):
    """Else the index that a power loss brings back takes the new segment for the old one."""
    tier = open_disk()
    put(tier, samples.meta("x"), samples.payload("x", MIB // 2))
    number = tier.core.appender.open_segment
    tier.close()
    index = synced_index(tmp_path / "store")
    tier = open_disk()

    def fail(*_args: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:  # a segment whose sync failed takes no more records
        patch.setattr(os, "fdatasync", fail)
        assert isinstance(put(tier, samples.meta("y"), samples.payload("y")), WriteRefused)
    tier.remove([samples.meta("x").id])
    assert number not in tier.core.home.segment_numbers()
    tier = open_disk(crash(tier, tmp_path / "killed"))
    assert isinstance(put(tier, samples.meta("new"), samples.payload("new")), WriteDone)
    tier = open_disk(power_loss(tier, tmp_path / "dark", index))
    assert samples.read(tier, "new") == [samples.payload("new")]
    assert orphans(tier) == set()


@pytest.mark.parametrize("sequence", [1 << 62, (1 << 62) + 1, (1 << 63) - 1, (1 << 64) - 1])
def test_no_header_takes_all_the_numbers(open_disk, samples, tmp_path, sequence):
    tier = open_disk()
    put(tier, samples.meta("x"), samples.payload("x"))
    entry = tier.core.index.get(samples.meta("x").id)
    home = crash(tier, tmp_path / "killed")
    renumbered(segment_path(home, 1), entry.offset, sequence)
    for path in home.glob("index.sqlite*"):
        path.unlink()
    tier = open_disk(home)
    assert isinstance(put(tier, samples.meta("y"), samples.payload("y")), WriteDone)
    assert samples.read(tier, "x", "y") == [samples.payload("x"), samples.payload("y")]
    tier.close()
    (home / "index.sqlite").unlink()
    assert samples.read(open_disk(home), "x", "y") == [samples.payload("x"), samples.payload("y")]


def test_what_is_adopted_is_durable_before_its_older_copy_goes(
    open_disk, samples, tmp_path, monkeypatch
):
    """A copy that a kill cut short may stand in the page cache only; the older one is durable."""
    tier = open_disk()
    put(tier, samples.meta("x"), samples.payload("x"))
    copy = tier.core.reclaimer.copy_of(
        tier.core.index.get(samples.meta("x").id), tier.core.keys, BufferPool()
    )
    tier.core.appender.retire()  # the copy goes to a segment of its own
    tier.core.appender.append([copy], tier.core.now_ms())
    home = crash(tier, tmp_path / "killed")
    order: list[tuple[str, int]] = []
    real_sync, real_apply = os.fdatasync, IndexWriter.apply

    def sync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        order.append(("sync", int(path.stem)))
        real_sync(descriptor)

    def apply(index: IndexWriter, change: object) -> None:
        order.extend(("index", entry.segment) for entry in change.add)
        real_apply(index, change)

    monkeypatch.setattr(os, "fdatasync", sync)
    monkeypatch.setattr(IndexWriter, "apply", apply)
    again = open_disk(home)
    assert again.recovery.duplicates == 1
    assert order[:3] == [("sync", 2), ("index", 2), ("sync", 1)]
