"""Which roads are open from here: each is tried, for what a kernel or a sandbox allows is known by
trying.

    shm, readv        a process of this host is begun, and read from
    tcp               a lender on loopback, or the one that is named, is asked (asking.py)
    mooncake, nixl    imported, by a process of its own: what they load may end one
"""

from __future__ import annotations

import importlib.util
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import numpy as np

from ownerserve.cli.transfer.asking import ask_lender
from ownerserve.cli.transfer.probe_peer import PROBE_BYTES, pattern
from ownerserve.kv.listening import LOOPBACK
from ownerserve.kv.regions import SharedMemory
from ownerserve.report.transfer_table import RoadFound, RoadState
from ownerserve.transfer.movers.digests import Xxh3
from ownerserve.transfer.movers.engines import MISSING_LIBRARY, MODULES
from ownerserve.transfer.movers.peers import own_name, started_ticks
from ownerserve.transfer.movers.port import Mover
from ownerserve.transfer.movers.process_name import ProcessName
from ownerserve.transfer.movers.readv import readv_mover
from ownerserve.transfer.movers.rights import Unreadable, read_rights
from ownerserve.transfer.movers.shm import shm_mover
from ownerserve.transfer.movers.tcp.handshake import TransferKey
from ownerserve.transfer.movers.tcp.server import TcpServer
from ownerserve.transfer.vocabulary import Ended, FramePiece, Read, ReadFailed, ReadLanded, Runs

READ_S = 10.0
IMPORT_S = 60.0
_SHM_NEEDS = (
    "run both processes as one user, in one pid namespace, where /proc, memfd_create and"
    " pidfd_open are allowed"
)


class ProbedProcess(NamedTuple):
    """A process that was begun to be read from."""

    name: ProcessName
    shared: SharedMemory


class NoProbe(NamedTuple):
    """None could be begun, or it could share nothing: why."""

    why: str


@contextmanager
def probe() -> Iterator[ProbedProcess | NoProbe]:
    """Yield a process of this host that shares PROBE_BYTES. It ends with the block, or with this
    process."""
    source = importlib.util.find_spec("ownerserve.cli.transfer.probe_peer")
    assert source is not None and source.origin is not None
    command = [sys.executable, "-I", source.origin]
    try:
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    except OSError as error:
        yield NoProbe(f"{sys.executable}: {error.strerror}")
        return
    with process:
        yield _told(process)


def _told(process: subprocess.Popen[str]) -> ProbedProcess | NoProbe:
    """Return the process by what it says of itself."""
    assert process.stdout is not None and process.stderr is not None
    said = process.stdout.readline().split()
    if len(said) != 2:
        return NoProbe((process.stderr.read().strip().splitlines() or ["it says nothing"])[-1])
    try:
        here, begun = own_name(), started_ticks(process.pid)
    except OSError as error:
        return NoProbe(f"{error.filename}: {error.strerror}")
    name = ProcessName(here.boot, here.pid_space, pid=process.pid, started_ticks=begun)
    place = f"/proc/{process.pid}/fd/{said[0]}"
    return ProbedProcess(name, SharedMemory(place, int(said[1]), PROBE_BYTES))


def local_roads() -> list[RoadFound]:
    """Try the roads between processes of this host."""
    with probe() as peer:
        if isinstance(peer, NoProbe):
            found = f"a process that shares sealed memory can't be begun: {peer.why}"
            mend = "allow memfd_create, and /proc, in the container's profile"
            return [RoadFound("shm", RoadState.CLOSED, found, mend), readable(os.getpid())]
        return [_shm(peer), _readv(peer)]


def _shm(peer: ProbedProcess) -> RoadFound:
    mover = shm_mover(peer.name, peer.shared, digests=Xxh3())
    end = _brought(mover, peer.shared)
    if isinstance(end, ReadLanded):
        found = "another process's sealed memory (memfd) was mapped and read"
        return RoadFound("shm", RoadState.OPEN, found)
    why = end.reason if isinstance(end, ReadFailed) else "not in time"
    found = f"another process's sealed memory can't be read: {why}"
    return RoadFound("shm", RoadState.CLOSED, found, _SHM_NEEDS)


