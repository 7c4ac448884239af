"""NIXL's mover as the contract's tests open it: one agent a process, for as long as it lives."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import nixl._api  # noqa: F401 - who lends is forked off a process that has imported it

from ownerserve.transfer.movers.arena import Slot, StagingMemory
from ownerserve.transfer.movers.digests import Digests
from ownerserve.transfer.movers.nixl import NixlProgress, nixl_mover, open_agent, told_by
from ownerserve.transfer.movers.port import Lender, Mover
from ownerserve.transfer.vocabulary import Road
from tests.support.transfer.roads import LendingPool, Opening

_kept: list[Any] = []
"""Whatever is registered with the agent, and what serves readers, until the process ends."""


@cache
def agent_of(pid: int) -> Any:
    return open_agent(f"test-{pid}")


class NixlRoad:
    kind = Road("nixl", is_fenced=False, is_signed=False)
    path = f"{__name__}:NIXL"
    reads_frozen_peers = False

    def lend(self, lender: Lender, pool: LendingPool) -> bytes:
        agent = agent_of(os.getpid())
        agent.register_memory([(pool.shared.address, pool.shared.bytes, 0, "")], "DRAM")
        progress = NixlProgress(agent)
        progress.resume()
        _kept.append(progress)
        return told_by(agent).encode()

    def open(self, opening: Opening, digests: Digests, *, arena: StagingMemory) -> Mover:
        agent = agent_of(os.getpid())
        if arena not in _kept:
            first = int(arena.runs(Slot(0, 0, 1)).addresses[0])
            agent.register_memory([(first, arena.capacity_bytes, 0, "")], "DRAM")
            _kept.append(arena)
        return nixl_mover(agent, opening.road.decode(), arena=arena, digests=digests)


NIXL = NixlRoad()
