"""This module keeps many direct reads in the air from one thread, by Linux's own asynchronous I/O
(io_submit).

A thread for each read in the air costs two hand-overs of the interpreter lock a record, more than
the record's digest. The kernel's queue costs one system call for many. io_submit is what Docker's
default profile allows (io_uring it does not); where it is refused, reads go one after another.

The kernel writes into the buffers until a read is reaped, so `run` ends only when all are, also
when its caller stops early: close the generator (contextlib.closing), do not leave it lying.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Generator, Sequence

from ownerserve.kv.units import MIB
from ownerserve.store.format.header import BLOCK
from ownerserve.store.format.segment import DirectRead

DEPTH = 16
IN_FLIGHT_BYTES = 8 * MIB
_IOCB = struct.Struct("<QIIHhIQQqQII")
_EVENT = struct.Struct("<QQqq")
_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""Machine -> numbers of io_setup, io_destroy, io_getevents, io_submit."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
assert _IOCB.size == 64


class KernelQueue:
    """A kernel queue is one io_submit context and the arrays it is talked to with. It is one
    thread's.
    """

    def __init__(self) -> None:
        self._setup, self._destroy, self._getevents, self._submit = _CALLS[platform.machine()]
        self._handle = ctypes.c_ulong(0)
        if _libc.syscall(self._setup, DEPTH, ctypes.byref(self._handle)) < 0:
            raise OSError(ctypes.get_errno(), "io_setup")
        self._blocks = (ctypes.c_char * (_IOCB.size * DEPTH))()
        base = ctypes.addressof(self._blocks)
        self._pointers = (ctypes.c_void_p * DEPTH)(
            *(base + _IOCB.size * place for place in range(DEPTH))
        )
        self._events = (ctypes.c_char * (_EVENT.size * DEPTH))()

    def send(self, reads: Sequence[tuple[int, DirectRead]]) -> int:
        """Start reads given as (tag, read), at most DEPTH; returns how many the kernel took."""
        for place, (tag, read) in enumerate(reads):
            address = ctypes.addressof(ctypes.c_char.from_buffer(read.into))
            _IOCB.pack_into(
                self._blocks, _IOCB.size * place,
                tag, 0, 0, 0, 0, read.fd, address, len(read.into), read.offset, 0, 0, 0,
            )  # fmt: skip
        return max(0, int(_libc.syscall(self._submit, self._handle, len(reads), self._pointers)))

    def reap(self) -> list[tuple[int, int]]:
        """Wait for at least one read that is in the air; returns (tag, bytes read or a negative
        errno) of each that is done. Raises OSError.
        """
        while True:
            count = _libc.syscall(self._getevents, self._handle, 1, DEPTH, self._events, None)
            if count > 0:
                found = (_EVENT.unpack_from(self._events, n * _EVENT.size) for n in range(count))
                return [(tag, result) for tag, _, result, _ in found]
            code = ctypes.get_errno()
            if count < 0 and code != errno.EINTR:
                raise OSError(code, f"io_getevents: {os.strerror(code)}")

    def close(self) -> None:
        """Destroy the queue; waits for what is in the air."""
        _libc.syscall(self._destroy, self._handle)


class ReadQueue:
    """A read queue holds kernel queues, one for each thread that is reading now; they are made at
    first need and kept.
    """

    def __init__(self) -> None:
        self._idle: list[KernelQueue] = []
        self._refused = platform.machine() not in _CALLS

    def run(self, reads: Sequence[DirectRead]) -> Generator[tuple[int, int], None, None]:
        """Make all reads; yields (index, bytes read or a negative errno) of each as they complete.

        What the caller does between two answers overlaps with what is still in the air.
        """
        context = self._take() if len(reads) > 1 else None
        if context is None:
            yield from ((index, one(read)) for index, read in enumerate(reads))
            return
        air: dict[int, int] = {}
        following = 0
        landed: list[tuple[int, int]] = []
        try:
            while following < len(reads) or air or landed:
                batch = _batch(reads, following, air)
                taken = context.send(batch) if batch else 0
                air.update((tag, len(read.into)) for tag, read in batch[:taken])
                following += taken
                yield from landed  # while those just sent are on their way
                if not air and following < len(reads):
                    following += 1  # the kernel takes none, now or ever: do one by hand
                    landed = [(following - 1, one(reads[following - 1]))]
                    continue
                landed = context.reap() if air else []
                for tag, _ in landed:
                    del air[tag]
        finally:
            self._settle(context, air)

    def _settle(self, context: KernelQueue, air: dict[int, int]) -> None:
        """Wait until the kernel writes nowhere any more."""
        try:
            while air:
                for tag, _ in context.reap():
                    del air[tag]
            self._idle.append(context)
        except OSError:
            context.close()

    def _take(self) -> KernelQueue | None:
        if self._refused:
            return None
        try:
            return self._idle.pop()
        except IndexError:
            pass
        try:
            return KernelQueue()
        except OSError:
            self._refused = True  # a sandbox, or the machine's queues are all taken
            return None

    def close(self) -> None:
        """Give the kernel its queues back. Nobody may be reading."""
        while self._idle:
            self._idle.pop().close()


def _batch(
    reads: Sequence[DirectRead], start: int, air: dict[int, int]
) -> list[tuple[int, DirectRead]]:
    """Return the reads from `start` that may join those in the air: DEPTH at most, and not too many
    bytes.
    """
    batch: list[tuple[int, DirectRead]] = []
    room = IN_FLIGHT_BYTES - sum(air.values())
    for tag in range(start, min(len(reads), start + DEPTH - len(air))):
        room -= len(reads[tag].into)
        if room < 0 and (batch or air):
            break
        batch.append((tag, reads[tag]))
    return batch


def one(read: DirectRead) -> int:
    """Make one read by hand: bytes read (fewer at the end of the file) or a negative errno."""
    done = 0
    try:
        while done < len(read.into):
            count = os.preadv(read.fd, [read.into[done:]], read.offset + done)
            done += count
            if count == 0 or count % BLOCK:
                break
    except OSError as error:
        return -(error.errno or errno.EIO)
    return done
