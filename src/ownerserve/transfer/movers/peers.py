"""A peer process of the same host, held so that its pid can't become another's unnoticed.

ProcessName ── open_peer ──> PeerProcess: a pidfd, whose life is asked before and after a read
                         └─> ReadFailure: UNABLE (not of this host), PEER_LOST (it has ended)
"""

from __future__ import annotations

import os
import select
from pathlib import Path

from ownerserve.transfer.movers.process_name import ProcessName
from ownerserve.transfer.vocabulary import ReadFailure

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_SPACE = Path("/proc/self/ns/pid")
_STARTED = 19
"""Field 22 of /proc/PID/stat, counted from the one behind the name, which may hold anything."""


def started_ticks(pid: int) -> int:
    """Return when the process began, in clock ticks since boot; raises OSError if it is none."""
    told = Path(f"/proc/{pid}/stat").read_text()
    return int(told.rpartition(")")[2].split()[_STARTED])


def own_name() -> ProcessName:
    """Return this process's name, as peers of its host are told it."""
    pid = os.getpid()
    boot, pid_space = _BOOT_ID.read_text().strip(), _PID_SPACE.stat().st_ino
    return ProcessName(boot, pid_space, pid=pid, started_ticks=started_ticks(pid))


class PeerProcess:
    """A `PeerProcess` is one life of a process of this host. Owns the pidfd by which it knows."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._poll = select.poll()
        self._poll.register(pidfd, select.POLLIN)

    def lives(self) -> bool:
        """Tell whether the process has not ended: its pid is its own until then, and what was read
        by it before was read of it."""
        return not self._poll.poll(0)

    def close(self) -> None:
        """Let the pidfd go."""
        os.close(self._pidfd)


def open_peer(name: ProcessName) -> PeerProcess | ReadFailure:
    """Return the process of that name, held; UNABLE: it is not of this host or not seen from
    here; PEER_LOST: it has ended, and its pid may be another's."""
    here = own_name()
    if (name.boot, name.pid_space) != (here.boot, here.pid_space):
        return ReadFailure.UNABLE
    try:
        pidfd = os.pidfd_open(name.pid)
    except ProcessLookupError:
        return ReadFailure.PEER_LOST
    except OSError:  # a kernel or a sandbox without pidfds
        return ReadFailure.UNABLE
    try:
        same = started_ticks(name.pid) == name.started_ticks
    except OSError:
        same = False
    if not same:
        os.close(pidfd)
        return ReadFailure.PEER_LOST
    return PeerProcess(name.pid, pidfd)
