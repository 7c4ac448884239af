"""How a prefix is cut into stored records, and what each is called.

Owns the names. A record's id follows from the tokens alone, so what a store holds of a prompt is
found by asking for ids: no listing, nothing to rebuild after a restart.

    blocks   0 1 2 3 4 5 6 7 | 8 9 10 11 ...            record_blocks = 8
    range    [0, 8)            [8, 11) [8, 16)          begins on the grid, ends at any boundary
    point                   ^           ^               one record a boundary

A session that grows writes its last, unfinished cell again when it is longer: at most one cell
twice a turn. Every component has its own record; the payload is a unit of bytes for each block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import msgspec

from ownerserve.cache.layout import Component, Layout
from ownerserve.kv.artifacts import ArtifactIds, ArtifactKey, Identity, PointKey, RangeKey
from ownerserve.kv.ids import PrefixHash
from ownerserve.kv.specs import Coverage
from ownerserve.node.vocabulary.layouts import Parts, descriptors
from ownerserve.store.format.model import ID_BYTES, SHARED, Kind, Meta, meta_of

Digests = Sequence[PrefixHash]
"""Chain digests of a prefix: `digests[i]` stands for its first i + 1 blocks."""


class Ends(Protocol):
    """Chain digests by block: all of a prefix, or those at which its records end."""

    def __getitem__(self, block: int, /) -> PrefixHash: ...


class Cell(msgspec.Struct, frozen=True):
    """Blocks [first, end) of a prefix: one range record a component."""

    first: int
    end: int


class Inside(msgspec.Struct, frozen=True):
    """A stored record that holds `boundary` at the end of its first `units` units."""

    meta: Meta
    units: int
    boundary: bytes


class RecordNames:
    """Ids and metadata under one identity, layout and grid. Holds no state."""

    def __init__(
        self,
        identity: Identity,
        layout: Layout,
        *,
        engine: str,
        blocks: int,
        parts: Parts | None = None,
    ) -> None:
        """`engine` names the byte layout of a slot, and its version; `blocks` are those of a
        record; `parts` the arrays in a slot, without which no other layout can be converted."""
        self.layout = layout
        self.range_names, self.point_names = layout.range_names, layout.point_names
        self.identity = identity
        self.blocks = blocks
        self._parts = parts
        self._descriptors = descriptors(layout, parts or {}, form=engine)
        self._engine = engine
        digest = identity.digest()
        self._ids = {c.name: ArtifactIds(digest, c.name) for c in layout.components}
        self._places: dict[str, list[bytes]] = {name: [] for name in self.range_names}
        self.tenant = identity.tenant_salt if any(identity.tenant_salt) else SHARED
        self._slot_bytes = {c.name: c.slot_bytes for c in layout.components}
        self._metas = {c.name: self._meta(c) for c in layout.components}

    def descriptor(self, component: str) -> bytes:
        """How a record of the component lies, as its header says it."""
        return self._descriptors[component]

    def of(self, tenant: bytes) -> RecordNames:
        """A tenant's names, by its salt; these where it is empty."""
        if not tenant:
            return self
        identity = msgspec.structs.replace(self.identity, tenant_salt=tenant)
        return RecordNames(
            identity, self.layout, engine=self._engine, blocks=self.blocks, parts=self._parts
        )

    def slot_bytes(self, component: str) -> int:
        """Bytes of one unit of a component's record."""
        return self._slot_bytes[component]

    def payload_bytes(self, component: str, slots: Sequence[int]) -> int:
        """Bytes of a record of these slots."""
        return len(slots) * self._slot_bytes[component]

    def cell_ending_at(self, end: int) -> Cell:
        """The cell whose last block is the one before `end`."""
        return Cell((end - 1) // self.blocks * self.blocks, end)

    def cells(self, depth: int) -> Iterator[Cell]:
        """What [0, depth) is stored as."""
        for first in range(0, depth, self.blocks):
            yield Cell(first, min(first + self.blocks, depth))

    def range_id(self, component: str, cell: Cell, digests: Ends) -> bytes:
        block = self.layout.block_tokens
        hashed = digests[cell.end - 1]
        return self._ids[component].range(hashed, cell.first * block, cell.end * block)

    def range_ids(self, cells: Iterable[Cell], digests: Digests) -> dict[bytes, Cell]:
        """Every range component's id of each cell, as `range_id` makes them."""
        grid, ids = self.blocks, dict[bytes, Cell]()
        for cell in cells:
            for name in self.range_names:
                if cell.end - cell.first == grid:
                    place = self._place(name, cell.first // grid)
                    ids[self._ids[name].at(digests[cell.end - 1], place)] = cell
                else:
                    ids[self.range_id(name, cell, digests)] = cell
        return ids

    def _place(self, component: str, number: int) -> bytes:
        """What the ids of all prefixes' whole cells of that number have in common."""
        places, tokens = self._places[component], self.blocks * self.layout.block_tokens
        while len(places) <= number:
            start = len(places) * tokens
            places.append(self._ids[component].place(start, start + tokens))
        return places[number]

    def point_id(self, component: str, depth: int, digests: Ends) -> bytes:
        return self._ids[component].point(digests[depth - 1], depth * self.layout.block_tokens)

    def shared_cell(self, inside: Inside, digests: Digests) -> Cell | None:
        """The part of a range record that a prefix shares; None when the record is of another
        identity or grid, or the boundary is not the prefix's."""
        meta, block = inside.meta, self.layout.block_tokens
        ids, first = self._ids.get(meta.component), meta.first_token // block
        depth = first + inside.units
        hashed = PrefixHash(meta.prefix_hash)
        if ids is None or meta.kind is not Kind.RANGE or first % self.blocks:
            return None
        if ids.range(hashed, meta.first_token, meta.end_token) != meta.id:
            return None
        if not first < depth <= len(digests) or digests[depth - 1] != inside.boundary:
            return None
        return Cell(first, depth)

    def range_meta(self, component: str, cell: Cell, digests: Digests) -> Meta:
        units, block = cell.end - cell.first, self.layout.block_tokens
        inner = b"".join(digests[cell.first : cell.end - 1])
        assert len(inner) == (units - 1) * ID_BYTES
        return msgspec.structs.replace(
            self._metas[component],
            id=self.range_id(component, cell, digests),
            prefix_hash=digests[cell.end - 1],
            first_token=cell.first * block,
            end_token=cell.end * block,
            units=units,
            boundaries=inner,
        )

    def point_meta(self, component: str, depth: int, digests: Digests) -> Meta:
        position = depth * self.layout.block_tokens
        return msgspec.structs.replace(
            self._metas[component],
            id=self.point_id(component, depth, digests),
            prefix_hash=digests[depth - 1],
            first_token=position,
            end_token=position,
        )

    def _meta(self, component: Component) -> Meta:
        """What all records of a component say of themselves."""
        nowhere = PrefixHash(bytes(ID_BYTES))
        key: ArtifactKey = PointKey(nowhere, 1, component.name)
        if component.coverage is Coverage.RANGE:
            key = RangeKey(nowhere, 0, 1, component.name)
        meta = meta_of(self.identity, key, tenant=self.tenant)
        return msgspec.structs.replace(meta, descriptor=self._descriptors[component.name])
