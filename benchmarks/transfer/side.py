"""One side of one contender, as a process: it lends, or it reads what it is told, until its input
ends.

    python benchmarks/transfer/side.py lend CONTENDER            prints how it is reached, as JSON
    python benchmarks/transfer/side.py read CONTENDER REACHED    a shape's name a line -> its time

Contenders: `plain` (Python's own gather sockets), `told`, `xxh3`, `blake3` (the TCP mover by what
proves the bytes), `mooncake`, `nixl`. The last two run in their own environments and import nothing
of ours.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transfer.shapes import SHAPES, Shape, empty, filled, right

Bytes = NDArray[np.uint8]
ENTRIES = 1024
BATCH = 512


class Side(Protocol):
    """What a contender does: lend a buffer, and make a reader of one."""

    def lend(self, memory: Bytes) -> Any:
        """Begin to lend; says how it is reached."""
        ...

    def reader(self, reached: Any, memory: Bytes) -> Callable[[Shape], None]:
        """What reads one shape into the memory; raises where it fails."""
        ...


def views(shape: Shape, memory: Bytes) -> list[memoryview]:
    whole = memoryview(memory)
    return [whole[at : at + shape.length] for at in shape.offsets().tolist()]


def moved(call: Callable[[list[memoryview]], int], parts: list[memoryview]) -> None:
    """Call until all parts have moved, 1,024 of them at once at most."""
    at, into = 0, 0
    while at < len(parts):
        count = call(
            [parts[at][into:], *parts[at + 1 : at + ENTRIES]] if into else parts[at : at + ENTRIES]
        )
        into += count
        while at < len(parts) and into >= len(parts[at]):
            into -= len(parts[at])
            at += 1


class Plain:
    """Python's gather sockets, blocking, and nothing beside: no key, no digest, no deadline."""

    def lend(self, memory: Bytes) -> Any:
        prepared = [views(shape, memory) for shape in SHAPES]
        listener = socket.create_server(("127.0.0.1", 0))

        def serve() -> None:
            sock, _ = listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while asked := sock.recv(1):
                moved(sock.sendmsg, prepared[asked[0]])

        threading.Thread(target=serve, daemon=True).start()
        return listener.getsockname()[1]

    def reader(self, reached: Any, memory: Bytes) -> Callable[[Shape], None]:
        prepared = [views(shape, memory) for shape in SHAPES]
        sock = socket.create_connection(("127.0.0.1", reached))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def read(shape: Shape) -> None:
            place = SHAPES.index(shape)
            sock.sendall(bytes([place]))
            moved(lambda parts: sock.recvmsg_into(parts)[0], prepared[place])

        return read


class Ours:
    """The TCP mover with a key, one connection. `proof`: what proves the bytes."""

    def __init__(self, proof: str) -> None:
        self._proof = proof

    def lend(self, memory: Bytes) -> Any:
        from ownerserve.transfer.movers.digests import Xxh3, digest_of
        from ownerserve.transfer.movers.tcp.handshake import TransferKey
        from ownerserve.transfer.movers.tcp.server import TcpServer
        from ownerserve.transfer.vocabulary import FramePiece, Runs

        base = memory.ctypes.data
        lent = [Runs(base + shape.offsets(), shape.lengths()) for shape in SHAPES]

        class Lending:
            def runs(self, ticket: int, piece: FramePiece) -> Runs | None:
                return lent[ticket]

            def stands(self, ticket: int) -> bool:
                return True

        server = TcpServer(Lending(), key=TransferKey(b"k" * 32))
        self.server = server
        return [server.port, [digest_of(runs, Xxh3()).hex() for runs in lent]]

    def reader(self, reached: Any, memory: Bytes) -> Callable[[Shape], None]:
        import select

        from ownerserve.transfer.movers.digests import Xxh3
        from ownerserve.transfer.movers.tcp.client import TcpMover
        from ownerserve.transfer.movers.tcp.handshake import TransferKey
        from ownerserve.transfer.movers.tcp.settings import Peer, ReaderSettings
        from ownerserve.transfer.movers.tcp.wire import DigestKind
        from ownerserve.transfer.vocabulary import FramePiece, Read, ReadLanded, Runs

        kinds = {"told": DigestKind.NONE, "xxh3": DigestKind.XXH3, "blake3": DigestKind.BLAKE3}
        port, digests = reached
        settings = ReaderSettings(digest=kinds[self._proof])
        peer = Peer("127.0.0.1", port, TransferKey(b"k" * 32))
        mover = TcpMover(peer, Xxh3(), settings=settings)
        base = memory.ctypes.data
        goals = [Runs(base + shape.offsets(), shape.lengths()) for shape in SHAPES]
        piece = FramePiece(b"a" * 32, 0, 1, 0, 1)

        def read(shape: Shape) -> None:
            place = SHAPES.index(shape)
            digest = bytes.fromhex(digests[place]) if self._proof == "told" else b""
            until_s = time.monotonic() + 600
            mover.start(Read(1, place, piece, goals[place], None, digest, until_s))
            select.select([mover.fileno()], [], [])
            (end,) = mover.ended()
            assert isinstance(end, ReadLanded), end

        return read


