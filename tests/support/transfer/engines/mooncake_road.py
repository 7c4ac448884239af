"""Mooncake's mover as the contract's tests open it: one engine a process, while it lives."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from mooncake.engine import TransferEngine

from ownerserve.transfer.movers.arena import Slot, StagingMemory
from ownerserve.transfer.movers.digests import Digests
from ownerserve.transfer.movers.mooncake import mooncake_mover
from ownerserve.transfer.movers.port import Lender, Mover
from ownerserve.transfer.vocabulary import Road
from tests.support.transfer.roads import LendingPool, Opening

_kept: list[StagingMemory] = []
"""Whatever is registered with the engine, until the process ends."""


@cache
def engine_of(pid: int) -> Any:
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return engine


class MooncakeRoad:
    kind = Road("mooncake", is_fenced=False, is_signed=False)
    path = f"{__name__}:MOONCAKE"
    reads_frozen_peers = False

    def lend(self, lender: Lender, pool: LendingPool) -> bytes:
        engine = engine_of(os.getpid())
        assert engine.register_memory(pool.shared.address, pool.shared.bytes) == 0
        return f"127.0.0.1:{engine.get_rpc_port()}".encode()

    def open(self, opening: Opening, digests: Digests, *, arena: StagingMemory) -> Mover:
        engine = engine_of(os.getpid())
        if arena not in _kept:
            first = int(arena.runs(Slot(0, 0, 1)).addresses[0])
            assert engine.register_memory(first, arena.capacity_bytes) == 0
            _kept.append(arena)
        return mooncake_mover(engine, opening.road.decode(), arena=arena, digests=digests)


MOONCAKE = MooncakeRoad()
