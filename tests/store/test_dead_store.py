"""A dead worker's store is read without writing a byte in it: real processes, kill -9."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ownerserve.kv.errors import InvalidInput
from ownerserve.store.disk.home import StoreHeld
from ownerserve.store.disk.snapshot import DeadStore, StoreSnapshot, view_of
from ownerserve.store.disk.tier import DiskTier
from ownerserve.store.format.segment import segment_path
from tests.support.children import importing
from tests.support.store.writing_child import SIZE, Writing, written_and_killed

RECORDS = 40
NOBODY = 65534


def fingerprint(directory: Path) -> dict[str, tuple[int, int, int, str]]:
    """All that a write would change: names, modes, sizes, times, bytes."""
    found = {}
    for path in [directory, *sorted(directory.rglob("*"))]:
        stat = path.stat()
        digest = hashlib.sha256(path.read_bytes() if path.is_file() else b"").hexdigest()
        found[str(path)] = (stat.st_mode, stat.st_size, stat.st_mtime_ns, digest)
    return found


AS_NOBODY = f"""
import os, sys
from ownerserve.cli.store import command
if os.getuid() == 0:
    os.setgroups([])
    os.setgid({NOBODY})
    os.setuid({NOBODY})
command(sys.argv[1:])
"""
AS_US = ("-m", "ownerserve.cli.main", "store")


def asked(*arguments: str | Path, how: Sequence[str] = AS_US) -> subprocess.CompletedProcess[bytes]:
    """`ownerserve store ... --json -` in a process of its own."""
    command = [sys.executable, *how, *map(str, arguments), "--json", "-"]
    return subprocess.run(command, env=importing(), capture_output=True, check=False)


def told(*arguments: str | Path, how: Sequence[str] = AS_US) -> dict[str, Any]:
    """What it told."""
    done = asked(*arguments, how=how)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    body: dict[str, Any] = json.loads(done.stdout)
    return body


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a worker that was killed; nobody writes it."""
    store = tmp_path_factory.mktemp("killed") / "store"
    written_and_killed(store, 0, RECORDS)
    assert (store / "index.sqlite-wal").stat().st_size > 0, "its index was never put in order"
    return store


@pytest.fixture
def dead(killed: Path, tmp_path: Path) -> Path:
    """A copy of it, to be harmed."""
    shutil.copytree(killed, tmp_path / "dead")
    return tmp_path / "dead"


def all_read(store: DeadStore | DiskTier, samples) -> bool:
    return samples.read(store, *range(RECORDS)) == [
        samples.payload(n, SIZE) for n in range(RECORDS)
    ]


def lose_index(store: Path) -> None:
    for path in store.glob("index.sqlite*"):
        path.unlink()


def put_in_order(store: Path) -> Path:
    """The index without a log beside it, as a worker leaves it that is stopped."""
    with closing(sqlite3.connect(store / "index.sqlite")) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return store / "index.sqlite"


def malform_index(store: Path) -> None:
    """All pages but the first: it opens, and then a query fails."""
    index = put_in_order(store)
    size = index.stat().st_size
    assert size > 8 * 4096
    with index.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (size - 4096))


def tear_tail(store: Path) -> None:
    """The last write was cut: its header stands, its payload does not."""
    snapshot = StoreSnapshot(store)
    last = max(snapshot.entries(), key=lambda entry: entry.sequence)
    snapshot.close()
    lose_index(store)
    with segment_path(store, last.segment).open("r+b") as file:
        file.seek(last.offset + last.header_bytes)
        file.write(bytes(last.stored_bytes - last.header_bytes))


HARMS = {
    "index there": lambda _: None,
    "index missing": lose_index,
    "index malformed": malform_index,
    "index is no index": lambda store: put_in_order(store).write_bytes(b"x" * 9000),
    "its log missing": lambda store: (store / "index.sqlite-wal").unlink(),
    "STORE missing": lambda store: (store / "STORE").unlink(),
    "LOCK missing": lambda store: (store / "LOCK").unlink(),
}


