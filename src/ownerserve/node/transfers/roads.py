"""Roads are the ways by which a node's peers are read, the fastest first:

    shm     the peer's pools are shared memory of this host        transfer.movers.shm
    readv   this process may read the peer's memory by address     transfer.movers.readv
    tcp     everywhere                                             transfer.movers.tcp

A road that is not open here says so once (`UNABLE`), and control takes the next one. An address is
HOST:PORT of a peer's transfer port, as its lends say it. A host that stands for all of the peer's
(0.0.0.0) is the one at which its RPC port is reached.
"""

from __future__ import annotations

from collections.abc import Sequence

from ownerserve.kv.addresses import parse_address
from ownerserve.kv.errors import InvalidInput
from ownerserve.node.transfers.memory import LenderPlaces
from ownerserve.transfer.movers.digests import Xxh3
from ownerserve.transfer.movers.port import Mover
from ownerserve.transfer.movers.readv import readv_mover
from ownerserve.transfer.movers.shm import shm_mover
from ownerserve.transfer.movers.tcp.client import TcpMover
from ownerserve.transfer.movers.tcp.handshake import TransferKey
from ownerserve.transfer.movers.tcp.settings import Peer, ReaderSettings
from ownerserve.transfer.vocabulary import Road

SHM = Road("shm", is_fenced=True, is_signed=False)
READV = Road("readv", is_fenced=True, is_signed=False)
TCP = Road("tcp", is_fenced=True, is_signed=True)
ROADS = (SHM.name, READV.name, TCP.name)
_BY_NAME = {road.name: road for road in (SHM, READV, TCP)}
EVERYWHERE = ("0.0.0.0", "[::]")


class NodeRoads:
    """`NodeRoads` open movers to peers, over TCP with the fleet's key where there is one."""

    def __init__(
        self,
        key: TransferKey | None,
        roads: Sequence[str] = ROADS,
        *,
        settings: ReaderSettings | None = None,
    ) -> None:
        """Open `roads` alone, tried in that order. Raises InvalidInput for one that is none."""
        self._key = key
        self._settings = settings or ReaderSettings()
        unknown = [name for name in roads if name not in ROADS]
        if unknown or not roads:
            problem = f"{unknown[0]!r} is none" if unknown else "names none"
            raise InvalidInput("transfer-roads", problem, f"name some of {', '.join(ROADS)}")
        self.kinds = tuple(_BY_NAME[name] for name in roads)

    def open(self, road: str, address: str, memory: LenderPlaces | None) -> Mover | None:
        """Return a mover by that road to `address`, or to the process of `memory`; None: the road
        is not open to it. Raises InvalidInput for an address that is none, or that is not to be
        connected to."""
        digests = Xxh3()
        if road == TCP.name:
            host, port = parse_address(address, field="address", mend="give HOST:PORT")
            peer = Peer(host.strip("[]"), port, self._key)
            return TcpMover(peer, digests, settings=self._settings)
        if memory is None:
            return None
        if road == READV.name:
            return readv_mover(memory.process, digests)
        shared = memory.shared()
        return None if shared is None else shm_mover(memory.process, shared, digests=digests)


def told_address(address: str, rpc_host: str) -> str:
    """Return the address at which a peer is read, as who reaches its RPC port at `rpc_host` must
    say it."""
    host, _, port = address.rpartition(":")
    return f"{rpc_host}:{port}" if host in EVERYWHERE else address
