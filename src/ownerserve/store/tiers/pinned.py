"""Pinned memory is page-locked host memory, which a GPU copies from and to without a bounce buffer.

Owns which mappings are registered. The CUDA runtime comes from outside (`torch.cuda.cudart()`), so
that nothing here imports torch. Memory that can't be locked (ulimit, an old driver) is used as it
is: slower, and counted.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections import Counter
from typing import Any, Protocol

log = logging.getLogger("ownerserve.store")

_SUCCESS = 0
_DEFAULT_FLAGS = 0


class CudaHost(Protocol):
    """CudaHost is the two calls of the CUDA runtime that are needed; each returns 0 for success."""

    def cudaHostRegister(self, address: int, size: int, flags: int, /) -> Any: ...

    def cudaHostUnregister(self, address: int, /) -> Any: ...


class PinnedMemory:
    """Pinned memory is for a `BufferPool` whose buffers a GPU reads and writes. Implements
    buffers.Memory.

    Locking costs about as much as touching every page, so the pool should keep what is idle.
    """

    def __init__(self, cuda: CudaHost) -> None:
        self._cuda = cuda
        self._addresses: dict[int, int] = {}  # by id of the mapping, which the pool keeps alive
        self.counters: Counter[str] = Counter()

    def map(self, size: int) -> mmap.mmap:
        """Return a new mapping of `size` bytes, pinned for CUDA where it can be."""
        memory = mmap.mmap(-1, size)
        probe = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(probe)
        del probe  # a mapping with an export can't be closed
        status = int(self._cuda.cudaHostRegister(address, size, _DEFAULT_FLAGS))
        if status == _SUCCESS:
            self._addresses[id(memory)] = address
            self.counters["pinned_bytes"] += size
        else:
            if not self.counters["unpinned_bytes"]:
                log.warning(
                    "host memory can't be page-locked (CUDA error %d): copies to the device go "
                    "through a bounce buffer; raise ulimit -l",
                    status,
                )
            self.counters["unpinned_bytes"] += size
        return memory

    def unmap(self, memory: mmap.mmap) -> None:
        """Unpin a mapping that no view refers to."""
        address = self._addresses.pop(id(memory), None)
        if address is None:
            self.counters["unpinned_bytes"] -= len(memory)
            return
        self.counters["pinned_bytes"] -= len(memory)
        if int(self._cuda.cudaHostUnregister(address)) != _SUCCESS:
            self.counters["unregister_failed"] += 1
