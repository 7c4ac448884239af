"""A scratch folder lies among the machine's temporary files and goes with its process, at latest
when another one makes its own: a killed process removes nothing.

Each holds a lock on its folder for as long as it lives. A folder whose lock is free is a dead
process's.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "ownerserve-index-"
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class ScratchFolder:
    """A `ScratchFolder` is a folder of this process's own."""

    def __init__(self) -> None:
        """Make it, and remove those of this user that dead processes left. Raises OSError."""
        remove_abandoned(Path(tempfile.gettempdir()))
        self.path, self._fd = _made()

    def remove(self) -> None:
        """Remove the folder with what is in it; twice is harmless."""
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1


def remove_abandoned(parent: Path) -> int:
    """Remove the scratch folders of this user below `parent` whose processes are dead; return how
    many.
    """
    gone = 0
    for path in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, a living process's, or just removed
            fd = os.open(path, _OPEN)
            try:
                if os.fstat(fd).st_uid == os.geteuid():
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path)
                    gone += 1
            finally:
                os.close(fd)
    return gone


def _made() -> tuple[Path, int]:
    """Make a folder and lock it. Until it is locked another process may take it for abandoned."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        with suppress(FileNotFoundError, BlockingIOError):
            fd = os.open(path, _OPEN)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.stat()
            except (FileNotFoundError, BlockingIOError):
                os.close(fd)
                raise
            except OSError:  # no locks here: nobody can take it for abandoned either
                pass
            return path, fd
