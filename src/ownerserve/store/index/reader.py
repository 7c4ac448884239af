"""The index knows where each record lies. SQLite in WAL mode; made again from the segments if lost.

Owns the tables and a bounded map of hot entries. All writes of one step go through `apply`, one
transaction, so that the index moves from one true state to the next. Never the only place of
anything but recency, reuse counts and prices, which a cache may lose.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from itertools import islice
from pathlib import Path
from threading import Lock, RLock, local
from typing import Any, TypeVar

import msgspec

from ownerserve.kv.errors import UNREADABLE, OwnerServeError
from ownerserve.store.format.model import ArtifactKind, Listed, Meta, TierUsage, unit_ends

SCHEMA_VERSION = 3
HOT_ENTRIES = 1 << 17
HIGHEST_SEQUENCE, HIGHEST_SEGMENT = "highest_sequence", "highest_segment"
"""Keys of `about`: the high-water marks, which only grow. An index of an older release has none."""
BATCH = 256
_WALK = 1024
_MALFORMED = frozenset(
    {
        sqlite3.SQLITE_ERROR,  # a table or a column is missing
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_MISMATCH,
        sqlite3.SQLITE_NOTADB,
    }
)
_INTEGERS = {int}
T = TypeVar("T")

SCHEMA = """
CREATE TABLE about (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
CREATE TABLE records (
  sequence INTEGER PRIMARY KEY, mark INTEGER NOT NULL, kind INTEGER NOT NULL, tenant BLOB NOT NULL,
  segment INTEGER NOT NULL, offset INTEGER NOT NULL, header INTEGER NOT NULL,
  stored INTEGER NOT NULL, payload INTEGER NOT NULL, touched_ms INTEGER NOT NULL,
  reuse INTEGER NOT NULL, cost_ms REAL NOT NULL, meta BLOB NOT NULL);
CREATE INDEX records_by_mark ON records (mark);
CREATE INDEX records_by_segment ON records (segment);
CREATE INDEX records_by_age ON records (kind, touched_ms);
CREATE INDEX records_by_tenant ON records (tenant) WHERE tenant != x'';
CREATE TABLE boundary (
  hash BLOB, sequence INTEGER, unit INTEGER, PRIMARY KEY (hash, sequence)) WITHOUT ROWID;
CREATE INDEX boundary_by_record ON boundary (sequence);
CREATE TABLE usage (
  tenant BLOB, kind INTEGER, bytes INTEGER, records INTEGER, PRIMARY KEY (tenant, kind)
) WITHOUT ROWID;
CREATE TABLE segments (
  number INTEGER PRIMARY KEY, end INTEGER, size INTEGER, live INTEGER, state INTEGER);
CREATE TABLE doomed (segment INTEGER, offset INTEGER, length INTEGER);
CREATE TABLE quarantine (
  id BLOB, tenant BLOB, segment INTEGER, offset INTEGER, length INTEGER, reason TEXT,
  at_ms INTEGER);
"""
_COLUMNS = "meta, sequence, segment, offset, header, stored, payload, touched_ms, reuse, cost_ms"


MIGRATE = {
    1: """
    ALTER TABLE records ADD COLUMN mark INTEGER NOT NULL DEFAULT 0;
    UPDATE records SET mark = mark_of(id);
    DROP INDEX records_by_id;
    ALTER TABLE records DROP COLUMN id;
    CREATE INDEX records_by_mark ON records (mark);
    """,
    2: "UPDATE records SET meta = without_epoch(meta);",
}
"""What takes an index of this schema to the next one."""


def mark_of(id_: bytes) -> int:
    """Return the first 8 bytes of an id as SQLite's integer: a key of 8 bytes, not 32 kept twice.

    Two ids may share a mark (about 3 in a million stores of 10^7 records hold such a pair); the
    whole id stands in the row's meta and decides.
    """
    return int.from_bytes(id_[:8], "little", signed=True)


def without_epoch(meta: bytes) -> bytes:
    """Return a row's meta as schema 3 has it: up to schema 2 its eighth field was an owner's
    epoch.
    """
    fields = msgspec.msgpack.decode(meta)
    return msgspec.msgpack.encode([*fields[:7], *fields[8:]])


class IndexFailed(OwnerServeError):
    """The store must act: SQLite could not do what the index was asked. The segments still hold the
    truth.
    """


class DamagedIndex(IndexFailed):
    """The store must make the index anew: what lies in its file is no index, or its rows make no
    sense.
    """


class IndexEntry(msgspec.Struct, frozen=True, gc=False):
    """An entry is a row of the index: where a record lies and what it is."""

    meta: Meta
    sequence: int
    segment: int
    offset: int
    header_bytes: int
    stored_bytes: int
    payload_bytes: int
    touched_ms: int
    reuse_count: int = 0
    restore_cost_ms: float = 0.0

    @property
    def span(self) -> SegmentSpan:
        """`span` is the bytes that the record occupies."""
        return SegmentSpan(self.segment, self.offset, self.stored_bytes)

    def listed(self) -> Listed:
        """Return the entry as a tier's catalogue shows it."""
        return Listed(
            meta=self.meta,
            payload_bytes=self.payload_bytes,
            stored_bytes=self.stored_bytes,
            touched_s=self.touched_ms / 1000,
            reuse_count=self.reuse_count,
            restore_cost_ms=self.restore_cost_ms,
        )


class SegmentState(IntEnum):
    """A segment that is OPEN takes records, one that is FULL takes none; DROPPED is empty and about
    to be unlinked.
    """

    OPEN = 0
    FULL = 1
    DROPPED = 2


class SegmentRow(msgspec.Struct, frozen=True):
    """A segment row is what the index knows of a segment: records end at `end`; `live_bytes` of
    them are alive.
    """

    number: int
    end: int
    size_bytes: int
    live_bytes: int
    state: SegmentState


class SegmentSpan(msgspec.Struct, frozen=True):
    """A segment span is dead bytes of a segment that are still to be erased."""

    segment: int
    offset: int
    length: int


class Quarantined(msgspec.Struct, frozen=True):
    """A quarantined record failed verification: it is not served, and kept for inspection until
    gc.
    """

    id: bytes
    tenant: bytes
    span: SegmentSpan
    reason: str
    at_ms: int


class Touch(msgspec.Struct, gc=False):
    """A touch counts the reads of a record that the index has not heard of yet."""

    entry: IndexEntry
    at_ms: int
    times: int = 1

    def applied(self) -> IndexEntry:
        """Return the entry as it is once they count."""
        return msgspec.structs.replace(
            self.entry,
            touched_ms=max(self.entry.touched_ms, self.at_ms),
            reuse_count=self.entry.reuse_count + self.times,
        )


class Change(msgspec.Struct):
    """A change is one step of the index from one true state to the next."""

    add: Sequence[IndexEntry] = ()
    remove: Sequence[IndexEntry] = ()
    doom: Sequence[SegmentSpan] = ()
    erased: Sequence[SegmentSpan] = ()
    segments: Sequence[SegmentRow] = ()
    forget_segments: Sequence[int] = ()
    quarantine: Sequence[Quarantined] = ()
    touched: Sequence[Touch] = ()
    priced: Mapping[int, float] = {}


class IndexReader:
    """An index reader answers queries, to any number of processes and threads; each sees the last
    committed state. Raises IndexFailed; once that was DamagedIndex, `is_damaged` says so.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_damaged = False
        self._local = local()
        self._open: list[sqlite3.Connection] = []
        self._hot: dict[bytes, IndexEntry] = {}
        self._generation = 0
        self._lock = Lock()
        self._connecting = RLock()  # held while the file is exchanged: nobody opens the old one

    def _connect(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            with self._connecting:
                connection = sqlite3.connect(
                    self.path, isolation_level=None, check_same_thread=False, timeout=10
                )
                self._open.append(connection)  # first: a damaged file fails at the next statement
                self._prepare(connection)
                self._local.connection = connection
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Set what each thread's connection needs."""
        connection.execute("PRAGMA cache_size = -16384")
        connection.execute("PRAGMA mmap_size = 268435456")

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            with mapped():
                yield
        except DamagedIndex:
            self.is_damaged = True
            raise

    def _rows(
        self, make: Callable[[tuple[Any, ...]], T], sql: str, values: Sequence[object] = ()
    ) -> list[T]:
        """Return what `make` makes of each row; a ValueError of it says that a row makes no
        sense.
        """
        with self._mapped():
            rows = self._connect().execute(sql, values).fetchall()
            try:
                return [make(row) for row in rows]
            except ValueError as error:
                raise DamagedIndex(f"index: {error}") from error

    def get(self, id_: bytes) -> IndexEntry | None:
        """Return the entry of `id_`, if there is one."""
        entry = self._hot.get(id_)
        if entry is not None:
            return entry
        generation = self._generation
        for entry in self._select("WHERE mark = ?", (mark_of(id_),)):
            if entry.meta.id == id_:
                self._remember((entry,), generation)
                return entry
        return None

    def get_many(self, ids: Sequence[bytes]) -> dict[bytes, IndexEntry]:
        """Return the entries of those that are there; one query for each 256 not in memory."""
        hot = self._hot
        found = {id_: entry for id_ in ids if (entry := hot.get(id_)) is not None}
        cold = [id_ for id_ in ids if id_ not in found] if len(found) < len(ids) else []
        if not cold:
            return found
        generation = self._generation
        fresh = []
        for at in range(0, len(cold), BATCH):
            part = cold[at : at + BATCH]
            places = ",".join("?" * len(part))
            fresh += self._select(f"WHERE mark IN ({places})", [mark_of(id_) for id_ in part])
        wanted = set(cold)
        fresh = [entry for entry in fresh if entry.meta.id in wanted]
        self._remember(fresh, generation)
        for entry in fresh:
            found[entry.meta.id] = entry
        return found

    def _select(self, where: str, values: Sequence[object] = ()) -> list[IndexEntry]:
        return self._rows(_entry, f"SELECT {_COLUMNS} FROM records {where}", values)

    def _remember(self, entries: Iterable[IndexEntry], generation: int) -> None:
        with self._lock:
            if generation != self._generation:
                return  # a write came in between: what was read may be gone
            hot = self._hot
            for entry in entries:
                hot[entry.meta.id] = entry
            if len(hot) > HOT_ENTRIES:
                # An eighth at once: each look for the oldest key passes all that were deleted.
                for id_ in list(islice(hot, HOT_ENTRIES // 8)):
                    del hot[id_]

    def forget(self, id_: bytes) -> None:
        """Ask SQLite next time: another process may have moved it."""
        self._hot.pop(id_, None)

    def oldest(
        self, kind: ArtifactKind, limit: int, *, tenant: bytes | None = None
    ) -> list[IndexEntry]:
        """List up to `limit` entries of a kind (of a tenant), least recently touched first."""
        if tenant is None:
            return self._select("WHERE kind = ? ORDER BY touched_ms LIMIT ?", (kind, limit))
        where = "WHERE kind = ? AND tenant = ? ORDER BY touched_ms LIMIT ?"
        return self._select(where, (kind, tenant, limit))

    def walk(
        self, *, tenant: bytes | None = None, segment: int | None = None
    ) -> Iterator[IndexEntry]:
        """Iterate over every entry (of a tenant, of a segment), in order of writing."""
        conditions, after = ["sequence > ?"], -1
        more: list[object] = []
        if segment is not None:
            conditions.append("segment = ?")
            more.append(segment)
        if tenant:
            conditions.append("tenant = ? AND tenant != x''")  # as the partial index says it
            more.append(tenant)
        elif tenant is not None:
            conditions.append("tenant = x''")
        where = f"WHERE {' AND '.join(conditions)} ORDER BY sequence LIMIT {_WALK}"
        while True:
            rows = self._select(where, [after, *more])
            yield from rows
            if len(rows) < _WALK:
                return
            after = rows[-1].sequence

    def at_boundary(self, prefix_hash: bytes) -> list[tuple[IndexEntry, int]]:
        """List the records that have `prefix_hash` at a unit's end: (entry, units up to there)."""
        sql = "SELECT sequence, unit FROM boundary WHERE hash = ?"
        rows = self._rows(_integers, sql, (prefix_hash,))
        found = []
        for sequence, unit in rows:
            found += [(e, unit) for e in self._select("WHERE sequence = ?", (sequence,))]
        return found

    def usage(self) -> dict[tuple[bytes, ArtifactKind], TierUsage]:
        """Return bytes and records by (tenant, kind)."""
        sql = "SELECT tenant, kind, bytes, records FROM usage WHERE records > 0"
        return dict(self._rows(_usage, sql))

    def segments(self) -> list[SegmentRow]:
        """List the rows of all segments, by number."""
        sql = "SELECT number, end, size, live, state FROM segments ORDER BY number"
        return self._rows(_segment, sql)

    def doomed(self) -> list[SegmentSpan]:
        """List the dead spans that are still to be erased."""
        sql = "SELECT segment, offset, length FROM doomed"
        return self._rows(lambda row: SegmentSpan(*_integers(row)), sql)

    def quarantined(self) -> list[Quarantined]:
        """List the records that failed verification, oldest first."""
        columns = "id, tenant, reason, segment, offset, length, at_ms"
        return self._rows(_quarantined, f"SELECT {columns} FROM quarantine ORDER BY at_ms")

    def highest_sequence(self) -> int:
        """Return the highest sequence number that the index ever heard of, removed records'
        included; 0 when there is none.
        """
        return self._highest(HIGHEST_SEQUENCE, "SELECT max(sequence) FROM records")

    def _highest(self, mark: str, standing: str) -> int:
        rows = self._rows(_integers, "SELECT value FROM about WHERE key = ?", (mark,))
        rows += self._rows(lambda row: row, standing)  # NULL where none stands
        return max((int(value) for (value,) in rows if value is not None), default=0)

    def close(self) -> None:
        """Close every thread's connection."""
        for connection in self._open:
            connection.close()
        self._open.clear()
        self._local = local()


class IndexFollower(IndexReader):
    """An index follower reads an index that another process writes. Where that one has made it
    anew, in another file of the same name, the follower goes over to that.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = self._standing()

    def _standing(self) -> tuple[int, int]:
        try:
            found = self.path.stat()
        except OSError as error:
            raise IndexFailed(f"index: {error}") from error
        return found.st_dev, found.st_ino

    def _connect(self) -> sqlite3.Connection:
        if self._standing() != self._file:
            with self._connecting:
                self.close()
                with self._lock:
                    self._generation += 1
                    self._hot.clear()
                self._file = self._standing()
        return super()._connect()


decode_meta = msgspec.msgpack.Decoder(Meta).decode


def _integers(row: tuple[Any, ...]) -> tuple[Any, ...]:
    if not set(map(type, row)) <= _INTEGERS:
        raise ValueError("a row has something else in place of a number")
    return row


def _entry(row: tuple[Any, ...]) -> IndexEntry:
    _integers(row[1:-1])
    if type(row[0]) is not bytes or type(row[-1]) is not float:
        raise ValueError("a row has something else in place of a record's meta or cost")
    return IndexEntry(decode_meta(row[0]), *row[1:])


def _usage(row: tuple[Any, ...]) -> tuple[tuple[bytes, ArtifactKind], TierUsage]:
    tenant, *numbers = row
    kind, stored_bytes, records = _integers(tuple(numbers))
    return (tenant, ArtifactKind(kind)), TierUsage(stored_bytes, records)


def _segment(row: tuple[Any, ...]) -> SegmentRow:
    number, end, size_bytes, live_bytes, state = _integers(row)
    return SegmentRow(number, end, size_bytes, live_bytes, SegmentState(state))


def _quarantined(row: tuple[Any, ...]) -> Quarantined:
    id_, tenant, reason, *numbers = row
    *place, at_ms = _integers(tuple(numbers))
    return Quarantined(id_, tenant, SegmentSpan(*place), reason, at_ms)


@contextmanager
def mapped() -> Iterator[None]:
    """Raise SQLite's errors as IndexFailed, and those of a file that is no index and of rows that
    make no sense as DamagedIndex.
    """
    try:
        yield
    except sqlite3.Error as error:
        kind = DamagedIndex if _is_damage(error) else IndexFailed
        raise kind(f"index: {error}") from error
    except UNREADABLE as error:
        raise DamagedIndex(f"index: {error}") from error


def _is_damage(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:  # Python's own: a closed connection, or text that is none
        return isinstance(error, sqlite3.OperationalError)
    return (code & 0xFF) in _MALFORMED


def boundary_rows(entry: IndexEntry) -> Iterator[tuple[bytes, int, int]]:
    """Iterate over (hash, sequence, unit) of each unit end that costs a row here."""
    return ((digest, entry.sequence, unit) for digest, unit in unit_ends(entry.meta))
