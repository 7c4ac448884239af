"""Mooncake's mover as the contract's tests open it: one engine a process, while it lives."""

from __future__ import annotations

import os
from functools import cache

from ownerserve.transfer.movers.arena import StagingMemory
from ownerserve.transfer.movers.digests import Digests
from ownerserve.transfer.movers.mooncake import OpenMooncake
from ownerserve.transfer.movers.port import Lender, Mover
from ownerserve.transfer.vocabulary import Road
from tests.support.transfer.roads import LendingPool, Opening

_kept: list[StagingMemory] = []
"""Whatever is registered with the engine, until the process ends."""


@cache
def engine_of(pid: int) -> OpenMooncake:
    return OpenMooncake("127.0.0.1")


class MooncakeRoad:
    kind = Road("mooncake", is_fenced=False, is_signed=False)
    path = f"{__name__}:MOONCAKE"
    reads_frozen_peers = False

    def lend(self, lender: Lender, pool: LendingPool) -> bytes:
        engine = engine_of(os.getpid())
        engine.register(pool.shared.address, pool.shared.bytes)
        return engine.address.encode()

    def open(self, opening: Opening, digests: Digests, *, arena: StagingMemory) -> Mover:
        engine = engine_of(os.getpid())
        if arena not in _kept:
            engine.register(arena.address, arena.capacity_bytes)
            _kept.append(arena)
        return engine.mover(opening.road.decode(), arena=arena, digests=digests)


MOONCAKE = MooncakeRoad()
