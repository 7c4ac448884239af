"""The mover over Mooncake's Transfer Engine: its threads write, so it can't be fenced. Arena only.

What was measured of it (docs/evidence/transfer.md): a batch that failed goes on writing, and so
does one whose peer was frozen, once it runs again. So a read that ends amid a batch ends
`ReadUnproven`; `ReadQuiet` follows when the engine says that all of its descriptors have landed,
and never where it says that the batch failed. It has no authentication: who reaches its port reads
what is registered.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from ownerserve.transfer.movers.arena import StagingMemory
from ownerserve.transfer.movers.digests import Digests
from ownerserve.transfer.movers.unfenced import DESCRIPTORS_MAX, Batch, BatchState, UnfencedMover

REFUSED_ABOVE = 1024
"""Over so many descriptors queued for a peer, the engine refuses and writes all the same."""
assert DESCRIPTORS_MAX < REFUSED_ABOVE


class MooncakeEngine(Protocol):
    """What this mover needs of mooncake.engine.TransferEngine, which knows the arena already."""

    def batch_transfer_sync_read(
        self, peer: str, goals: list[int], sources: list[int], lengths: list[int], /
    ) -> int:
        """Read a batch; returns 0 when all of it has landed. May block for 30 s. (Its asynchronous
        calls say that a batch is done when its first descriptor is: measured.)"""
        ...


class _Returned(msgspec.Struct, frozen=True):
    """A batch whose call has returned."""

    state: BatchState

    def look(self) -> BatchState:
        return self.state


class _PeerEngine:
    """The engine, and the name by which it knows one peer."""

    def __init__(self, engine: MooncakeEngine, peer: str) -> None:
        self._engine, self._peer = engine, peer

    def begin(self, batch: Batch, /) -> _Returned:
        goals, sources, lengths = batch.goals[:, 0], batch.sources[:, 0], batch.goals[:, 1]
        failed = self._engine.batch_transfer_sync_read(
            self._peer, goals.tolist(), sources.tolist(), lengths.tolist()
        )
        return _Returned(BatchState.FAILED if failed else BatchState.LANDED)


def mooncake_mover(
    engine: MooncakeEngine, peer: str, *, arena: StagingMemory, digests: Digests
) -> UnfencedMover:
    """Return a mover that reads from the peer by its engine's name, into the arena."""
    return UnfencedMover("mooncake", _PeerEngine(engine, peer), arena=arena, digests=digests)
