"""A prompt's state comes from two sources: the device, and the store below it. Pure.

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

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple, Protocol

import msgspec

from ownerserve.cache.effects import MoveBorder
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
    Verified,
)
from ownerserve.cache.sessions import Awaited
from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.messages import RestoreAction, Tier
from ownerserve.kv.prefix import HashedPrefix, Packed
from ownerserve.node.vocabulary.events import LOADS, TurnArrived
from ownerserve.node.vocabulary.records import (
    Cell,
    Digests,
    Inside,
    LeadUse,
    RecordNames,
    lead_use,
)
from ownerserve.plan.inputs import Backlog, RangeSpan, RestoreQuery
from ownerserve.plan.outcome import Priced
from ownerserve.plan.residency import NEAREST_FIRST, PointRow, RangeRow, points_of, spans_of
from ownerserve.store.format.model import Want

# ---- the device


class _Prompt(NamedTuple):
    session_id: SessionId
    hashed: HashedPrefix
    blocks: int


class Walks:
    """`Walks` follow the prompts of turns that are here along the tree of one cache.

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
        """Keep the digests of the turn's prompt, if it brings any that go on from its session; else
        its prompt is compared from the root."""
        session_id, hashed = event.session_id, event.hashed
        if session_id is not None and hashed is not None and hashed.is_of(event.tokens):
            blocks = len(event.tokens) // self._cache.layout.packed_block_bytes
            self._prompts[event.turn_id] = _Prompt(session_id, hashed, blocks)

    def over(self, turn_id: TurnId) -> None:
        """Forget the turn, which has ended or is gone, and release what it retained; one that never
        came is no error."""
        self._prompts.pop(turn_id, None)
        self._cache.residents.release(turn_id)

    def match(self, turn_id: TurnId, tokens: Packed) -> Match:
        """Return how much of `tokens` the cache has resident, and at which points the turn could go
        on."""
        prompt = self._prompts.get(turn_id)
        behind = None if prompt is None else self._cache.residents.behind(*prompt)
        return self._cache.match(tokens, behind=behind)

    def missing_blocks(
        self, turn_id: TurnId, tokens: Packed, *, held: int = 0, more: int | None = None
    ) -> int:
        """Return how many blocks of the prompt, resident or not, neither a running turn nor this
        one (its first `held`) holds; behind what is resident only `more` of them, where that is
        given."""
        prompt = self._prompts.get(turn_id)
        behind = None if prompt is None else self._cache.residents.behind(*prompt)
        return self._cache.residents.missing_blocks(tokens, behind=behind, held=held, more=more)

    def retain(
        self, turn_id: TurnId, tokens: Packed, now: float, *, awaited: Awaited = Awaited.IN_LINE
    ) -> None:
        """Ask the cache to keep what of the prompt is resident until the turn is over: it is
        evicted last."""
        prompt = self._prompts.get(turn_id)
        behind = None if prompt is None else self._cache.residents.behind(*prompt)
        self._cache.residents.retain(turn_id, tokens, now, behind=behind, awaited=awaited)


class Later(msgspec.Struct, frozen=True):
    """A device answers `Later` when its engine tells only by itself: `DeviceAsked` follows for a
    match, `DevicePlaced` for room."""


