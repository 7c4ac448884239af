"""The mover over Mooncake's Transfer Engine: its threads write, so it can't be fenced. Arena only.

What was measured of it (docs/evidence/transfer.md): a batch that failed goes on writing, and so
does one whose peer was frozen, once it runs again. So a read that ends amid a batch ends
`ReadUnproven`; `ReadQuiet` follows when the engine says that all of its descriptors have landed,
and never where it says that the batch failed. It has no authentication: who reaches its port reads
and writes what is registered.

    lender   OpenMooncake(host), register the pools, .address ──> LentMemory.roads
    reader   OpenMooncake(host), register the arena, .mover(address)
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from ownerserve.kv.errors import InvalidInput
from ownerserve.transfer.movers.arena import StagingMemory
from ownerserve.transfer.movers.digests import Digests
from ownerserve.transfer.movers.engines import FIELD, load_engine
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


class OpenMooncake:
    """An `OpenMooncake` is Mooncake's engine, open in this process over TCP (OpenEngine, port.py).
    It answers its readers by threads of its own."""

    def __init__(self, host: str) -> None:
        """Open the engine on a free port. `host` is the address of this machine at which peers
        reach it; it listens on all. Raises InvalidInput where it can't be opened."""
        self._engine: Any = load_engine("mooncake").TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
            mend = "see what it says above, or leave mooncake out"
            raise InvalidInput(FIELD, f"Mooncake's engine can't be opened at {host}", mend)
        self.address = f"{host}:{self._engine.get_rpc_port()}"

    def register(self, address: int, size: int) -> None:
        """Let these bytes of this process be read from, and into. Raises InvalidInput where the
        engine takes them not."""
        if self._engine.register_memory(address, size):
            mend = "see what it says above, or leave mooncake out"
            raise InvalidInput(FIELD, f"Mooncake takes {size} bytes not", mend)

    def mover(self, address: str, *, arena: StagingMemory, digests: Digests) -> UnfencedMover:
        """Return a mover that reads from the peer whose engine has that address."""
        return mooncake_mover(self._engine, address, arena=arena, digests=digests)

    def lends(self) -> None:
        """Do nothing: it answers readers always."""

    def rests(self) -> None:
        """Do nothing, as `lends`."""

    def close(self) -> None:
        """Do nothing: its threads end with the process."""
