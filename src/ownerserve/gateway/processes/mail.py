"""Mail goes from one process of a gateway to another: a socket, with the input that was read of it.

    any process ── sendmsg(kind, input, socket) ──> [ mailbox of process 2 ] ──> process 2
                            over INLINE_BYTES: the input in a memfd

Owns the mailboxes and the form of a parcel. A mailbox is a pair of sockets that the supervisor
makes before it forks and keeps: there is no path by which anybody else could write to it, and what
is in it when its process is killed is read by the one that takes its place. Who sends never waits:
what does not fit into a full mailbox waits here, up to WAITING_MAX parcels.
"""

from __future__ import annotations

import array
import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from http import HTTPStatus
from typing import NamedTuple

from ownerserve.gateway.http.replies import Rejected

log = logging.getLogger("ownerserve.gateway")

INLINE_BYTES = 32 * 1024
WAITING_MAX = 1024
READ_AT_ONCE = 64
_FD_BYTES = array.array("i").itemsize


class ParcelKind(Enum):
    """A parcel's kind says what its receiver does with it; the value is its first byte."""

    CLIENT = b"c"
    """A client's connection, and what was read of it and not answered."""
    QUESTION = b"q"
    """A question to the admin port; the answer is written to the socket."""


class Parcel(NamedTuple):
    """A parcel is a descriptor of a socket that its receiver has to close, and data beside it."""

    kind: ParcelKind
    descriptor: int
    data: bytes


class Mailbox:
    """A mailbox is one process's: all send to it, and it alone receives."""

    def __init__(self) -> None:
        self.inlet, self.outlet = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.inlet.settimeout(0)
        self.outlet.settimeout(0)


class Post:
    """The post is what one process sends with: `mailboxes` are all processes', by their numbers."""

    def __init__(self, mailboxes: Sequence[Mailbox]) -> None:
        self._inlets = [mailbox.inlet for mailbox in mailboxes]
        self._waiting: list[deque[Parcel]] = [deque() for _ in mailboxes]
        self._loop = asyncio.get_running_loop()

    @property
    def waiting(self) -> int:
        """How many parcels wait for room in a mailbox."""
        return sum(map(len, self._waiting))

    def send(self, process: int, parcel: Parcel) -> None:
        """Send a parcel; its descriptor stays the sender's. Raises Rejected when it can't be
        sent."""
        waiting = self._waiting[process]
        try:
            if not waiting and _sent(self._inlets[process], parcel):
                return
            if len(waiting) >= WAITING_MAX:
                raise OSError(f"process {process} has {WAITING_MAX} parcels waiting")
            waiting.append(parcel._replace(descriptor=os.dup(parcel.descriptor)))
        except OSError as error:
            log.warning("a connection can't be given to process %d: %s", process, error)
            raise Rejected(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "exhausted",
                "gateway: the process that has this session can't be reached; retry soon",
            ) from error
        self._loop.add_writer(self._inlets[process].fileno(), self._go_on, process)

    def _go_on(self, process: int) -> None:
        """Send what waits, as far as there is room."""
        waiting = self._waiting[process]
        while waiting:
            try:
                if not _sent(self._inlets[process], waiting[0]):
                    return
            except OSError as error:
                log.warning("a connection is lost on its way to process %d: %s", process, error)
            os.close(waiting.popleft().descriptor)
        self._loop.remove_writer(self._inlets[process].fileno())

    def close(self) -> None:
        """Drop what waits."""
        for process, waiting in enumerate(self._waiting):
            if waiting:
                self._loop.remove_writer(self._inlets[process].fileno())
            while waiting:
                os.close(waiting.popleft().descriptor)


class Receiving:
    """The receiving end of a process's mailbox; `take` has each parcel, and closes its
    descriptor."""

    def __init__(self, mailbox: Mailbox, take: Callable[[Parcel], None]) -> None:
        self._outlet = mailbox.outlet
        self._take = take
        self._loop = asyncio.get_running_loop()

    def open(self) -> None:
        """Begin to receive."""
        self._loop.add_reader(self._outlet.fileno(), self._read)

    def close(self) -> None:
        """Receive no more; what is in the mailbox stays there."""
        self._loop.remove_reader(self._outlet.fileno())

    def _read(self) -> None:
        for _ in range(READ_AT_ONCE):
            try:
                parcel = _received(self._outlet)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                log.warning("a connection that another process gave is lost: %s", error)
                continue
            try:
                self._take(parcel)
            except Exception:  # a callback of the event loop
                log.exception("a fault over what another process gave")


def _sent(inlet: socket.socket, parcel: Parcel) -> bool:
    """Return whether there was room for the parcel. Raises OSError."""
    kind, descriptor, data = parcel
    descriptors = [descriptor]
    if len(data) > INLINE_BYTES:
        descriptors.append(_in_memory(data))
        data = b""
    try:
        rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors)
        inlet.sendmsg([kind.value, data], [rights])
    except (BlockingIOError, InterruptedError):
        return False
    finally:
        for one in descriptors[1:]:
            os.close(one)
    return True


def _in_memory(data: bytes) -> int:
    descriptor = os.memfd_create("ownerserve-input")
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _received(outlet: socket.socket) -> Parcel:
    """Return the next parcel. Raises BlockingIOError when there is none, OSError for one that
    could not be taken in."""
    said, rights, flags, _ = outlet.recvmsg(1 + INLINE_BYTES, socket.CMSG_SPACE(2 * _FD_BYTES))
    descriptors = array.array("i")
    for level, kind, data in rights:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % _FD_BYTES])
    try:
        if not said or not descriptors or flags & socket.MSG_CTRUNC:
            raise OSError("it came without its socket or its input: no descriptor is left here")
        data = said[1:] if len(descriptors) == 1 else _of_memory(descriptors[1])
        parcel = Parcel(ParcelKind(said[:1]), descriptors[0], data)
    except BaseException:
        for one in descriptors[:1]:
            os.close(one)
        raise
    finally:
        for one in descriptors[1:]:
            os.close(one)
    return parcel


def _of_memory(descriptor: int) -> bytes:
    length = os.fstat(descriptor).st_size
    data = bytearray(length)
    at = 0
    while at < length:
        read = os.preadv(descriptor, [memoryview(data)[at:]], at)
        if not read:
            raise OSError("its input is short")
        at += read
    return bytes(data)
