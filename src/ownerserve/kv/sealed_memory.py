"""Sealed memory is a memfd that other processes of this host may map (kv.regions.SharedMemory).

A memfd has no name in any file system: when the process has ended, however, nothing is left of it
but what others still map. Sealed against shrinking, it kills nobody who touches a mapping of it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from typing import NamedTuple


class SealedMemory(NamedTuple):
    """Sealed memory is a `mapping` of zeros, and the `name` by which others open what it maps."""

    mapping: mmap.mmap
    name: str


def sealed_memory(label: str, size: int) -> SealedMemory:
    """Return `size` bytes of zeros, which are there as long as somebody looks into the mapping;
    pages take room once they are written. Raises OSError in a sandbox that allows no memfd."""
    opened = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(opened, size)
        fcntl.fcntl(opened, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        mapping = mmap.mmap(opened, size)
    except OSError:
        os.close(opened)
        raise
    weakref.finalize(mapping, os.close, opened)
    return SealedMemory(mapping, f"/proc/{os.getpid()}/fd/{opened}")