@pytest.mark.parametrize("harm", HARMS)
def test_it_is_read_whole_and_left_bit_for_bit_as_it_was(dead, samples, harm):
    HARMS[harm](dead)
    before = fingerprint(dead)
    store = DeadStore(dead)
    assert all_read(store, samples)
    assert len(list(store.entries())) == RECORDS
    assert store.at_boundary(samples.meta(1).prefix_hash) == []
    assert set(store.find([samples.meta(1).id])) == {samples.meta(1).id}
    store.close()
    assert fingerprint(dead) == before


@pytest.mark.parametrize("harm", ["index malformed", "index is no index"])
def test_its_next_worker_makes_a_damaged_index_anew(dead, samples, open_disk, harm):
    """One that was malformed in its middle kept the store shut."""
    HARMS[harm](dead)
    tier = open_disk(dead)
    assert all_read(tier, samples)
    assert tier.recovery.index_rebuilt


def test_another_process_verifies_it(killed):
    before = fingerprint(killed)
    body = told("verify", killed)
    assert body["counts"] == {"sound": RECORDS}
    assert len(told("ls", killed, "--limit", "100")["records"]) == RECORDS
    assert fingerprint(killed) == before


def test_a_torn_write_is_no_record_and_stays_where_it_is(dead, samples):
    tear_tail(dead)
    before = fingerprint(dead)
    store = DeadStore(dead)
    assert store.recovery.torn == 1
    assert samples.read(store, RECORDS - 1) == "absent"
    assert samples.read(store, 0) == [samples.payload(0, SIZE)]
    store.close()
    assert fingerprint(dead) == before


def test_what_fails_verification_is_put_aside_in_memory_alone(dead, samples):
    snapshot = StoreSnapshot(dead)
    entry = snapshot.find([samples.meta(1).id]) and next(
        e for e in snapshot.entries() if e.meta.id == samples.meta(1).id
    )
    snapshot.close()
    with segment_path(dead, entry.segment).open("r+b") as file:
        file.seek(entry.offset + entry.header_bytes + 7)
        [byte] = file.read(1)
        file.seek(entry.offset + entry.header_bytes + 7)
        file.write(bytes([byte ^ 1]))
    before = fingerprint(dead)
    for _ in range(2):
        store = DeadStore(dead)
        assert samples.read(store, 1) == "corrupt"
        assert samples.read(store, 1) == "absent"
        assert [bad.id for bad in store.quarantined()] == [samples.meta(1).id]
        assert sum(store.bad.values()) == 1
        store.close()
    assert fingerprint(dead) == before


def test_keys_are_asked_as_ever(dead, samples, tmp_path):
    wrong = tmp_path / "wrong"
    wrong.write_bytes(b"w" * 32)
    before = fingerprint(dead)
    for index in ("index there", "index missing"):
        HARMS[index](dead)
        before = fingerprint(dead)
        with pytest.raises(InvalidInput, match="did not seal"):
            DeadStore(dead, key_file=wrong)
        assert fingerprint(dead) == before
    (dead / "KEY").rename(tmp_path / "elsewhere")
    store = DeadStore(dead)
    assert samples.read(store, 0) == "no_key"
    assert samples.read(store, 1) == [samples.payload(1, SIZE)]
    store.close()
    store = DeadStore(dead, key_file=tmp_path / "elsewhere")
    assert all_read(store, samples)
    store.close()


def test_one_that_a_living_process_writes_is_refused_and_read_beside_it(tmp_path, samples):
    writing = Writing(tmp_path / "store", 0, 5)
    try:
        with pytest.raises(StoreHeld, match=f"is written by process {writing.pid}"):
            DeadStore(tmp_path / "store")
        view = view_of(tmp_path / "store")
        assert samples.read(view, 0, 1) == [samples.payload(n, SIZE) for n in (0, 1)]
        view.close()
        assert told("verify", tmp_path / "store")["counts"] == {"sound": 5}
    finally:
        writing.kill()
    view = view_of(tmp_path / "store")
    assert isinstance(view, DeadStore)
    view.close()


