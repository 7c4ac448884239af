"""An index that is malformed in its middle is made again from the segments, as a missing one is:
when the store is opened, and while it is running.
"""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest

from ownerserve.kv.clock import ManualClock
from ownerserve.kv.units import MIB
from ownerserve.store.disk.maintain import collect
from ownerserve.store.disk.rotate import KeyChange, rotate_key
from ownerserve.store.disk.snapshot import StoreSnapshot
from ownerserve.store.format.model import AlreadyStored, ReadHit, Want
from ownerserve.store.index.reader import DamagedIndex
from ownerserve.store.tiers.backend import put
from ownerserve.store.tiers.buffers import BufferPool
from ownerserve.store.tiers.policy import KindLimits, TierLimits

RECORDS = 120
SIZE = 4096
TENANT = b"t" * 32
ROOMY = TierLimits(KindLimits(64 * MIB, 3600.0), KindLimits(64 * MIB, 60.0))
HARMS = ("zeros", "ones", "random", "of another place")


@pytest.fixture
def filled(open_disk, samples, tmp_path) -> Path:
    """A closed store whose index has many pages; every third record is a tenant's."""
    tier = open_disk(limits=ROOMY)
    for number in range(RECORDS):
        put(tier, meta_of(samples, number), samples.payload(number, SIZE))
    tier.close()
    return tmp_path / "store"


def meta_of(samples, number):
    return samples.meta(number, tenant=TENANT if number % 3 == 0 else b"")


def expected(samples):
    return [samples.payload(number, SIZE) for number in range(RECORDS)]


def pages_of(index: Path) -> tuple[int, int]:
    """Its pages, and how long each is."""
    connection = sqlite3.connect(index)
    (size,) = connection.execute("PRAGMA page_size").fetchone()
    connection.close()
    return index.stat().st_size // size, size


def root_page(index: Path, table: str) -> int:
    """The page that a table begins with; the first is 0."""
    connection = sqlite3.connect(index)
    sql = "SELECT rootpage FROM sqlite_master WHERE name = ?"
    (page,) = connection.execute(sql, (table,)).fetchone()
    connection.close()
    return page - 1


def harmed(index: Path, page: int, how: str = "ones") -> None:
    """Overwrite one page of the index; nothing else of the file changes."""
    _, size = pages_of(index)
    data = bytearray(index.read_bytes())
    data[page * size : (page + 1) * size] = {
        "zeros": bytes(size),
        "ones": b"\xff" * size,
        "random": random.Random(page).randbytes(size),
        "of another place": data[:size],
    }[how]
    index.write_bytes(data)


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", HARMS)
def test_with_any_page_harmed_the_store_opens_and_every_record_is_there(
    open_disk, samples, filled, how, step
):
    """What only a read comes upon is a miss until the next write or pass of upkeep."""
    index = filled / "index.sqlite"
    whole = index.read_bytes()
    pages, _ = pages_of(index)
    assert pages > 15
    rebuilt = 0
    for page in range(0, pages, step):
        index.write_bytes(whole)
        harmed(index, page, how)
        tier = open_disk(filled, limits=ROOMY)
        if samples.read(tier, *range(RECORDS)) != expected(samples):
            tier.expire()
        assert samples.read(tier, *range(RECORDS)) == expected(samples), page
        said = put(tier, meta_of(samples, 1), samples.payload(1, SIZE))
        assert isinstance(said, AlreadyStored), page
        rebuilt += tier.recovery.index_rebuilt
        tier.close()
    assert rebuilt > pages // step // 2


@pytest.fixture
def running(open_disk, samples, filled):
    """An open store of which a page of rows, that opening does not read, is harmed."""
    harmed(filled / "index.sqlite", root_page(filled / "index.sqlite", "records_by_mark"))
    tier = open_disk(filled, limits=ROOMY)
    assert not tier.recovery.index_rebuilt
    return tier


def test_what_a_read_comes_upon_is_mended_by_the_next_write(samples, running):
    assert samples.read(running, 0) == "io_error"
    assert isinstance(put(running, meta_of(samples, 1), samples.payload(1, SIZE)), AlreadyStored)
    assert running.recovery.index_rebuilt and running.recovery.adopted == RECORDS
    assert samples.read(running, *range(RECORDS)) == expected(samples)
    assert sum(used.records for used in running.usage().values()) == RECORDS
    put(running, samples.meta("new"), samples.payload("new"))
    assert samples.read(running, "new") == [samples.payload("new")]


def test_a_removal_that_comes_upon_it_is_done(samples, running):
    assert running.remove([samples.meta(7).id]) == 1
    assert samples.read(running, 7) == "absent"
    assert samples.read(running, 8) == [samples.payload(8, SIZE)]


def test_a_purge_that_comes_upon_it_leaves_nothing_of_the_tenant(open_disk, samples, filled):
    harmed(filled / "index.sqlite", root_page(filled / "index.sqlite", "records_by_tenant"))
    tier = open_disk(filled, limits=ROOMY)
    assert tier.purge(TENANT) == RECORDS // 3
    assert all(samples.read(tier, n) == "absent" for n in range(0, RECORDS, 3))
    assert samples.read(tier, 1, 2) == [samples.payload(1, SIZE), samples.payload(2, SIZE)]


