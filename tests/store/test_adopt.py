"""A dead worker's store is taken over into another one: real stores, killed processes."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from ownerserve.cli.store import command
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.units import MIB
from ownerserve.store.disk.snapshot import view_of
from ownerserve.store.disk.tier import DiskOptions, DiskTier
from ownerserve.store.format.model import ArtifactKind
from ownerserve.store.format.segment import segment_path
from ownerserve.store.service.runtime import WallClock
from ownerserve.store.tiers.backend import put
from ownerserve.store.tiers.policy import KindLimits, TierLimits
from tests.support.store.samples import Samples
from tests.support.store.writing_child import SIZE, Writing, tenant_of, written_and_killed

FIRST, END = 0, 24
COMMON = 16
LAST = 40
LARGE = 100_000


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stores of killed workers, which have eight artifacts in common."""
    folder = tmp_path_factory.mktemp("killed")
    written_and_killed(folder / "from", FIRST, END)
    written_and_killed(folder / "into", COMMON, LAST)
    return folder


@pytest.fixture
def stores(killed: Path, tmp_path: Path) -> tuple[Path, Path]:
    for name in ("from", "into"):
        shutil.copytree(killed / name, tmp_path / name)
    return tmp_path / "from", tmp_path / "into"


def adopt(source: Path, into: Path, *flags: str) -> dict[str, object]:
    """`ownerserve store adopt FROM INTO --json -`."""
    arguments = ["adopt", str(source), str(into), *flags, "--json", "-"]
    done = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    body: dict[str, object] = json.loads(done.stdout)
    return body


