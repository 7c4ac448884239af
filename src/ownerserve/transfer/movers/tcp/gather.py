"""Gather lists move a piece's bytes between its runs and a socket: no copy is made of them here.

    runs     |--------- run 0 ---------|- run 1 -|--- run 2 ---|
    slices   |  0   |  1   |  2   |  3    |  4    |  5   | 6 |     SLICE_BYTES each, but the last
    entries  |  0   |  1   |  2   | 3 | 4 | 5|  6 |  7   | 8 |     cut where a run or a slice ends

The kernel reads and writes the entries as they are (struct iovec is two int64). A slice is what is
digested at a time: small enough to lie in a cache yet when it has been copied, and so large that a
call of the kernel and the interpreter's lock are paid for seldom.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from bisect import bisect_right
from collections.abc import Callable

import numpy as np

from ownerserve.kv.units import MIB
from ownerserve.transfer.movers.digests import Hasher
from ownerserve.transfer.vocabulary import Runs

SLICE_BYTES = 1 * MIB
ENTRIES_MAX = 1024
"""The most entries that one call of the kernel takes (IOV_MAX)."""
_ENTRY_BYTES = 16
_READ_ONLY = 0x100
_SEND_NOW = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_FILL = socket.MSG_WAITALL


class _Message(ctypes.Structure):
    """struct msghdr: entries, and nothing beside them."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_bytes", ctypes.c_uint32),
        ("entries", ctypes.c_void_p),
        ("entry_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_bytes", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_CALL = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_libc.sendmsg.argtypes = _libc.recvmsg.argtypes = _CALL
_libc.sendmsg.restype = _libc.recvmsg.restype = ctypes.c_ssize_t
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view.restype = ctypes.py_object


class Gather:
    """A `Gather` is the bytes of a piece in this process's memory, and how many of them have moved
    (`moved`). It reads or writes memory in `send` and `receive` alone, and hashes it in `digest`.
    """

    def __init__(self, runs: Runs) -> None:
        """Raises ValueError for what are no runs."""
        if runs.addresses.shape != runs.lengths.shape or np.any(runs.lengths < 0):
            raise ValueError("runs have an address and a length each")
        addresses, lengths = runs.addresses, runs.lengths
        if not lengths.all():
            holds = lengths > 0
            addresses, lengths = addresses[holds], lengths[holds]
        self.bytes = int(lengths.sum())
        self.moved = 0
        cuts = np.arange(0, self.bytes, SLICE_BYTES)
        if len(lengths) > 1:
            starts = np.cumsum(lengths) - lengths
            cuts = np.union1d(starts, cuts)
            run = np.searchsorted(starts, cuts, side="right") - 1
            at = addresses[run] + cuts - starts[run]
        else:
            at = cuts + int(addresses.sum())
        self._entries = np.empty((len(cuts), 2), dtype=np.int64)
        self._entries[:, 0] = at
        self._entries[:-1, 1] = cuts[1:] - cuts[:-1]
        self._entries[-1:, 1] = self.bytes - cuts[-1:]
        self._starts: list[int] = cuts.tolist()
        self._message = _Message()
        self._address = self._entries.ctypes.data
        self._base = int(at.min()) if len(at) else 0
        self._at: list[int] = (at - self._base).tolist()
        span = int((at + self._entries[:, 1]).max()) - self._base if len(at) else 0
        self._memory: memoryview = _view(self._base or None, span, _READ_ONLY)

    def slice_end(self, byte: int) -> int:
        """Return where the slice that `byte` lies in ends."""
        return min((byte // SLICE_BYTES + 1) * SLICE_BYTES, self.bytes)

    def send(self, descriptor: int, end: int) -> int:
        """Send some of the bytes [moved, end) and return how many; 0: the socket takes none now.
        `end` is the end of a slice. Raises OSError."""
        return self._move(_libc.sendmsg, descriptor, end=end, flags=_SEND_NOW)

    def receive(self, descriptor: int, end: int) -> int:
        """Write what comes into the bytes [moved, end), and return how much it was: all of them,
        unless the socket's patience (SO_RCVTIMEO) ends before. `end` is the end of a slice. Raises
        OSError; ConnectionError where nothing comes any more."""
        return self._move(_libc.recvmsg, descriptor, end=end, flags=_FILL)

    def digest(self, hasher: Hasher, start: int, end: int) -> None:
        """Have the bytes [start, end) digested, of which both are ends of slices."""
        first, last = bisect_right(self._starts, start) - 1, bisect_right(self._starts, end - 1)
        cuts = [*self._starts[first + 1 : last], end]
        for at, cut in zip(self._at[first:last], cuts, strict=True):
            hasher.update(self._memory[at : at + cut - start])
            start = cut

    def _move(
        self, call: Callable[[int, int, int], int], descriptor: int, *, end: int, flags: int
    ) -> int:
        first = bisect_right(self._starts, self.moved) - 1
        count = bisect_right(self._starts, end - 1) - first
        self._message.entries = self._address + first * _ENTRY_BYTES
        self._message.entry_count = min(count, ENTRIES_MAX)
        while (moved := call(descriptor, ctypes.addressof(self._message), flags)) < 0:
            number = ctypes.get_errno()
            if number == errno.EAGAIN:
                return 0
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number))
        if not moved:
            raise ConnectionResetError(errno.ECONNRESET, "the other side has closed")
        self.moved += moved
        self._cut(self.moved)
        return moved

    def _cut(self, at: int) -> None:
        """Have the entry that byte `at` lies in begin there."""
        entry = bisect_right(self._starts, at) - 1
        passed = at - self._starts[entry]
        if passed and at < self.bytes:
            end = self._starts[entry + 1] if entry + 1 < len(self._starts) else self.bytes
            self._entries[entry] = (self._base + self._at[entry] + passed, end - at)
