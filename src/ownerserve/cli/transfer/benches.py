"""What `transfer bench` measures: the roads to a child of this process, or TCP to another host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from ownerserve.cli.transfer.asking import address_of, ask_lender
from ownerserve.cli.transfer.lending import LendingChild
from ownerserve.cli.transfer.measuring import (
    Bench,
    Bringer,
    Goal,
    Memcpy,
    MemcpyDigested,
    MoverReading,
    NotBrought,
)
from ownerserve.cli.transfer.pool import BenchPool, check_memory
from ownerserve.cli.transfer.shapes import ReadShape
from ownerserve.kv.errors import Corrupt, InvalidInput, PeerLost
from ownerserve.kv.listening import LOOPBACK
from ownerserve.kv.units import format_bytes
from ownerserve.report.transfer_table import RoadSpeed, RoadState
from ownerserve.transfer.movers.digests import Xxh3
from ownerserve.transfer.movers.port import Mover
from ownerserve.transfer.movers.readv import readv_mover
from ownerserve.transfer.movers.shm import shm_mover
from ownerserve.transfer.movers.tcp.client import TcpMover
from ownerserve.transfer.movers.tcp.handshake import TransferKey
from ownerserve.transfer.movers.tcp.settings import Peer
from ownerserve.transfer.vocabulary import ReadFailure

HERE = "a child of this process"


class BenchReport(msgspec.Struct, frozen=True):
    """What was measured: who lent, the round trip where it was another process than a child, which
    roads are closed here, and the speeds."""

    lender: str
    round_trip_ms: float | None
    closed: list[str]
    speeds: list[RoadSpeed]


class Measuring:
    """`Measuring` is one bench: what it opens, `closing` closes."""

    def __init__(self, shapes: Sequence[ReadShape], rounds: int, closing: ExitStack) -> None:
        """Take the memory. Raises InvalidInput where there is not enough."""
        self._shapes, self._rounds, self._closing = list(shapes), rounds, closing
        self._span_bytes = max(shape.span_bytes for shape in shapes)
        check_memory(3 * self._span_bytes, field="--size")

    def here(self, key_file: Path | None, key: TransferKey | None) -> tuple[Bench, list[str]]:
        """Return the bench of all roads that are open to a child, and those that are not."""
        child = self._closing.enter_context(LendingChild(self._shapes, key_file))
        goal, contenders = self._memory()
        opened = child.opening()
        digests = dict(zip(self._shapes, opened.digests, strict=True))
        base, closed = opened.shared.address, []
        movers: tuple[Mover, ...] = (
            shm_mover(opened.process, opened.shared, digests=Xxh3()),
            readv_mover(opened.process, Xxh3()),
            TcpMover(Peer(LOOPBACK, opened.port, key), Xxh3()),
        )
        for mover in movers:
            self._closing.callback(mover.close)
            reading = MoverReading(mover, goal, base=base, digests=digests)
            if self._is_open(reading):
                contenders.append(reading)
            else:
                closed.append(mover.name)
        return Bench(self._shapes, contenders, self._rounds, child.pid), closed

    def there(self, host: str, port: int, key: TransferKey | None) -> tuple[Bench, float | None]:
        """Return the bench of TCP to a `transfer serve`, and the round trip to it, in ms. Raises
        InvalidInput where none is there."""
        asked = ask_lender(host, port, key)
        if asked.state is not RoadState.OPEN:
            raise InvalidInput("HOST:PORT", asked.found, asked.mend)
        goal, contenders = self._memory()
        mover = TcpMover(Peer(address_of(host), port, key), Xxh3())
        self._closing.callback(mover.close)
        contenders.append(MoverReading(mover, goal, base=None, digests={}))
        return Bench(self._shapes, contenders, self._rounds, 0), asked.round_trip_ms

    def _is_open(self, reading: MoverReading) -> bool:
        """Tell whether the road is open here, by one read. Raises as `run` where it is, and nothing
        came."""
        try:
            reading.bring(self._shapes[0])
        except NotBrought as failed:
            if failed.reason is not ReadFailure.UNABLE:
                raise explained(failed, self._shapes, HERE) from failed
            return False
        return True

    def _memory(self) -> tuple[Goal, list[Bringer]]:
        """Return the goal of all reads, and what memory alone does."""
        goal, source = Goal(self._span_bytes), BenchPool(self._span_bytes)
        return goal, [Memcpy(source, goal), MemcpyDigested(source, goal)]


def run(bench: Bench, lender: str, advance: Callable[[], None]) -> list[RoadSpeed]:
    """Measure. Raises InvalidInput, PeerLost or Corrupt, by who must act, where a read brought
    nothing."""
    try:
        return bench.run(advance)
    except NotBrought as failed:
        raise explained(failed, bench.shapes, lender) from failed


def explained(
    failed: NotBrought, shapes: Sequence[ReadShape], lender: str
) -> InvalidInput | PeerLost | Corrupt:
    """Return the error by who must act."""
    match failed.reason:
        case ReadFailure.REFUSED:
            size = format_bytes(max(shape.span_bytes for shape in shapes)).replace(" ", "")
            mend = f"run `ownerserve transfer serve --size {size}` there, or ask for smaller sizes"
            return InvalidInput("HOST:PORT", f"{lender} lends no test pool of that size", mend)
        case ReadFailure.CORRUPT:
            return Corrupt(f"{failed.road}: bytes came that do not match their digest")
        case _:
            problem = f"{failed.road}: {lender} stopped lending amid the measurement"
            return PeerLost(f"{problem} ({failed.reason}); does it still run?")
