"""The TCP mover as the contract's tests open it: on loopback, with a key."""

from __future__ import annotations

from ownerserve.transfer.movers.arena import StagingMemory
from ownerserve.transfer.movers.digests import Digests
from ownerserve.transfer.movers.port import Lender, Mover
from ownerserve.transfer.movers.tcp.client import TcpMover
from ownerserve.transfer.movers.tcp.handshake import TransferKey
from ownerserve.transfer.movers.tcp.server import TcpServer
from ownerserve.transfer.movers.tcp.settings import Peer
from ownerserve.transfer.vocabulary import Road
from tests.support.transfer.roads import LendingPool, Opening

KEY = TransferKey(b"the fleet's own transfer key, 32+")
_serving: list[TcpServer] = []
"""What the lending process serves, until it ends."""


class TcpRoad:
    kind = Road("tcp", is_fenced=True, is_signed=True)
    path = f"{__name__}:TCP"
    reads_frozen_peers = False

    def lend(self, lender: Lender, pool: LendingPool) -> bytes:
        _serving.append(TcpServer(lender, key=KEY))
        return str(_serving[-1].port).encode()

    def open(self, opening: Opening, digests: Digests, *, arena: StagingMemory) -> Mover:
        return TcpMover(Peer("127.0.0.1", int(opening.road), KEY), digests)


TCP = TcpRoad()
