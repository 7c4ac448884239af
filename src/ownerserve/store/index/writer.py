"""The index has one writer: schema, and `apply`, one transaction a step."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from ownerserve.store.format.model import ArtifactKind, TierUsage
from ownerserve.store.index.reader import (
    BATCH,
    HIGHEST_SEGMENT,
    HIGHEST_SEQUENCE,
    MIGRATE,
    SCHEMA,
    SCHEMA_VERSION,
    Change,
    DamagedIndex,
    IndexEntry,
    IndexFailed,
    IndexReader,
    Quarantined,
    SegmentState,
    boundary_rows,
    mark_of,
    without_epoch,
)
from ownerserve.store.tiers.backend import OnRemoved, nobody_listens

_encode = msgspec.msgpack.Encoder().encode


class IndexWriter(IndexReader):
    """An index writer is the only one of its store: the store's lock sees to that."""

    def __init__(self, path: Path, store_id: bytes) -> None:
        super().__init__(path)
        self.is_new = False
        self.on_removed: OnRemoved = nobody_listens
        self.standing: dict[tuple[bytes, ArtifactKind], TierUsage] = {}
        self._store_id = store_id
        try:
            self._open_or_create()
        except IndexFailed:
            self.close()
            raise

    def make_anew(self) -> None:
        """Begin with an empty index in place of the one that lies there. Queries of other threads
        fail for a moment, then find what has come in. Raises IndexFailed, and OSError.
        """
        with self._connecting:
            self.close()
            discard(self.path)
            with self._lock:
                self._generation += 1
                self._hot.clear()
            self._open_or_create()

    def _open_or_create(self) -> None:
        store_id = self._store_id
        with self._mapped():
            connection = self._connect()
            connection.execute("PRAGMA journal_mode = WAL")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version == 0:
                with self._transaction() as cursor:
                    for statement in SCHEMA.split(";"):
                        cursor.execute(statement)
                    cursor.execute("INSERT INTO about VALUES ('store_id', ?)", (store_id,))
                    cursor.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                self.is_new = True
            elif version in MIGRATE:
                self._migrate(version)
            elif version != SCHEMA_VERSION:
                raise IndexFailed(f"index schema {version}, expected {SCHEMA_VERSION}")
            found = connection.execute("SELECT value FROM about WHERE key = 'store_id'").fetchone()
            if found is None or found[0] != store_id:
                raise IndexFailed("the index belongs to another store")
        self.standing.clear()  # others read this very mapping
        self.standing.update(self.usage())

    def _migrate(self, version: int) -> None:
        """Run every schema step from `version` on, in one transaction."""
        for function in (mark_of, without_epoch):
            self._connect().create_function(function.__name__, 1, function, deterministic=True)
        with self._transaction() as cursor:
            for step in range(version, SCHEMA_VERSION):
                for statement in MIGRATE[step].split(";"):
                    cursor.execute(statement)
            cursor.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _prepare(self, connection: sqlite3.Connection) -> None:
        super()._prepare(connection)
        connection.execute("PRAGMA synchronous = NORMAL")

    @contextmanager
    def _transaction(self, level: str = "NORMAL") -> Iterator[sqlite3.Cursor]:
        cursor = self._connect().cursor()
        cursor.execute(f"PRAGMA synchronous = {level}")
        cursor.execute("BEGIN IMMEDIATE")
        try:
            yield cursor
            cursor.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                cursor.execute("ROLLBACK")
            raise

    def apply(self, change: Change) -> None:
        """Apply all of `change` in one transaction; raises IndexFailed and applies none of it."""
        with self._mapped(), self._transaction(_sync_level(change)) as cursor:
            _remove(cursor, change.remove)
            for row in change.segments:
                cursor.execute(
                    "INSERT INTO segments VALUES (?,?,?,?,?) ON CONFLICT (number) DO UPDATE SET"
                    " end = max(end, excluded.end), size = excluded.size, state = excluded.state",
                    (row.number, row.end, row.size_bytes, row.live_bytes, row.state),
                )
            _add(cursor, change.add)
            grown = _account(cursor, change)
            _raise_marks(cursor, change)
            cursor.executemany(
                "INSERT INTO doomed VALUES (?,?,?)",
                [(s.segment, s.offset, s.length) for s in change.doom],
            )
            cursor.executemany(
                "DELETE FROM doomed WHERE segment = ? AND offset = ?",
                [(s.segment, s.offset) for s in change.erased],
            )
            for number in change.forget_segments:
                for table, column in (("segments", "number"), ("doomed", "segment")):
                    cursor.execute(f"DELETE FROM {table} WHERE {column} = ?", (number,))
                cursor.execute("DELETE FROM quarantine WHERE segment = ?", (number,))
            _annotate(cursor, change)
        with self._lock:
            self._generation += 1
            for entry in change.remove:
                self._hot.pop(entry.meta.id, None)
            for entry in change.add:
                self._hot[entry.meta.id] = entry
            for touch in change.touched:
                hot = self._hot.get(touch.entry.meta.id)
                if hot is not None and hot.sequence == touch.entry.sequence:
                    self._hot[touch.entry.meta.id] = touch.applied()
            for key, growth in grown.items():
                before = self.standing.get(key, TierUsage())
                self.standing[key] = TierUsage(
                    *(a + b for a, b in zip(before, growth, strict=True))
                )
        self._remember((), self._generation)
        if change.remove:
            moved = {entry.meta.id for entry in change.add}
            self.on_removed([e.meta for e in change.remove if e.meta.id not in moved])

    def check(self) -> None:
        """Read every page. Raises DamagedIndex for an index that is damaged within."""
        try:
            (said,) = self._rows(lambda row: str(row[0]), "PRAGMA quick_check(1)")
        except IndexFailed as error:
            said = str(error)
        if said != "ok":
            self.is_damaged = True
            raise DamagedIndex(f"index: {said}")

    def settle(self) -> None:
        """Make durable all that was applied, by earlier writers too. Raises IndexFailed."""
        with self._mapped(), self._transaction("FULL") as cursor:
            cursor.execute(
                "INSERT INTO about VALUES ('settled', 1)"
                " ON CONFLICT (key) DO UPDATE SET value = value + 1"
            )

    def newest(self, kind: ArtifactKind) -> Iterator[IndexEntry]:
        """Iterate over every entry of a kind, most recently touched first."""
        where = (
            "WHERE kind = ? AND (touched_ms, sequence) < (?, ?)"
            f" ORDER BY touched_ms DESC, sequence DESC LIMIT {BATCH}"
        )
        before = (1 << 62, 1 << 62)
        while rows := self._select(where, (kind, *before)):
            yield from rows
            before = (rows[-1].touched_ms, rows[-1].sequence)

    def overlaps(self, entry: IndexEntry) -> bool:
        """Tell whether another record is said to lie where this one is."""
        sql = (
            "SELECT 1 FROM records WHERE segment = ? AND sequence != ?"
            " AND offset < ? AND offset + stored > ? LIMIT 1"
        )
        end = entry.offset + entry.stored_bytes
        place = (entry.segment, entry.sequence, end, entry.offset)
        return bool(self._rows(lambda row: row, sql, place))

    def sequences_among(self, numbers: Sequence[int]) -> set[int]:
        """Return those of `numbers` that a record bears."""
        found: set[int] = set()
        for at in range(0, len(numbers), BATCH):
            part = numbers[at : at + BATCH]
            places = ",".join("?" * len(part))
            sql = f"SELECT sequence FROM records WHERE sequence IN ({places})"
            found.update(self._rows(lambda row: row[0], sql, part))
        return found

    def highest_segment(self) -> int:
        """Return the highest segment number that the index ever heard of; 0 when there is none."""
        return self._highest(HIGHEST_SEGMENT, "SELECT max(number) FROM segments")

    def release(self, quarantined: Sequence[Quarantined]) -> None:
        """Make quarantined records doomed spans, in one transaction. Raises IndexFailed."""
        with self._mapped(), self._transaction("FULL") as cursor:
            spans = [(q.span.segment, q.span.offset, q.span.length) for q in quarantined]
            where = [span[:2] for span in spans]
            cursor.executemany("DELETE FROM quarantine WHERE segment = ? AND offset = ?", where)
            cursor.executemany("INSERT INTO doomed VALUES (?,?,?)", spans)


