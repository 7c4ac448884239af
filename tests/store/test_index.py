"""The index by its marks: ids that share one, and indexes of former schemas."""

from __future__ import annotations

import sqlite3
import zipfile
from pathlib import Path

import msgspec
import pytest

from ownerserve.store.format.model import AlreadyStored, ArtifactKind
from ownerserve.store.index.reader import SCHEMA_VERSION, IndexReader
from ownerserve.store.tiers.backend import put

GOLDEN = Path(__file__).parent / "golden" / "with_epochs.zip"
"""A store as the code before schema 3 left it: records 1, 2 (a point) and 3, the first two written
under an owner's epoch, (3, 7) and (2^40, 2^50); record 1 has a price."""


def with_epoch(meta: bytes) -> bytes:
    """A row's meta as it was up to schema 2."""
    fields = msgspec.msgpack.decode(meta)
    return msgspec.msgpack.encode([*fields[:7], [3, 7], *fields[7:]])


def test_ids_that_share_their_first_bytes_are_told_apart(open_disk, samples):
    tier = open_disk()
    ids = [b"same8byt" + bytes([n]) * 24 for n in range(3)]
    for n, id_ in enumerate(ids[:2]):
        put(tier, samples.meta(n, id=id_), samples.payload(n))
    tier.close()
    tier = open_disk()  # which has none of them in memory yet
    assert tier.core.index.get(ids[2]) is None
    assert [tier.core.index.get(id_).meta.id for id_ in ids[:2]] == ids[:2]
    tier.close()
    tier = open_disk()
    assert set(tier.find(ids)) == set(ids[:2])
    tier.remove(ids[:1])
    assert set(tier.find(ids)) == {ids[1]}


def test_an_index_of_schema_1_is_taken_over_with_recency_and_prices(open_disk, samples):
    tier = open_disk()
    for n in range(5):
        put(tier, samples.meta(n), samples.payload(n))
    tier.price({samples.meta(3).id: 12.5})
    samples.read(tier, 2)
    before = {id_: tier.find([id_])[id_] for n in range(5) for id_ in [samples.meta(n).id]}
    path = tier.core.home.index_path
    tier.close()
    old = sqlite3.connect(path)
    old.create_function("id_of", 1, lambda meta: msgspec.msgpack.decode(meta)[0])
    old.create_function("with_epoch", 1, with_epoch)
    old.executescript(
        "UPDATE records SET meta = with_epoch(meta);"
        "ALTER TABLE records ADD COLUMN id BLOB; UPDATE records SET id = id_of(meta);"
        "DROP INDEX records_by_mark; ALTER TABLE records DROP COLUMN mark;"
        "CREATE UNIQUE INDEX records_by_id ON records (id); PRAGMA user_version = 1"
    )
    old.close()
    tier = open_disk()
    assert not tier.recovery.index_rebuilt
    assert tier.find(list(before)) == before
    assert samples.read(tier, *range(5)) == [samples.payload(n) for n in range(5)]
    with sqlite3.connect(path) as found:
        assert found.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
    assert IndexReader(path).highest_sequence() == 5


@pytest.mark.parametrize("index", ["taken over", "made again"])
def test_a_store_whose_records_bear_an_epoch_is_read_and_its_former_owner_s_spill_is_taken(
    open_disk, samples, tmp_path, index
):
    """The bytes are what counts: whoever wrote them, and under whatever epoch."""
    with zipfile.ZipFile(GOLDEN) as golden:
        golden.extractall(tmp_path / "store")
    if index == "made again":
        (tmp_path / "store" / "index.sqlite").unlink()
    tier = open_disk()
    assert tier.recovery.index_rebuilt == (index == "made again")
    kinds = {1: ArtifactKind.RANGE, 2: ArtifactKind.POINT, 3: ArtifactKind.RANGE}
    metas = {n: samples.meta(n, kind) for n, kind in kinds.items()}
    found = tier.find([meta.id for meta in metas.values()])
    assert {n: found[meta.id].meta for n, meta in metas.items()} == metas
    assert found[metas[1].id].restore_cost_ms == (0.0 if index == "made again" else 12.5)
    assert samples.read(tier, 1, 2, 3) == [samples.payload(n) for n in (1, 2, 3)]
    for n, meta in metas.items():
        assert put(tier, meta, samples.payload(n)) == AlreadyStored(meta.id)
    tier.close()
    again = open_disk()
    assert not again.recovery.index_rebuilt
    assert samples.read(again, 1, 2, 3) == [samples.payload(n) for n in (1, 2, 3)]
