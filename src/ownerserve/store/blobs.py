"""The port of a remote tier's medium, named blobs, and the embedded one: a shared directory.

A medium raises OSError (a missing blob: FileNotFoundError) and Backpressure, nothing else.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from ownerserve.kv.errors import CapacityExceeded
from ownerserve.store.segment import sync_directory


class Backpressure(CapacityExceeded):
    """The medium is full or busy now; the same call may work later."""


class BlobInfo(NamedTuple):
    """One listed blob."""

    key: str
    modified_s: float


class Blobs(Protocol):
    """Blobs by name, each written whole or not at all."""

    def put(self, key: str, data: memoryview) -> None: ...

    def get_into(self, key: str, offset: int, into: memoryview) -> int:
        """Bytes read from `offset`, fewer than asked at the blob's end."""
        ...

    def delete(self, key: str) -> None: ...

    def move(self, key: str, to: str) -> None: ...

    def list(self, prefix: str) -> Iterator[BlobInfo]: ...


class DirectoryBlobs:
    """Blobs as files of a directory that several machines may share (NFS, CephFS, Lustre)."""

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True)

    def _path(self, key: str) -> Path:
        return self._root / key

    def put(self, key: str, data: memoryview) -> None:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            with temporary.open("xb", buffering=0) as file:
                done = 0
                while done < len(data):
                    done += file.write(data[done:])
                os.fdatasync(file.fileno())
            temporary.rename(path)
            sync_directory(path.parent)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise

    def get_into(self, key: str, offset: int, into: memoryview) -> int:
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
        self._path(key).unlink(missing_ok=True)

    def move(self, key: str, to: str) -> None:
        target = self._path(to)
        target.parent.mkdir(parents=True, exist_ok=True)
        self._path(key).rename(target)

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        for folder, _, names in os.walk(self._root / prefix):
            for name in names:
                path = Path(folder, name)
                if name.endswith(".tmp"):
                    continue
                with suppress(FileNotFoundError):
                    modified_s = path.stat().st_mtime
                    yield BlobInfo(path.relative_to(self._root).as_posix(), modified_s)
