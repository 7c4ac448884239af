"""What the disk tier's port, its reader's complaints and its maintenance share.

Owns the writer's two locks, the touches not yet in the index, and the counters. `appending` is
held by who appends, across its I/O; `lock` by who changes the index or the accounts, for short.
Who needs both takes `appending` first (`exclusive`). Every method is called with `lock` held,
except `touch`, which needs none, and those that take it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import TypeVar

from ownerserve.kv.clock import Clock
from ownerserve.store.disk.home import Home
from ownerserve.store.disk.reclaim import span
from ownerserve.store.disk.recover import Recovered
from ownerserve.store.format.model import ArtifactKind, Listed
from ownerserve.store.format.seal import Keys
from ownerserve.store.index.reader import Change, IndexEntry, IndexFailed, Quarantined, Touch
from ownerserve.store.tiers.health import Health

log = logging.getLogger("ownerserve.store")

_FLUSH_AT = 4096
T = TypeVar("T")


def listed(entry: IndexEntry) -> Listed:
    """An index entry as the catalogue shows it."""
    return Listed(
        meta=entry.meta,
        payload_bytes=entry.payload_bytes,
        stored_bytes=entry.stored_bytes,
        touched_s=entry.touched_ms / 1000,
        reuse_count=entry.reuse_count,
        restore_cost_ms=entry.restore_cost_ms,
    )


class DiskCore:
    """An open store's parts and the steps that several of its callers take."""

    def __init__(self, home: Home, keys: Keys, clock: Clock, *, parts: Recovered) -> None:
        self.home = home
        self.keys = keys
        self.clock = clock
        self.index = parts.index
        self.appender = parts.appender
        self.reclaimer = parts.reclaimer
        self.appending = RLock()
        self.lock = RLock()
        self.health = Health(f"store {home.directory}")
        self.counters: Counter[str] = Counter()
        self._touched: dict[int, Touch] = {}

    def now_ms(self) -> int:
        """The clock's reading, as the format keeps it."""
        return int(self.clock.now() * 1000)

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Hold the lock; what the medium does wrong is noted and goes no further."""
        with self.lock:
            try:
                yield
            except (OSError, IndexFailed) as error:
                self.trouble(error)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """As `shielded`, and nothing is being appended: every record on disk is in the index."""
        with self.appending, self.shielded():
            yield

    def attempt(self, step: Callable[[], T], otherwise: T) -> T:
        """The step's result; `otherwise` when the medium failed."""
        with self.shielded():
            return step()
        return otherwise  # type: ignore[unreachable]  # mypy: a context manager may swallow

    def trouble(self, error: object) -> None:
        """A write failed."""
        self.counters["io_errors"] += 1
        self.health.failed(error, self.clock.now())

    def touch(self, entries: Iterable[IndexEntry]) -> None:
        """These were read. Kept in memory; a crash loses recency and nothing else.

        Takes no lock, since every read comes through here: at worst one touch of two is lost.
        """
        now_ms, touched = self.now_ms(), self._touched
        for entry in entries:
            touch = touched.get(entry.sequence)
            if touch is None:
                touched[entry.sequence] = Touch(entry, now_ms)
            else:
                touch.at_ms, touch.times = now_ms, touch.times + 1
        if len(touched) >= _FLUSH_AT:
            with self.shielded():
                self.flush()

    def flush(self) -> None:
        """Recency and reuse counts into the index."""
        touched, self._touched = self._touched, {}
        if touched:
            self.index.apply(Change(touched=list(touched.values())))

    def find(self, ids: Sequence[bytes]) -> dict[bytes, Listed]:
        """What the index has of `ids`, reads not yet flushed included. Needs no lock."""
        found = {}
        for id_, entry in self.index.get_many(ids).items():
            touch = self._touched.get(entry.sequence)
            found[id_] = listed(entry if touch is None else touch.applied())
        return found

    def evict(self, ids: Sequence[bytes]) -> int:
        """Remove records; how many there were."""
        entries = list(self.index.get_many(ids).values()) if ids else []
        if entries:
            self.reclaimer.remove(entries)
            self.reclaimer.drop_empty()
            self.counters["evicted"] += len(entries)
        return len(entries)

    def oldest(self, kind: ArtifactKind, limit: int, tenant: bytes | None = None) -> list[Listed]:
        """Least recently touched first."""
        return [listed(entry) for entry in self.index.oldest(kind, limit, tenant=tenant)]

    def oldest_flushed(self, kind: ArtifactKind, limit: int) -> list[Listed]:
        """Least recently touched first, the latest reads counted; nothing when the index fails."""

        def step() -> list[Listed]:
            self.flush()
            return self.oldest(kind, limit)

        return self.attempt(step, [])

    def price(self, costs_ms: Mapping[bytes, float]) -> None:
        """Note what it costs to make these artifacts again."""
        with self.shielded():
            entries = self.index.get_many(list(costs_ms))
            self.index.apply(Change(priced={e.sequence: costs_ms[i] for i, e in entries.items()}))
            for id_ in entries:
                self.index.forget(id_)

    def quarantine(self, entry: IndexEntry, reason: str) -> None:
        """A record failed verification: it is a miss from now on, kept for inspection until gc."""
        with self.shielded():
            standing = self.index.get(entry.meta.id)
            if standing is None or standing.sequence != entry.sequence:
                return
            bad = Quarantined(entry.meta.id, entry.meta.tenant, span(entry), reason, self.now_ms())
            self.index.apply(Change(remove=[entry], quarantine=[bad]))
            self.counters["quarantined"] += 1
            log.warning(
                "%s: record %s in segment %d at %d quarantined: %s",
                self.health.name,
                entry.meta.id.hex()[:16],
                entry.segment,
                entry.offset,
                reason,
            )