class Mooncake:
    """Mooncake's Transfer Engine over TCP, without a metadata server, in batches of 512."""

    def _engine(self, memory: Bytes) -> Any:
        from mooncake.engine import TransferEngine

        engine = TransferEngine()
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        assert engine.register_memory(memory.ctypes.data, memory.nbytes) == 0
        self.kept = engine
        return engine

    def lend(self, memory: Bytes) -> Any:
        engine = self._engine(memory)
        return [f"127.0.0.1:{engine.get_rpc_port()}", memory.ctypes.data]

    def reader(self, reached: Any, memory: Bytes) -> Callable[[Shape], None]:
        name, there = reached
        engine, here = self._engine(memory), memory.ctypes.data

        def read(shape: Shape) -> None:
            at, lengths = shape.offsets(), shape.lengths()
            for first in range(0, shape.count, BATCH):
                batch = slice(first, first + BATCH)
                rc = engine.batch_transfer_sync_read(
                    name,
                    (here + at[batch]).tolist(),
                    (there + at[batch]).tolist(),
                    lengths[batch].tolist(),
                )
                assert rc == 0, rc

        return read


class Nixl:
    """NIXL's UCX back end over TCP, without its progress thread."""

    def _agent(self, name: str, memory: Bytes) -> Any:
        os.environ["UCX_TLS"] = "tcp"  # else it takes shared memory, which no other host has
        import nixl._api as nixl

        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        agent = nixl.nixl_agent(name, config)
        agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
        return agent

    def lend(self, memory: Bytes) -> Any:
        agent = self._agent("lender", memory)
        threading.Thread(target=_progress, args=(agent,), daemon=True).start()
        return [agent.get_agent_metadata().hex(), memory.ctypes.data]

    def reader(self, reached: Any, memory: Bytes) -> Callable[[Shape], None]:
        metadata, there = reached
        agent, here = self._agent("reader", memory), memory.ctypes.data
        peer = agent.add_remote_agent(bytes.fromhex(metadata))

        def read(shape: Shape) -> None:
            rows = np.zeros((shape.count, 3), np.uint64)
            rows[:, 1] = shape.lengths()
            rows[:, 0] = here + shape.offsets()
            local = agent.get_xfer_descs(rows, "DRAM")
            far = rows.copy()
            far[:, 0] = there + shape.offsets()
            handle = agent.initialize_xfer(
                "READ", local, agent.get_xfer_descs(far, "DRAM"), peer, b""
            )
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            assert state == "DONE", state
            agent.release_xfer_handle(handle)

        return read


def _progress(agent: Any) -> None:
    """A lender without a progress thread moves on only as it is asked something."""
    while True:
        agent.get_new_notifs()
        time.sleep(0.0002)


CONTENDERS: dict[str, Side] = {
    "plain": Plain(),
    "told": Ours("told"),
    "xxh3": Ours("xxh3"),
    "blake3": Ours("blake3"),
    "mooncake": Mooncake(),
    "nixl": Nixl(),
}


def main() -> None:
    role, contender, *rest = sys.argv[1:]
    side = CONTENDERS[contender]
    if role == "lend":
        memory = filled()
        print("\n" + json.dumps(["reached", side.lend(memory)]), flush=True)
        sys.stdin.read()
        return
    goal = empty()
    read = side.reader(json.loads(rest[0]), goal)
    shapes = {shape.name: shape for shape in SHAPES}
    print("\n" + json.dumps(["reached", None]), flush=True)
    for line in sys.stdin:
        shape = shapes[line.strip()]
        goal[: 2 * shape.bytes] = 1
        cpu_s, begun_s = time.process_time(), time.perf_counter()
        read(shape)
        took_s, cpu_s = time.perf_counter() - begun_s, time.process_time() - cpu_s
        print("\n" + json.dumps(["took", took_s, cpu_s, right(shape, goal)]), flush=True)


if __name__ == "__main__":
    main()
