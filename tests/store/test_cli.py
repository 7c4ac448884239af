"""`ownerserve store` as a user types it."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from ownerserve.cli.store import command
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.prefix import tenant_salt
from ownerserve.store.format.model import ArtifactKind
from ownerserve.store.format.segment import segment_path
from ownerserve.store.tiers.backend import put


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(command, list(arguments), catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result.stdout


@pytest.fixture
def filled(open_disk, samples, tmp_path):
    """A store with 3 shared ranges, a point, and two records of tenant acme. Still open."""
    tier = open_disk()
    for number in range(3):
        put(tier, samples.meta(number), samples.payload(number))
    put(tier, samples.meta("point", ArtifactKind.POINT), samples.payload("point"))
    acme = tenant_salt(b"s" * 32, "acme")
    for number in ("a", "b"):
        put(tier, samples.meta(number, tenant=acme), samples.payload(number))
    return tier


def test_ls_beside_a_writer(filled, tmp_path):
    body = json.loads(run("ls", str(tmp_path / "store"), "--json", "-"))
    assert body["schema"] == "ownerserve.store.ls/1"
    rows = {(row["tenant"][:6], row["kind"]): row["records"] for row in body["usage"]}
    assert rows["shared", "range"] == 3
    assert rows["shared", "point"] == 1
    assert len(body["records"]) == 6
    assert "csa_main" in run("ls", str(tmp_path / "store"), "--limit", "1")


def test_verify_tells_sound_from_bad(filled, samples, tmp_path):
    directory = str(tmp_path / "store")
    assert json.loads(run("verify", directory, "--json", "-"))["counts"] == {"sound": 6}
    entry = filled.core.index.get(samples.meta(1).id)
    with segment_path(tmp_path / "store", entry.segment).open("r+b") as file:
        file.seek(entry.offset + 5000)
        file.write(b"\xff\x00\xff")
    body = json.loads(run("verify", directory, "--json", "-", status=1))
    assert body["counts"] == {"sound": 5, "corrupt": 1}
    assert body["bad"] == [{"id": samples.meta(1).id.hex(), "reason": "corrupt"}]


def test_gc_needs_the_store_to_itself(filled, tmp_path):
    with pytest.raises(InvalidInput, match="written by process"):
        run("gc", str(tmp_path / "store"))
    filled.close()
    body = json.loads(run("gc", str(tmp_path / "store"), "--point-ttl", "0", "--json", "-"))
    assert body["expired"] == 1
    run("gc", str(tmp_path / "store"), "--rebuild-index")
    assert json.loads(run("verify", str(tmp_path / "store"), "--json", "-"))["counts"] == {
        "sound": 5
    }


@pytest.mark.parametrize("refused", ["in use", "--capacity", "--key-file"])
def test_an_index_is_dropped_by_nobody_whose_command_is_refused(filled, tmp_path, refused):
    """It was, before the store's lock was asked for: under the worker that wrote it."""
    store, arguments = tmp_path / "store", []
    if refused != "in use":
        filled.close()
        arguments = [refused, "nonsense"]
    index = store / "index.sqlite"
    before = index.stat().st_ino
    with pytest.raises(InvalidInput):
        run("gc", str(store), "--rebuild-index", *arguments)
    assert index.stat().st_ino == before


def test_gc_shrinks_to_a_capacity(filled, tmp_path):
    filled.close()
    body = json.loads(run("gc", str(tmp_path / "store"), "--capacity", "60KiB", "--json", "-"))
    assert body["evicted"] >= 3
    assert body["stored_bytes"] <= 60 * 1024


def test_purge_by_name_and_by_tag(filled, samples, tmp_path):
    filled.close()
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 32)
    directory = str(tmp_path / "store")
    with pytest.raises(InvalidInput, match="not 64 hex digits"):
        run("purge", directory, "--tenant", "acme")
    said = run("purge", directory, "--tenant", "acme", "--secret-file", str(secret))
    assert said.startswith("2 records of ")
    tag = tenant_salt(b"s" * 32, "acme").hex()
    body = json.loads(run("purge", directory, "--tenant", tag, "--json", "-"))
    assert body["records"] == 0
    assert json.loads(run("verify", directory, "--json", "-"))["counts"] == {"sound": 4}


def test_no_store_there(tmp_path):
    with pytest.raises(InvalidInput, match="holds no store"):
        run("ls", str(tmp_path))


def test_bench_leaves_nothing(tmp_path):
    body = json.loads(run("bench", str(tmp_path), "--size", "1MiB", "--rounds", "1", "--json", "-"))
    assert {row["unit"] for row in body["rows"]} == {"MB/s", "rows/s", "us"}
    assert list(tmp_path.iterdir()) == []
