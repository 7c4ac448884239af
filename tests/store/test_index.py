"""The index by its marks: ids that share one, and an index of schema 1."""

from __future__ import annotations

import sqlite3

import msgspec

from ownerserve.store.index import SCHEMA_VERSION, IndexReader
from ownerserve.store.tier import put


def test_ids_that_share_their_first_bytes_are_told_apart(open_disk, samples):
    tier = open_disk()
    ids = [b"same8byt" + bytes([n]) * 24 for n in range(3)]
    for n, id_ in enumerate(ids[:2]):
        put(tier, samples.meta(n, id=id_), samples.payload(n))
    tier.core.index._hot.clear()
    assert tier.core.index.get(ids[2]) is None
    assert [tier.core.index.get(id_).meta.id for id_ in ids[:2]] == ids[:2]
    tier.core.index._hot.clear()
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
    old.executescript(
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
