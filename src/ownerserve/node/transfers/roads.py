"""Roads are the ways by which a node's peers are read:

    shm         the peer's pools are shared memory of this host        transfer.movers.shm
    readv       this process may read the peer's memory by address     transfer.movers.readv
    tcp         everywhere                                             transfer.movers.tcp
    mooncake    both have Mooncake's engine open                       transfer.movers.mooncake
    nixl        both have NIXL's agent open                            transfer.movers.nixl

A road that is not open here says so once (`UNABLE`), and control takes the next one. An address is
HOST:PORT of a peer's transfer port, as its lends say it. A host that stands for all of the peer's
(0.0.0.0) is the one at which its RPC port is reached. How a peer's engines are reached its lends
say beside where they lie (memory.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ownerserve.kv.addresses import EVERYWHERE, parse_address
from ownerserve.kv.errors import InvalidInput
from ownerserve.node.transfers.memory import LenderPlaces
from ownerserve.node.transfers.read_arena import ReadArena
from ownerserve.transfer.movers.digests import Digests, Xxh3
from ownerserve.transfer.movers.port import Mover, OpenEngine
from ownerserve.transfer.movers.readv import readv_mover
from ownerserve.transfer.movers.shm import shm_mover
from ownerserve.transfer.movers.tcp.client import TcpMover
from ownerserve.transfer.movers.tcp.handshake import TransferKey
from ownerserve.transfer.movers.tcp.settings import Peer, ReaderSettings
from ownerserve.transfer.vocabulary import Road

SHM = Road("shm", is_fenced=True, is_signed=False)
READV = Road("readv", is_fenced=True, is_signed=False)
TCP = Road("tcp", is_fenced=True, is_signed=True)
MOONCAKE = Road("mooncake", is_fenced=False, is_signed=False)
NIXL = Road("nixl", is_fenced=False, is_signed=False)
ROADS = (SHM.name, READV.name, TCP.name)
"""The default, the fastest first."""
_BY_NAME = {road.name: road for road in (SHM, READV, TCP, MOONCAKE, NIXL)}


def kinds_of(roads: Sequence[str]) -> tuple[Road, ...]:
    """Return the roads of these names. Raises InvalidInput for one that is none."""
    unknown = [name for name in roads if name not in _BY_NAME]
    if unknown or not roads:
        problem = f"{unknown[0]!r} is none" if unknown else "names none"
        raise InvalidInput("transfer-roads", problem, f"name some of {', '.join(_BY_NAME)}")
    return tuple(_BY_NAME[name] for name in roads)


class NodeRoads:
    """`NodeRoads` open movers to peers: over TCP with the fleet's key where there is one, by an
    engine where it is open here, into `arena`."""

    def __init__(
        self,
        key: TransferKey | None,
        roads: Sequence[str] = ROADS,
        *,
        settings: ReaderSettings | None = None,
        engines: Mapping[str, OpenEngine] | None = None,
        arena: ReadArena | None = None,
        digests: Digests | None = None,
    ) -> None:
        """Open `roads` alone, tried in that order. Raises InvalidInput for one that is none."""
        self.kinds = kinds_of(roads)
        self.arena = arena
        self._key = key
        self._settings = settings or ReaderSettings()
        self._engines = engines or {}
        self._digests = digests or Xxh3()

    def open(self, road: str, address: str, memory: LenderPlaces | None) -> Mover | None:
        """Return a mover by that road to `address`, or to the process of `memory`; None: the road
        is not open to it. Raises InvalidInput for an address that is none, or that is not to be
        connected to."""
        digests = self._digests
        if road == TCP.name:
            host, port = parse_address(address, field="address", mend="give HOST:PORT")
            peer = Peer(host.strip("[]"), port, self._key)
            return TcpMover(peer, digests, settings=self._settings)
        if memory is None:
            return None
        if (engine := self._engines.get(road)) is not None:
            told = memory.engines.get(road)
            if told is None or self.arena is None:
                return None
            return engine.mover(told, arena=self.arena.memory, digests=digests)
        if road == READV.name:
            return readv_mover(memory.process, digests)
        shared = memory.shared()
        return None if shared is None else shm_mover(memory.process, shared, digests=digests)


def told_address(address: str, rpc_host: str) -> str:
    """Return the address at which a peer is read, as who reaches its RPC port at `rpc_host` must
    say it."""
    host, _, port = address.rpartition(":")
    return f"{rpc_host}:{port}" if host in EVERYWHERE else address
