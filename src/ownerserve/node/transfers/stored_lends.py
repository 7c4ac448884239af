"""Stored lends are lends of what a node has below its device: records of its host memory and its
disk, read into a stage (stage.py), where peers read them.

    asked thread    open, end          what of it is known here (`find`), and a stage's room
    stage threads   read, verify, write into the stage, batch by batch: TurnGrew, at last TurnOver
    any thread      runs, stands, memory

To control a lend whose records are still being read is one that follows a turn: what has come is
told as it comes, and a record that can't be read ends it short, so that its reader computes.
The class owns its tickets; the store owns the records, and who asks ends each ticket
(source_side.py). What could be lent of a session is told elsewhere (stored_looks.py).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from threading import Lock
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from ownerserve.kv.ids import TurnId
from ownerserve.node.transfers.lending import (
    FoundRecord,
    LentArtifact,
    SessionHint,
    piece_bytes,
    runs_of,
    serves,
)
from ownerserve.node.transfers.stage import LendStage
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


class RecordForms(Protocol):
    """`RecordForms` say how records lie in a store (node.vocabulary.records.RecordNames)."""

    def descriptor(self, component: str) -> bytes:
        """Return the encoded descriptor of the component's records."""
        ...

    def slot_bytes(self, component: str) -> int:
        """Return the bytes of one unit of the component's records."""
        ...


FindRecord = Callable[[SessionHint, Sequence[bytes]], Mapping[bytes, FoundRecord]]
"""Finds what the ids stand for that may be lent to who hints so, as far as they are known."""


class LentStore(Protocol):
    """A `LentStore` is the media whose records are lent (node.storage.backing); its call waits."""

    def read_own(self, wants: Sequence[Want]) -> ReadOutcome:
        """Read the wants, verified, or give a miss; nothing is brought from elsewhere."""
        ...


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
        self, forms: RecordForms, find: FindRecord, store: LentStore, *, stage: LendStage
    ) -> None:
        self.counts: Counter[str] = Counter()
        """`staged_bytes` that were read for peers, and `failed` reads of them."""
        self.address = ""
        self.tell: Callable[[SourceEvent], None] = lambda event: None
        self._forms = forms
        self._find = find
        self._store = store
        self.stage = stage
        self._standing: dict[int, _Ticket] = {}
        self._numbers = FIRST_TICKET
        self._lock = Lock()
        self._staging = ThreadPoolExecutor(STAGING_THREADS, "transfer-stage")

    # -- where the node is ---------------------------------------------------------------------

    def open(self, asked: OpenLend, hint: SessionHint) -> LendOpened | LendNotOpened:
        """Lend all that is wanted, if it is known here, and there is room for it; `opened` begins
        to read it."""
        lend = asked.lend
        if not serves(lend.ranks):
            return LendNotOpened(asked.number, LendRefusal.MISMATCH)
        named = self._find(hint, [piece.artifact for piece in lend.wanted])
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
        ranks = (LentRank(lend.ranks[0].rank, self.address),)
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
        self._staging.shutdown(wait=False, cancel_futures=True)

    # -- on any thread -------------------------------------------------------------------------

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

    def _free(self) -> str:
        size = self.stage.regions[0].bytes if self.stage.regions else 0
        return f"{max(0, size - self.stage.used_bytes())} of {size} bytes"

    def _placed(
        self, found: Sequence[tuple[FramePiece, FoundRecord]], first: dict[str, int]
    ) -> Iterator[_ToRead]:
        """Yield where in the stage each piece goes."""
        for piece, record in found:
            units, name = piece.end_unit - piece.first_unit, record.component
            size = units * self._forms.slot_bytes(name)
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
                descriptor=self._forms.descriptor(one.component),
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
