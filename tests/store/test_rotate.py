"""A key is rotated: every record is there before, amid and after, and the old key opens nothing.

The short form looks at every fifth step on disk, and test_rotate_killed.py at some real kills; all:

    OWNERSERVE_CRASH_EVERY=1 python -m pytest tests/store/test_rotate*.py
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ownerserve.cli.store import command
from ownerserve.kv.clock import ManualClock
from ownerserve.kv.errors import InvalidInput
from ownerserve.store.disk import rotate
from ownerserve.store.disk.maintain import collect
from ownerserve.store.disk.reclaim import Reclaimer
from ownerserve.store.format.seal import SealKind
from ownerserve.store.format.segment import segment_path
from ownerserve.store.index.reader import Change
from ownerserve.store.index.writer import IndexWriter
from ownerserve.store.tiers.backend import put
from ownerserve.store.tiers.buffers import BufferPool

TENANT, OTHER = b"t" * 32, b"u" * 32
TENANTS = {number: (TENANT, b"", OTHER)[number % 3] for number in range(9)}
SEALED = sum(1 for tenant in TENANTS.values() if tenant)
SIZE = 30_000


def fill(tier: Any, samples: Any) -> None:
    for number, tenant in TENANTS.items():
        put(tier, samples.meta(number, tenant=tenant), samples.payload(number, SIZE))


def whole(tier: Any, samples: Any) -> bool:
    there = samples.read(tier, *TENANTS) == [samples.payload(n, SIZE) for n in TENANTS]
    return there and not tier.core.index.quarantined()


def rotated(store: Path, **change: Path) -> rotate.Rotated:
    return rotate.rotate_key(
        store, rotate.KeyChange(**change), clock=ManualClock(1.8e9), on_progress=lambda _: None
    )


EVERY = min(5, int(os.environ.get("OWNERSERVE_CRASH_EVERY", "5")))
SMALL = {"segment_bytes": 32 * 4096}


@pytest.fixture
def store(open_disk, samples, tmp_path) -> Path:
    tier = open_disk(**SMALL)
    fill(tier, samples)
    tier.close()
    return tmp_path / "store"


@pytest.mark.parametrize("at_rest", [SealKind.BLAKE3, SealKind.AES_GCM])
def test_all_records_have_the_new_key_and_none_the_old(open_disk, samples, tmp_path, at_rest):
    if at_rest is SealKind.AES_GCM:
        pytest.importorskip("cryptography")
    tier = open_disk(at_rest=at_rest, **SMALL)
    fill(tier, samples)
    kinds = {number: tier.find([samples.meta(number).id]) for number in TENANTS}
    tier.price({samples.meta(0).id: 70.0})
    tier.close()
    store = tmp_path / "store"
    old = tmp_path / "old"
    shutil.copy(store / "KEY", old)
    done = rotated(store)
    assert (done.records, done.resealed, done.unreadable) == (SEALED, SEALED, 0)
    assert (store / "KEY").read_bytes() != old.read_bytes()
    assert not (store / "KEY.next").exists()
    with pytest.raises(InvalidInput, match="did not seal"):
        open_disk(key_file=old, **SMALL)
    again = open_disk(at_rest=at_rest, **SMALL)
    assert whole(again, samples)
    found = again.find([samples.meta(0).id])[samples.meta(0).id]
    assert found.restore_cost_ms == 70.0
    assert found.meta == kinds[0][samples.meta(0).id].meta
    again.close()
    for path in store.glob("index.sqlite*"):
        path.unlink()
    assert whole(open_disk(at_rest=at_rest, **SMALL), samples)


def test_a_copy_under_the_old_key_stands_nowhere(open_disk, samples, store):
    before = macs_in(store)
    assert len(before) == SEALED
    rotated(store)
    assert len(macs_in(store)) == SEALED
    assert not before & macs_in(store)


def macs_in(store: Path) -> set[bytes]:
    """The MACs of the tenants' records that stand in the segments, whatever the index says."""
    return {
        data[at + 328 : at + 360]
        for data in (path.read_bytes() for path in (store / "segments").iterdir())
        for at in range(4096, len(data), 4096)
        if data[at : at + 8] == b"OwnSRec\n" and data[at + 128 : at + 160] != bytes(32)
    }


