"""A store and its key: another one, none, the same again; and a rotation, cut short anywhere."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ownerserve.kv.errors import InvalidInput
from ownerserve.store.disk.snapshot import StoreSnapshot
from ownerserve.store.format.model import WriteDone
from ownerserve.store.format.seal import Keys, fingerprint
from ownerserve.store.tiers.backend import put

TENANT, OTHER = b"t" * 32, b"u" * 32
TENANTS = {number: (TENANT, OTHER, b"")[number % 3] for number in range(20)}


def fill(tier, samples) -> None:
    for number, tenant in TENANTS.items():
        stored = put(tier, samples.meta(number, tenant=tenant), samples.payload(number, 100_000))
        assert isinstance(stored, WriteDone)


def all_of_them(tier, samples) -> bool:
    return samples.read(tier, *TENANTS) == [samples.payload(n, 100_000) for n in TENANTS]


@pytest.fixture
def store(open_disk, samples, tmp_path) -> Path:
    """A closed store of 20 records, of two tenants and of none."""
    tier = open_disk()
    fill(tier, samples)
    tier.close()
    return tmp_path / "store"


def lose_index(store: Path) -> None:
    for path in store.glob("index.sqlite*"):
        path.unlink()


def as_older(store: Path) -> None:
    """The store as a release that knew no fingerprints left it."""
    (store / "KEYID").unlink()


def content(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (store / "segments").iterdir()}


@pytest.mark.parametrize("index", ["index there", "index lost"])
@pytest.mark.parametrize("wrote", ["fingerprint", "older release"])
@pytest.mark.parametrize("key", ["wrong KEY", "wrong key file", "no KEY"])
def test_another_key_opens_nothing_and_harms_nothing(
    open_disk, samples, store, tmp_path, index, wrote, key
):
    """20 of 20 good records were quarantined, and with the index lost erased; a lost KEY was made
    anew."""
    if index == "index lost":
        lose_index(store)
    if wrote == "older release":
        as_older(store)
    right, before = (store / "KEY").read_bytes(), content(store)
    wrong = tmp_path / "wrong"
    wrong.write_bytes(os.urandom(32))
    if key == "no KEY":
        (store / "KEY").unlink()
    elif key == "wrong KEY":
        shutil.copy(wrong, store / "KEY")
    message = "KEY is missing.*put it back" if key == "no KEY" else "did not seal.*name the key"
    for _ in range(2):
        with pytest.raises(InvalidInput, match=message):
            open_disk(key_file=wrong if key == "wrong key file" else None)
    assert content(store) == before
    assert (store / "KEY").exists() == (key != "no KEY")
    (store / "KEY").write_bytes(right)
    again = open_disk()
    assert all_of_them(again, samples)
    assert again.recovery.torn == 0
    assert again.core.index.quarantined() == []


def test_the_right_key_from_elsewhere_opens(open_disk, samples, store, tmp_path):
    (store / "KEY").rename(tmp_path / "elsewhere")
    assert all_of_them(open_disk(key_file=tmp_path / "elsewhere"), samples)


def test_a_store_without_tenants_takes_any_key(open_disk, samples, tmp_path):
    tier = open_disk()
    put(tier, samples.meta(1), samples.payload(1))
    tier.close()
    (tmp_path / "key").write_bytes(b"k" * 32)
    tier = open_disk(key_file=tmp_path / "key")
    put(tier, samples.meta(2, tenant=TENANT), samples.payload(2))
    tier.close()
    with pytest.raises(InvalidInput, match="KEY did not seal"):
        open_disk()
    assert samples.read(open_disk(key_file=tmp_path / "key"), 1, 2) != "corrupt"


def test_a_lost_key_is_made_anew_where_no_tenant_has_a_record(open_disk, samples, tmp_path):
    tier = open_disk()
    put(tier, samples.meta(1), samples.payload(1))
    tier.close()
    (tmp_path / "store" / "KEY").unlink()
    tier = open_disk()
    put(tier, samples.meta(2, tenant=TENANT), samples.payload(2))
    tier.close()
    assert samples.read(open_disk(), 1, 2) == [samples.payload(1), samples.payload(2)]


@pytest.mark.parametrize("harm", ["flipped bit", "cut", "another store's"])
def test_a_damaged_fingerprint_is_made_again_from_the_records(
    open_disk, samples, store, tmp_path, harm
):
    sound = (store / "KEYID").read_bytes()
    if harm == "another store's":
        open_disk(tmp_path / "other").close()
        shutil.copy(tmp_path / "other" / "KEYID", store / "KEYID")
    else:
        data = bytearray(sound)
        data[40] ^= 4
        (store / "KEYID").write_bytes(data[:50] if harm == "cut" else data)
    assert all_of_them(open_disk(), samples)
    assert (store / "KEYID").read_bytes() == sound


def test_a_fingerprint_is_not_the_key_and_the_files_are_the_owner_s_alone(store):
    key = (store / "KEY").read_bytes()
    data = (store / "KEYID").read_bytes()
    assert fingerprint(key) in data
    assert key not in data
    assert [(store / name).stat().st_mode & 0o777 for name in ("KEY", "KEYID")] == [0o600] * 2


def test_a_reader_without_the_key_says_so_and_one_with_another_is_refused(samples, store, tmp_path):
    right = (store / "KEY").read_bytes()
    (store / "KEY").unlink()
    snapshot = StoreSnapshot(store)
    assert samples.read(snapshot, 0) == "no_key"
    assert samples.read(snapshot, 2) == [samples.payload(2, 100_000)]
    snapshot.close()
    (store / "KEY").write_bytes(os.urandom(32))
    with pytest.raises(InvalidInput, match="KEY did not seal"):
        StoreSnapshot(store)
    (tmp_path / "right").write_bytes(right)
    snapshot = StoreSnapshot(store, key_file=tmp_path / "right")
    assert samples.read(snapshot, 0) == [samples.payload(0, 100_000)]
    snapshot.close()
    snapshot = StoreSnapshot(store, keys=Keys())
    assert len(list(snapshot.entries())) == 20
    snapshot.close()