def discard(path: Path) -> None:
    """Remove the index at `path`; nobody of this process may have it open."""
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _sync_level(change: Change) -> str:
    """Return how durable a change is when it returns. What was added is found again in the
    segments, so its transaction may be lost. What is about to be erased or unlinked is not: a row
    that came back after a power cut would say of a hole that it is a record.
    """
    dropped = any(row.state is SegmentState.DROPPED for row in change.segments)
    return "FULL" if change.doom or dropped else "NORMAL"


def _remove(cursor: sqlite3.Cursor, entries: Iterable[IndexEntry]) -> None:
    keys = [(entry.sequence,) for entry in entries]
    cursor.executemany("DELETE FROM records WHERE sequence = ?", keys)
    cursor.executemany("DELETE FROM boundary WHERE sequence = ?", keys)


def _add(cursor: sqlite3.Cursor, entries: Iterable[IndexEntry]) -> None:
    cursor.executemany(
        "INSERT INTO records (sequence, mark, kind, tenant, segment, offset, header, stored,"
        " payload, touched_ms, reuse, cost_ms, meta) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)",
        [_row(entry) for entry in entries],
    )
    cursor.executemany(
        "INSERT OR IGNORE INTO boundary VALUES (?,?,?)",
        [row for entry in entries for row in boundary_rows(entry)],
    )


