"""A store's home is its directory: its identity, its lock, its segment files.

DIR/STORE        4 KiB: which store this is (`superblock`)
DIR/LOCK         flock'd by the one writer
DIR/KEY, KEYID   the key of tenants' records, and which it is (`keyring`)
DIR/ADOPTED      which store has taken its records over (`adopt`)
DIR/segments/    NNNNNNNNNN.seg: the truth
DIR/index.sqlite the index, made again from the segments when lost
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from pathlib import Path

from ownerserve.kv.durable import make_directory, sync_directory
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.units import format_bytes
from ownerserve.store.disk.superblock import (
    DEFAULT_SEGMENT_BYTES,
    MIN_SEGMENT_BYTES,
    STORE_ID_BYTES,
    Superblock,
    from_segments,
    read_superblock,
)
from ownerserve.store.format.header import BLOCK
from ownerserve.store.format.segment import SUFFIX

log = logging.getLogger("ownerserve.store")

ADOPTED = "ADOPTED"
"""Tells which store has taken this one's records over; gone when a writer opens it again."""
_TRIES, _AGAIN_S = 4, 0.05


class Home:
    """A home is a store's directory and what is fixed about it. It holds no file open but the
    lock.
    """

    def __init__(self, directory: Path, superblock: Superblock) -> None:
        self.directory = directory
        self.index_path = directory / "index.sqlite"
        """Where the store's index lies; elsewhere for who may write nothing in `directory`."""
        self.store_id = superblock.store_id
        self.segment_bytes = superblock.segment_bytes
        self._lock_fd = -1

    @classmethod
    def create_or_open(cls, directory: Path, segment_bytes: int = DEFAULT_SEGMENT_BYTES) -> Home:
        """Open the store at `directory`, made when there is none, and take the writer's lock. A
        STORE file that is damaged or gone is made again from the segments. Raises InvalidInput for
        a bad `segment_bytes` and for another's directory.
        """
        if segment_bytes % BLOCK or segment_bytes < MIN_SEGMENT_BYTES:
            raise InvalidInput(
                "segment_bytes",
                format_bytes(segment_bytes),
                f"use a multiple of 4 KiB from {format_bytes(MIN_SEGMENT_BYTES)}",
            )
        make_directory(directory)
        make_directory(directory / "segments")
        lock_fd = _lock(directory)
        try:
            home = cls(directory, _superblock(directory, segment_bytes))
            home._lock_fd = lock_fd
            if (directory / ADOPTED).exists():
                home.remove(ADOPTED)  # it lives again: what it will hold was adopted by nobody
        except BaseException:
            os.close(lock_fd)
            raise
        return home

    @classmethod
    def open(cls, directory: Path) -> Home:
        """Open the store at `directory` for reading; nothing is written. Raises InvalidInput when
        there is none.
        """
        found = read_superblock(directory) or from_segments(directory)
        if found is None and (directory / "STORE").exists():
            raise _damaged(directory)
        if found is None:
            raise InvalidInput("store", f"{directory} holds no store", "name another one")
        return cls(directory, found)

    def lock(self) -> None:
        """Keep every other writer out until `unlock`; changes no more than LOCK. Raises StoreHeld,
        and OSError on a medium that can't be written.
        """
        self._lock_fd = _lock(self.directory)

    def cap_segments(self, most_bytes: int) -> None:
        """Let new segments be at most `most_bytes` large, but never smaller than the format's
        least: the open one is preallocated, which counts on the disk.
        """
        most_bytes = max(MIN_SEGMENT_BYTES, most_bytes // BLOCK * BLOCK)
        self.segment_bytes = min(self.segment_bytes, most_bytes)

    def write(self, name: str, data: bytes) -> None:
        """Make `data` the whole of the store's small file `name`, durably; a crash leaves the file
        as it was. Raises OSError.
        """
        _write_once(self.directory / name, data)

    def rename(self, name: str, new: str) -> None:
        """Give the store's file `name` another name, durably, in place of what had it."""
        (self.directory / name).rename(self.directory / new)
        sync_directory(self.directory)

    def remove(self, name: str) -> None:
        """Remove the store's file `name`, if it is there."""
        (self.directory / name).unlink(missing_ok=True)
        sync_directory(self.directory)

    def segment_numbers(self) -> list[int]:
        """Return the numbers of the segment files that stand, ascending."""
        found = (self.directory / "segments").glob(f"*{SUFFIX}")
        return sorted(int(path.stem) for path in found if path.stem.isdecimal())

    def sweep(self) -> int:
        """Remove what an interrupted creation left; returns how many files."""
        left = list(self.directory.glob("*.tmp"))
        for path in left:
            path.unlink()
        return len(left)

    def unlock(self) -> None:
        """Give up the writer's lock: another writer may come in."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _superblock(directory: Path, segment_bytes: int) -> Superblock:
    """Return what STORE says; it is written where it is damaged, gone, or was never there."""
    found = read_superblock(directory)
    if found is not None:
        return found
    found = from_segments(directory)
    if found is not None:
        log.warning("%s/STORE is damaged or gone: made again from the segments", directory)
    elif (directory / "STORE").exists():
        raise _damaged(directory)
    else:
        _refuse_foreign(directory)
        found = Superblock(os.urandom(STORE_ID_BYTES), segment_bytes)
    _write_once(directory / "STORE", found.encode())
    return found


def _damaged(directory: Path) -> InvalidInput:
    return InvalidInput(
        "store",
        f"{directory}/STORE is damaged, and no segment says what it said",
        "restore it, or remove it and the segments to start anew",
    )


class StoreHeld(InvalidInput):
    """The operator must choose: a living process has the store open for writing."""


def refuse_held(directory: Path) -> None:
    """Raise StoreHeld, with its holder's name, when a living process writes the store. Changes
    nothing; a store without a LOCK file is nobody's. Raises OSError when it can't be told.
    """
    try:
        fd = os.open(directory / "LOCK", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _held(directory, fd) from error
    finally:
        os.close(fd)


def _held(directory: Path, fd: int) -> StoreHeld:
    owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "another process"
    return StoreHeld(
        "store", f"{directory} is written by {owner}", "stop it, or name another directory"
    )


def _lock(directory: Path) -> int:
    fd = os.open(directory / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _take(fd)
    except BlockingIOError as error:
        held = _held(directory, fd)
        os.close(fd)
        raise held from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"process {os.getpid()}\n".encode(), 0)
    return fd


def _take(fd: int) -> None:
    """Take the writer's lock; who only asks whether it is held (`refuse_held`) lets go at once."""
    for left in reversed(range(_TRIES)):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not left:
                raise
            time.sleep(_AGAIN_S)
        else:
            return


def _refuse_foreign(directory: Path) -> None:
    if any((directory / "segments").iterdir()):
        raise InvalidInput(
            "store",
            f"{directory} has segments but no STORE file, and none of them says what it said",
            "restore it, or remove the segments to start anew",
        )


def _write_all(fd: int, data: bytes, path: Path) -> None:
    left = data
    while left:
        count = os.write(fd, left)
        if count <= 0:
            raise OSError(errno.EIO, "short write", str(path))
        left = left[count:]


def _write_once(path: Path, data: bytes) -> None:
    """Write `data` durably under `path`, or leave nothing there."""
    temporary = path.with_suffix(".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        _write_all(fd, data, path)
        os.fsync(fd)
    finally:
        os.close(fd)
    temporary.rename(path)
    sync_directory(path.parent)
