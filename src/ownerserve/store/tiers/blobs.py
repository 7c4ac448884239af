"""Blobs is the port of a remote tier's medium, named blobs; the embedded one is a shared directory.

A medium raises OSError (a missing blob: FileNotFoundError, one that `put_new` found there:
FileExistsError) and Backpressure, nothing else.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from ownerserve.kv.durable import make_directory, sync_directory
from ownerserve.kv.errors import CapacityExceeded

_UNFINISHED = ".tmp"
_FILE_MODE, _FOLDER_MODE = 0o600, 0o700


class Backpressure(CapacityExceeded):
    """The medium is full or busy now; the same call may work later."""


class BlobInfo(NamedTuple):
    """A blob's info is one listed blob."""

    key: str
    modified_s: float


class Blobs(Protocol):
    """Blobs is a medium of blobs by name, each written whole or not at all."""

    def put(self, key: str, data: memoryview) -> None:
        """Write a blob under `key`."""
        ...

    def put_new(self, key: str, data: memoryview) -> None:
        """Write a blob only if there is none: of several writers one wins, the others get
        FileExistsError.
        """
        ...

    def settle(self, key: str) -> None:
        """Make a blob that is there as durable as one that is written now: its writer may have died
        before that.
        """
        ...

    def get_into(self, key: str, offset: int, into: memoryview) -> int:
        """Read from `offset`; returns the bytes read, fewer than asked at the blob's end."""
        ...

    def delete(self, key: str) -> None:
        """Delete a blob; one that is not there is no error."""
        ...

    def move(self, key: str, to: str) -> None:
        """Give a blob another name (a medium that can't deletes it)."""
        ...

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        """Iterate over the blobs under `prefix`, which ends with a slash; none where the medium has
        no listing.
        """
        ...

    def tidy(self, before_s: float) -> int:
        """Give up what writers that died left half-written before then; returns how many."""
        ...


class DirectoryBlobs:
    """DirectoryBlobs are files of a directory that several machines may share (NFS, CephFS,
    Lustre). They are their owner's alone (0600, folders 0700): all machines write as one user.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._kept: set[Path] = set()
        make_directory(root, mode=_FOLDER_MODE)

    def _path(self, key: str) -> Path:
        return self._root / key

    def put(self, key: str, data: memoryview) -> None:
        """Write a blob under `key`."""
        self._write(key, data, Path.rename)

    def put_new(self, key: str, data: memoryview) -> None:
        """Write a blob only if there is none. Raises FileExistsError where there is one."""
        self._write(key, data, _link)

    def settle(self, key: str) -> None:
        """Make the name of a blob that is there durable; its bytes were before it had one."""
        folder = self._path(key).parent
        self._keep_folder(folder)
        sync_directory(folder)

    def _write(self, key: str, data: memoryview, publish: Callable[[Path, Path], object]) -> None:
        path = self._path(key)
        self._keep_folder(path.parent)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_UNFINISHED}")
        try:
            with open(temporary, "xb", buffering=0, opener=_for_us_alone) as file:
                done = 0
                while done < len(data):
                    count = file.write(data[done:])
                    if not count:
                        raise OSError(errno.EIO, "short write", str(temporary))
                    done += count
                os.fdatasync(file.fileno())
            publish(temporary, path)
            sync_directory(path.parent)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise

    def _keep_folder(self, folder: Path) -> None:
        """Make a folder of the medium and those above it; synced once by each process."""
        if folder in self._kept and folder.is_dir():
            return
        if folder != self._root:
            self._keep_folder(folder.parent)
        make_directory(folder, mode=_FOLDER_MODE)
        self._kept.add(folder)

    def get_into(self, key: str, offset: int, into: memoryview) -> int:
        """Read from `offset`; return the bytes read, fewer than asked at the blob's end."""
        fd = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < len(into):
                count = os.preadv(fd, [into[done:]], offset + done)
                if count == 0:
                    break
                done += count
            return done
        finally:
            os.close(fd)

    def delete(self, key: str) -> None:
        """Delete a blob; one that is not there is no error."""
        path = self._path(key)
        path.unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            sync_directory(path.parent)  # also where it was gone: who unlinked it may have died

    def move(self, key: str, to: str) -> None:
        """Give a blob another name."""
        target = self._path(to)
        self._keep_folder(target.parent)
        self._path(key).rename(target)

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        """Iterate over the blobs under `prefix`, which ends with a slash."""
        for path in self._files(prefix):
            if not path.name.endswith(_UNFINISHED):
                with suppress(FileNotFoundError):
                    modified_s = path.stat().st_mtime
                    yield BlobInfo(path.relative_to(self._root).as_posix(), modified_s)

    def _files(self, prefix: str) -> Iterator[Path]:
        for folder, _, names in os.walk(self._root / prefix):
            yield from (Path(folder, name) for name in names)

    def tidy(self, before_s: float) -> int:
        """Give up what writers that died left half-written before then; return how many."""
        gone = 0
        for path in self._files(""):
            with suppress(FileNotFoundError):
                if path.name.endswith(_UNFINISHED) and path.stat().st_mtime < before_s:
                    path.unlink()
                    gone += 1
        return gone


def _for_us_alone(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, _FILE_MODE)


def _link(temporary: Path, path: Path) -> None:
    """Give the file its name, atomically where rename would replace; a shared file system decides
    who was first.
    """
    path.hardlink_to(temporary)
    temporary.unlink()
