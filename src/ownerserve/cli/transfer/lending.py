"""The process that lends to `ownerserve transfer bench`: a test pool, until its stdin is closed.

    bench ── stdin, never written to ──> here: its end is the end of this process
          <── one line: Opening ──────── here

So nothing is left of it, however the bench ends. A Ctrl-C comes to both; the bench ends this one.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import msgspec

from ownerserve.cli.options import fleet_key
from ownerserve.cli.transfer.pool import BenchPool
from ownerserve.cli.transfer.shapes import ReadShape, parse_shape
from ownerserve.kv.errors import Corrupt, PeerLost
from ownerserve.kv.regions import SharedMemory
from ownerserve.transfer.movers.peers import own_name
from ownerserve.transfer.movers.process_name import ProcessName
from ownerserve.transfer.movers.rights import permit_readers
from ownerserve.transfer.movers.tcp.handshake import transfer_key
from ownerserve.transfer.movers.tcp.server import TcpServer

END_S = 5.0


class Opening(msgspec.Struct, frozen=True):
    """An `Opening` is how the lending process is read: who it is, where its memory lies, its TCP
    port on loopback, and the xxh3 of each shape that was named, in their order."""

    process: ProcessName
    shared: SharedMemory
    port: int
    digests: list[bytes]


def lend(key_file: str, shapes: list[ReadShape]) -> None:
    """Lend a pool that holds the shapes until stdin is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    permit_readers()
    key = fleet_key(Path(key_file) if key_file else None)
    pool = BenchPool(max(shape.span_bytes for shape in shapes))
    server = TcpServer(pool, key=None if key is None else transfer_key(key))
    digests = [pool.digest(shape) for shape in shapes]
    opening = Opening(own_name(), pool.shared, server.port, digests)
    sys.stdout.buffer.write(msgspec.json.encode(opening) + b"\n")
    sys.stdout.buffer.flush()
    sys.stdin.buffer.read()
    server.close()


class LendingChild:
    """A `LendingChild` is such a process, as the bench has it: within `with`. Owns the process."""

    def __init__(self, shapes: list[ReadShape], key_file: Path | None) -> None:
        options = [shape.option for shape in shapes]
        command = [sys.executable, "-m", __name__, str(key_file or ""), *options]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    @property
    def pid(self) -> int:
        """Return its pid."""
        return self._process.pid

    def opening(self) -> Opening:
        """Wait until it lends. Raises PeerLost where it ends before, which its stderr explains."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerLost("the lending process ended before it lent anything")
        try:
            return msgspec.json.decode(line, type=Opening)
        except msgspec.MsgspecError as error:
            raise Corrupt(f"the lending process said {line[:80]!r}") from error

    def __enter__(self) -> LendingChild:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


if __name__ == "__main__":
    lend(sys.argv[1], [parse_shape(text, field="shape") for text in sys.argv[2:]])
