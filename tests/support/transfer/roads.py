"""Roads that the contract is held against: how a lending process opens one, and how it is read.

A road's own module has its object; `path` names it (`module:NAME`), for the lending process imports
it by itself.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ownerserve.kv.regions import SharedMemory
from ownerserve.transfer.movers.arena import StagingMemory
from ownerserve.transfer.movers.digests import Digests
from ownerserve.transfer.movers.port import Lender, Mover
from ownerserve.transfer.movers.process_name import ProcessName
from ownerserve.transfer.movers.readv import readv_mover
from ownerserve.transfer.movers.shm import shm_mover
from ownerserve.transfer.vocabulary import Road


class LendingPool(NamedTuple):
    """A lending process's pool: all its bytes, and where they are."""

    bytes: NDArray[np.uint8]
    shared: SharedMemory


class Opening(NamedTuple):
    """What a reader is told of a lending process. `road` is what `RoadUnderTest.lend` said."""

    name: ProcessName
    shared: SharedMemory
    road: bytes


class RoadUnderTest(Protocol):
    """A road, as the contract's tests open it."""

    @property
    def kind(self) -> Road: ...

    @property
    def path(self) -> str:
        """`module:NAME` of this object."""
        ...

    @property
    def reads_frozen_peers(self) -> bool:
        """Whether a read of a peer that is stopped lands all the same."""
        ...

    def lend(self, lender: Lender, pool: LendingPool) -> bytes:
        """In the lending process: begin to serve, and say how this is reached."""
        ...

    def open(self, opening: Opening, digests: Digests, *, arena: StagingMemory) -> Mover:
        """In the reading process: a mover to that peer. All goals lie in the arena."""
        ...


class ReadvRoad:
    kind = Road("readv", is_fenced=True, is_signed=False)
    path = f"{__name__}:READV"
    reads_frozen_peers = True

    def lend(self, lender: Lender, pool: LendingPool) -> bytes:
        return b""

    def open(self, opening: Opening, digests: Digests, *, arena: StagingMemory) -> Mover:
        return readv_mover(opening.name, digests)


class ShmRoad:
    kind = Road("shm", is_fenced=True, is_signed=False)
    path = f"{__name__}:SHM"
    reads_frozen_peers = True

    def lend(self, lender: Lender, pool: LendingPool) -> bytes:
        return b""

    def open(self, opening: Opening, digests: Digests, *, arena: StagingMemory) -> Mover:
        return shm_mover(opening.name, opening.shared, digests=digests)


READV, SHM = ReadvRoad(), ShmRoad()
