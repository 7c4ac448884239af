"""Stored lends are lends of what a node has below its device: records of its host memory and its
disk, read into a stage (stage.py), where peers read them.

    asked thread    tip, open, end     what the node knows of its sessions, and a stage's room
    look thread     look               what of a session stands in the store now
    stage threads   read, verify, write into the stage, batch by batch: TurnGrew, at last TurnOver
    any thread      runs, stands, memory

To control a lend whose records are still being read is one that follows a turn: what has come is
told as it comes, and a record that can't be read ends it short, so that its reader computes.
The class owns its tickets; the store owns the records, and who asks ends each ticket
(source_side.py).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from threading import Lock
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from ownerserve.kv.ids import SessionId, TurnId
from ownerserve.kv.messages import Tier
from ownerserve.kv.wire.rpc import AskPrefix, PrefixIs
from ownerserve.node.transfers.lending import (
    FoundRecord,
    LentArtifact,
    SessionHint,
    piece_bytes,
    runs_of,
    serves,
)
from ownerserve.node.transfers.stage import LendStage
from ownerserve.node.vocabulary.records import RecordNames, TipRecords
from ownerserve.plan.cost.prices import Prices
from ownerserve.store.format.model import ReadMiss, ReadOutcome, Want
from ownerserve.transfer.control.events import (
    LendNotOpened,
    LendOpened,
    OpenLend,
    SourceEvent,
    TurnGrew,
    TurnOver,
)
from ownerserve.transfer.control.messages import LendRefusal, LentRank
from ownerserve.transfer.control.pieces import SizedPiece
from ownerserve.transfer.vocabulary import FramePiece, Runs

log = logging.getLogger("ownerserve.transfer")

FIRST_TICKET = 1 << 48
"""Tickets from here on are of stored lends; a cache's begin at 1."""
BATCH_BYTES = 8 << 20
"""So much is read at once, and told; a record at least."""
STAGING_THREADS = 2
LENT_TIERS = (Tier.HOST, Tier.DISK)


class StoredSessions(Protocol):
    """`StoredSessions` know what was copied below the device (node.ownership.inventory); asked
    where the node is."""

    def records(self, session_id: SessionId) -> TipRecords | None:
        """Return the records of the session as it was last copied; None: it is not known."""
        ...


class LentStore(Protocol):
    """A `LentStore` is the media whose records are lent (node.storage.backing); its calls wait."""

    def standing(self, ids: Sequence[bytes]) -> Mapping[Tier, Set[bytes]]:
        """Return which of `ids` stand in host memory and on disk."""
        ...

    def read_own(self, wants: Sequence[Want]) -> ReadOutcome:
        """Read the wants, verified, or give a miss; nothing is brought from elsewhere."""
        ...


class StoredPrefix(NamedTuple):
    """A stored prefix is what may be below the device of a session's first `blocks` blocks, and
    what reading took when that was asked."""

    records: TipRecords
    blocks: int
    prices: Prices


class _ToRead(NamedTuple):
    """A record that is wanted: its piece, whose first unit goes to that block of the stage."""

    piece: FramePiece
    component: str
    block: int
    size: int


class _Ticket(msgspec.Struct, eq=False):
    number: int
    to_read: tuple[_ToRead, ...]
    artifacts: Mapping[bytes, LentArtifact] = {}
    is_being_read: bool = False

    @property
    def turn_id(self) -> TurnId:
        """What control knows the reading by."""
        return TurnId(f"stored-{self.number}")


