"""Both sides of the TCP mover in one process, and what may stand between them."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from enum import Enum
from typing import Any

import numpy as np
from xxhash import xxh3_128_digest

from ownerserve.transfer.movers.digests import Xxh3
from ownerserve.transfer.movers.tcp.client import TcpMover
from ownerserve.transfer.movers.tcp.handshake import (
    NONCE_BYTES,
    WELCOME_BYTES,
    ReaderHandshake,
    TransferKey,
)
from ownerserve.transfer.movers.tcp.server import TcpServer
from ownerserve.transfer.movers.tcp.settings import LenderSettings, Peer, ReaderSettings
from ownerserve.transfer.movers.tcp.wire import Checking, Signing
from ownerserve.transfer.vocabulary import (
    Ended,
    FramePiece,
    Read,
    ReadFailed,
    ReadFailure,
    ReadLanded,
    Runs,
)
from tests.support.waits import WAIT_S, until

KEY = TransferKey(b"a transfer key of the tests' own!")
PIECE = FramePiece(b"a" * 32, 0, 4, 0, 2)
POISON = 0xA5
LONG_S = 3600.0


def one_run(memory: np.ndarray[Any, np.dtype[np.uint8]]) -> Runs:
    """All of an array as one run."""
    return Runs(np.array([memory.ctypes.data], np.int64), np.array([memory.nbytes], np.int64))


class TestLender:
    """Lends PIECE under every ticket below 100. `stands` is asked of `verdicts`, if there are any,
    one after another, the last one for good."""

    __test__ = False

    def __init__(self, size: int) -> None:
        self.memory = np.random.default_rng(size).integers(0, 256, size, np.uint8)
        self.verdicts: list[bool] = [True]
        self.asked = 0
        self.on_runs: Callable[[], None] = lambda: None
        self.on_stands: Callable[[], None] = lambda: None

    def runs(self, ticket: int, piece: FramePiece) -> Runs | None:
        self.on_runs()
        return one_run(self.memory) if ticket < 100 and piece == PIECE else None

    def stands(self, ticket: int) -> bool:
        self.asked += 1
        self.on_stands()
        return self.verdicts.pop(0) if len(self.verdicts) > 1 else self.verdicts[0]


class Rig(ExitStack):
    """A lender, its server, and movers to it or to what stands before it. Use it by `with`."""

    def __init__(
        self,
        size: int,
        *,
        key: TransferKey | None = KEY,
        settings: LenderSettings | None = None,
    ) -> None:
        super().__init__()
        self.lender = TestLender(size)
        self.key = key
        self.server = TcpServer(self.lender, key=key, settings=settings)
        self.callback(self.server.close)
        self.numbers = iter(range(1, 1_000_000))

    def mover(
        self,
        port: int | None = None,
        *,
        key: TransferKey | None = KEY,
        settings: ReaderSettings | None = None,
    ) -> TcpMover:
        """A mover to that port, the server's own unless said."""
        peer = Peer("127.0.0.1", port or self.server.port, key)
        mover = TcpMover(peer, Xxh3(), settings=settings)
        self.callback(mover.close)
        return mover

    def read(
        self, *, ticket: int = 1, for_s: float = LONG_S, size: int | None = None, told: bool = True
    ) -> Read:
        """A read of PIECE into poison; `told`: with the digest of what is lent."""
        goal = np.full(self.lender.memory.nbytes if size is None else size, POISON, np.uint8)
        digest = xxh3_128_digest(self.lender.memory.tobytes()) if told else b""
        read = Read(next(self.numbers), ticket, PIECE, one_run(goal), None, digest,
                    time.monotonic() + for_s)  # fmt: skip
        self.goals = {**getattr(self, "goals", {}), read.number: goal}
        return read

    def is_right(self, read: Read) -> bool:
        """Whether the read's goal holds what is lent."""
        return bool(np.array_equal(self.goals[read.number], self.lender.memory))

    def has_come(self, read: Read, count: int) -> bool:
        """Whether the first `count` bytes have, by the last of them."""
        last = slice(count - 64, count)
        return bool(np.array_equal(self.goals[read.number][last], self.lender.memory[last]))

    def is_untouched(self, read: Read) -> bool:
        return bool((self.goals[read.number] == POISON).all())

    def paint(self, read: Read) -> None:
        """The goal is another's from now on."""
        self.goals[read.number][:] = POISON

    def raw(self) -> Known:
        """A connection that has shown the key and does what the test says."""
        sock = self.enter_context(socket.create_connection(("127.0.0.1", self.server.port)))
        return Known(sock, self.key)


