"""kill -9, EIO, ENOSPC and empty writes at system calls of commit, evict, compact and re-open.

By strace. The short form (markers: crash) takes every k-th call; all of them:

    OWNERSERVE_CRASH_EVERY=1 python -m pytest tests/store/test_crash.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from ownerserve.kv.clock import ManualClock
from ownerserve.store.disk.scan import records
from ownerserve.store.disk.tier import DiskTier
from ownerserve.store.format.header import BLOCK
from ownerserve.store.format.model import MissReason, ReadHit, ReadMiss, Want
from ownerserve.store.format.segment import Segment, segment_path
from tests.support.store import crash_child

pytestmark = [
    pytest.mark.crash,
    pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace"),
]

CALLS = [
    "pwrite64",
    "pwritev",
    "pwritev2",  # what os.pwritev calls where the kernel has it: the segments' writes
    "pread64",
    "preadv",
    "preadv2",
    "write",
    "fdatasync",
    "fsync",
    "fallocate",
    "ftruncate",
    "unlink",
    "rename",
    "mkdir",
    "openat",
]
EVERY = int(os.environ.get("OWNERSERVE_CRASH_EVERY", "24"))
CHILD = Path(crash_child.__file__)


def run(
    directory: Path, inject: str | None = None, log: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    """The child under strace."""
    trace = ",".join(CALLS) if inject is None else inject.split(":")[0]
    command = ["strace", "-f", "-qq", "-y", "-e", f"trace={trace}"]
    command += ["-o", str(log or os.devnull)]
    command += ["-e", f"inject={inject}"] if inject else []
    command += [sys.executable, str(CHILD), str(directory / "store"), str(directory / "acks")]
    return subprocess.run(command, check=False, capture_output=True, timeout=300)


def points(directory: Path) -> Iterator[tuple[str, int]]:
    """(call, n) of every n-th call that touches the store, counted over the whole run."""
    # A first life writes the .pyc files; from then on every run makes the same calls.
    (directory / "warm").mkdir()
    assert run(directory / "warm").returncode == 0
    log = directory / "calls"
    assert run(directory, log=log).returncode == 0
    seen: Counter[str] = Counter()
    for line in log.read_text().splitlines():
        name = line.split("(")[0].split()[-1]
        if name not in CALLS:
            continue
        seen[name] += 1
        if str(directory / "store") in line:
            yield name, seen[name]


def check(directory: Path) -> None:
    """Re-open after the fault: acknowledged or absent, never torn, never an orphan."""
    acks = directory / "acks"
    told = [line.split() for line in acks.read_text().splitlines()] if acks.exists() else []
    put = {int(number) for word, number in told if word == "put"}
    removing = {int(number) for word, number in told if word == "removing"}
    gone = {int(number) for word, number in told if word == "gone"}
    tier = DiskTier(directory / "store", ManualClock(2e9), options=crash_child.OPTIONS)
    try:
        for number in range(1, crash_child.RECORDS + 1):
            outcome = tier.read([Want(crash_child.meta(number).id)])
            if isinstance(outcome, ReadHit):
                assert outcome.parts[0].data == crash_child.payload(number), "wrong bytes"
                assert number not in gone, f"{number} came back after its removal"
            else:
                assert isinstance(outcome, ReadMiss)
                assert outcome.reason is MissReason.ABSENT, f"{number}: {outcome.reason}"
                assert number not in put - removing, f"{number} was acknowledged and is lost"
        core = tier.core
        standing = {
            (number, header.place.offset)
            for number in core.home.segment_numbers()
            for header in records(
                Segment(segment_path(core.home.directory, number), os.O_RDONLY),
                BLOCK,
                core.home.store_id,
            )
        }
        assert standing == {(entry.segment, entry.offset) for entry in core.index.walk()}
        assert core.index.doomed() == []
        assert not list((directory / "store").glob("*.tmp"))
    finally:
        tier.close()


@pytest.fixture(scope="module")
def every_point(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, int]]:
    return list(points(tmp_path_factory.mktemp("count")))


def some(every_point: list[tuple[str, int]], shift: int) -> list[tuple[str, int]]:
    return every_point[shift % EVERY :: EVERY]


def test_the_calls_that_write_segments_and_index_are_among_the_points(every_point):
    """A kernel or a Python that writes by another call would leave them out unseen."""
    calls = Counter(call for call, _ in every_point)
    assert calls["pwritev"] + calls["pwritev2"] >= 10, "segments"
    assert calls["pwrite64"] > 80, "index"
    assert calls["preadv"] + calls["preadv2"] > 3


def test_kill_at_every_call(every_point, tmp_path):
    for place, (call, number) in enumerate(some(every_point, 0)):
        directory = tmp_path / str(place)
        directory.mkdir()
        ended = run(directory, f"{call}:signal=KILL:when={number}")
        assert ended.returncode != 0, (call, number)
        check(directory)


@pytest.mark.parametrize(("code", "shift"), [("EIO", 3), ("ENOSPC", 7)])
def test_error_at_every_call(every_point, tmp_path, code, shift):
    """The child meets refusals, never an exception; afterwards the store is whole."""
    for place, (call, number) in enumerate(some(every_point, shift)):
        directory = tmp_path / str(place)
        directory.mkdir()
        ended = run(directory, f"{call}:error={code}:when={number}")
        assert ended.returncode == 0, (call, number, ended.stderr.decode()[-2000:])
        check(directory)


def test_a_write_that_takes_nothing_at_every_call(every_point, tmp_path):
    """The shortest of short writes, SQLite's among them: strace answers 0 and nothing is written.

    Writes that take a part are test_recovery.py's.
    """
    writes = [point for point in every_point if "write" in point[0]]
    for place, (call, number) in enumerate(some(writes, 5)):
        directory = tmp_path / str(place)
        directory.mkdir()
        ended = run(directory, f"{call}:retval=0:when={number}")
        assert ended.returncode == 0, (call, number, ended.stderr.decode()[-2000:])
        check(directory)
