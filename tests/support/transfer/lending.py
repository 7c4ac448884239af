"""A process that lends: it owns a pool in shared memory and does what a test tells it over a pipe.

    test      LendingProcess ──pipe──> serve(), in a process forked off a clean one
    a piece   lies in the pool as the test says: (offset, bytes) of each run, in order

Forked off multiprocessing's forkserver, which has imported what it needs: 10 ms each. What a
lending process does for a road (listen, say) it does by `RoadUnderTest.lend`.
"""

from __future__ import annotations

import fcntl
import importlib
import mmap
import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from typing import cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from ownerserve.kv.regions import SharedMemory
from ownerserve.transfer.movers.digests import KeyedBlake3, Xxh3, digest_of
from ownerserve.transfer.movers.peers import own_name
from ownerserve.transfer.movers.process_name import ProcessName
from ownerserve.transfer.vocabulary import FramePiece, Runs
from tests.support.transfer.roads import LendingPool, RoadUnderTest
from tests.support.waits import WAIT_S, until

JUNK = 0xEE
"""What fills a block when it is used again."""


class LendPiece(msgspec.Struct, tag=True):
    """Lend the piece under the ticket: its runs are filled with `contents(seed, ...)`."""

    ticket: int
    piece: FramePiece
    runs: list[tuple[int, int]]
    seed: int
    key: bytes | None


class Revoke(msgspec.Struct, tag=True):
    """The ticket stands no more; nothing of it is used again yet."""

    ticket: int


class Reuse(msgspec.Struct, tag=True):
    """The ticket stands no more, and then its blocks are another's: full of JUNK."""

    ticket: int


class Stands(msgspec.Struct, tag=True):
    """The asker's `More`: does the ticket stand?"""

    ticket: int


class PieceLent(msgspec.Struct, tag=True):
    """Where the piece lies in the lending process, and its digest."""

    runs: list[tuple[int, int]]
    digest: bytes


class Said(msgspec.Struct, tag=True):
    """Yes or no; of what is only done: yes."""

    yes: bool


class Opened(msgspec.Struct, tag=True):
    """The process lends: who it is, where its memory lies, and what its road says of itself."""

    name: ProcessName
    shared: SharedMemory
    road: bytes


Told = LendPiece | Revoke | Reuse | Stands
Answered = PieceLent | Said | Opened