class Known:
    """The reader's side of a connection after its handshake."""

    def __init__(self, sock: socket.socket, key: TransferKey | None) -> None:
        self.socket = sock
        sock.settimeout(WAIT_S)
        handshake = ReaderHandshake(key, os.urandom(NONCE_BYTES))
        sock.sendall(handshake.hello)
        proof, keys = handshake.welcomed(exactly(sock, WELCOME_BYTES))
        sock.sendall(proof)
        self.signing, self.checking = Signing(keys.asks), Checking(keys.answers)


def exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := sock.recv(count - len(data))):
        data += more
    return data


def everything(sock: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    data = b""
    with suppress(ConnectionResetError):
        while more := sock.recv(1 << 16):
            data += more
    return data


def end_of(mover: TcpMover, read: Read) -> Ended:
    """Wait for the end of the only read that runs."""
    assert select.select([mover.fileno()], [], [], WAIT_S)[0], "no end came"
    (end,) = mover.ended()
    assert end.number == read.number
    return end


def bring(mover: TcpMover, read: Read) -> Ended:
    """Make a read, and wait for its end."""
    mover.start(read)
    return end_of(mover, read)


def failed(read: Read, reason: ReadFailure) -> ReadFailed:
    return ReadFailed(read.number, reason)


def landed(read: Read) -> ReadLanded:
    return ReadLanded(read.number, read.goal.bytes)


class Side(Enum):
    """Who said it."""

    READER = "reader"
    LENDER = "lender"


class Cut(Exception):
    """Both sides' connections end here."""


class Hold(Exception):
    """Nothing of this side goes on, and nobody is told."""


Change = Callable[[Side, int, bytes], bytes]
"""What is sent on of what came: (who said it, bytes before it on this connection, what it is). May
raise Cut or Hold."""


class Proxy:
    """Stands between readers and a lender, on a free port. `heard` is what each side of each
    connection said. Use it by `with`."""

    def __init__(self, port: int, change: Change) -> None:
        self._to, self._change = port, change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.heard: list[dict[Side, bytes]] = []
        self._open: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                reader, _ = self._listener.accept()
                lender = socket.create_connection(("127.0.0.1", self._to))
                self._open += [reader, lender]
                said = {Side.READER: b"", Side.LENDER: b""}
                self.heard.append(said)
                for side, ends in (
                    (Side.READER, (reader, lender)),
                    (Side.LENDER, (lender, reader)),
                ):
                    pump = threading.Thread(
                        target=self._pump, args=(side, *ends, said), daemon=True
                    )
                    self._threads.append(pump)
                    pump.start()

    def _pump(
        self, side: Side, here: socket.socket, there: socket.socket, said: dict[Side, bytes]
    ) -> None:
        try:
            while data := here.recv(1 << 16):
                before = len(said[side])
                said[side] += data
                there.sendall(self._change(side, before, data))
        except Hold:
            return
        except (OSError, Cut):
            pass
        for sock in (here, there):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in list(self._open):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(WAIT_S)


def flipping(side: Side, at: int) -> Change:
    """A change that flips a bit of that side's byte number `at`."""

    def change(who: Side, before: int, data: bytes) -> bytes:
        if who is not side or not before <= at < before + len(data):
            return data
        flipped = bytearray(data)
        flipped[at - before] ^= 0x10
        return bytes(flipped)

    return change


def stopping(side: Side, at: int, *, by: type[Exception]) -> Change:
    """A change that lets `at` bytes of that side through, and then raises."""

    def change(who: Side, before: int, data: bytes) -> bytes:
        if who is side and before + len(data) > at:
            raise by
        return data

    return change


def closed_all(server: TcpServer) -> None:
    """Wait until the server has no connection."""
    until(lambda: server.connections == 0, what="the end of all connections")
