"""A store's home is its directory: its identity, its lock, its segment files.

DIR/STORE        4 KiB: format, store id, segment size (docs/format.md)
DIR/LOCK         flock'd by the one writer
DIR/KEY, KEYID   the key of tenants' records, and which it is (`keyring`)
DIR/segments/    NNNNNNNNNN.seg: the truth
DIR/index.sqlite the index, made again from the segments when lost
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import zlib
from pathlib import Path

from ownerserve.kv.durable import make_directory, sync_directory
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.units import MIB, format_bytes
from ownerserve.store.format.header import BLOCK
from ownerserve.store.format.segment import SUFFIX

MAGIC = b"OwnStor\n"
VERSION = 1
READABLE = frozenset({VERSION})
DEFAULT_SEGMENT_BYTES = 256 * MIB
MIN_SEGMENT_BYTES = 16 * BLOCK
_SUPERBLOCK = struct.Struct("<8sHHI16sQ")
_CRC = struct.Struct("<I")
STORE_ID_BYTES = 16


class Home:
    """A home is a store's directory and what is fixed about it. It holds no file open but the
    lock.
    """

    def __init__(self, directory: Path, store_id: bytes, segment_bytes: int) -> None:
        self.directory = directory
        self.store_id = store_id
        self.segment_bytes = segment_bytes
        self._lock_fd = -1

    @property
    def index_path(self) -> Path:
        """Return where the store's index lies."""
        return self.directory / "index.sqlite"

    @classmethod
    def create_or_open(cls, directory: Path, segment_bytes: int = DEFAULT_SEGMENT_BYTES) -> Home:
        """Open the store at `directory`, made when there is none, and take the writer's lock.
        Raises InvalidInput for a bad `segment_bytes` and for another's directory.
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
            if not (directory / "STORE").exists():
                _refuse_foreign(directory)
                store_id = os.urandom(STORE_ID_BYTES)
                _write_once(directory / "STORE", _superblock(store_id, segment_bytes))
            home = cls.open(directory)
        except BaseException:
            os.close(lock_fd)
            raise
        home._lock_fd = lock_fd  # noqa: SLF001 - its own class
        return home

    @classmethod
    def open(cls, directory: Path) -> Home:
        """Open the store at `directory` for reading; raises InvalidInput when there is none."""
        try:
            data = (directory / "STORE").read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise InvalidInput(
                "store", f"{directory} holds no store", "name another one"
            ) from error
        if len(data) < _SUPERBLOCK.size + _CRC.size or data[:8] != MAGIC:
            raise InvalidInput("store", f"{directory}/STORE is damaged", "restore it or start anew")
        _, version, _, _, store_id, segment_bytes = _SUPERBLOCK.unpack_from(data)
        if version not in READABLE:
            raise InvalidInput("store", f"format {version}", f"use a release that reads {version}")
        if zlib.crc32(data[: _SUPERBLOCK.size]) != _CRC.unpack_from(data, _SUPERBLOCK.size)[0]:
            raise InvalidInput("store", f"{directory}/STORE is damaged", "restore it or start anew")
        return cls(directory, store_id, segment_bytes)

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


def _superblock(store_id: bytes, segment_bytes: int) -> bytes:
    body = _SUPERBLOCK.pack(MAGIC, VERSION, 0, 0, store_id, segment_bytes)
    return (body + _CRC.pack(zlib.crc32(body))).ljust(BLOCK, b"\0")


def _lock(directory: Path) -> int:
    fd = os.open(directory / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "another process"
        os.close(fd)
        raise InvalidInput(
            "store", f"{directory} is written by {owner}", "stop it, or name another directory"
        ) from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"process {os.getpid()}\n".encode(), 0)
    return fd


def _refuse_foreign(directory: Path) -> None:
    if any((directory / "segments").iterdir()):
        raise InvalidInput(
            "store", f"{directory} has segments but no STORE file", "restore it or start anew"
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