class StoredLends:
    """`StoredLends` lend what one node has in its store. `tell` takes what the source side is to
    know, `address` is where this process's mover serves."""

    def __init__(
        self,
        names: RecordNames,
        sessions: StoredSessions,
        store: LentStore,
        *,
        stage: LendStage,
        prices: Callable[[], Prices],
    ) -> None:
        self.counts: Counter[str] = Counter()
        """`staged_bytes` that were read for peers, and `failed` reads of them."""
        self.address = ""
        self.tell: Callable[[SourceEvent], None] = lambda event: None
        self._names = names
        self._sessions = sessions
        self._store = store
        self.stage = stage
        self._prices = prices
        self._standing: dict[int, _Ticket] = {}
        self._numbers = FIRST_TICKET
        self._lock = Lock()
        self._looking = ThreadPoolExecutor(1, "transfer-look")
        self._staging = ThreadPoolExecutor(STAGING_THREADS, "transfer-stage")

    # -- where the node is ---------------------------------------------------------------------

    def behind(self, asked: AskPrefix, held: PrefixIs) -> StoredPrefix | None:
        """Return what may be below the device beyond what it holds; None: nothing more."""
        records = self._records(SessionHint(asked.session_id, asked.parent, asked.tokens))
        if records is None:
            return None
        blocks = min(records.tip.depth, asked.tokens // self._block)
        points = tuple(depth * self._block for depth in records.points if depth <= blocks)
        if self._reach(PrefixIs(blocks * self._block, points)) <= self._reach(held):
            return None
        return StoredPrefix(records, blocks, self._prices())

    def open(self, asked: OpenLend, hint: SessionHint) -> LendOpened | LendNotOpened:
        """Lend all that is wanted, if the session's records are that, and there is room for them;
        `opened` begins to read them."""
        lend, records = asked.lend, self._records(hint)
        if not serves(lend.ranks):
            return LendNotOpened(asked.number, LendRefusal.MISMATCH)
        named = {} if records is None else dict(self._named(records))
        found = [(piece, named[piece.artifact]) for piece in lend.wanted if piece.artifact in named]
        if not found or len(found) < len(lend.wanted) or not all(map(_has, found)):
            return LendNotOpened(asked.number, LendRefusal.NOT_HELD)
        units = Counter[str]()
        for piece, record in found:
            units[record.component] += piece.end_unit - piece.first_unit
        number = self._numbers + 1
        first = self.stage.take(number, units)
        if first is None:
            log.info("nothing is lent from the store: %s of lend memory are free", self._free())
            return LendNotOpened(asked.number, LendRefusal.NO_ROOM)
        self._numbers = number
        ticket = _Ticket(number, tuple(self._placed(found, first)))
        with self._lock:
            self._standing[number] = ticket
        ranks = (LentRank(0, lend.ranks[0].rank, self.address),)
        return LendOpened(asked.number, number, ranks, (), follows=ticket.turn_id)

    def opened(self, number: int) -> None:
        """Begin to read what is lent, now that control knows of the ticket."""
        ticket = self._standing.get(number)
        if ticket is not None:
            self._staging.submit(self._read_all, ticket)

    def end(self, number: int) -> None:
        """End the ticket, and free its room once nobody writes there; one that is over is no
        error."""
        with self._lock:
            ticket = self._standing.pop(number, None)
            if ticket is not None and not ticket.is_being_read:
                self.stage.give_back(number)

    def close(self) -> None:
        """Begin to read nothing any more."""
        self._looking.shutdown(wait=False, cancel_futures=True)
        self._staging.shutdown(wait=False, cancel_futures=True)

    # -- on any thread -------------------------------------------------------------------------

    def look(
        self, stored: StoredPrefix, held: PrefixIs, *, told: Callable[[PrefixIs], None]
    ) -> None:
        """Find what stands in the store now; `told` hears of it, or of what the device holds where
        that is as much. Does not wait."""

        def looked() -> None:
            found = held
            try:
                below = self._told(stored)
                found = below if self._reach(below) > self._reach(held) else held
            except Exception:  # the root of this thread: the device's word stands
                log.exception("what lies below the device is not told")
            told(found)

        try:
            self._looking.submit(looked)
        except RuntimeError:  # it is closed
            told(held)

    def runs(self, number: int, piece: FramePiece) -> Runs | None:
        """Return where the piece lies; None: it is not lent under that ticket, or not read yet."""
        ticket = self._standing.get(number)
        return None if ticket is None else runs_of(ticket.artifacts.get(piece.artifact), piece)

    def stands(self, number: int) -> bool:
        """Tell whether the ticket stands; False before its room is another's."""
        return number in self._standing

    def lent(self, number: int) -> Mapping[bytes, LentArtifact]:
        """Return what may be read under the ticket."""
        ticket = self._standing.get(number)
        return {} if ticket is None else ticket.artifacts

    # -- parts ---------------------------------------------------------------------------------

    @property
    def _block(self) -> int:
        return self._names.layout.block_tokens

    def _free(self) -> str:
        size = self.stage.regions[0].bytes if self.stage.regions else 0
        return f"{max(0, size - self.stage.used_bytes())} of {size} bytes"

    def _records(self, hint: SessionHint) -> TipRecords | None:
        for session_id in (hint.session_id, hint.parent):
            if session_id is not None and (found := self._sessions.records(session_id)):
                return found
        return None

    def _reach(self, held: PrefixIs) -> tuple[int, int]:
        """Return up to where a turn can go on from what is held, and where range state ends."""
        points = self._names.point_names
        return (max(held.points, default=0) if points else held.tokens, held.tokens)

    def _cells(self, records: TipRecords) -> Iterator[tuple[int, tuple[bytes, ...]]]:
        """Yield each cell of the tip: the depth at which it ends, and its ids by component."""
        yield from zip(self._names.ends(records.tip.depth), records.ranges, strict=True)

    def _named(self, records: TipRecords) -> Iterator[tuple[bytes, FoundRecord]]:
        for end, ids in self._cells(records):
            first = self._names.cell_ending_at(end).first
            for name, id_ in zip(self._names.range_names, ids, strict=True):
                yield id_, FoundRecord(name, first, end)
        for depth, ids in records.points.items():
            for name, id_ in zip(self._names.point_names, ids, strict=True):
                yield id_, FoundRecord(name, depth, depth)

    def _told(self, stored: StoredPrefix) -> PrefixIs:
        """Look, and return what can be had of the prefix without a gap, and how long it takes to
        read."""
        records = stored.records
        standing = self._store.standing(records.ids)
        held = frozenset[bytes]().union(*(standing.get(tier, ()) for tier in LENT_TIERS))
        depth, needed = 0, list[bytes]()
        for end, ids in self._cells(records):
            if end > stored.blocks or not held.issuperset(ids):
                break
            depth, needed = end, [*needed, *ids]
        points = sorted(at for at, ids in records.points.items() if at <= depth and held >= {*ids})
        if not depth or (tip := records.tip.ends.get(depth - 1)) is None:
            return PrefixIs(0)
        needed += records.points[points[-1]] if points else ()
        ready_ms = self._read_ms(records, needed, standing, prices=stored.prices)
        at = tuple(point * self._block for point in points)
        return PrefixIs(depth * self._block, at, tip, ready_ms)

    def _read_ms(
        self,
        records: TipRecords,
        ids: Sequence[bytes],
        standing: Mapping[Tier, Set[bytes]],
        *,
        prices: Prices,
    ) -> float:
        """Return what reading these takes, each from the fastest tier, one tier behind the
        other."""
        named, sizes = dict(self._named(records)), Counter[Tier]()
        for id_ in ids:
            tier = next(tier for tier in LENT_TIERS if id_ in standing.get(tier, ()))
            record = named[id_]
            units = max(1, record.end - record.first)
            sizes[tier] += units * self._names.slot_bytes(record.component)
        return sum(prices.tiers[tier].ms(count) for tier, count in sizes.items())

    def _placed(
        self, found: Sequence[tuple[FramePiece, FoundRecord]], first: dict[str, int]
    ) -> Iterator[_ToRead]:
        """Yield where in the stage each piece goes."""
        for piece, record in found:
            units, name = piece.end_unit - piece.first_unit, record.component
            size = units * self._names.slot_bytes(name)
            yield _ToRead(piece, name, first[name], size)
            first[name] += units

    # -- on the stage's threads ----------------------------------------------------------------

    def _read_all(self, ticket: _Ticket) -> None:
        """Read what the ticket is for, until it is over or a record can't be read."""
        with self._lock:
            if ticket.number not in self._standing:
                return
            ticket.is_being_read = True
        try:
            for batch in _batches(ticket.to_read):
                if not self.stands(ticket.number) or not self._read(ticket, batch):
                    break
        except Exception:  # the root of this thread: the lend ends short
            self.counts["failed"] += 1
            log.exception("what is lent of the store is not read")
        finally:
            with self._lock:
                ticket.is_being_read = False
                if ticket.number not in self._standing:
                    self.stage.give_back(ticket.number)
            self.tell(TurnOver(ticket.turn_id))

    def _read(self, ticket: _Ticket, batch: Sequence[_ToRead]) -> bool:
        """Read some records into the stage, and tell of them; False: one could not be read."""
        wants = [
            Want(
                one.piece.artifact,
                one.piece.first_unit,
                one.piece.end_unit,
                descriptor=self._names.descriptor(one.component),
            )
            for one in batch
        ]
        read = self._store.read_own(wants)
        if isinstance(read, ReadMiss) or any(
            len(part.data) != one.size for part, one in zip(read.parts, batch, strict=True)
        ):
            self.counts["failed"] += 1
            return False
        artifacts, pieces = dict(ticket.artifacts), list[SizedPiece]()
        for part, one in zip(read.parts, batch, strict=True):
            self.stage.write(one.component, one.block, part.data)
            blocks = np.arange(one.piece.end_unit, dtype=np.int64) - one.piece.first_unit
            places = self.stage.places[one.component]
            lent = LentArtifact(places, np.maximum(blocks, 0) + one.block)
            artifacts[one.piece.artifact] = lent
            pieces.append(SizedPiece(one.piece, piece_bytes(one.piece, lent)))
        ticket.artifacts = artifacts
        self.counts["staged_bytes"] += sum(one.size for one in batch)
        self.tell(TurnGrew(ticket.turn_id, tuple(pieces)))
        return True


def _batches(records: Sequence[_ToRead]) -> Iterator[Sequence[_ToRead]]:
    """Cut the records into batches of some BATCH_BYTES."""
    before, numbered = 0, list[tuple[int, _ToRead]]()
    for one in records:
        numbered.append((before // BATCH_BYTES, one))
        before += one.size
    for _, batch in groupby(numbered, key=lambda item: item[0]):
        yield [one for _, one in batch]


def _has(found: tuple[FramePiece, FoundRecord]) -> bool:
    """Tell whether the record has the piece's units."""
    piece, record = found
    return 0 <= piece.first_unit < piece.end_unit <= max(1, record.end - record.first)
