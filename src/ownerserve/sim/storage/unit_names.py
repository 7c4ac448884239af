"""This module names prefixes and records by unit ids: these are chained, so that an id names all
before it, and nothing is hashed.

    digest     | last unit's id, 4 | zeros, 28 |
    record     | last unit's id, 4 | component, 12 | start, 8 | end, 8 |     a point: start = end

Same lengths and equalities as production's digests and artifact ids, at a tenth of the time. Owns
nothing, and never leaves the simulator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from struct import Struct
from typing import ClassVar, cast

from ownerserve.kv.ids import PrefixHash
from ownerserve.kv.prefix import SHA256_BYTES, ArtifactId, ArtifactIds, Packed, PrefixChain
from ownerserve.node.vocabulary.records import RecordNames
from ownerserve.sim.timeline.turns import UNIT_BYTES

_PADDING = bytes(SHA256_BYTES - UNIT_BYTES)
_COMPONENT_BYTES = 12


class UnitChain(PrefixChain):
    """A unit chain's digests are the ids of the last units of its blocks."""

    def extend(self, packed: Packed) -> Sequence[PrefixHash]:
        """Append units; returns the digests of the blocks that became full."""
        data = self._tail + packed if self._tail else packed
        full = len(data) - len(data) % self._block_bytes
        last_ids = Struct(f"{self._block_bytes - UNIT_BYTES}x{UNIT_BYTES}s")
        names = [name + _PADDING for (name,) in last_ids.iter_unpack(data[:full])]
        added = cast("list[PrefixHash]", names)
        self.digests += added
        if added:
            self._state = added[-1]
        self._tail = data[full:]
        return added


class UnitRecordIds(ArtifactIds):
    """Unit ids are the artifact ids of one component in a run of one model and tenant."""

    def __init__(self, identity_digest: bytes, component: str) -> None:
        super().__init__(identity_digest, component)
        self._name = hashlib.sha256(component.encode()).digest()[:_COMPONENT_BYTES]

    def place(self, start: int, end: int) -> bytes:
        """Return what the ids of [start, end) have in common."""
        return self._name + start.to_bytes(8, "little") + end.to_bytes(8, "little")

    def at(self, prefix_hash: PrefixHash, place: bytes) -> ArtifactId:
        """Return the id of the range artifact of that prefix at a `place`."""
        return ArtifactId(prefix_hash[:UNIT_BYTES] + place)

    def each(
        self, prefix_hashes: Iterable[PrefixHash], places: Iterable[bytes]
    ) -> Sequence[ArtifactId]:
        """Return the ids of the range artifacts of those prefixes, each at its place."""
        size = UNIT_BYTES
        names = [name[:size] + at for name, at in zip(prefix_hashes, places, strict=True)]
        return cast("list[ArtifactId]", names)

    def point(self, prefix_hash: PrefixHash, position: int) -> ArtifactId:
        """Return the id of the state at `position`."""
        return self.at(prefix_hash, self.place(position, position))


class UnitNames(RecordNames):
    """Unit names are a simulated node's."""

    id_maker: ClassVar[type[ArtifactIds]] = UnitRecordIds
    chain_maker: ClassVar[type[PrefixChain]] = UnitChain
