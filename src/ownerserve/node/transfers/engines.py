"""A node's engines are transfer engines of other makers, open for as long as its process lives: by
them its pools are read, and it reads peers', into one arena.

    mooncake    transfer.movers.mooncake    over TCP, on all addresses of this machine
    nixl        transfer.movers.nixl        over UCX, on those of UCX_NET_DEVICES, else on all

Neither asks anybody who he is: who reaches its port reads and writes what is registered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ownerserve.kv.addresses import EVERYWHERE
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.messages import RoutingUnit
from ownerserve.kv.regions import Region
from ownerserve.kv.units import MIB
from ownerserve.node.transfers.read_arena import ReadArena
from ownerserve.node.transfers.roads import MOONCAKE, NIXL
from ownerserve.transfer.movers.engines import load_engine
from ownerserve.transfer.movers.mooncake import OpenMooncake
from ownerserve.transfer.movers.nixl import OpenNixl
from ownerserve.transfer.movers.port import OpenEngine

ENGINES = (MOONCAKE.name, NIXL.name)
ARENA_BYTES = 256 * MIB
LEAST_ARENA_BYTES = MIB
"""What a piece has at most, unless a layer of one unit is larger (control/pieces.py)."""


def check_engines(roads: Sequence[str], *, host: str, arena_bytes: int) -> None:
    """Raise InvalidInput where an engine among `roads` is not installed, or has not what it
    needs."""
    if MOONCAKE.name in roads and host in EVERYWHERE:
        problem = f"{host} is no address at which Mooncake's engines reach each other"
        raise InvalidInput("transfer-host", problem, "give this machine's own")
    wanted = [road for road in ENGINES if road in roads]
    if wanted and arena_bytes < LEAST_ARENA_BYTES:
        problem = f"{arena_bytes} bytes hold no piece that {wanted[0]} reads"
        raise InvalidInput("transfer-arena", problem, "give 1MiB or more")
    for road in wanted:
        load_engine(road)


class NodeEngines:
    """`NodeEngines` are one node's, by their roads, with the arena into which they read: there is
    none without an engine."""

    def __init__(
        self, unit: RoutingUnit, roads: Sequence[str], *, host: str, arena_bytes: int
    ) -> None:
        """Open those among `roads`, reached at `host`. Raises InvalidInput where one can't be."""
        check_engines(roads, host=host, arena_bytes=arena_bytes)
        self.opened: dict[str, OpenEngine] = {}
        if MOONCAKE.name in roads:
            self.opened[MOONCAKE.name] = OpenMooncake(host)
        if NIXL.name in roads:
            life = f"{unit.worker}/{unit.dp_rank}/{unit.incarnation}"
            self.opened[NIXL.name] = OpenNixl(life)
        self.arena = ReadArena(arena_bytes) if self.opened else None

    def register(self, regions: Iterable[Region]) -> dict[str, str]:
        """Let peers read the regions' memory from now on; returns how each engine is reached."""
        pools = sorted({(region.address, region.bytes) for region in regions})
        arenas = [] if self.arena is None else [self.arena.memory]
        for engine in self.opened.values():
            for address, size in (*pools, *((one.address, one.capacity_bytes) for one in arenas)):
                engine.register(address, size)
        return {road: engine.address for road, engine in self.opened.items()} if pools else {}

    def lends(self) -> None:
        """Answer readers from now on; any thread may call."""
        for engine in self.opened.values():
            engine.lends()

    def rests(self) -> None:
        """Answer none any more: nothing is lent; any thread may call."""
        for engine in self.opened.values():
            engine.rests()

    def close(self) -> None:
        """Answer nobody any more."""
        for engine in self.opened.values():
            engine.close()
