"""What a frame costs the directory: how many idle processes renew on one core.

    python benchmarks/directory_frames.py [--processes N] [--connections N] [--seconds S]

Against a real `ownerserve directory serve` with a lease of 30 s. Each of N processes sends
one frame in 10 s, at its own moment: RenewLease of its ranks when idle, Advance of one session and
RenewLease when it has finished a turn. The frames are as pyzmq puts them on the wire, over as many
TCP connections as one machine has room for; a connection plays its share of the processes. Counted
is the service's own CPU, kernel time with it, from /proc. `cores` is what N processes take.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import cast

import uvloop

from ownerserve.directory import messages as ask
from ownerserve.directory.rpc.client import DirectoryClient
from ownerserve.directory.rpc.frames import Outcomes, RequestBatch, decode_answer, encode
from ownerserve.kv.ids import Incarnation, PrefixHash, SessionId, WorkerId
from ownerserve.kv.messages import RoutingUnit
from result import Row, report

PERIOD_S = 10.0
"""Between two frames of an idle process: a third of the lease."""

TICK_S = 0.005
WINDOWS = 5
REGISTERED_AT_ONCE = 1000

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_PROPERTY = b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
READY = b"\x04" + bytes([len(b"\x05READY" + _PROPERTY)]) + b"\x05READY" + _PROPERTY


def unit(number: int, rank: int = 0) -> RoutingUnit:
    return RoutingUnit(WorkerId(f"10.0.{number >> 8}.{number & 255}:8100"), rank, Incarnation(1))


def part(body: bytes, *, more: int) -> bytes:
    """One part of a ZMTP message."""
    if len(body) < 256:
        return bytes([more, len(body)]) + body
    return bytes([more | 2]) + struct.pack(">Q", len(body)) + body


class Peer(asyncio.Protocol):
    """One ZMTP 3.0 connection, NULL mechanism; answers are counted, the last one is kept."""

    def __init__(self, ready: Callable[[], None], heard: Callable[[bytes], None]) -> None:
        self._ready, self._heard = ready, heard
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._has_greeting = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(GREETING + READY)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._has_greeting and len(self._buffer) >= 64:
            del self._buffer[:64]
            self._has_greeting = True
        while self._has_greeting and (found := self._taken()) is not None:
            flags, body = found
            if flags & 4:
                self._ready()
            elif not flags & 1:
                self._heard(body)

    def send(self, frame: bytes) -> None:
        assert self._transport is not None
        self._transport.write(part(bytes(8), more=1) + part(frame, more=0))

    def _taken(self) -> tuple[int, bytes] | None:
        buffer = self._buffer
        head = 9 if buffer and buffer[0] & 2 else 2
        if len(buffer) < head:
            return None
        size = struct.unpack_from(">Q", buffer, 1)[0] if head == 9 else buffer[1]
        if len(buffer) < head + size:
            return None
        flags, body = buffer[0], bytes(buffer[head : head + size])
        del buffer[: head + size]
        return flags, body


def cpu_s(pid: int) -> float:
    """What a process has used, kernel time with it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


class Load:
    """All processes, played in turn at an even pace."""

    def __init__(self, frames: Iterator[bytes], rate: float) -> None:
        self.heard = 0
        self.last = b""
        self._frames = frames
        self._rate = rate
        self._peers: list[Peer] = []
        self._ready = 0

    async def connect(self, host: str, port: int, connections: int) -> None:
        loop = asyncio.get_running_loop()
        for start in range(0, connections, 200):
            made = [
                loop.create_connection(lambda: Peer(self._one_ready, self._one_heard), host, port)
                for _ in range(min(200, connections - start))
            ]
            self._peers += [peer for _, peer in await asyncio.gather(*made)]
        while self._ready < connections:
            await asyncio.sleep(0.05)

    async def run(self, seconds: float) -> int:
        """Frames sent."""
        began_s, sent = time.monotonic(), 0
        while (passed_s := time.monotonic() - began_s) < seconds:
            due = int(passed_s * self._rate) - sent
            for frame in islice(self._frames, due):
                self._peers[sent % len(self._peers)].send(frame)
                sent += 1
            await asyncio.sleep(TICK_S)
        while self.heard < sent and time.monotonic() - began_s < 2 * seconds:
            await asyncio.sleep(TICK_S)
        return sent

    def _one_ready(self) -> None:
        self._ready += 1

    def _one_heard(self, body: bytes) -> None:
        self.heard += 1
        self.last = body


def renewals(processes: int, ranks: int) -> Iterator[bytes]:
    """Frames of idle processes, for ever."""
    frames = [
        encode(RequestBatch(tuple(ask.RenewLease(unit(number, rank)) for rank in range(ranks))))
        for number in range(processes)
    ]
    while True:
        yield from frames