def test_what_was_found_and_not_mended_is_mended_by_the_next_open(samples, running, open_disk):
    assert samples.read(running, 0) == "io_error"
    home = running.core.home.directory
    running.close()
    again = open_disk(home, limits=ROOMY)
    assert again.recovery.index_rebuilt
    assert samples.read(again, *range(RECORDS)) == expected(samples)


def test_a_rotation_that_comes_upon_it_is_done_by_the_next_call(open_disk, samples, filled):
    index = filled / "index.sqlite"
    connection = sqlite3.connect(index)
    connection.execute("UPDATE records SET meta = x'c1' WHERE sequence = 50")
    connection.commit()
    connection.close()

    def rotated():
        return rotate_key(filled, KeyChange(), clock=ManualClock(), on_progress=lambda _: None)

    with pytest.raises(DamagedIndex):
        rotated()
    assert rotated().records == RECORDS // 3
    tier = open_disk(filled, limits=ROOMY)
    assert samples.read(tier, *range(RECORDS)) == expected(samples)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE records SET meta = x'c1' WHERE sequence = 50",
        "UPDATE records SET meta = 'text' WHERE sequence = 50",
        "UPDATE records SET offset = 'far' WHERE sequence = 50",
        "UPDATE segments SET state = 9 WHERE number = 1",
        "UPDATE segments SET end = x'00' WHERE number = 1",
        "UPDATE usage SET kind = 77 WHERE tenant = x''",
        "INSERT INTO doomed VALUES ('a', 4096, NULL)",
        "INSERT INTO quarantine VALUES (x'', x'', 1, 'b', 4096, 'why', 0)",
        "UPDATE about SET value = 'many' WHERE key = 'highest_sequence'",
        "DROP TABLE boundary",
    ],
)
def test_rows_that_make_no_sense_are_made_again(open_disk, samples, filled, change):
    connection = sqlite3.connect(filled / "index.sqlite")
    connection.execute(change)
    connection.commit()
    connection.close()
    tier = open_disk(filled, limits=ROOMY)
    tier.read([Want(samples.meta(number).id) for number in range(RECORDS)])
    put(tier, samples.meta("new", units=2, boundaries=b"h" * 32), samples.payload("new"))
    tier.purge(b"nobody" + bytes(26))
    wanted = [Want(samples.meta(number).id) for number in range(RECORDS)]
    found = tier.read(wanted)
    assert isinstance(found, ReadHit)
    assert [bytes(part.data) for part in found.parts] == expected(samples)
    assert tier.recovery.index_rebuilt


def test_a_row_that_points_at_another_record_harms_neither(open_disk, samples, filled, clock):
    """SQLite does not see it. Put aside, its place would be erased a week later: the other's."""
    connection = sqlite3.connect(filled / "index.sqlite")
    connection.execute(
        "UPDATE records SET offset = (SELECT offset FROM records WHERE sequence = 60)"
        " WHERE sequence = 61"
    )
    connection.commit()
    connection.close()
    tier = open_disk(filled, limits=ROOMY)
    assert samples.read(tier, 60) == "corrupt"
    collect(tier.core, BufferPool(), kept_s=-1.0)
    put(tier, samples.meta("new"), samples.payload("new"))
    assert samples.read(tier, 59, 60) == [samples.payload(n, SIZE) for n in (59, 60)]


WRONG_PLACES = {
    "another's": "offset = (SELECT offset FROM records WHERE sequence = 60)",
    "within another": "offset = 4096 + (SELECT offset FROM records WHERE sequence = 60)",
    "the next one's too": "stored = 2 * stored",
    "none": "offset = offset + 5",
}


@pytest.mark.parametrize("place", WRONG_PLACES)
def test_the_removal_of_a_row_with_a_wrong_place_erases_no_other(open_disk, samples, filled, place):
    """It punched its hole where the row said, unseen."""
    connection = sqlite3.connect(filled / "index.sqlite")
    connection.execute(f"UPDATE records SET {WRONG_PLACES[place]} WHERE sequence = 61")
    connection.commit()
    connection.close()
    tier = open_disk(filled, limits=ROOMY)
    assert tier.remove([samples.meta(60).id]) == 1
    others = [number for number in range(RECORDS) if number != 60]
    assert samples.read(tier, *others) == [samples.payload(n, SIZE) for n in others]
    tier.close()
    for path in filled.glob("index.sqlite*"):
        path.unlink()
    again = open_disk(filled, limits=ROOMY)
    assert samples.read(again, 60) == "absent", "its own place was erased"
    assert samples.read(again, *others) == [samples.payload(n, SIZE) for n in others]


def test_who_reads_beside_the_writer_goes_over_to_the_index_made_anew(samples, running):
    """A scheduler process looks into the store for as long as its engine runs."""
    snapshot = StoreSnapshot(running.core.home.directory)
    assert snapshot.find([samples.meta(1).id]) == {}  # it comes upon the damage too
    put(running, samples.meta("new"), samples.payload("new"))
    ids = [samples.meta(name).id for name in ("new", 1, 2)]
    assert snapshot.standing(ids) == frozenset(ids)
    assert isinstance(snapshot.read([Want(id_) for id_ in ids]), ReadHit)
    running.remove(ids[:1])
    assert snapshot.standing(ids) == frozenset(ids[1:])
    snapshot.close()