def content(store: Path) -> dict[str, str]:
    """The store's files but its lock and mark, and the journals of its worker."""
    return {
        str(path.relative_to(store)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(store.rglob("*"))
        if path.is_file() and path.name not in ("LOCK", "ADOPTED")
    }


def holds(store: Path, *numbers: int, size: int = SIZE) -> bool:
    view = view_of(store)
    try:
        wanted = [Samples.payload(number, size) for number in numbers]
        return Samples.read(view, *numbers) == wanted
    finally:
        view.close()


def test_two_stores_become_one_and_the_dead_one_stays_as_it_was(stores):
    source, into = stores
    before = content(source)
    body = adopt(source, into)
    assert body["records"] == {
        "records": END, "adopted": COMMON, "adopted_bytes": body["records"]["adopted_bytes"],
        "standing": END - COMMON, "expired": 0, "left_out": 0, "unreadable": 0, "evicted": 0,
        "is_marked": True,
    }  # fmt: skip
    assert holds(into, *range(LAST))
    assert content(source) == before
    assert adopt(source, into)["was_done"] is True


def test_age_uses_and_price_go_with_a_record(open_disk, clock, samples, tmp_path):
    old = open_disk(tmp_path / "old")
    put(old, samples.meta(1), samples.payload(1))
    clock.advance(50.0)
    samples.read(old, 1)
    samples.read(old, 1)
    old.price({samples.meta(1).id: 7.5})
    touched_s = clock.now()
    old.close()
    adopt(tmp_path / "old", tmp_path / "new")
    found = open_disk(tmp_path / "new").find([samples.meta(1).id])[samples.meta(1).id]
    assert (found.touched_s, found.reuse_count, found.restore_cost_ms) == (touched_s, 2, 7.5)


def aged(store: Path, numbers: list[int], clock, open_disk, kind=ArtifactKind.RANGE) -> None:
    """A store of these artifacts, each a minute younger than the one before."""
    tier = open_disk(store, limits=TierLimits(KindLimits(64 * MIB), KindLimits(64 * MIB)))
    for number in numbers:
        clock.advance(60.0)
        put(tier, Samples.meta(number, kind), Samples.payload(number, LARGE))
    tier.close()


def test_where_there_is_not_room_for_all_the_newest_of_both_stay(open_disk, clock, tmp_path):
    aged(tmp_path / "from", [0, 1, 2], clock, open_disk)
    aged(tmp_path / "into", [10, 11, 12], clock, open_disk)
    aged(tmp_path / "from", [3, 4, 5], clock, open_disk)
    body = adopt(tmp_path / "from", tmp_path / "into", "--capacity", "800KiB")["records"]
    assert (body["adopted"], body["left_out"], body["evicted"]) == (3, 3, 0)
    assert holds(tmp_path / "into", 3, 4, 5, 10, 11, 12, size=LARGE)

    aged(tmp_path / "late", [6, 7], clock, open_disk)
    body = adopt(tmp_path / "late", tmp_path / "into", "--capacity", "800KiB")["records"]
    assert (body["adopted"], body["left_out"], body["evicted"]) == (2, 0, 2)
    assert holds(tmp_path / "into", 3, 4, 5, 6, 7, 12, size=LARGE)
    assert not holds(tmp_path / "into", 10, size=LARGE)


def test_a_bad_record_is_left_out_and_stays_where_it_is(stores):
    source, into = stores
    view = view_of(source)
    entry = next(e for e in view.entries() if e.meta.id == Samples.meta(1).id)
    view.close()
    with segment_path(source, entry.segment).open("r+b") as file:
        file.seek(entry.offset + entry.header_bytes + 100)
        file.write(b"\xff\x00\xff")
    before = content(source)
    body = adopt(source, into)["records"]
    assert (body["adopted"], body["unreadable"]) == (COMMON - 1, 1)
    assert not holds(into, 1)
    assert content(source) == before


def test_it_may_lack_its_index(stores):
    source, into = stores
    for path in source.glob("index.sqlite*"):
        path.unlink()
    assert adopt(source, into)["records"]["adopted"] == COMMON
    assert holds(into, *range(LAST))


def test_a_store_is_made_where_there_is_none(stores, tmp_path):
    assert adopt(stores[0], tmp_path / "new")["records"]["adopted"] == END
    assert holds(tmp_path / "new", *range(END))


def test_nobody_adopts_it_twice_until_a_worker_has_opened_it_again(stores, tmp_path):
    source, into = stores
    adopt(source, into)
    with pytest.raises(InvalidInput, match=r"was adopted by the store with id .*remove .*ADOPTED"):
        adopt(source, tmp_path / "third")
    DiskTier(source, WallClock(), options=DiskOptions()).close()
    assert not (source / "ADOPTED").exists()
    assert adopt(source, tmp_path / "fourth")["records"]["adopted"] == END


def test_a_damaged_mark_is_none(stores):
    source, into = stores
    adopt(source, into)
    (source / "ADOPTED").write_bytes(b"{")
    assert adopt(source, into)["records"]["standing"] == END


@pytest.mark.parametrize("held", ["from", "into"])
def test_a_store_of_a_living_worker_is_refused_by_its_name(stores, tmp_path, held):
    source, into = stores
    writing = Writing(tmp_path / held, 0, 0)
    try:
        with pytest.raises(InvalidInput, match=f"{held} is written by process {writing.pid}"):
            adopt(source, into)
    finally:
        writing.kill()
    assert adopt(source, into)["records"]["adopted"] == COMMON


def test_keys_are_asked_before_anything_is_written(stores, tmp_path):
    source, into = stores
    before = content(into)
    key = (source / "KEY").rename(tmp_path / "elsewhere")
    with pytest.raises(InvalidInput, match=r"sealed with a key that is not there.*--key-file"):
        adopt(source, into)
    (tmp_path / "wrong").write_bytes(b"w" * 32)
    with pytest.raises(InvalidInput, match="did not seal"):
        adopt(source, into, "--key-file", str(tmp_path / "wrong"))
    with pytest.raises(InvalidInput, match="did not seal"):
        adopt(source, into, "--key-file", str(key), "--into-key-file", str(tmp_path / "wrong"))
    assert content(into)["KEY"] == before["KEY"]
    assert adopt(source, into, "--key-file", str(key))["records"]["adopted"] == COMMON
    assert holds(into, *range(LAST))
    assert tenant_of(0), "of them some are a tenant's"


def test_a_store_is_not_adopted_into_itself_or_its_copy(stores, tmp_path):
    source, _ = stores
    shutil.copytree(source, tmp_path / "copy")
    with pytest.raises(InvalidInput, match="are one store, or one is a copy"):
        adopt(source, tmp_path / "copy")
    with pytest.raises(InvalidInput, match="is written by process"):
        adopt(source, source)


def test_what_holds_no_store_is_told(tmp_path):
    with pytest.raises(InvalidInput, match="holds no store"):
        adopt(tmp_path / "none", tmp_path / "into")
    assert not (tmp_path / "into").exists()