class Device(Protocol):
    """A `Device` is the place where turns find their state. It is told what the node decided and
    decides nothing."""

    @property
    def layout(self) -> Layout:
        """`layout` is the components and the block length of the device's state."""
        ...

    def match(self, turn_id: TurnId, tokens: Packed) -> Match | Later:
        """Return how much of `tokens` is on the device."""
        ...

    def shortage(self, blocks: int) -> Shortage | None:
        """Return what would have to be evicted for so many range blocks; None: the device does not
        say."""
        ...

    def reserve(
        self, turn_id: TurnId, arrival: Arrival, now: float
    ) -> SlotsReserved | NoRoom | CacheRefused | Later:
        """Reserve slots for state that comes from the store; NoRoom or CacheRefused where there are
        none to be had."""
        ...

    def give_way(self, short: NoRoom) -> tuple[MoveBorder, ...]:
        """Have point slots give way to the range blocks that were missing; nothing where they
        can't, or where something else was."""
        ...

    def commit(self, ticket: int, parts: Sequence[Verified], now: float) -> Inserted | CacheRefused:
        """Make the reserved slots count, which are written with `parts`: all of them, or
        nothing."""
        ...

    def abort(self, ticket: int, now: float) -> None:
        """Give the reserved slots up: nothing in them counts. They may still be written to, and
        are nobody else's, until `quiet`."""
        ...

    def quiet(self, ticket: int) -> None:
        """Note that nobody writes into the slots of a reservation that was given up: they may be
        used again."""
        ...


class OwnDevice:
    """`OwnDevice` is our own HeteroCache as a `Device`: it answers at once."""

    def __init__(self, cache: HeteroCache, walks: Walks) -> None:
        self._cache = cache
        self._walks = walks

    @property
    def layout(self) -> Layout:
        """Return the cache's layout."""
        return self._cache.layout

    def match(self, turn_id: TurnId, tokens: Packed) -> Match:
        return self._walks.match(turn_id, tokens)

    def shortage(self, blocks: int) -> Shortage:
        return self._cache.occupancy.shortage(blocks)

    def reserve(
        self, turn_id: TurnId, arrival: Arrival, now: float
    ) -> SlotsReserved | NoRoom | CacheRefused | Later:
        return self._cache.ingest.reserve(arrival, now)

    def give_way(self, short: NoRoom) -> tuple[MoveBorder, ...]:
        if short.pool != self._cache.occupancy.blocks.name:
            return ()
        return self._cache.border.give_way(short.missing)

    def commit(self, ticket: int, parts: Sequence[Verified], now: float) -> Inserted | CacheRefused:
        return self._cache.ingest.commit(ticket, parts, now)

    def abort(self, ticket: int, now: float) -> None:
        self._cache.ingest.abort(ticket, now)

    def quiet(self, ticket: int) -> None:
        self._cache.ingest.quiet(ticket)


# ---- the store, and both as the planner's question


class RecordQuery(msgspec.Struct, frozen=True, gc=False):
    """A `RecordQuery` says what a record's id stands for: the component's blocks [first, end), or
    the point at `end` where the two are equal; that point is another one's lead if `lead` says how.
    `first` None: the cell of the grid that ends there, which most are and few are found of."""

    component: str
    end: int
    first: int | None = None
    lead: LeadUse | None = None


class StoredRecord(msgspec.Struct, frozen=True, gc=False):
    """A `StoredRecord` is a record's id with the nearest tier that is said to have it; `lead`: how
    it gives the point, if it is another one's lead."""

    id: bytes
    tier: Tier
    lead: LeadUse | None = None


class StoredRecords(msgspec.Struct, frozen=True):
    """`StoredRecords` are the store's part of one prompt: for each cell of the grid the longest
    range that all components have, and for each depth the point components there. What a peer holds
    of them it has at hand in `peer_ready_ms`, all of it."""

    cells: tuple[tuple[Cell, dict[str, StoredRecord]], ...]
    points: dict[int, dict[str, StoredRecord]]
    peer_ready_ms: float = 0.0


NOTHING_HELD = StoredRecords((), {})


def record_queries(
    names: RecordNames, digests: Digests, *, ranges: Iterable[int], points: Iterable[int]
) -> dict[bytes, RecordQuery]:
    """Return the ids to ask for with what each stands for: range records that end at a depth of
    `ranges`, and point state at those of `points`."""
    ends = tuple(ranges)
    asked = {
        id_: RecordQuery(name, end)
        for end, ids in zip(ends, names.range_ids(ends, digests), strict=True)
        for name, id_ in zip(names.range_names, ids, strict=True)
    }
    for depth in points if names.point_names else ():
        for name in names.point_names:
            asked[names.point_id(name, depth, digests)] = RecordQuery(name, depth, depth)
    return asked


