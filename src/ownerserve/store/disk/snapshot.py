"""A view reads a store that it does not write: beside its writer, or when that one is dead.

StoreSnapshot   another process may be writing. What it sees is the index's last committed state; a
                record that the writer moves or removes in the meantime is looked up again, and is
                then found or an honest miss
DeadStore       nobody writes. No byte of the directory is changed, and no index is needed there
view_of         whichever it is
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ownerserve.kv.errors import InvalidInput
from ownerserve.store.disk.home import Home, StoreHeld, refuse_held
from ownerserve.store.disk.keyring import reading_keys
from ownerserve.store.disk.read import DiskReader, OpenSegments
from ownerserve.store.disk.recover import survey
from ownerserve.store.disk.scratch import ScratchFolder
from ownerserve.store.format.model import ArtifactKind, Listed, Meta, ReadOutcome, TierUsage, Want
from ownerserve.store.format.seal import Keys
from ownerserve.store.index.reader import (
    Change,
    IndexEntry,
    IndexFailed,
    IndexFollower,
    IndexReader,
    Quarantined,
    SegmentRow,
)
from ownerserve.store.index.writer import IndexWriter
from ownerserve.store.tiers.buffers import BufferPool, BufferSource


class StoreView:
    """A view is the reading half of a store on disk, over an index of it."""

    def __init__(self, home: Home, index: IndexReader, keys: Keys) -> None:
        self.home = home
        self.bad: Counter[str] = Counter()
        self._index = index
        self._reader = DiskReader(
            home,
            index,
            keys,
            segments=OpenSegments(home),
            landing=BufferPool(),
            listeners=(lambda _: None, self._found_bad),
        )

    def _found_bad(self, entry: IndexEntry, reason: str) -> None:
        self.bad[reason] += 1

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


class StoreSnapshot(StoreView):
    """A snapshot is a view of what the store's writer, perhaps another process, last committed.

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
        super().__init__(home, IndexFollower(home.index_path), keys)


class DeadStore(StoreView):
    """A dead store is a view of a store that nobody writes: a dead worker's, or one on a read-only
    medium. No byte of its directory is written.

    What is needed of an index is a copy in the temporary folder, brought up to what the segments
    hold, or made from them where it is missing or damaged; it goes with `close`, or, after a kill,
    when the next dead store is opened. A record that fails verification leaves that copy: it is a
    miss from then on, here. Keys are as in
    `StoreSnapshot`. Raises StoreHeld for a store that a living process writes: what stands changes
    under such an index, and a snapshot reads it better.
    """

    def __init__(
        self, directory: Path, *, key_file: Path | None = None, keys: Keys | None = None
    ) -> None:
        self._folder = ScratchFolder()
        try:
            home, index, keys = self._open(directory, key_file, keys)
        except BaseException:
            self._folder.remove()
            raise
        super().__init__(home, index, keys)
        self._writer = index

    def _open(
        self, directory: Path, key_file: Path | None, keys: Keys | None
    ) -> tuple[Home, IndexWriter, Keys]:
        home = Home.open(directory)
        try:
            self._approach(home)
            home.index_path = copied_index(home, self._folder.path)
            keys = reading_keys(home, key_file) if keys is None else keys
            index, self.recovery = survey(home, keys, landing=BufferPool())
        except OSError as error:
            raise InvalidInput("store", str(error), "let this user read all of it") from error
        except IndexFailed as error:
            mend = f"make room in {tempfile.gettempdir()}, or name another folder as TMPDIR"
            raise InvalidInput("store", str(error), mend) from error
        return home, index, keys

    def _approach(self, home: Home) -> None:
        """Make sure that nobody writes the store."""
        refuse_held(home.directory)

    def _found_bad(self, entry: IndexEntry, reason: str) -> None:
        super()._found_bad(entry, reason)
        bad = Quarantined(entry.meta.id, entry.meta.tenant, entry.span, reason, entry.touched_ms)
        with suppress(IndexFailed):  # then it is read again, and is a miss again
            self._writer.apply(Change(remove=[entry], quarantine=[bad]))

    def newest(self, kind: ArtifactKind) -> Iterator[IndexEntry]:
        """Iterate over every record of a kind, most recently touched first. Raises IndexFailed."""
        return self._writer.newest(kind)

    def close(self) -> None:
        """Let go of files, and of the copy of the index."""
        super().close()
        self._folder.remove()


def copied_index(home: Home, folder: Path) -> Path:
    """Copy the store's index, with what its writer had not yet moved into it, and return the copy's
    path; nothing stands there when there is no index. Raises OSError.
    """
    copy = folder / home.index_path.name
    for suffix in ("", "-wal"):
        with suppress(FileNotFoundError):
            shutil.copyfile(f"{home.index_path}{suffix}", f"{copy}{suffix}")
    return copy


def view_of(
    directory: Path, *, key_file: Path | None = None, keys: Keys | None = None
) -> StoreView:
    """Return a view of the store at `directory`, whether a process writes it or not. Raises
    InvalidInput.
    """
    try:
        return DeadStore(directory, key_file=key_file, keys=keys)
    except StoreHeld:
        return StoreSnapshot(directory, key_file=key_file, keys=keys)
