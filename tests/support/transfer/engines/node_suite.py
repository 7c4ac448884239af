"""Two processes over the classes by which workers lend and bring, and one engine between them: what
one holds the other reads by way of its arena, and a peer that is killed amid leaves its part there.

    class TestMine(NodesOverEngine):
        road = "mine"
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from ownerserve.kv.ids import Incarnation, WorkerId
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.units import MIB
from ownerserve.kv.wire.headers import LenderAddress
from ownerserve.node.transfers.opening import TransferPlace
from ownerserve.store.format.model import ReadHit, ReadMiss
from ownerserve.transfer.movers.arena import ArenaNumbers
from ownerserve.transfer.movers.unfenced import UnfencedMover
from ownerserve.transfer.vocabulary import Read
from tests.support.children import importing
from tests.support.node.lending_nodes import AGENT, PROMPT, Node, cells, wanted
from tests.support.waits import WAIT_S, until

ARENA_BYTES = 4 * MIB
LIFE = 7


def place(road: str) -> TransferPlace:
    return TransferPlace(roads=(road,), arena_bytes=ARENA_BYTES)


def lend(road: str) -> None:
    """Be the node that holds the prompt; say where it is and what it holds, until stdin ends."""
    node = Node("near", place=place(road), life=LIFE)
    node.turn(AGENT, PROMPT)
    records = wanted(node.address).records
    held = {
        id_.hex(): node.bytes_of(one).hex()
        for id_, one in records.items()
        if one.end == 10 or (one.first < one.end and one.end % 4 == 0)
    }
    print(json.dumps({"rpc": node.address.address, "held": held}), flush=True)
    sys.stdin.read()
    os._exit(0)  # whatever threads an engine has


class NearProcess:
    """The node that lends, in a process of its own. Close it."""

    def __init__(self, road: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, road],
            env=importing(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            told = self._told()
        except BaseException:
            self.close()
            raise
        unit = RoutingUnit(WorkerId("near"), 0, Incarnation(LIFE))
        self.address = LenderAddress(unit, told["rpc"])
        self.held = {bytes.fromhex(id_): bytes.fromhex(held) for id_, held in told["held"].items()}

    def _told(self) -> dict[str, Any]:
        """What the process says once it lends; an engine may say something before."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                told: dict[str, Any] = json.loads(line)
                return told
        raise AssertionError("the lending process ended")

    def freeze(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(WAIT_S)

    def close(self) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def bring(near: NearProcess, far: Node) -> ReadHit | ReadMiss:
    """Read all that the other holds; where it comes, it is the same."""
    prefix = wanted(near.address)
    wants = cells(prefix, far.transfers.peers.look(prefix))
    assert len(wants) == 4, far.transfers.counts()
    read = far.transfers.peers.read(wants)
    if isinstance(read, ReadHit):
        for want, part in zip(wants, read.parts, strict=True):
            assert bytes(part.data) == near.held[want.id]
    return read


def arena_of(node: Node) -> ArenaNumbers:
    found = node.transfers.counts().arena
    assert found is not None
    return found


class NodesOverEngine:
    """What holds of nodes with that road. `road` is set by the class of an engine."""

    road: ClassVar[str]

    @pytest.fixture
    def near(self) -> Iterator[NearProcess]:
        near = NearProcess(self.road)
        yield near
        near.close()

    @pytest.fixture
    def far(self) -> Iterator[Node]:
        far = Node("far", place=place(self.road))
        yield far
        far.close()

    def test_what_one_process_holds_another_reads_by_way_of_its_arena(
        self, near: NearProcess, far: Node
    ) -> None:
        assert isinstance(bring(near, far), ReadHit), far.transfers.counts()
        counts = far.transfers.counts()
        assert counts.brings == {"brought": 1} and set(counts.brought_bytes) == {self.road}
        numbers = arena_of(far)
        assert numbers.free_bytes == numbers.capacity_bytes
        assert isinstance(bring(near, far), ReadHit), "after its lends had rested"

    def test_a_peer_that_is_killed_amid_a_read_is_a_miss_and_leaves_the_arena_counted(
        self, near: NearProcess, far: Node, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        start = UnfencedMover.start

        def freeze_first(mover: UnfencedMover, read: Read) -> None:
            if not has_begun:
                near.freeze()
            has_begun.append(read.number)
            start(mover, read)

        has_begun: list[int] = []
        assert isinstance(bring(near, far), ReadHit), "its connection stands"
        monkeypatch.setattr(UnfencedMover, "start", freeze_first)
        prefix = wanted(near.address)
        wants = cells(prefix, far.transfers.peers.look(prefix))
        reading = far.between(lambda: far.transfers.peers.read(wants))
        until(lambda: has_begun and arena_of(far).reserved_bytes, what="a read of a frozen peer")
        near.kill()
        assert isinstance(reading.result(WAIT_S), ReadMiss)
        numbers = arena_of(far)
        assert numbers.abandoned_bytes > 0 and numbers.abandoned_total > 0
        assert numbers.abandoned_bytes + numbers.free_bytes == numbers.capacity_bytes


if __name__ == "__main__":
    lend(sys.argv[1])
