"""Buffers are page-aligned for direct I/O, and recycled only when nobody can still see them.

A buffer goes back to the pool when the last view of it is gone. There is no release to forget and
none to do too early: a late reader of a recycled buffer would be wrong bytes by our own hand.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import defaultdict
from contextlib import suppress
from threading import Lock
from typing import Any, Protocol

from ownerserve.kv.errors import CapacityExceeded
from ownerserve.kv.units import GIB, MIB
from ownerserve.store.format.header import BLOCK

HUGE_PAGE = 2 * MIB


class BufferSource(Protocol):
    """A buffer source gives memory for bytes that are read or about to be written; on CUDA it is
    pinned.
    """

    def take(self, count: int) -> memoryview:
        """Return a writable view of `count` bytes, page-aligned; raises CapacityExceeded when there
        is none.
        """
        ...


class _Lease(weakref.ref["ctypes.Array[ctypes.c_char]"]):
    """A lease is a weak reference to the array that all views of a buffer hold; when it dies, none
    is left.
    """

    __slots__ = ("memory",)
    memory: mmap.mmap


class Memory(Protocol):
    """Memory is what a pool's buffers are mapped from and go back to."""

    def map(self, size: int) -> mmap.mmap:
        """Return a new mapping of `size` bytes."""
        ...

    def unmap(self, memory: mmap.mmap) -> None:
        """Let go of a mapping that no view refers to; the mapping itself ends with the object."""
        ...


class AnonymousMemory:
    """Anonymous memory is pageable memory of this process, of huge pages where the size allows: a
    direct read must find and pin every page that it lands in.
    """

    def map(self, size: int) -> mmap.mmap:
        """Return a new mapping of `size` bytes."""
        memory = mmap.mmap(-1, size)
        if size >= HUGE_PAGE:
            with suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def unmap(self, memory: mmap.mmap) -> None:
        """Undo nothing: the mapping ends with its object."""


class BufferPool:
    """A buffer pool is a BufferSource with at most `limit_bytes` in use, which keeps idle buffers
    warm.

    A fresh mapping costs a page fault for each 4 KiB, about as much as the read itself.
    """

    def __init__(
        self,
        limit_bytes: int = 2 * GIB,
        idle_limit_bytes: int = GIB // 4,
        *,
        memory: Memory | None = None,
    ) -> None:
        self._memory = memory or AnonymousMemory()
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._idle_bytes = 0
        self._idle_limit_bytes = idle_limit_bytes
        self._idle: defaultdict[int, list[mmap.mmap]] = defaultdict(list)
        self._leases: dict[int, _Lease] = {}
        self._lock = Lock()

    def take(self, count: int) -> memoryview:
        """Return a buffer of at least so many bytes; its holder gives it back."""
        size = _size_class(count)
        with self._lock:
            if self.used_bytes + size > self.limit_bytes:
                raise CapacityExceeded(f"{self.used_bytes:,} bytes of I/O buffers are in use")
            self.used_bytes += size
            idle = self._idle[size]
            memory = idle.pop() if idle else None
            if memory is not None:
                self._idle_bytes -= size
        if memory is None:
            memory = self._memory.map(size)
        array = (ctypes.c_char * size).from_buffer(memory)
        lease = _Lease(array, self._give_back)
        lease.memory = memory
        self._leases[id(lease)] = lease
        return memoryview(array).cast("B")[:count]

    def _give_back(self, lease: weakref.ref[Any]) -> None:
        # Runs wherever the last view dies, perhaps inside take() of this very thread: no lock.
        assert isinstance(lease, _Lease)
        del self._leases[id(lease)]
        memory = lease.memory
        size = len(memory)
        self.used_bytes -= size
        if self._idle_bytes + size <= self._idle_limit_bytes:
            self._idle_bytes += size
            self._idle[size].append(memory)
        else:
            self._memory.unmap(memory)


def _size_class(count: int) -> int:
    """Return `count` rounded up to a quarter step between powers of two, at least 4 KiB."""
    if count <= 4 * BLOCK:
        return max(BLOCK, -(-count // BLOCK) * BLOCK)
    step = 1 << (count.bit_length() - 3)
    return -(-count // step) * step