def _readv(peer: ProbedProcess) -> RoadFound:
    rights = read_rights(peer.name.pid)
    if isinstance(rights, Unreadable):
        return RoadFound("readv", RoadState.CLOSED, rights.why, rights.mend)
    end = _brought(readv_mover(peer.name, Xxh3()), peer.shared)
    if isinstance(end, ReadLanded):
        found = "another process's memory was read by address (process_vm_readv)"
        return RoadFound("readv", RoadState.OPEN, found)
    why = end.reason if isinstance(end, ReadFailed) else "not in time"
    mend = "share the engine's pools (shm), or use tcp"
    return RoadFound("readv", RoadState.CLOSED, f"a read by address failed: {why}", mend)


def readable(pid: int) -> RoadFound:
    """Find out whether that process's memory may be read by address. Nothing of it is read."""
    rights = read_rights(pid)
    if isinstance(rights, Unreadable):
        return RoadFound("readv", RoadState.CLOSED, f"process {pid}: {rights.why}", rights.mend)
    found = f"the memory of process {pid} may be read by address (process_vm_readv)"
    return RoadFound("readv", RoadState.OPEN, found)


def _brought(mover: Mover, shared: SharedMemory) -> Ended | None:
    """Have the mover read all that the probe shares; None: no end in time."""
    goal = np.zeros(PROBE_BYTES, np.uint8)
    whole = np.array([PROBE_BYTES], np.int64)
    told = Xxh3().begin()
    told.update(memoryview(pattern()))
    read = Read(
        number=1,
        ticket=0,
        piece=FramePiece(bytes(32), 0, 1, 0, 1),
        goal=Runs(np.array([goal.ctypes.data], np.int64), whole),
        source=Runs(np.array([shared.address], np.int64), whole),
        digest=told.digest(),
        deadline_s=time.monotonic() + READ_S,
    )
    try:
        mover.start(read)
        select.select([mover], [], [], READ_S)
        return next(iter(mover.ended()), None)
    finally:
        mover.close()


class _NothingLent:
    """The lender that has nothing: whoever asks is refused."""

    def runs(self, ticket: int, piece: FramePiece) -> None:
        return None

    def stands(self, ticket: int) -> bool:
        return False


def loopback_tcp(key: TransferKey | None) -> RoadFound:
    """Try TCP on this host, with the key."""
    server = TcpServer(_NothingLent(), LOOPBACK, key=key)
    try:
        return ask_lender(LOOPBACK, server.port, key)
    finally:
        server.close()


class Engine(NamedTuple):
    """A transfer engine that is not ours: what is imported of it, who brings it, and the mend."""

    road: str
    module: str
    distributions: tuple[str, ...]
    mend: str


ENGINES = (
    Engine(
        "mooncake",
        MODULES["mooncake"],
        ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"),
        "pip install 'ownerserve[mooncake]'",
    ),
    Engine(
        "nixl",
        MODULES["nixl"],
        ("nixl", "nixl-cu12", "nixl-cu13"),
        "pip install 'ownerserve[nixl]' (beside a CPU build of torch: --no-deps nixl nixl-cu12)",
    ),
)


def engine_road(engine: Engine) -> RoadFound:
    """Find out whether the engine is installed, can be imported, and has a mover here."""
    package = engine.module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        return RoadFound(engine.road, RoadState.ABSENT, "not installed", engine.mend)
    said = f"{engine.road} {_version(engine)}"
    problem = _import_problem(engine.module)
    if problem:
        lacks = MISSING_LIBRARY.search(problem)
        mend = f"install the system's package of {lacks[1]}" if lacks else engine.mend
        return RoadFound(engine.road, RoadState.CLOSED, f"{said}: {problem}", mend)
    if importlib.util.find_spec(f"ownerserve.transfer.movers.{engine.road}") is None:
        found = f"{said} is installed, and this version of OwnerServe has no mover for it"
        return RoadFound(engine.road, RoadState.CLOSED, found)
    return RoadFound(engine.road, RoadState.OPEN, f"{said} can be imported")


def _version(engine: Engine) -> str:
    for name in engine.distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of unknown version"


def _import_problem(module: str) -> str:
    """Return why the module can't be imported; nothing where it can."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {module}"],
            capture_output=True,
            text=True,
            timeout=IMPORT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"its import does not end within {IMPORT_S:g} s"
    last = (done.stderr.strip().splitlines() or [f"its import ends with {done.returncode}"])[-1]
    return last if done.returncode else ""
