"""Where a prompt's state can come from: the device, and the store below it. Pure.

    Device        what a node needs of the place where KV lives while a turn runs
    OwnDevice     our HeteroCache: it answers at once, and takes state in before any turn runs
    an engine's   its blocks belong to its requests: what it has, and where state may go, is known
                  only when its scheduler asks. Until then it answers `Later`, and the node waits
    Walks         where each prompt parts from what is resident in our HeteroCache
    the rest      what the store was asked for and has, as the planner's plain data; and the chosen
                  way back, as reads and slots

Abilities (plan.inputs) say what may be planned for a device; nothing here asks which one it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple, Protocol

import msgspec

from ownerserve.cache.hetero import HeteroCache
from ownerserve.cache.layout import Layout
from ownerserve.cache.outcomes import (
    Arrival,
    CacheRefused,
    Inserted,
    Match,
    NoRoom,
    Shortage,
    SlotsReserved,
)
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.messages import RestoreAction, Tier
from ownerserve.kv.prefix import HashedPrefix, Packed
from ownerserve.node.vocabulary.events import TurnArrived
from ownerserve.node.vocabulary.records import Cell, Digests, Inside, RecordNames
from ownerserve.plan.inputs import Backlog, RestoreQuery
from ownerserve.plan.outcome import Priced
from ownerserve.plan.residency import NEAREST_FIRST, PointRow, RangeRow, points_of, spans_of
from ownerserve.store.format.model import Want

# ---- the device


class _Prompt(NamedTuple):
    session_id: SessionId
    hashed: HashedPrefix
    blocks: int


class Walks:
    """Walks of prompts along the tree of one cache, by turn.

        session   |===== resident =====|-- gone --|          tip: the digest of all of it
        prompt    |===============================|++++++|   its digest there is the tip: what of
                                                             the session is resident need not be
                                                             compared

    A prompt whose digests say that it goes on from its session is followed from there on: what that
    costs does not grow with the session. Any other one is compared from the root. The class owns
    the digests of turns that are here; the cache owns what is resident.
    """

    def __init__(self, cache: HeteroCache) -> None:
        self._cache = cache
        self._prompts: dict[TurnId, _Prompt] = {}

    def arrived(self, event: TurnArrived) -> None:
        """A turn is here. One whose prompt comes without digests of its own is compared."""
        session_id, hashed = event.session_id, event.hashed
        if session_id is not None and hashed is not None and hashed.is_of(event.tokens):
            blocks = len(event.tokens) // self._cache.layout.packed_block_bytes
            self._prompts[event.turn_id] = _Prompt(session_id, hashed, blocks)

    def over(self, turn_id: TurnId) -> None:
        """The turn has ended or is gone; one that never came is no error."""
        self._prompts.pop(turn_id, None)

    def match(self, turn_id: TurnId, tokens: Packed) -> Match:
        """What the turn could go on from."""
        prompt = self._prompts.get(turn_id)
        behind = None if prompt is None else self._cache.residents.behind(*prompt)
        return self._cache.match(tokens, behind=behind)

    def missing_blocks(self, turn_id: TurnId, tokens: Packed, *, held: int = 0) -> int:
        """Blocks of the prompt that are not held for it or for a running turn, resident or not."""
        prompt = self._prompts.get(turn_id)
        behind = None if prompt is None else self._cache.residents.behind(*prompt)
        return self._cache.residents.missing_blocks(tokens, behind=behind, held=held)

    def retain(self, turn_id: TurnId, tokens: Packed, now: float) -> None:
        """What of the prompt is resident is to stay until the turn is over."""
        prompt = self._prompts.get(turn_id)
        behind = None if prompt is None else self._cache.residents.behind(*prompt)
        self._cache.residents.retain(turn_id, tokens, now, behind=behind)


class Later(msgspec.Struct, frozen=True):
    """The engine knows only when it asks: `DeviceAsked` for a match, `DevicePlaced` for room."""


class Device(Protocol):
    """The place where turns find their state. It is told what the node decided; decides nothing."""

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
    ) -> SlotsReserved | NoRoom | CacheRefused | Later:
        """Slots for state from outside."""
        ...

    def commit(self, ticket: int, digest: bytes, now: float) -> Inserted | CacheRefused:
        """The slots are written with what `digest` stands for: all of it counts, or nothing."""
        ...

    def abort(self, ticket: int) -> None:
        """Nobody writes into the slots any more, and nothing in them counts."""
        ...


class OwnDevice:
    """Our own HeteroCache as a Device."""

    def __init__(self, cache: HeteroCache, walks: Walks) -> None:
        self._cache = cache
        self._walks = walks

    @property
    def layout(self) -> Layout:
        return self._cache.layout

    def match(self, turn_id: TurnId, tokens: Packed) -> Match:
        return self._walks.match(turn_id, tokens)

    def shortage(self, blocks: int) -> Shortage:
        return self._cache.occupancy.shortage(blocks)

    def reserve(
        self, turn_id: TurnId, arrival: Arrival, now: float
    ) -> SlotsReserved | NoRoom | CacheRefused | Later:
        return self._cache.ingest.reserve(arrival, now)

    def commit(self, ticket: int, digest: bytes, now: float) -> Inserted | CacheRefused:
        return self._cache.ingest.commit(ticket, digest, now)

    def abort(self, ticket: int) -> None:
        self._cache.ingest.abort(ticket)
        self._cache.ingest.quiet(ticket)


# ---- the store, and both as the planner's question


LOADS = (RestoreAction.LOAD_GLOBAL, RestoreAction.LOAD_POINT)


class RecordQuery(msgspec.Struct, frozen=True):
    """What an id stands for: blocks of `cell`, or the point at its end when it is empty."""

    component: str
    cell: Cell


class StoredRecord(msgspec.Struct, frozen=True):
    """A record, and where it is said to be."""

    id: bytes
    tier: Tier


class StoredRecords(msgspec.Struct, frozen=True):
    """The store's part of one prompt: for each cell of the grid the longest range that all
    components have; for each depth the point components there."""

    cells: tuple[tuple[Cell, dict[str, StoredRecord]], ...]
    points: dict[int, dict[str, StoredRecord]]


NOTHING_HELD = StoredRecords((), {})


def record_queries(
    names: RecordNames, digests: Digests, *, ranges: Iterable[int], points: Iterable[int]
) -> dict[bytes, RecordQuery]:
    """Ids worth asking for, and what each would be: range records that end at a depth of `ranges`
    and point state at those of `points`."""
    asked: dict[bytes, RecordQuery] = {}
    for end in ranges:
        cell = names.cell_ending_at(end)
        for name in names.range_names:
            asked[names.range_id(name, cell, digests)] = RecordQuery(name, cell)
    for depth in points if names.point_names else ():
        point = Cell(depth, depth)
        for name in names.point_names:
            asked[names.point_id(name, depth, digests)] = RecordQuery(name, point)
    return asked


def queries_inside(
    names: RecordNames, digests: Digests, inside: Iterable[Inside]
) -> dict[bytes, RecordQuery]:
    """What records that share only their beginning with the prefix are good for."""
    cells = ((item.meta, names.shared_cell(item, digests)) for item in inside)
    return {meta.id: RecordQuery(meta.component, cell) for meta, cell in cells if cell is not None}


def stored_records(
    names: RecordNames,
    asked: Mapping[bytes, RecordQuery],
    found: Mapping[bytes, Tier],
    *,
    without: Set[bytes] = frozenset(),
) -> StoredRecords:
    """What of `found` can be used: whole sets of components only, none that failed before."""
    ranges: dict[Cell, dict[str, StoredRecord]] = {}
    points: dict[int, dict[str, StoredRecord]] = {}
    for id_, tier in found.items():
        what = asked.get(id_)
        if what is None or id_ in without:
            continue
        if what.cell.first == what.cell.end:
            points.setdefault(what.cell.end, {})[what.component] = StoredRecord(id_, tier)
        else:
            ranges.setdefault(what.cell, {})[what.component] = StoredRecord(id_, tier)
    longest: dict[int, Cell] = {}
    for cell, parts in ranges.items():
        if len(parts) == len(names.range_names):
            before = longest.get(cell.first)
            if before is None or before.end < cell.end:
                longest[cell.first] = cell
    cells = sorted(longest.values(), key=lambda cell: cell.first)
    return StoredRecords(tuple((cell, ranges[cell]) for cell in cells), points)


def restore_query(
    names: RecordNames,
    match: Match,
    stored: StoredRecords,
    *,
    tokens: int,
    backlog: Backlog,
    hbm_ms_per_gib: float = 0.0,
) -> RestoreQuery:
    """The planner's question for a prompt of `tokens` tokens, at that price of device memory."""
    layout = names.layout
    block = layout.block_tokens
    spans = spans_of(_range_rows(names, match, stored), layout.range_names)
    covered = spans[-1].end if spans else 0
    deepest = min(covered, (tokens - 1) // block * block)
    rows = [
        PointRow(name, point.position, Tier.DEVICE, 0)
        for point in match.points
        for name in layout.point_names
        if name not in point.lacks
    ]
    rows += [
        PointRow(name, depth * block, record.tier, names.slot_bytes(name))
        for depth, at in stored.points.items()
        for name, record in at.items()
    ]
    positions = {deepest, *(point.position for point in match.points)} - {0}
    points = points_of(
        (row for row in rows if row.position <= deepest), layout.point_names, positions=positions
    )
    return RestoreQuery(
        tokens=tokens,
        spans=spans,
        points=points,
        known_tokens=covered,
        backlog=backlog,
        hbm_ms_per_gib=hbm_ms_per_gib,
    )


def _range_rows(names: RecordNames, match: Match, stored: StoredRecords) -> list[RangeRow]:
    """A row for each component and each run of cells that touch and lie in one tier."""
    layout, runs = names.layout, list[tuple[int, int, Tier]]()
    for cell, parts in stored.cells:
        tier = max((record.tier for record in parts.values()), key=NEAREST_FIRST.index)
        if runs and runs[-1][1] == cell.first and runs[-1][2] is tier:
            runs[-1] = (runs[-1][0], cell.end, tier)
        else:
            runs.append((cell.first, cell.end, tier))
    rows = []
    for name in layout.range_names:
        if match.range_tokens:
            rows.append(RangeRow(name, 0, match.range_tokens, Tier.DEVICE, 0))
        size, block = names.slot_bytes(name), layout.block_tokens
        rows += [
            RangeRow(name, first * block, end * block, tier, size * (end - first))
            for first, end, tier in runs
        ]
    return rows


def is_loading(way: Priced) -> bool:
    """Whether a way back needs anything from the store."""
    return any(step.action in LOADS for step in way.steps)


class RecordRead(msgspec.Struct, frozen=True):
    """One want and where its bytes belong: blocks [first, end) of the prefix, or a point."""

    want: Want
    component: str
    first: int
    end: int
    size_bytes: int
    tier: Tier

    @property
    def is_point(self) -> bool:
        return self.first == self.end


def record_reads(
    names: RecordNames, stored: StoredRecords, *, way: Priced, start: int
) -> tuple[RecordRead, ...]:
    """What must be read so that blocks [start, way.position) and the way's point are at hand.

    Range records first, from the front; units that are resident already are not read.
    """
    block, found = names.layout.block_tokens, list[RecordRead]()
    goal = way.position // block
    for cell, parts in stored.cells:
        first, end = max(cell.first, start), min(cell.end, goal)
        if first >= end:
            continue
        units = (first - cell.first, end - cell.first)
        for name, record in parts.items():
            want = Want(record.id, *units, descriptor=names.descriptor(name))
            size = names.slot_bytes(name) * (end - first)
            found.append(RecordRead(want, name, first, end, size, record.tier))
    if way.checkpoint is not None and any(s.action is RestoreAction.LOAD_POINT for s in way.steps):
        depth = way.checkpoint // block
        for name, record in stored.points.get(depth, {}).items():
            want = Want(record.id, descriptor=names.descriptor(name))
            size = names.slot_bytes(name)
            found.append(RecordRead(want, name, depth, depth, size, record.tier))
    return tuple(found)
