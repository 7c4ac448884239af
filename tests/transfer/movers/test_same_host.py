"""Who is read on one host, and what of its memory: names of processes, rights, sealed objects."""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import shared_memory

import pytest
from msgspec.structs import replace

from ownerserve.kv.regions import SharedMemory
from ownerserve.transfer.movers.digests import Xxh3
from ownerserve.transfer.movers.peers import PeerProcess, open_peer, own_name
from ownerserve.transfer.movers.process_name import ProcessName
from ownerserve.transfer.movers.rights import (
    Readable,
    RightsFacts,
    Unreadable,
    explain,
    permit_readers,
    read_rights,
)
from ownerserve.transfer.movers.shm import shm_mover
from ownerserve.transfer.vocabulary import Ended, FramePiece, Read, ReadFailed, ReadFailure
from tests.support.transfer.lending import LendingProcess
from tests.support.transfer.other_user import read_as_nobody
from tests.support.transfer.reading import open_files, runs_of, the_end_of
from tests.support.transfer.roads import SHM

SIZE = 1 << 16


@contextmanager
def memory_object(*, flags: int, seals: int) -> Iterator[SharedMemory]:
    """A memfd of this process, of SIZE bytes."""
    descriptor = os.memfd_create("test", flags)
    os.ftruncate(descriptor, SIZE)
    if seals:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    yield SharedMemory(f"/proc/{os.getpid()}/fd/{descriptor}", 4096, SIZE)
    os.close(descriptor)


def end_of_a_read(shared: SharedMemory, name: ProcessName | None = None) -> Ended:
    """What comes of a read of no bytes from that object."""
    mover = shm_mover(name or own_name(), shared, digests=Xxh3())
    none = runs_of([])
    digest = Xxh3().begin().digest()
    mover.start(Read(1, 1, FramePiece(bytes(32), 0, 1, 0, 1), none, none, digest, 1e12))
    end = the_end_of(mover)
    mover.close()
    return end


def why(shared: SharedMemory, name: ProcessName | None = None) -> ReadFailure:
    files = open_files()
    end = end_of_a_read(shared, name)
    assert open_files() == files
    assert isinstance(end, ReadFailed)
    return end.reason


def test_an_object_that_could_shrink_is_not_mapped() -> None:
    with memory_object(flags=os.MFD_ALLOW_SEALING, seals=fcntl.F_SEAL_GROW) as shared:
        assert why(shared) is ReadFailure.UNABLE
    with memory_object(flags=0, seals=0) as shared:
        assert why(shared) is ReadFailure.UNABLE


def test_a_sealed_one_can_not_shrink_under_a_reader() -> None:
    with memory_object(flags=os.MFD_ALLOW_SEALING, seals=fcntl.F_SEAL_SHRINK) as shared:
        assert end_of_a_read(shared) != ReadFailed(1, ReadFailure.UNABLE)
        with pytest.raises(PermissionError):
            os.truncate(shared.name, 0)
        assert why(replace(shared, bytes=SIZE + 1)) is ReadFailure.UNABLE, "it is shorter than said"
        assert why(replace(shared, bytes=0)) is ReadFailure.UNABLE


def test_a_posix_object_and_other_files_are_not_mapped() -> None:
    posix = shared_memory.SharedMemory(create=True, size=SIZE)
    try:
        for name in (posix.name, f"/dev/shm/{posix.name}", "/etc/passwd", "/proc/1/fd/0", ""):
            assert why(SharedMemory(name, 0, SIZE)) is ReadFailure.UNABLE
    finally:
        posix.close()
        posix.unlink()
    readable, writable = os.pipe()
    assert why(SharedMemory(f"/proc/{os.getpid()}/fd/{readable}", 0, SIZE)) is ReadFailure.UNABLE
    os.close(readable)
    os.close(writable)


def test_a_run_that_leaves_the_object_is_refused() -> None:
    lending = LendingProcess(SHM, SIZE)
    shared = lending.opened.shared
    mover = shm_mover(lending.opened.name, shared, digests=Xxh3())
    goal = ctypes.create_string_buffer(100)
    into = runs_of([(ctypes.addressof(goal), 100)])
    piece = FramePiece(bytes(32), 0, 1, 0, 1)
    ends = shared.address + SIZE
    for number, begin in enumerate((shared.address - 1, ends - 99, ends, ends + 5000), 1):
        mover.start(Read(number, 1, piece, into, runs_of([(begin, 100)]), b"", 1e12))
        assert the_end_of(mover) == ReadFailed(number, ReadFailure.REFUSED)
    mover.start(Read(9, 1, piece, into, runs_of([(ends - 100, 100)]), b"", 1e12))
    assert the_end_of(mover) == ReadFailed(9, ReadFailure.CORRUPT), "it was read"
    mover.close()
    lending.close()


def test_a_process_is_named_by_its_life_not_by_its_pid() -> None:
    lending = LendingProcess(SHM, SIZE)
    name = lending.opened.name
    peer = open_peer(name)
    assert isinstance(peer, PeerProcess)
    assert peer.lives()
    assert open_peer(replace(name, started_ticks=name.started_ticks + 1)) is ReadFailure.PEER_LOST
    assert open_peer(replace(name, boot="another host")) is ReadFailure.UNABLE
    assert open_peer(replace(name, pid_space=1)) is ReadFailure.UNABLE
    lending.kill()
    assert not peer.lives()
    assert open_peer(name) is ReadFailure.PEER_LOST
    peer.close()
    lending.close()


def test_rights_over_a_process_are_found_out_without_reading_it() -> None:
    found = read_rights(os.getpid())
    assert isinstance(found, Readable)
    gone = LendingProcess(SHM, SIZE)
    pid = gone.pid
    gone.close()
    missing = read_rights(pid)
    assert isinstance(missing, Unreadable)
    assert "no process" in missing.why
    permit_readers()


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        (RightsFacts(0, has_capability=True, own_uid=0, peer_uid=0), "seccomp"),
        (RightsFacts(0, has_capability=False, own_uid=5, peer_uid=6), "uid 6"),
        (RightsFacts(1, has_capability=False, own_uid=5, peer_uid=5), "permit_readers"),
        (RightsFacts(2, has_capability=False, own_uid=5, peer_uid=5), "CAP_SYS_PTRACE"),
        (RightsFacts(0, has_capability=False, own_uid=5, peer_uid=5), "namespace"),
    ],
)
def test_a_refusal_says_why_and_what_to_do(facts: RightsFacts, named: str) -> None:
    told = explain(facts)
    assert named in f"{told.why}; {told.mend}"


def test_a_refusal_by_the_kernel_ends_reads_as_unable() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs to become another user")
    lending = LendingProcess(SHM, SIZE)
    told = read_as_nobody(lending.opened.name, lending.opened.shared.address)
    assert ReadFailure.UNABLE in told
    assert "uid 0" in told
    assert repr(bytes(10)) in told
    lending.close()
