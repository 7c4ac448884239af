"""The key of a shared medium: what it keeps out, who must have it, what there is without one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from ownerserve.cli.main import cli
from ownerserve.kv.clock import ManualClock
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.units import MIB
from ownerserve.node.storage.backing import Backing, open_backing
from ownerserve.node.storage.media import open_remote
from ownerserve.store.format.model import RefusalReason, WriteDone, WriteRefused
from ownerserve.store.format.seal import Keys, SealKind
from ownerserve.store.format.verify import draft, record_room
from ownerserve.store.tiers.agreement import KEY_PRINT
from ownerserve.store.tiers.backend import put
from ownerserve.store.tiers.blobs import DirectoryBlobs
from ownerserve.store.tiers.remote import RemoteTier, record_key
from tests.support.store.samples import Samples

TENANT = b"t" * 32


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    return tmp_path / "shared"


def key_file(tmp_path: Path, name: str = "medium.key") -> Path:
    path = tmp_path / name
    done = CliRunner().invoke(cli, ["store", "new-key", str(path)])
    assert done.exit_code == 0, done.output
    return path


def remote(shared: Path, key: bytes | None, clock: ManualClock) -> RemoteTier:
    return RemoteTier("remote", DirectoryBlobs(shared), clock=clock, keys=Keys(key))


def forge(shared: Path, number: int, kind: SealKind, key: bytes | None = None) -> None:
    """Put a record of one's own making under an artifact's name: whole, with valid digests."""
    meta, payload = Samples.meta(number), b"forged" * 1000
    keys = Keys(key).for_medium() if kind is SealKind.BLAKE3 else Keys()
    seal = keys.for_write(meta.tenant)
    assert seal is not None
    assert seal.kind is kind
    head, total = record_room(meta, len(payload), seal)
    record = memoryview(bytearray(total))
    record[head : head + len(payload)] = payload
    draft(record, meta, len(payload), seal=seal, now_ms=1)
    path = shared / record_key(meta.id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(record[: head + len(payload)])


@pytest.mark.parametrize(
    ("kind", "key"), [(SealKind.XXH3, None), (SealKind.BLAKE3, b"a guess of thirty-two bytes long")]
)
def test_a_forged_record_with_valid_digests_is_refused(shared, clock, samples, kind, key):
    tier = remote(shared, b"k" * 32, clock)
    put(tier, samples.meta(2), samples.payload(2))
    forge(shared, 1, kind, key)
    assert samples.read(tier, 1) == "corrupt"
    assert tier.counters["forged"] == 1
    assert not tier.find([samples.meta(1).id])  # nobody waits for it any more
    assert samples.read(tier, 2) == [samples.payload(2)]
    assert (shared / record_key(samples.meta(1).id)).exists()  # it is nobody's to move


def test_every_record_there_bears_a_mac_and_tenants_records_may_lie_there(shared, clock, samples):
    tier = remote(shared, b"k" * 32, clock)
    for number, tenant in enumerate((b"", TENANT)):
        meta = samples.meta(number, tenant=tenant)
        assert isinstance(put(tier, meta, samples.payload(number)), WriteDone)
        assert samples.read(remote(shared, b"k" * 32, clock), number) == [samples.payload(number)]
        seal = (shared / record_key(samples.meta(number).id)).read_bytes()[13]
        assert seal == SealKind.BLAKE3


def test_files_and_folders_are_their_owners_alone(shared, clock, samples):
    before = os.umask(0)
    try:
        tier = remote(shared, b"k" * 32, clock)
        put(tier, samples.meta(1), samples.payload(1))
        tier.price({samples.meta(1).id: 5.0})
    finally:
        os.umask(before)
    found = [shared, *shared.rglob("*")]
    assert len(found) > 6
    for path in found:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("other", [b"x" * 32, None])
def test_who_has_another_key_neither_reads_nor_writes_and_harms_nothing(
    shared, clock, samples, other
):
    right = remote(shared, b"k" * 32, clock)
    for number in range(20):
        put(
            right,
            samples.meta(number, tenant=TENANT if number % 2 else b""),
            samples.payload(number),
        )
    wrong = remote(shared, other, clock)
    for number in range(20):
        assert samples.read(wrong, number) == "no_key"
    refused = put(wrong, samples.meta("new"), samples.payload(1))
    assert refused == WriteRefused(RefusalReason.NO_KEY, samples.meta("new").id)
    with pytest.raises(InvalidInput, match=r"remote-key-file: .* is sealed with the key"):
        wrong.agree()
    assert not list(shared.glob("quarantine/*"))
    assert [samples.read(right, number) for number in range(20)] == [
        [samples.payload(number)] for number in range(20)
    ]


def test_a_damaged_fingerprint_is_written_anew(shared, clock, samples):
    put(remote(shared, b"k" * 32, clock), samples.meta(1), samples.payload(1))
    path = shared / KEY_PRINT
    whole = path.read_bytes()
    for damaged in (whole[:9], b"", bytes(len(whole)), whole + b"more"):
        path.write_bytes(damaged)
        assert samples.read(remote(shared, b"k" * 32, clock), 1) == [samples.payload(1)]
        assert path.read_bytes() == whole


def test_a_medium_that_is_silent_at_first_is_asked_again(shared, clock, samples):
    class Silent(DirectoryBlobs):
        silent = True

        def get_into(self, key: str, offset: int, into: memoryview) -> int:
            if self.silent:
                raise TimeoutError(key)
            return super().get_into(key, offset, into)

    put(remote(shared, b"k" * 32, clock), samples.meta(1), samples.payload(1))
    blobs = Silent(shared)
    tier = RemoteTier("remote", blobs, clock=clock, keys=Keys(b"x" * 32))
    assert samples.read(tier, 1) == "io_error"
    assert put(tier, samples.meta(2), b"2").reason is RefusalReason.IO_ERROR  # type: ignore[union-attr]
    blobs.silent = False
    clock.advance(3600)
    assert samples.read(tier, 1) == "no_key"
    assert put(tier, samples.meta(2), b"2").reason is RefusalReason.NO_KEY  # type: ignore[union-attr]


def test_without_a_key_the_medium_keeps_what_is_of_no_tenant(shared, clock, samples):
    tier = remote(shared, None, clock)
    assert isinstance(put(tier, samples.meta(1), samples.payload(1)), WriteDone)
    refused = put(tier, samples.meta(2, tenant=TENANT), samples.payload(2))
    assert refused == WriteRefused(RefusalReason.NO_KEY, samples.meta(2, tenant=TENANT).id)
    assert not (shared / KEY_PRINT).exists()


# ---- the operator's key file


def backing(tmp_path: Path, key: Path | None) -> Backing:
    opened = open_backing(None, MIB, remote=str(tmp_path / "shared"), remote_key_file=key)
    assert opened is not None
    return opened


def test_two_workers_with_one_key_file_share_a_tenants_record(tmp_path, samples):
    key = key_file(tmp_path)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    one, two = backing(tmp_path, key), backing(tmp_path, key)
    put(one.tiers, samples.meta(1, tenant=TENANT), samples.payload(1))
    assert samples.read(two.tiers, 1) == [samples.payload(1)]
    one.close()
    two.close()


def test_another_key_file_or_none_is_one_clear_error(tmp_path, samples):
    backing(tmp_path, key_file(tmp_path)).close()
    for key in (key_file(tmp_path, "other.key"), None):
        with pytest.raises(InvalidInput, match=r"remote-key-file: .* give the key file"):
            backing(tmp_path, key)


def test_a_key_file_that_can_not_be_one_is_refused(tmp_path):
    short, key = tmp_path / "short", key_file(tmp_path)
    short.write_bytes(b"k" * 31)
    for path, problem in (
        (tmp_path / "none", "store new-key"),
        (short, "31 bytes"),
    ):
        with pytest.raises(InvalidInput, match=problem):
            open_remote(str(tmp_path / "shared"), ManualClock(0.0), path)
    key.chmod(0o644)
    with pytest.raises(InvalidInput, match="chmod 600"):
        open_remote(str(tmp_path / "shared"), ManualClock(0.0), key)
    with pytest.raises(InvalidInput, match="no shared medium"):
        open_backing(None, MIB, remote_key_file=key)


def test_a_key_file_is_never_written_over(tmp_path):
    path = key_file(tmp_path)
    before = path.read_bytes()
    done = CliRunner().invoke(cli, ["store", "new-key", str(path)])
    assert done.exit_code != 0
    assert path.read_bytes() == before
