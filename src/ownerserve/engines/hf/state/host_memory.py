"""The memory of an arena: where the device is this host's own memory, other processes of the host
may map it.

    Linux, cpu     a memfd, sealed against shrinking, mapped once    /proc/PID/fd/N (kv.regions)
    else           plain memory of the device                        shared with nobody

A memfd has no name in any file system: when the process has ended, however, nothing is left of it
but what others still map. It is there as long as the tensor is.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import sys
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from ownerserve.kv.regions import SharedMemory

log = logging.getLogger("ownerserve.engine")


class ArenaMemory(NamedTuple):
    """An arena's memory is a `tensor` of bytes [n], all zero at first, and the object that holds it
    where others may map it; None where nobody may."""

    tensor: Tensor
    shared: SharedMemory | None


def arena_memory(size: int, device: torch.device) -> ArenaMemory:
    """Return `size` bytes of zeros on the device, for others of this host to map if that can be."""
    if size and device.type == "cpu" and sys.platform == "linux":
        try:
            return _shared(size)
        except OSError as error:  # a sandbox that allows no memfd
            log.info("the arena is not shared with other processes: %s", error)
    return ArenaMemory(torch.zeros(size, dtype=torch.uint8, device=device), None)


def _shared(size: int) -> ArenaMemory:
    opened = os.memfd_create("ownerserve-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(opened, size)
        fcntl.fcntl(opened, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        mapping = mmap.mmap(opened, size)  # unmapped with the last tensor that looks into it
    except OSError:
        os.close(opened)
        raise
    tensor = torch.frombuffer(mapping, dtype=torch.uint8)
    weakref.finalize(mapping, os.close, opened)
    name = f"/proc/{os.getpid()}/fd/{opened}"
    return ArenaMemory(tensor, SharedMemory(name, tensor.data_ptr(), size))
