"""Record names say how a prefix is cut into stored records, what each is called, and how its bytes
lie. Pure.

The module owns the names. A record's id follows from the tokens alone, so what a store holds of a
prompt is found by asking for ids: no listing, nothing to rebuild after a restart.

    blocks   0 1 2 3 4 5 6 7 | 8 9 10 11 ...            record_blocks = 8
    range    [0, 8)            [8, 11) [8, 16)          begins on the grid, ends at any boundary
    point                   ^           ^               one record a boundary
    lead                   [~~~~~~)                     rows before a point's window

A session that grows writes its last, unfinished cell again when it is longer: at most one cell
twice a turn. Every component has its own record; the payload is a unit of bytes for each block.
A session's `Tip` says which records to look for to know whether the session still stands there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import ClassVar, Protocol

import msgspec

from ownerserve.cache.layout import Component, Layout
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.frame import ITEM_BYTES, PayloadPart
from ownerserve.kv.ids import PrefixHash, SessionId
from ownerserve.kv.prefix import (
    ArtifactIds,
    ArtifactKey,
    Identity,
    PointKey,
    PrefixChain,
    RangeKey,
)
from ownerserve.kv.specs import Coverage
from ownerserve.store.format.convert import ByteOrder, PayloadLayout
from ownerserve.store.format.model import ID_BYTES, SHARED, Meta, meta_of

# ---- how a record's bytes lie, as the store's reader can convert them
#
#     kv.frame         | part 0, layer 0 | layer 1 | ... | part 1, layer 0 | ...
#     store.convert    | page 0          | page 1  | ... | page L          | ...
#
# What is stored is the canonical payload: the engine named in a description is its format, and its
# "layers" are the arrays of all parts, one for each layer. Only what is true of the bytes is said:
# where parts differ in shape, or padding lies between them, a unit is one page with one entry,
# which can be taken as it is, turned in byte order if its scalars are alike, and nothing else.


Parts = Mapping[str, Sequence[PayloadPart]]
"""The arrays of a unit, by component."""

ANY_VERSION = ""
"""The canonical payload does not depend on which version of an engine computed it."""
MIXED = "mixed"


def descriptors(layout: Layout, parts: Parts, *, form: str) -> dict[str, bytes]:
    """Return each component's descriptor, encoded, by component name. `form` is like "payload/1": a
    name, and a number that changes when the layout does. Raises InvalidInput for another form."""
    name, _, version = form.rpartition("/")
    if not name or not version.isdecimal():
        raise InvalidInput("engine", f"{form!r}", 'name a layout and its version: "payload/1"')
    return {
        component.name: _describe(
            _opaque(component, layout.block_tokens, name=name, version=int(version)),
            tuple(parts.get(component.name, ())),
            is_range=component.coverage is Coverage.RANGE,
        ).encode()
        for component in layout.components
    }


def _opaque(component: Component, block_tokens: int, *, name: str, version: int) -> PayloadLayout:
    """Describe a unit as one page with one entry, which is true of whatever is in it."""
    return PayloadLayout(
        engine=name,
        engine_version=ANY_VERSION,
        layout_version=version,
        first_layer=0,
        end_layer=1,
        shard=0,
        shards=1,
        block_tokens=block_tokens,
        entries=1,
        entry_bytes=component.slot_bytes,
        page_bytes=component.slot_bytes,
        scalar=MIXED,
        scalar_bytes=0,
        byte_order=ByteOrder.LITTLE,
    )


def _describe(
    opaque: PayloadLayout, parts: Sequence[PayloadPart], *, is_range: bool
) -> PayloadLayout:
    """Return `opaque` with what the arrays `parts` add to it: scalar type, pages and entries, as
    far as they are uniform."""
    types = {part.dtype for part in parts}
    if len(types) != 1:
        return opaque
    scalar, unit_bytes = types.pop(), opaque.page_bytes
    typed = msgspec.structs.replace(opaque, scalar=scalar, scalar_bytes=ITEM_BYTES[scalar])
    padding = unit_bytes - sum(part.payload_bytes for part in parts)
    if padding and len(parts) == 1:  # at the end
        return msgspec.structs.replace(typed, entry_bytes=unit_bytes - padding)
    shapes = {part.shape for part in parts}
    if padding or len(shapes) > 1:
        return typed
    layers, rows = shapes.pop()[:2]
    pages = len(parts) * layers
    entries = rows if is_range and opaque.block_tokens % rows == 0 else 1
    page_bytes = unit_bytes // pages
    return msgspec.structs.replace(
        typed,
        end_layer=pages,
        entries=entries,
        entry_bytes=page_bytes // entries,
        page_bytes=page_bytes,
    )


Digests = Sequence[PrefixHash]
"""Chain digests of a prefix: `digests[i]` stands for its first i + 1 blocks."""


class Ends(Protocol):
    """An `Ends` maps a block to the chain digest at its end: for all blocks of a prefix, or for
    those at which its records end."""

    def __getitem__(self, block: int, /) -> PrefixHash: ...


class Cell(msgspec.Struct, frozen=True, gc=False):
    """A `Cell` is the blocks [first, end) of a prefix that one range record of each component
    holds; an empty one stands for the point at `end`."""

    first: int
    end: int


class LeadForm(msgspec.Struct, frozen=True):
    """A `LeadForm` says how the windows of a model lead up to a point's: `component` is the lead's,
    a unit of it is the rows of B tokens, and the model's one point component `point_name` keeps
    `window_rows` rows."""

    component: Component
    point_name: str
    window_rows: int


class LeadUse(msgspec.Struct, frozen=True, gc=False):
    """A `LeadUse` says how the lead of a point at `end` gives the point at `depth`, both in blocks:
    units [first, first + units) of the lead's record, and of the point's record `base_id` the rows
    before `depth`; empty where the lead has all of them.

        lead    [~~u~~|~~u~~|~~u~~)                 K units, up to the window of the point at `end`
        point                      [== window ==)end
        here          [~~~~~~ window ~~~~)depth
    """

    depth: int
    end: int
    first: int
    units: int
    base_id: bytes = b""


class Inside(msgspec.Struct, frozen=True):
    """An `Inside` is a stored record that holds `boundary` at the end of its first `units`
    units."""

    meta: Meta
    units: int
    boundary: bytes


PLACES_KEPT = 32_768


class _Places(dict[int, bytes]):
    """The places of one component are what its records' ids have in common whatever the prefix, by
    the depth at which a cell of the grid ends. Made as they are asked for, PLACES_KEPT at most."""

    def __init__(self, ids: ArtifactIds, blocks: int, block_tokens: int) -> None:
        self._ids, self._blocks, self._block_tokens = ids, blocks, block_tokens

    def __missing__(self, end: int) -> bytes:
        if len(self) >= PLACES_KEPT:
            self.clear()
        first, block = (end - 1) // self._blocks * self._blocks, self._block_tokens
        self[end] = place = self._ids.place(first * block, end * block)
        return place


class RecordNames:
    """`RecordNames` makes the ids and metadata of records under one identity, layout and grid of
    cells."""

    id_maker: ClassVar[type[ArtifactIds]] = ArtifactIds
    chain_maker: ClassVar[type[PrefixChain]] = PrefixChain
    """What names records, and the prefixes that they are of."""

    def __init__(
        self,
        identity: Identity,
        layout: Layout,
        *,
        engine: str,
        blocks: int,
        parts: Parts | None = None,
        lead: LeadForm | None = None,
    ) -> None:
        """Make the names. `engine` names the byte layout of a slot, and its version; `blocks` are
        those of a record; `parts` the arrays in a slot, without which no other layout can be
        converted; `lead` is None where points have none."""
        self.layout = layout
        self.lead = lead
        components = layout.components
        if lead is not None:
            components += (lead.component,)
        self.range_names, self.point_names = layout.range_names, layout.point_names
        self.identity = identity
        self.blocks = blocks
        self._parts = parts
        named = msgspec.structs.replace(layout, components=components)
        self._descriptors = descriptors(named, parts or {}, form=engine)
        self._engine = engine
        digest = identity.digest()
        self._ids = {c.name: self.id_maker(digest, c.name) for c in components}
        block = layout.block_tokens
        self._places = {name: _Places(ids, blocks, block) for name, ids in self._ids.items()}
        self.tenant = identity.tenant_salt if any(identity.tenant_salt) else SHARED
        self._slot_bytes = {c.name: c.slot_bytes for c in components}
        self._metas = {c.name: self._meta(c) for c in components}

    def descriptor(self, component: str) -> bytes:
        """Return the encoded descriptor of the component's records, as their headers hold it."""
        return self._descriptors[component]

    def of(self, tenant: bytes) -> RecordNames:
        """Return the names under the tenant's salt; these themselves where `tenant` is empty."""
        if not tenant:
            return self
        identity = msgspec.structs.replace(self.identity, tenant_salt=tenant)
        return type(self)(
            identity,
            self.layout,
            engine=self._engine,
            blocks=self.blocks,
            parts=self._parts,
            lead=self.lead,
        )

    def slot_bytes(self, component: str) -> int:
        """Return the bytes of one unit of the component's records."""
        return self._slot_bytes[component]

    def payload_bytes(self, component: str, slots: Sequence[int]) -> int:
        """Return the bytes of a record of these slots."""
        return len(slots) * self._slot_bytes[component]

    def cell_ending_at(self, end: int) -> Cell:
        """Return the cell of the grid whose last block is the one before `end`."""
        return Cell((end - 1) // self.blocks * self.blocks, end)

    def ends(self, depth: int) -> Sequence[int]:
        """Return the depths at which the cells end that [0, depth) is stored as, in order; the last
        one may be short."""
        ends = [*range(self.blocks, depth + 1, self.blocks)]
        return [*ends, depth] if depth % self.blocks else ends

    def range_id(self, component: str, cell: Cell, digests: Ends) -> bytes:
        """Return the id of the component's range record of the cell."""
        ids, end = self._ids[component], cell.end
        if cell.first == (end - 1) // self.blocks * self.blocks:
            return ids.at(digests[end - 1], self._places[component][end])
        block = self.layout.block_tokens
        return ids.range(digests[end - 1], cell.first * block, end * block)

    def range_ids(self, depths: Sequence[int], digests: Ends) -> Sequence[tuple[bytes, ...]]:
        """Return, for each of `depths`, the ids by component of the range records of the cell that
        ends there: as `range_id` makes them, at a fraction of its time."""
        hashed, columns = [digests[end - 1] for end in depths], list[Sequence[bytes]]()
        for name in self.range_names:
            places = self._places[name]
            columns.append(self._ids[name].each(hashed, [places[end] for end in depths]))
        return list(zip(*columns, strict=True)) or [()] * len(depths)

    def point_id(self, component: str, depth: int, digests: Ends) -> bytes:
        """Return the id of the component's point record at `depth` blocks."""
        return self._ids[component].point(digests[depth - 1], depth * self.layout.block_tokens)

    def shared_cell(self, inside: Inside, digests: Digests) -> Cell | None:
        """Return the part of a range record that the prefix of `digests` shares; None when the
        record is of another identity or grid, or the boundary is not the prefix's."""
        meta, block = inside.meta, self.layout.block_tokens
        ids, first = self._ids.get(meta.component), meta.first_token // block
        depth = first + inside.units
        hashed = PrefixHash(meta.prefix_hash)
        if ids is None or meta.component not in self.range_names or first % self.blocks:
            return None
        if ids.range(hashed, meta.first_token, meta.end_token) != meta.id:
            return None
        if not first < depth <= len(digests) or digests[depth - 1] != inside.boundary:
            return None
        return Cell(first, depth)

    def range_meta(self, component: str, cell: Cell, digests: Digests) -> Meta:
        """Return the metadata of the component's range record of the cell, with the digests
        inside it."""
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
        """Return the metadata of the component's point record at `depth` blocks."""
        position = depth * self.layout.block_tokens
        return msgspec.structs.replace(
            self._metas[component],
            id=self.point_id(component, depth, digests),
            prefix_hash=digests[depth - 1],
            first_token=position,
            end_token=position,
        )

    def _meta(self, component: Component) -> Meta:
        """Return the fields that all records of a component have in common; the others are
        placeholders."""
        nowhere = PrefixHash(bytes(ID_BYTES))
        key: ArtifactKey = PointKey(nowhere, 1, component.name)
        if component.coverage is Coverage.RANGE:
            key = RangeKey(nowhere, 0, 1, component.name)
        meta = meta_of(self.identity, key, tenant=self.tenant)
        return msgspec.structs.replace(meta, descriptor=self._descriptors[component.name])


# ---- leads


def lead_units(names: RecordNames, depth: int, *, tokens: int) -> int:
    """Return how many units the lead of the point at `depth` blocks has, given for how many tokens
    before it rows are to be had; 0: none, or too few to be of use."""
    if names.lead is None:
        return 0
    block = names.layout.block_tokens
    units = min(tokens, max(0, depth * block - names.lead.window_rows)) // block
    return units if units > 1 else 0


def lead_meta(names: RecordNames, cell: Cell, digests: Digests) -> Meta:
    """Return the metadata of the lead that makes a point of each boundary inside `cell`, whose end
    has one."""
    assert names.lead is not None
    return names.range_meta(names.lead.component.name, cell, digests)


def lead_use(names: RecordNames, inside: Inside, digests: Digests) -> LeadUse | None:
    """Return how a lead gives a point of the prefix; None when the record is none, or the boundary
    is not the prefix's."""
    meta, lead, block = inside.meta, names.lead, names.layout.block_tokens
    if lead is None or meta.component != lead.component.name or inside.units >= meta.units:
        return None
    first, end = meta.first_token // block, meta.end_token // block
    depth, ends = first + inside.units, {end - 1: PrefixHash(meta.prefix_hash)}
    if names.range_id(meta.component, Cell(first, end), ends) != meta.id:
        return None
    if not 0 < depth <= len(digests) or digests[depth - 1] != inside.boundary:
        return None
    rows = min(lead.window_rows, (end - depth) * block)
    has_all = rows == lead.window_rows
    base = b"" if has_all else names.point_id(lead.point_name, end, ends)
    return LeadUse(depth, end, inside.units, -(-rows // block), base)


# ---- tips


TIPS_KEPT = 4096
"""Sessions of which a node, and the file beside its store, keep the tip."""


class Tip(msgspec.Struct, frozen=True):
    """A `Tip` is a session's blocks [0, depth), as they were last copied; depth 0: the session is
    forgotten.

    A tip keeps the digests at the ends of its records instead of the tokens, so that a later life
    of the worker can look for them too.

    `ends` maps a block to the chain digest at its end: of each range record's last block, and of
    the last block before each of `points`, the depths whose point state was copied too. `tenant` is
    the salt in its records' names; empty: what all share.
    """

    session_id: SessionId
    depth: int
    ends: dict[int, PrefixHash] = {}
    points: tuple[int, ...] = ()
    tenant: bytes = b""


class TipDepth(msgspec.Struct, frozen=True):
    """A `TipDepth` says how much of a tip a tier can give back: `depth` blocks, up to `digest`.
    `has_point`: the point state there too; else the state up to it comes by a replay."""

    depth: int
    digest: PrefixHash | None = None
    has_point: bool = False


NOTHING = TipDepth(0)


def tip_of(
    names: RecordNames,
    session_id: SessionId,
    depth: int,
    *,
    digests: Digests,
    points: Iterable[int],
    tenant: bytes = b"",
) -> Tip:
    """Return the tip of a session of which blocks [0, depth) were copied, with point state at the
    depths `points` that lie in it."""
    kept = tuple(sorted(at for at in points if 0 < at <= depth))
    at = _last_blocks(names, depth, kept)
    return Tip(session_id, depth, {block: digests[block] for block in sorted(at)}, kept, tenant)


class TipRecords(msgspec.Struct, frozen=True):
    """The records of a tip are named once and asked for as often as somebody wants to know: `ids`
    are all of them, `ranges` those of each of its cells of `blocks` blocks, in order, `points`
    those of point state by depth."""

    tip: Tip
    blocks: int
    ids: tuple[bytes, ...]
    ranges: Sequence[tuple[bytes, ...]]
    points: Mapping[int, tuple[bytes, ...]]
    has_points: bool

    def depth(self, held: frozenset[bytes], *, can_replay: bool) -> TipDepth:
        """Return how much of the tip can be brought back from the records `held`.

        Range state counts as far as no record lacks; a model with point state goes on at the
        deepest point that is there too, or, by a replay, where range state ends.
        """
        tip, has_point = self.tip, False
        cells = len(self.ranges)
        if not held.issuperset(self.ids):
            lacking = (at for at, ids in enumerate(self.ranges) if not held.issuperset(ids))
            cells = next(lacking, cells)
        depth = min(cells * self.blocks, tip.depth)
        if self.has_points and depth:
            points = self.points.items()
            whole = [at for at, ids in points if at <= depth and held.issuperset(ids)]
            if whole or not can_replay:
                depth, has_point = max(whole, default=0), True
        return TipDepth(depth, tip.ends.get(depth - 1), has_point) if depth else NOTHING


def records_of(names: RecordNames, tip: Tip) -> TipRecords:
    """Return the records of the tip."""
    names = names.of(tip.tenant)
    points = {
        depth: tuple(names.point_id(name, depth, tip.ends) for name in names.point_names)
        for depth in tip.points
    }
    ranges = names.range_ids(names.ends(tip.depth), tip.ends)
    ids = tuple(chain.from_iterable((*ranges, *points.values())))
    return TipRecords(tip, names.blocks, ids, ranges, points, bool(names.point_names))


def _last_blocks(names: RecordNames, depth: int, points: Iterable[int]) -> set[int]:
    """Return the last block of each record of a tip of `depth` blocks with these `points`."""
    return {end - 1 for end in (*names.ends(depth), *points)}


def is_sound(names: RecordNames, tip: Tip) -> bool:
    """Return whether a tip that was read from a file has the digests that its records' ids need."""
    needed = _last_blocks(names, tip.depth, tip.points)
    return needed <= tip.ends.keys() and all(0 < at <= tip.depth for at in tip.points)
