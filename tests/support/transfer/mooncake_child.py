"""Mooncake's engine under our mover, in its own environment: what came of it, as JSON.

python -m tests.support.transfer.mooncake_child            the reading side, and all checks
python -m tests.support.transfer.mooncake_child lend       the lending side
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
from mooncake.engine import TransferEngine

from ownerserve.transfer.movers.arena import ArenaBook, ArenaFull, Slot, StagingMemory
from ownerserve.transfer.movers.digests import Xxh3, digest_of
from ownerserve.transfer.movers.mooncake import MooncakeMover
from ownerserve.transfer.vocabulary import Ended, FramePiece, Read, Runs

MIB = 1 << 20
POOL = 64 * MIB
PIECE = FramePiece(b"a" * 32, 0, 1, 0, 1)


def engine_with(address: int, size: int) -> Any:
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(address, size) == 0
    return engine


def content() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return (np.arange(POOL // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.uint8)


def lend() -> None:
    pool = content()
    engine = engine_with(pool.ctypes.data, POOL)
    said = ["lent", f"127.0.0.1:{engine.get_rpc_port()}", pool.ctypes.data]
    print("\n" + json.dumps(said), flush=True)
    sys.stdin.read()


class Peer:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, "lend"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        line = next(line for line in self.process.stdout if line.startswith('["lent"'))
        _, self.name, self.address = json.loads(line)

    def source(self, count: int, length: int) -> Runs:
        at = np.random.default_rng(count).permutation(POOL // length)[:count] * length
        return Runs(self.address + at.astype(np.int64), np.full(count, length, np.int64))


class Checks:
    def __init__(self) -> None:
        self.memory = StagingMemory(POOL)
        self.book = ArenaBook(POOL)
        whole = self.memory.runs(Slot(0, 0, POOL))
        self.base = int(whole.addresses[0])
        self.engine = engine_with(self.base, POOL)
        self.pool = content()
        self.came: dict[str, Any] = {}
        self.numbers = 0

    def read(self, mover: MooncakeMover, peer: Peer, source: Runs, for_s: float) -> Slot:
        self.numbers += 1
        slot = self.book.reserve(self.numbers, source.bytes)
        assert isinstance(slot, Slot)
        self.held(slot)[:] = 0
        here = Runs(source.addresses - peer.address + self.pool.ctypes.data, source.lengths)
        until_s = time.monotonic() + for_s
        goal, digest = self.memory.runs(slot), digest_of(here, Xxh3())
        mover.start(Read(slot.number, 1, PIECE, goal, source, digest, until_s))
        return slot

    def told(self, mover: MooncakeMover) -> Ended:
        assert select.select([mover.fileno()], [], [], 120)[0], "nothing is told"
        (end,) = mover.ended()
        return end

    def held(self, slot: Slot) -> np.ndarray[Any, np.dtype[np.uint8]]:
        memory = (ctypes.c_ubyte * slot.bytes).from_address(self.base + slot.offset)
        return np.frombuffer(memory, np.uint8)

    def touched(self, slot: Slot) -> int:
        """How many bytes of the slot are not zero."""
        return int(np.count_nonzero(self.held(slot)))

    def whole(self) -> None:
        peer = Peer()
        mover = MooncakeMover(self.engine, peer.name, Xxh3())
        for count, length in ((1, 8 * MIB), (3000, 4096)):
            slot = self.read(mover, peer, peer.source(count, length), 600.0)
            self.came[f"{count} runs"] = type(self.told(mover)).__name__
            self.book.give_back(slot.number)
        os.kill(peer.process.pid, signal.SIGSTOP)
        slot = self.read(mover, peer, peer.source(8, MIB), 1.0)
        end = self.told(mover)
        self.came["frozen"] = [type(end).__name__, getattr(end, "reason", "")]
        self.book.abandon(slot.number, 0.0)
        at_end = self.touched(slot)
        others = self.book.reserve(10**6, POOL - 8 * MIB)
        full = self.book.reserve(10**6 + 1, 4096)
        apart = isinstance(others, Slot) and others.offset >= slot.offset + slot.bytes
        self.came["the slot is not used again"] = apart and isinstance(full, ArenaFull)
        os.kill(peer.process.pid, signal.SIGCONT)
        self.came["thawed"] = type(self.told(mover)).__name__
        self.came["bytes came late"] = self.touched(slot) > at_end
        self.book.quiet(slot.number)
        self.book.give_back(10**6)
        peer.process.kill()
        peer.process.wait()
        slot = self.read(mover, peer, peer.source(8, MIB), 600.0)
        end = self.told(mover)
        self.came["killed"] = [type(end).__name__, getattr(end, "reason", "")]
        self.book.abandon(slot.number, 0.0)
        mover.close()
        self.came["quiet after it failed"] = len(mover.ended())
        self.came["abandoned"] = self.book.numbers(0.0).abandoned_bytes
        self.book.check()


def main() -> None:
    if sys.argv[1:] == ["lend"]:
        lend()
        return
    checks = Checks()
    checks.whole()
    print("\n" + json.dumps(["came", checks.came]), flush=True)
    os._exit(0)  # the engine's own threads


if __name__ == "__main__":
    main()