def contents(seed: int, size: int) -> NDArray[np.uint8]:
    """The bytes of a piece, whose every part tells where it is."""
    words = np.arange(-(-size // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (words ^ np.uint64(seed * 0x5851F42D4C957F2D % 2**64)).view(np.uint8)[:size]


class PoolLender:
    """The `Lender` of a lending process; `port.Lender` says what it answers."""

    def __init__(self, pool: LendingPool) -> None:
        self._pool = pool
        self._lock = Lock()
        self._lent: dict[int, dict[FramePiece, Runs]] = {}

    def runs(self, ticket: int, piece: FramePiece) -> Runs | None:
        with self._lock:
            return self._lent.get(ticket, {}).get(piece)

    def stands(self, ticket: int) -> bool:
        with self._lock:
            return ticket in self._lent

    def lend(self, ticket: int, piece: FramePiece, runs: Runs) -> None:
        with self._lock:
            self._lent.setdefault(ticket, {})[piece] = runs

    def revoke(self, ticket: int) -> list[Runs]:
        with self._lock:
            return list(self._lent.pop(ticket, {}).values())


def _pool(size: int) -> LendingPool:
    descriptor = os.memfd_create("ownerserve-pool", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    bytes_ = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
    address = int(bytes_.ctypes.data)
    name = f"/proc/{os.getpid()}/fd/{descriptor}"
    return LendingPool(bytes_, SharedMemory(name, address, size))


def _fill(pool: LendingPool, runs: Sequence[tuple[int, int]], seed: int) -> Runs:
    data, at = contents(seed, sum(length for _, length in runs)), 0
    for offset, length in runs:
        pool.bytes[offset : offset + length] = data[at : at + length]
        at += length
    table = np.array(runs, np.int64).reshape(-1, 2)
    return Runs(table[:, 0] + pool.shared.address, table[:, 1].copy())


def _overwrite(pool: LendingPool, runs: Runs) -> None:
    for address, length in zip(runs.addresses, runs.lengths, strict=True):
        offset = int(address) - pool.shared.address
        pool.bytes[offset : offset + int(length)] = JUNK


def _do(told: Told, pool: LendingPool, lender: PoolLender) -> Answered:
    match told:
        case LendPiece():
            runs = _fill(pool, told.runs, told.seed)
            digests = Xxh3() if told.key is None else KeyedBlake3(told.key)
            lender.lend(told.ticket, told.piece, runs)
            pairs = zip(runs.addresses.tolist(), runs.lengths.tolist(), strict=True)
            return PieceLent(list(pairs), digest_of(runs, digests))
        case Revoke():
            lender.revoke(told.ticket)
            return Said(True)
        case Reuse():
            for runs in lender.revoke(told.ticket):
                _overwrite(pool, runs)
            return Said(True)
        case Stands():
            return Said(lender.stands(told.ticket))


def road_at(path: str) -> RoadUnderTest:
    """The road of that name: `module:NAME`."""
    module, _, name = path.partition(":")
    return cast(RoadUnderTest, getattr(importlib.import_module(module), name))


def serve(pipe: Connection, pool_bytes: int, path: str) -> None:
    """Lend until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pool = _pool(pool_bytes)
    lender = PoolLender(pool)
    opening = road_at(path).lend(lender, pool)
    pipe.send_bytes(msgspec.msgpack.encode(Opened(own_name(), pool.shared, opening)))
    decoder = msgspec.msgpack.Decoder(Told)
    while True:
        try:
            told = decoder.decode(pipe.recv_bytes())
        except EOFError:
            os._exit(0)  # whatever threads a road has
        pipe.send_bytes(msgspec.msgpack.encode(_do(told, pool, lender)))


class LendingProcess:
    """A lending process, as a test has it. Close it."""

    def __init__(self, road: RoadUnderTest, pool_bytes: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, road.path.partition(":")[0]])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, pool_bytes, road.path), daemon=True
        )
        self._process.start()
        theirs.close()
        self._decoder = msgspec.msgpack.Decoder(Answered)
        opened = self._answer()
        assert isinstance(opened, Opened)
        self.opened = opened
        self._ticket = 0

    def _answer(self) -> Answered:
        assert self._pipe.poll(WAIT_S), "the lending process is silent"
        return self._decoder.decode(self._pipe.recv_bytes())

    def tell(self, told: Told) -> Answered:
        self._pipe.send_bytes(msgspec.msgpack.encode(told))
        return self._answer()

    def lend(
        self, runs: Sequence[tuple[int, int]], *, seed: int, key: bytes | None = None
    ) -> tuple[int, FramePiece, PieceLent]:
        """Lend a piece of those runs (offset in the pool, bytes) under a new ticket."""
        self._ticket += 1
        piece = FramePiece(self._ticket.to_bytes(32, "big"), 0, 1, 0, 1)
        lent = self.tell(LendPiece(self._ticket, piece, list(runs), seed, key))
        assert isinstance(lent, PieceLent)
        return self._ticket, piece, lent

    def revoke(self, ticket: int) -> None:
        self.tell(Revoke(ticket))

    def reuse(self, ticket: int) -> None:
        self.tell(Reuse(ticket))

    def stands(self, ticket: int) -> bool:
        """The answer to a `More`."""
        said = self.tell(Stands(ticket))
        assert isinstance(said, Said)
        return said.yes

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def answers(self) -> bool:
        """Whether it lives and is not frozen."""
        return self._process.exitcode is None and _state(self.pid) != "T"

    def freeze(self) -> None:
        """Stop it; returns when it is."""
        os.kill(self.pid, signal.SIGSTOP)
        until(lambda: _state(self.pid) == "T", what="a frozen process")

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill it; returns when it is dead."""
        self._process.kill()
        self._process.join(WAIT_S)
        assert self._process.exitcode is not None

    def close(self) -> None:
        """End it, whatever became of it."""
        if self._process.exitcode is None:
            self.kill()
        self._pipe.close()
        self._process.close()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
