"""The memory of an arena: where the device is this host's own memory, other processes of the host
may map it.

    Linux, cpu     a memfd, sealed against shrinking, mapped once    /proc/PID/fd/N (kv.regions)
    else           plain memory of the device                        shared with nobody

It is there as long as the tensor is.
"""

from __future__ import annotations

import logging
import sys
from typing import NamedTuple

import torch
from torch import Tensor

from ownerserve.kv.regions import SharedMemory
from ownerserve.kv.sealed_memory import sealed_memory

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
    sealed = sealed_memory("ownerserve-arena", size)
    tensor = torch.frombuffer(sealed.mapping, dtype=torch.uint8)
    return ArenaMemory(tensor, SharedMemory(sealed.name, tensor.data_ptr(), size))
