"""Device: what a node needs of the place where KV lives while a turn runs.

    OwnDevice     our HeteroCache: it answers at once, and takes state in before any turn runs
    an engine's   its blocks belong to its requests: what it has, and where state may go, is known
                  only when its scheduler asks. Until then it answers `Later`, and the node waits

Abilities (plan.inputs) say what may be planned for a device; nothing here asks which one it is.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.layout import Layout
from ownerserve.cache.outcomes import (
    Arrival,
    Inserted,
    Match,
    NoRoom,
    Refused,
    Reserved,
    Shortage,
)
from ownerserve.kv.ids import TurnId
from ownerserve.kv.prefix import Packed
from ownerserve.node.restore.walks import Walks


class Later(msgspec.Struct, frozen=True):
    """Not known before the engine asks: `Asked` for a match, `Placed` for room."""


class Device(Protocol):
    """Where turns find their state. Called with what the node decided; decides nothing itself."""

    @property
    def layout(self) -> Layout: ...

    def match(self, turn_id: TurnId, tokens: Packed) -> Match | Later:
        """What of `tokens` is here."""
        ...

    def shortage(self, blocks: int) -> Shortage | None:
        """What would have to go for so many range blocks; None: the device does not say."""
        ...

    def reserve(
        self, turn_id: TurnId, arrival: Arrival, now: float
    ) -> Reserved | NoRoom | Refused | Later:
        """Slots for state from outside."""
        ...

    def commit(self, ticket: int, digest: bytes, now: float) -> Inserted | Refused:
        """The slots are written with what `digest` stands for: all of it counts, or nothing."""
        ...

    def abort(self, ticket: int) -> None:
        """Nobody writes into the slots any more, and nothing in them counts."""
        ...


class OwnDevice:
    """A HeteroCache as a Device."""

    def __init__(self, cache: HeteroCache, walks: Walks) -> None:
        self._cache = cache
        self._walks = walks

    @property
    def layout(self) -> Layout:
        return self._cache.layout

    def match(self, turn_id: TurnId, tokens: Packed) -> Match:
        return self._cache.match(tokens, behind=self._walks.behind(turn_id))

    def shortage(self, blocks: int) -> Shortage:
        return self._cache.rooms.shortage(blocks)

    def reserve(
        self, turn_id: TurnId, arrival: Arrival, now: float
    ) -> Reserved | NoRoom | Refused | Later:
        return self._cache.ingest.reserve(arrival, now)

    def commit(self, ticket: int, digest: bytes, now: float) -> Inserted | Refused:
        return self._cache.ingest.commit(ticket, digest, now)

    def abort(self, ticket: int) -> None:
        self._cache.ingest.abort(ticket)
        self._cache.ingest.quiet(ticket)