def _row(entry: IndexEntry) -> tuple[object, ...]:
    meta = entry.meta
    lean = msgspec.structs.replace(meta, boundaries=b"") if meta.boundaries else meta
    return (
        entry.sequence,
        mark_of(meta.id),
        meta.kind,
        meta.tenant,
        entry.segment,
        entry.offset,
        entry.header_bytes,
        entry.stored_bytes,
        entry.payload_bytes,
        entry.touched_ms,
        entry.reuse_count,
        entry.restore_cost_ms,
        _encode(lean),
    )


def _account(cursor: sqlite3.Cursor, change: Change) -> dict[tuple[bytes, ArtifactKind], TierUsage]:
    size: Counter[tuple[bytes, ArtifactKind]] = Counter()
    count: Counter[tuple[bytes, ArtifactKind]] = Counter()
    live: Counter[int] = Counter()
    for sign, entries in ((1, change.add), (-1, change.remove)):
        for entry in entries:
            key = (entry.meta.tenant, entry.meta.kind)
            size[key] += sign * entry.stored_bytes
            count[key] += sign
            live[entry.segment] += sign * entry.stored_bytes
    cursor.executemany(
        "INSERT INTO usage VALUES (?,?,?,?) ON CONFLICT (tenant, kind) DO UPDATE SET"
        " bytes = bytes + excluded.bytes, records = records + excluded.records",
        [(*key, size[key], count[key]) for key in size],
    )
    cursor.executemany(
        "UPDATE segments SET live = live + ? WHERE number = ?",
        [(amount, number) for number, amount in live.items()],
    )
    return {key: TierUsage(size[key], count[key]) for key in size}


def _raise_marks(cursor: sqlite3.Cursor, change: Change) -> None:
    sequence = max((entry.sequence for entry in change.add), default=0)
    segment = max((row.number for row in change.segments), default=0)
    cursor.executemany(
        "INSERT INTO about VALUES (?,?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
        " WHERE excluded.value > value",
        [(HIGHEST_SEQUENCE, sequence), (HIGHEST_SEGMENT, segment)],
    )


def _annotate(cursor: sqlite3.Cursor, change: Change) -> None:
    cursor.executemany(
        "UPDATE records SET touched_ms = max(touched_ms, ?), reuse = reuse + ? WHERE sequence = ?",
        [(touch.at_ms, touch.times, touch.entry.sequence) for touch in change.touched],
    )
    cursor.executemany(
        "UPDATE records SET cost_ms = ? WHERE sequence = ?",
        [(cost, sequence) for sequence, cost in change.priced.items()],
    )
    cursor.executemany(
        "INSERT INTO quarantine VALUES (?,?,?,?,?,?,?)",
        [
            (q.id, q.tenant, q.span.segment, q.span.offset, q.span.length, q.reason, q.at_ms)
            for q in change.quarantine
        ],
    )
