"""Names that outlive a power cut. A file's sync keeps its bytes; its name, and those of the folders
above it, are kept by a sync of the folder that they stand in.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def sync_directory(directory: Path) -> None:
    """Make names created in or removed from `directory` durable. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(directory: Path, *, mode: int = 0o777) -> None:
    """Make `directory` and what is missing above it, so that their names are durable. Each gets
    `mode`, less the umask. Raises OSError.

    The last one that stands is synced too: who made it may have died before its own sync.
    """
    missing = []
    path = directory
    while not path.exists():
        missing.append(path)
        path = path.parent
    with suppress(PermissionError):  # above what is ours: its owner's to keep
        sync_directory(path.parent)
    for path in reversed(missing):
        path.mkdir(mode, exist_ok=True)
        sync_directory(path.parent)