def test_who_reads_keeps_no_worker_from_starting(dead, samples, open_disk):
    """The next life begins while somebody looks: what that one sees is verified, or a miss."""
    store = DeadStore(dead)
    tier = open_disk(dead)
    assert tier.purge(b"t" * 32) > 0
    assert samples.read(store, 0) in ("corrupt", "absent")
    assert samples.read(store, 1) == [samples.payload(1, SIZE)]
    store.close()


@pytest.fixture
def readable(killed: Path) -> Iterator[Path]:
    """The dead store where everybody can read it and nobody write it."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ownerserve-readable-") as folder:
        store = Path(folder) / "store"
        shutil.copytree(killed, store)
        Path(folder).chmod(0o755)
        for path in [store, *store.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        yield store
        for path in [store, *store.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)


def test_a_user_who_may_write_nothing_reads_it(readable):
    before = fingerprint(readable)
    assert told("verify", readable, how=("-c", AS_NOBODY))["counts"] == {"sound": RECORDS}
    assert fingerprint(readable) == before


def test_on_a_read_only_mount(killed, tmp_path):
    mount = tmp_path / "mount"
    mount.mkdir()
    script = f"mount --bind {killed} {mount} && mount -o remount,bind,ro {mount}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", script], check=False).returncode:
        pytest.skip("no mount namespace here")
    verify = f"{sys.executable} -m ownerserve.cli.main store verify {mount} --json -"
    tried = f"{script} && ! touch {mount}/x 2>/dev/null && {verify}"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", tried], env=importing(), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert json.loads(done.stdout)["counts"] == {"sound": RECORDS}


def test_what_is_no_store_or_can_t_be_read_is_told(tmp_path, readable):
    with pytest.raises(InvalidInput, match="holds no store"):
        DeadStore(tmp_path)
    segment_path(readable, 1).chmod(0)
    done = asked("verify", readable, how=("-c", AS_NOBODY))
    assert b"Permission denied" in done.stderr
    assert b"let this user read all of it" in done.stderr


READING = """
import sys, time
from pathlib import Path
from ownerserve.store.disk.snapshot import DeadStore
store = DeadStore(Path(sys.argv[1]))
print("open", flush=True)
time.sleep(3600)
"""


def reading(store: Path, temporary: Path) -> subprocess.Popen[bytes]:
    """A process that has the dead store open."""
    reader = subprocess.Popen(
        [sys.executable, "-c", READING, str(store)],
        env=importing() | {"TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
    )
    assert reader.stdout is not None and reader.stdout.readline() == b"open\n"
    return reader


def test_what_killed_readers_left_goes_when_another_one_opens_a_store(
    dead, samples, monkeypatch, tmp_path
):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    readers = []
    try:
        readers.append(reading(dead, temporary))
        (left,) = temporary.iterdir()
        assert (left / "index.sqlite").stat().st_size > 0
        readers.append(reading(dead, temporary))
        (living,) = set(temporary.iterdir()) - {left}
        readers[0].kill()
        readers[0].wait()
        assert left.exists()
        store = DeadStore(dead)
        assert not left.exists() and (living / "index.sqlite").exists()
        assert all_read(store, samples)
        store.close()
        assert list(temporary.iterdir()) == [living]
    finally:
        for reader in readers:
            with reader:
                reader.kill()


def test_a_link_and_a_file_that_are_named_so_are_left_alone(dead, monkeypatch, tmp_path):
    temporary, elsewhere = tmp_path / "temporary", tmp_path / "elsewhere"
    temporary.mkdir()
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    (temporary / "ownerserve-index-link").symlink_to(elsewhere)
    (temporary / "ownerserve-index-file").touch()
    DeadStore(dead).close()
    assert elsewhere.is_dir() and len(list(temporary.iterdir())) == 2


def test_nothing_is_left_in_the_temporary_folder(dead, monkeypatch, tmp_path):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    DeadStore(dead).close()
    (dead / "KEY").write_bytes(b"short")
    with pytest.raises(InvalidInput, match="5 bytes"):
        DeadStore(dead)
    assert list((tmp_path / "temporary").iterdir()) == []
