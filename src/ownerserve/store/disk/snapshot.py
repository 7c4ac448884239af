"""A snapshot reads a store that another process may be writing: no lock, nothing changed on disk.

What it sees is the index's last committed state. A record that the writer moves or removes in the
meantime is looked up again, and is then found or an honest miss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ownerserve.kv.errors import InvalidInput
from ownerserve.store.disk.home import Home
from ownerserve.store.disk.keyring import reading_keys
from ownerserve.store.disk.read import DiskReader, OpenSegments
from ownerserve.store.format.model import ArtifactKind, Listed, Meta, ReadOutcome, TierUsage, Want
from ownerserve.store.format.seal import Keys
from ownerserve.store.index.reader import (
    IndexEntry,
    IndexFailed,
    IndexReader,
    Quarantined,
    SegmentRow,
)
from ownerserve.store.tiers.buffers import BufferPool, BufferSource


class StoreSnapshot:
    """A store's snapshot is the reading half of a store on disk, for any process.

    Tenants' records are read with the key in `key_file`, else the store's own; or with `keys`: who
    looks at the index alone needs none. Raises InvalidInput for a key that is not the store's.
    """

    def __init__(
        self, directory: Path, *, key_file: Path | None = None, keys: Keys | None = None
    ) -> None:
        home = Home.open(directory)
        keys = reading_keys(home, key_file) if keys is None else keys
        if not home.index_path.exists():
            raise InvalidInput("store", f"{directory} has no index", "open it once for writing")
        self.home = home
        self.bad: Counter[str] = Counter()
        self._index = IndexReader(home.index_path)
        self._reader = DiskReader(
            home,
            self._index,
            keys,
            segments=OpenSegments(home),
            landing=BufferPool(),
            listeners=(lambda _: None, lambda _, reason: self.bad.update((reason,))),
        )

    def read(self, wants: Sequence[Want], landing: BufferSource | None = None) -> ReadOutcome:
        """Read and verify all wants, or give a miss. Bad records are counted; quarantine is the
        writer's.
        """
        return self._reader.read(wants, landing)

    def find(self, ids: Sequence[bytes]) -> Mapping[bytes, Listed]:
        """Return what the index has of `ids`; nothing when it can't be read."""
        try:
            return {id_: entry.listed() for id_, entry in self._index.get_many(ids).items()}
        except IndexFailed:
            return {}

    def standing(self, ids: Sequence[bytes]) -> frozenset[bytes] | None:
        """Return which of `ids` the index has now, whatever was known of them; None when it can't
        be read.
        """
        for id_ in ids:
            self._index.forget(id_)
        try:
            return frozenset(self._index.get_many(ids))
        except IndexFailed:
            return None

    def at_boundary(self, prefix_hash: bytes) -> list[tuple[Meta, int]]:
        """List the records that hold this prefix at the end of one of their units, as (meta, units
        up to there); none when the index can't be read.
        """
        try:
            return [(entry.meta, units) for entry, units in self._index.at_boundary(prefix_hash)]
        except IndexFailed:
            return []

    def entries(self, tenant: bytes | None = None) -> Iterator[IndexEntry]:
        """Iterate over every record (of a tenant), in order of writing. Raises IndexFailed."""
        return self._index.walk(tenant=tenant)

    def usage(self) -> Mapping[tuple[bytes, ArtifactKind], TierUsage]:
        """Return bytes and records by tenant and kind. Raises IndexFailed."""
        return self._index.usage()

    def segments(self) -> list[SegmentRow]:
        """List the segments and how much of each is alive. Raises IndexFailed."""
        return self._index.segments()

    def quarantined(self) -> list[Quarantined]:
        """List the records that the writer found bad. Raises IndexFailed."""
        return self._index.quarantined()

    def close(self) -> None:
        """Let go of files and connections."""
        self._reader.close()
        self._index.close()