def lives(store: Path, into: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The store as a kill -9 leaves it before each step on disk of one rotation."""
    left: list[Path] = []

    def before(owner: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def step(*args: Any, **named: Any) -> Any:
            left.append(into / f"{len(left)}-{name}")
            shutil.copytree(store, left[-1])
            return real(*args, **named)

        monkeypatch.setattr(owner, name, step)

    for call in ("pwritev", "fdatasync", "fsync", "ftruncate", "posix_fallocate", "write"):
        before(os, call)
    for call in ("rename", "unlink"):
        before(Path, call)
    before(IndexWriter, "apply")
    before(Reclaimer, "erase")
    monkeypatch.setattr(rotate, "GROUP_BYTES", 2 * SIZE)
    rotated(store)
    monkeypatch.undo()
    left.append(store)
    return left


@pytest.mark.parametrize("index", ["index there", "index lost"])
def test_cut_short_anywhere_every_record_is_there_and_the_next_call_ends_it(
    open_disk, samples, store, tmp_path, monkeypatch, index
):
    old = tmp_path / "old"
    shutil.copy(store / "KEY", old)
    macs = macs_in(store)
    left = lives(store, tmp_path / "lives", monkeypatch)
    assert len(left) > 40
    for life in {*left[::-EVERY], *(life for life in left if life.name.endswith("-erase"))}:
        if index == "index lost":
            for path in life.glob("index.sqlite*"):
                path.unlink()
        tier = open_disk(life, **SMALL)
        assert whole(tier, samples), life.name
        put(tier, samples.meta("more", tenant=TENANT), samples.payload("more"))
        tier.close()
        done = rotated(life)
        assert done.resealed + done.standing == SEALED + 1, life.name
        assert sorted(path.name for path in life.glob("KEY*")) == ["KEY", "KEYID"]
        assert not macs & macs_in(life), life.name
        with pytest.raises(InvalidInput, match="did not seal"):
            open_disk(life, key_file=old, **SMALL)
        tier = open_disk(life, **SMALL)
        assert whole(tier, samples), life.name
        assert samples.read(tier, "more") == [samples.payload("more")]
        tier.close()


def test_a_rotation_cut_short_is_known_by_its_records_where_the_fingerprints_are_lost(
    open_disk, samples, store, tmp_path, monkeypatch
):
    for life in lives(store, tmp_path / "lives", monkeypatch)[::-EVERY]:
        (life / "KEYID").unlink()
        tier = open_disk(life, **SMALL)
        assert whole(tier, samples), life.name
        tier.close()


def test_key_files_elsewhere_and_a_call_with_other_files_amid_it(
    open_disk, samples, store, tmp_path, monkeypatch
):
    new, third = tmp_path / "new", tmp_path / "third"
    new.write_bytes(b"n" * 32)
    third.write_bytes(b"3" * 32)

    def fails(*_args: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fails)
        with pytest.raises(OSError, match="Input/output"):
            rotated(store, new_key_file=new)
    with pytest.raises(InvalidInput, match=r"not both of its keys.*rotate-key"):
        open_disk(**SMALL)
    with pytest.raises(InvalidInput, match="cut short"):
        rotated(store, new_key_file=third)
    assert rotated(store, new_key_file=new).resealed == SEALED
    assert not (store / "KEY").exists()
    with pytest.raises(InvalidInput, match=r"KEY is missing.*--key-file"):
        open_disk(**SMALL)
    assert rotated(store, new_key_file=new, key_file=new).standing == SEALED
    assert rotated(store, new_key_file=third, key_file=new).resealed == SEALED
    with pytest.raises(InvalidInput, match="--new-key-file: missing"):
        rotated(store, key_file=third)
    assert whole(open_disk(key_file=third, **SMALL), samples)


def test_a_damaged_record_is_told_and_harms_no_other(open_disk, samples, store):
    tier = open_disk(**SMALL)
    entry = tier.core.index.get(samples.meta(3).id)
    tier.close()
    with segment_path(store, entry.segment).open("r+b") as file:
        file.seek(entry.offset + 5000)
        file.write(b"\xff\x00\xff")
    assert rotated(store).unreadable == 1
    tier = open_disk(**SMALL)
    assert samples.read(tier, 3) == "corrupt"
    rest = [number for number in TENANTS if number != 3]
    assert samples.read(tier, *rest) == [samples.payload(n, SIZE) for n in rest]


def test_it_needs_the_store_to_itself(open_disk, samples, store):
    tier = open_disk(**SMALL)
    with pytest.raises(InvalidInput, match="written by process"):
        rotated(store)
    assert whole(tier, samples)


def run(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(command, [*arguments, "--json", "-"], catch_exceptions=False)
    assert result.exit_code == 0
    return dict(json.loads(result.stdout))


def test_the_command_says_what_it_did(open_disk, samples, store):
    body = run("rotate-key", str(store))
    assert body["schema"] == "ownerserve.store.rotate-key/1"
    assert (body["records"], body["resealed"], body["key"]) == (SEALED, SEALED, str(store / "KEY"))
    said = CliRunner().invoke(command, ["rotate-key", str(store)], catch_exceptions=False).output
    assert f"{SEALED} of {SEALED} records" in said
    assert run("verify", str(store))["counts"] == {"sound": len(TENANTS)}


def test_a_key_that_is_lost_for_good_is_replaced_and_tenants_records_are_given_up(
    open_disk, samples, store
):
    with pytest.raises(InvalidInput, match="--old-key-lost: no key is missing"):
        run("rotate-key", str(store), "--old-key-lost")
    tier = open_disk(**SMALL)
    entry = tier.core.index.get(samples.meta(0).id)
    tier.core.index.apply(Change(remove=[entry]))  # its bytes stand, and no row says so
    tier.close()
    before = macs_in(store)
    assert len(before) == SEALED
    (store / "KEY").unlink()
    with pytest.raises(InvalidInput, match="--old-key-lost"):
        run("gc", str(store))
    assert run("ls", str(store))["usage"]
    assert run("rotate-key", str(store), "--old-key-lost")["erased"] == SEALED - 1
    assert macs_in(store) == set()
    tier = open_disk(**SMALL)
    shared = [number for number, tenant in TENANTS.items() if not tenant]
    assert samples.read(tier, *shared) == [samples.payload(n, SIZE) for n in shared]
    assert samples.read(tier, 0) == "absent"
    fill(tier, samples)
    collect(tier.core, BufferPool())
    assert whole(tier, samples)
    tier.close()
    assert not before & macs_in(store)