def turns(processes: int, grants: dict[int, ask.Bound]) -> Iterator[bytes]:
    """Frames of processes that have each finished one more turn of a session."""
    version = 0
    while True:
        version += 1
        for number in range(processes):
            tip = PrefixHash(struct.pack("<QQ", number, version) * 2)
            told = ask.Advance(
                session(number), unit(number), grants[number].epoch, version, tip, 100_000
            )
            yield encode(RequestBatch((told, ask.RenewLease(unit(number)))))


def session(number: int) -> SessionId:
    return SessionId(f"{number:032x}")


def filled(address: str, processes: int, ranks: int) -> dict[int, ask.Bound]:
    """All are registered, and each owns one session."""
    client = DirectoryClient(address, timeout_s=60.0)
    grants: dict[int, ask.Bound] = {}
    for start in range(0, processes, REGISTERED_AT_ONCE):
        numbers = range(start, min(start + REGISTERED_AT_ONCE, processes))
        client.execute([ask.Register(unit(n, rank)) for n in numbers for rank in range(ranks)])
        bound = client.execute([ask.Bind(session(n), unit(n)) for n in numbers])
        for number, outcome in zip(numbers, bound, strict=True):
            assert isinstance(outcome, ask.Bound), outcome
            grants[number] = outcome
    client.close()
    return grants


def measured(load: Load, pid: int, seconds: float) -> list[tuple[float, float]]:
    """(CPU us a frame, share of the frames that were answered) of each window."""

    async def run() -> list[tuple[float, float]]:
        found = []
        for _ in range(WINDOWS):
            load.heard, before = 0, cpu_s(pid)
            sent = await load.run(seconds)
            found.append(((cpu_s(pid) - before) / sent * 1e6, load.heard / sent))
        return found

    return asyncio.get_event_loop().run_until_complete(run())


def rows(kind: str, load: Load, pid: int, *, processes: int, seconds: float) -> list[Row]:
    windows = measured(load, pid, seconds)
    cost_us = statistics.median(cost for cost, _ in windows)
    answered = min(share for _, share in windows)
    outcome = decode_answer(load.last)
    assert isinstance(outcome, Outcomes), outcome
    assert not any(isinstance(one, ask.Refused) for one in outcome.outcomes), outcome
    cores = cost_us * 1e-6 * processes / PERIOD_S
    return [
        Row(f"{kind}: a frame", "CPU us", cost_us),
        Row(f"{kind}: spread over {WINDOWS} windows", "CPU us", _spread(windows)),
        Row(f"{kind}: {processes:,} processes", "cores", cores, goal="<= 1"),
        Row(f"{kind}: frames answered", "share", answered, goal="1"),
    ]


def _spread(windows: list[tuple[float, float]]) -> float:
    costs = [cost for cost, _ in windows]
    return max(costs) - min(costs)


def run(found: argparse.Namespace, address: str, pid: int) -> list[Row]:
    processes, rate = found.processes, found.processes / PERIOD_S
    grants = filled(address, processes, found.ranks)
    host, _, port = address.removeprefix("tcp://").partition(":")
    kinds = {
        f"idle, {found.ranks} rank(s)": renewals(processes, found.ranks),
        "a turn finished": turns(processes, grants),
    }
    table: list[Row] = []
    for kind, frames in kinds.items():
        load = Load(frames, rate)
        asyncio.get_event_loop().run_until_complete(
            load.connect(host, int(port), found.connections)
        )
        given = {"processes": processes, "seconds": found.seconds}
        table += rows(f"{kind}, {found.connections:,} connections", load, pid, **given)
    table.append(Row(f"service with {processes:,} processes", "MB", rss_bytes(pid) / 1e6))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--connections", type=int, default=4_000)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each window")
    found = parser.parse_args()
    uvloop.install()
    asyncio.set_event_loop(asyncio.new_event_loop())
    with tempfile.TemporaryDirectory() as home:
        ready = Path(home, "ready")
        given = ["directory", "serve", "--home", home, "--lease", str(3 * PERIOD_S), "--new-fleet"]
        given += ["--port", "0", "--ready-file", str(ready)]
        serving = subprocess.Popen(
            [sys.executable, "-m", "ownerserve.cli.main", *given], stdout=subprocess.DEVNULL
        )
        try:
            while not ready.exists() or not ready.read_text().strip():
                assert serving.poll() is None
                time.sleep(0.1)
            table = run(found, ready.read_text().strip(), serving.pid)
        finally:
            serving.terminate()
            serving.wait(30)
    report("directory_frames", table)


if __name__ == "__main__":
    main()
