"""NIXL's mover as the contract's tests open it: one agent a process, for as long as it lives."""

from __future__ import annotations

import os
from functools import cache

import nixl._api  # noqa: F401 - who lends is forked off a process that has imported it

from ownerserve.transfer.movers.arena import StagingMemory
from ownerserve.transfer.movers.digests import Digests
from ownerserve.transfer.movers.nixl import OpenNixl
from ownerserve.transfer.movers.port import Lender, Mover
from ownerserve.transfer.vocabulary import Road
from tests.support.transfer.roads import LendingPool, Opening

_kept: list[StagingMemory] = []
"""Whatever is registered with the agent, until the process ends."""


@cache
def agent_of(pid: int) -> OpenNixl:
    return OpenNixl(f"test-{pid}")


class NixlRoad:
    kind = Road("nixl", is_fenced=False, is_signed=False)
    path = f"{__name__}:NIXL"
    reads_frozen_peers = False

    def lend(self, lender: Lender, pool: LendingPool) -> bytes:
        agent = agent_of(os.getpid())
        agent.register(pool.shared.address, pool.shared.bytes)
        agent.lends()
        return agent.address.encode()

    def open(self, opening: Opening, digests: Digests, *, arena: StagingMemory) -> Mover:
        agent = agent_of(os.getpid())
        if arena not in _kept:
            agent.register(arena.address, arena.capacity_bytes)
            _kept.append(arena)
        return agent.mover(opening.road.decode(), arena=arena, digests=digests)


NIXL = NixlRoad()
