"""Whether this process may read another one's memory by address, and what to do where it may not.

    read_rights(pid)   asks the kernel itself: a read at an address that nobody has
    EFAULT             the rights are there, the address is not: Readable
    EPERM              Unreadable, with why and the mend

`readv` needs PTRACE_MODE_ATTACH over its peer: the same uid (or CAP_SYS_PTRACE), a peer that is
dumpable, and what Yama's ptrace_scope adds to it. `shm` needs the same uid alone.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import msgspec
import numpy as np

from ownerserve.transfer.movers.cuts import Cuts
from ownerserve.transfer.movers.readv import read_memory

_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_CAP_SYS_PTRACE = 1 << 19
_PR_SET_PTRACER = 0x59616D61
_ANY = ctypes.c_ulong(-1)
_NO_SCOPE, _DESCENDANTS_ONLY, _ADMIN_ONLY = 0, 1, 2


class Readable(msgspec.Struct, frozen=True):
    """This process may read the other one's memory."""


class Unreadable(msgspec.Struct, frozen=True):
    """This process may not read the other one's memory: `why`, and what to do about it."""

    why: str
    mend: str


class RightsFacts(msgspec.Struct, frozen=True):
    """What the kernel goes by: `scope` is Yama's ptrace_scope (0 where there is no Yama)."""

    scope: int
    has_capability: bool
    own_uid: int
    peer_uid: int


def explain(facts: RightsFacts) -> Unreadable:
    """Return why the kernel refused, by what it goes by."""
    if facts.has_capability:
        return Unreadable(
            "the kernel refuses it to a process with CAP_SYS_PTRACE: a security module or a seccomp"
            " profile forbids process_vm_readv, or Yama's ptrace_scope is 3",
            "allow it in the container's profile, or share the engine's pools (shm)",
        )
    if facts.own_uid != facts.peer_uid:
        return Unreadable(
            f"the peer runs as uid {facts.peer_uid}, this process as {facts.own_uid}",
            "run both as one user, or give this one CAP_SYS_PTRACE",
        )
    if facts.scope >= _ADMIN_ONLY:
        return Unreadable(
            f"kernel.yama.ptrace_scope is {facts.scope}",
            "give this process CAP_SYS_PTRACE, or set the sysctl to 0, or share the engine's pools"
            " (shm)",
        )
    if facts.scope == _DESCENDANTS_ONLY:
        return Unreadable(
            "kernel.yama.ptrace_scope is 1, and the peer did not permit it",
            "have the peer call permit_readers, give this process CAP_SYS_PTRACE, or set the sysctl"
            " to 0",
        )
    return Unreadable(
        "the peer is not dumpable (it changed its user or capabilities) or in another user"
        " namespace",
        "run both in one user namespace, or give this process CAP_SYS_PTRACE",
    )


def _facts(pid: int) -> RightsFacts:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return RightsFacts(
        scope=int(_SCOPE.read_text()) if _SCOPE.exists() else _NO_SCOPE,
        has_capability=bool(int(status["CapEff"], 16) & _CAP_SYS_PTRACE),
        own_uid=os.getuid(),
        peer_uid=Path(f"/proc/{pid}").stat().st_uid,
    )


def read_rights(pid: int) -> Readable | Unreadable:
    """Find out whether the process's memory may be read by address. Nothing of it is read."""
    byte = np.zeros(1, np.uint8)
    nowhere = Cuts(
        goals=np.array([[byte.ctypes.data, 1]], np.int64),
        sources=np.array([[0, 1]], np.int64),
        chunks=(0, 1),
    )
    refused = -read_memory(pid, nowhere, 0, 1)
    if refused in (errno.EFAULT, -1):
        return Readable()
    if refused == errno.ESRCH:
        return Unreadable(f"there is no process {pid}", "name one that runs, in this pid namespace")
    if refused == errno.ENOSYS:
        return Unreadable("the kernel has no process_vm_readv", "share the engine's pools (shm)")
    try:
        return explain(_facts(pid))
    except FileNotFoundError:
        return Unreadable(f"there is no process {pid}", "name one that runs, in this pid namespace")


def permit_readers() -> None:
    """Have Yama's ptrace_scope 1 not keep processes of this one's uid from reading it; without Yama
    it is none's and changes nothing. For the process that lends."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)
