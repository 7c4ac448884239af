"""The STORE file has no second copy: a damaged or lost one is made again from the segments."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.units import MIB
from ownerserve.store.disk.home import Home
from ownerserve.store.disk.snapshot import StoreSnapshot
from ownerserve.store.disk.superblock import Superblock
from ownerserve.store.format.header import BLOCK
from ownerserve.store.format.model import ReadHit, Want
from ownerserve.store.format.segment import decode_segment_header, segment_path
from ownerserve.store.tiers.backend import put

RECORDS = 8
FIELDS_BYTES = 44


@pytest.fixture
def store(open_disk, samples, tmp_path) -> Path:
    """A closed store of three segments, the first larger than the others: one large record."""
    tier = open_disk()
    put(tier, samples.meta("large"), samples.payload("large", 2 * MIB))
    for number in range(RECORDS):
        put(tier, samples.meta(number), samples.payload(number, 200_000))
    tier.close()
    assert len(tier.core.home.segment_numbers()) == 3
    return tmp_path / "store"


def flipped(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def adopted(source: Path, store: Path, number: int) -> None:
    """Put the first segment of another store among `store`'s, as its segment `number`."""
    path = segment_path(store, number)
    shutil.copy(segment_path(source, 1), path)
    with path.open("r+b") as file:
        header = decode_segment_header(file.read(BLOCK))
        file.seek(0)
        file.write(msgspec.structs.replace(header, number=number).encode())


@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_any_flipped_bit_of_it_is_mended(store, step):
    whole = (store / "STORE").read_bytes()
    home = Home.open(store)
    for bit in range(0, 8 * FIELDS_BYTES, step):
        flipped(store / "STORE", bit)
        damaged = Home.open(store)  # a reader mends nothing
        assert (damaged.store_id, damaged.segment_bytes) == (home.store_id, home.segment_bytes)
        mended = Home.create_or_open(store, MIB // 2)  # what is asked for is for new stores
        mended.unlock()
        assert (store / "STORE").read_bytes() == whole


@pytest.mark.parametrize("harm", ["a flipped bit", "cut off", "empty", "gone", "random"])
def test_all_records_are_read_by_writers_and_by_readers(open_disk, samples, store, harm):
    path = store / "STORE"
    if harm == "a flipped bit":
        flipped(path, 8 * 20)
    elif harm == "gone":
        path.unlink()
    else:
        data = {"cut off": path.read_bytes()[:30], "empty": b"", "random": b"\x5a" * 4096}
        path.write_bytes(data[harm])
    snapshot = StoreSnapshot(store)
    found = snapshot.read([Want(samples.meta(number).id) for number in range(RECORDS)])
    snapshot.close()
    assert isinstance(found, ReadHit)
    tier = open_disk()
    assert not tier.recovery.index_rebuilt
    wanted = [samples.payload(n, 200_000) for n in range(RECORDS)]
    assert samples.read(tier, *range(RECORDS)) == wanted
    assert samples.read(tier, "large") == [samples.payload("large", 2 * MIB)]


def test_a_stray_segment_of_another_store_is_outvoted(open_disk, samples, store, tmp_path):
    other = open_disk(tmp_path / "other")
    put(other, samples.meta(99), samples.payload(99))
    other.close()
    adopted(tmp_path / "other", store, 9)
    store_id = Home.open(store).store_id
    (store / "STORE").unlink()
    assert Home.open(store).store_id == store_id
    assert Home.open(tmp_path / "other").store_id != store_id


def test_two_stores_equally_often_are_refused_and_left_alone(open_disk, samples, tmp_path):
    for name in ("one", "two"):
        tier = open_disk(tmp_path / name)
        put(tier, samples.meta(name), samples.payload(name))
        tier.close()
    adopted(tmp_path / "two", tmp_path / "one", 2)
    (tmp_path / "one" / "STORE").unlink()
    before = {path: path.read_bytes() for path in (tmp_path / "one" / "segments").iterdir()}
    for open_ in (Home.open, Home.create_or_open):
        with pytest.raises(InvalidInput, match="store: "):
            open_(tmp_path / "one")
    assert {path: path.read_bytes() for path in (tmp_path / "one" / "segments").iterdir()} == before


def test_damaged_with_no_segment_to_tell_it_is_refused(tmp_path):
    Home.create_or_open(tmp_path).unlock()
    flipped(tmp_path / "STORE", 100)
    for open_ in (Home.open, Home.create_or_open):
        with pytest.raises(InvalidInput, match=r"no segment says what it said; .* start anew"):
            open_(tmp_path)


def test_another_releases_store_is_refused_and_not_made_again(store, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("ownerserve.store.disk.superblock.VERSION", 2)
        newer = Superblock(b"n" * 16, MIB).encode()
    (store / "STORE").write_bytes(newer)
    for open_ in (Home.open, Home.create_or_open):
        with pytest.raises(InvalidInput, match=r"format 2; this code reads .* use a release"):
            open_(store)
    assert (store / "STORE").read_bytes() == newer