def queries_inside(
    names: RecordNames, digests: Digests, inside: Iterable[Inside]
) -> dict[bytes, RecordQuery]:
    """Return what the records `inside`, which share only their beginning with the prefix, can give
    it, by id."""
    queries: dict[bytes, RecordQuery] = {}
    for item in inside:
        cell, lead = names.shared_cell(item, digests), lead_use(names, item, digests)
        if cell is not None:
            queries[item.meta.id] = RecordQuery(item.meta.component, cell.end, cell.first)
        elif lead is not None and names.lead is not None:
            name, depth = names.lead.point_name, lead.depth
            queries[item.meta.id] = RecordQuery(name, depth, depth, lead)
    return queries


def stored_records(
    names: RecordNames,
    asked: Mapping[bytes, RecordQuery],
    found: Mapping[bytes, Tier],
    *,
    without: Set[bytes] = frozenset(),
) -> StoredRecords:
    """Return what of `found` can be used: for ranges whole sets of components only, and nothing of
    `without`, the ids that failed before."""
    ranges: dict[Cell, dict[str, StoredRecord]] = {}
    points: dict[int, dict[str, StoredRecord]] = {}
    for id_, tier in found.items():
        what = asked.get(id_)
        if what is None or id_ in without:
            continue
        if what.lead is not None:
            base = what.lead.base_id
            if not base or (base in found and base not in without):
                at = points.setdefault(what.end, {})
                at.setdefault(what.component, StoredRecord(id_, tier, what.lead))
        elif what.first == what.end:
            points.setdefault(what.end, {})[what.component] = StoredRecord(id_, tier)
        else:
            first, end = what.first, what.end
            cell = names.cell_ending_at(end) if first is None else Cell(first, end)
            ranges.setdefault(cell, {})[what.component] = StoredRecord(id_, tier)
    longest, whole = dict[int, Cell](), len(names.range_names)
    for cell, parts in ranges.items():
        if len(parts) == whole:
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
    """Return the planner's question for a prompt of `tokens` tokens, at that price of device
    memory."""
    layout = names.layout
    block = layout.block_tokens
    spans = spans_of(_range_rows(names, match, stored), layout.range_names)
    if not layout.range_names:
        spans = (RangeSpan(0, tokens),)  # a point alone is enough to go on from
    covered = spans[-1].end if spans else 0
    deepest = min(covered, (tokens - 1) // block * block)
    rows = [
        PointRow(name, point.position, Tier.DEVICE, 0)
        for point in match.points
        for name in layout.point_names
        if name not in point.lacks
    ]
    # A peer's points are read with the range state before them: their wait is counted once.
    ready = NOTHING_HELD if layout.range_names else stored
    rows += [
        PointRow(
            name, depth * block, record.tier, names.slot_bytes(name), _ready_ms(ready, record.tier)
        )
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


def covered_tokens(names: RecordNames, match: Match, stored: StoredRecords) -> int:
    """Return up to where range state is on the device or stored, without a gap; 0 for a model that
    has none."""
    if not names.range_names:
        return 0
    spans = spans_of(_range_rows(names, match, stored), names.range_names)
    return spans[-1].end if spans else 0


def _range_rows(names: RecordNames, match: Match, stored: StoredRecords) -> list[RangeRow]:
    """Return a row for each component and each run of cells that touch and lie in one tier."""
    layout, runs = names.layout, list[tuple[int, int, Tier]]()
    for cell, parts in stored.cells:
        tiers = {record.tier for record in parts.values()}
        tier = tiers.pop() if len(tiers) == 1 else max(tiers, key=NEAREST_FIRST.index)
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
            RangeRow(name, first * block, end * block, tier, size * (end - first), ready_ms)
            for first, end, tier in runs
            for ready_ms in (_ready_ms(stored, tier),)
        ]
    return rows


def _ready_ms(stored: StoredRecords, tier: Tier) -> float:
    """Return in how many ms what lies in `tier` is at hand there."""
    return stored.peer_ready_ms if tier is Tier.PEER else 0.0


def is_loading(way: Priced) -> bool:
    """Return whether a way back needs anything from the store."""
    return any(step.action in LOADS for step in way.steps)


class RecordRead(msgspec.Struct, frozen=True, gc=False):
    """A `RecordRead` is one want and where its bytes belong: blocks [first, end) of the prefix, or
    a point where the two are equal. `led_to`: the depth of the point, behind this one, whose record
    or lead is read; 0: it is this one's own."""

    want: Want
    component: str
    first: int
    end: int
    size_bytes: int
    tier: Tier
    led_to: int = 0

    @property
    def is_point(self) -> bool:
        """`is_point` tells point state from range state."""
        return self.first == self.end


def record_reads(
    names: RecordNames, stored: StoredRecords, *, way: Priced, start: int
) -> tuple[RecordRead, ...]:
    """Return the reads that bring blocks [start, way.position) and the way's point.

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
            if record.lead is not None:
                found += _reads_of_lead(names, record, record.lead)
                continue
            want = Want(record.id, descriptor=names.descriptor(name))
            size = names.slot_bytes(name)
            found.append(RecordRead(want, name, depth, depth, size, record.tier))
    return tuple(found)


def brought_tokens(
    names: RecordNames, reads: Iterable[RecordRead], *, complete: int, reached: int
) -> dict[Tier, int]:
    """Return how many tokens are at hand because of the reads, by where their range state came
    from; tokens of which the device lacked a point alone, by where that came from. The first
    `complete` blocks were at hand without; all reads reach up to depth `reached`.
    """
    block, found = names.layout.block_tokens, dict[Tier, int]()
    points, left = list[Tier](), (reached - complete) * block
    for read in reads:
        if read.is_point:
            points.append(read.tier)
        elif read.component == names.range_names[0] and read.end > complete:
            tokens = (read.end - max(read.first, complete)) * block
            found[read.tier] = found.get(read.tier, 0) + tokens
            left -= tokens
    if points and left > 0:
        farthest = max(points, key=NEAREST_FIRST.index)
        found[farthest] = found.get(farthest, 0) + left
    return found


def next_part(
    readings: tuple[RecordRead, ...], *, goal: int, blocks: int
) -> tuple[tuple[RecordRead, ...], int]:
    """Return the first of `readings`, which lead up to depth `goal`, that bring `blocks` blocks at
    most, and a whole record at least, and the depth that they reach. Point state comes with the
    last ones, since it is of use behind all others only; 0 blocks: all is one part.

        readings    [==== main ====][==== main ====][== main ==]  point
        part        `------------- blocks --------->|
    """
    ranges = [reading for reading in readings if not reading.is_point]
    if not blocks or not ranges:
        return readings, goal
    first = min(reading.first for reading in ranges)
    ends = {reading.end for reading in ranges}
    end = max((at for at in ends if at - first <= blocks), default=min(ends))
    if end >= goal:
        return readings, goal
    return tuple(reading for reading in ranges if reading.end <= end), end


def _reads_of_lead(names: RecordNames, record: StoredRecord, lead: LeadUse) -> Iterator[RecordRead]:
    """Yield the reads that bring a point by the lead of another one: of that one's record, where
    its rows are needed too, and of the lead."""
    assert names.lead is not None
    component, depth = names.lead.component.name, lead.depth
    name = names.lead.point_name
    if lead.base_id:
        want = Want(lead.base_id, descriptor=names.descriptor(name))
        size = names.slot_bytes(name)
        yield RecordRead(want, name, depth, depth, size, record.tier, led_to=lead.end)
    units = (lead.first, lead.first + lead.units)
    want = Want(record.id, *units, descriptor=names.descriptor(component))
    size = names.slot_bytes(component) * lead.units
    yield RecordRead(want, component, depth, depth, size, record.tier, led_to=lead.end)
