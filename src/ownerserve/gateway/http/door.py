"""The door lets clients in while there are descriptors for them, and for what is asked of workers
on their behalf.

A process has so many descriptors and no more. Who is let in needs one, and one at a worker; idle
connections to workers are kept beside. What is left over is the reserve: for probes, inventories,
RPC lines, the directory and the admin port. When the house is full the door is shut: who comes
waits in the kernel's queue, and nobody inside is failed for want of a descriptor.

A failure of the gateway's own says nothing of the worker that it was on its way to (`is_ours`).

Where a certificate is served, who comes is inside from the first byte on, and a client once keys
are agreed on.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from ownerserve.gateway.http.server_tls import HANDSHAKE_S, ServerTls
from ownerserve.kv.listening import close_listener

log = logging.getLogger("ownerserve.gateway")

BACKLOG = 4096
OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL})
"""No descriptor, memory or address of our own is left."""
ADMIN_CLIENTS = 64
FOR_A_WORKER = 8
"""Descriptors for what is asked of a worker beside turns: probe, inventory, RPC line."""
LIMIT_MAX = 1 << 20
ACCEPTS_AT_ONCE = 64
"""So many are let in before the loop goes on."""


def is_ours(error: OSError) -> bool:
    """Return whether a connection could not be made for want of something of the gateway's own."""
    if isinstance(error, socket.gaierror):  # without a descriptor no name is found
        return not _has_descriptor()
    return error.errno in OURS


def _has_descriptor() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in OURS
    return True


class Share(msgspec.Struct, frozen=True):
    """A share says how a process's descriptors are given out: how many clients may be inside, and
    how many idle connections each worker's pool may keep."""

    clients_max: int
    idle_max: int


def share_of(limit: int, workers: int) -> Share:
    """Return the share of a process that may have `limit` descriptors and has so many workers."""
    reserve = min(64 + ADMIN_CLIENTS + FOR_A_WORKER * workers, limit // 2)
    clients_max = max((limit - reserve) // 3, 1)
    return Share(clients_max, max(clients_max // max(workers, 1), 1))


def descriptor_limit() -> int:
    """Return how many descriptors this process may have."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return LIMIT_MAX if soft == resource.RLIM_INFINITY else min(soft, LIMIT_MAX)


def raise_descriptor_limit() -> None:
    """Raise what this process may have to what its parent allows it, where that can be done."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = LIMIT_MAX if hard == resource.RLIM_INFINITY else min(hard, LIMIT_MAX)
    if soft != resource.RLIM_INFINITY and wanted > soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError):  # the kernel allows less: what we have must do
            return


class Door:
    """The door has the listening socket, and counts who is inside. `make` makes the protocol of
    who comes; `tls`: what they are met with, None: plain bytes; `end`: how the listener ends."""

    def __init__(
        self,
        bound: socket.socket,
        make: Callable[[], asyncio.Protocol],
        *,
        clients_max: int,
        tls: ServerTls | None = None,
        end: Callable[[socket.socket], None] = close_listener,
    ) -> None:
        self.clients_max = clients_max
        self.inside = 0
        self.shut_times = 0
        """How often the house was full."""
        self.handshakes_failed = 0
        """How many could not agree on keys, or brought no certificate that is asked for."""
        self.is_shut = False
        """Whether the house is full and nobody is let in."""
        self._bound = bound
        self._make = make
        self._tls = tls
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._entering: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        """The port that clients come to; 0 for a Unix socket."""
        place = self._bound.getsockname()
        return 0 if isinstance(place, str) else int(place[1])

    def open(self) -> None:
        """Listen, and let in who comes."""
        self._bound.settimeout(0)
        self._bound.listen(BACKLOG)
        self._loop.add_reader(self._bound.fileno(), self._accept)

    def left(self, inside: int) -> None:
        """Hear that somebody has left, and how many are inside now; open the door when there is
        room for a few."""
        self.inside = inside + len(self._entering)
        has_room = self.inside < max(self.clients_max - self.clients_max // 16, 1)
        if self.is_shut and has_room and self._bound.fileno() >= 0:
            self.is_shut = False
            self._loop.add_reader(self._bound.fileno(), self._accept)

    def let_last_in(self) -> None:
        """Let in who has knocked already: the kernel hangs up on them when the door is closed."""
        if not self.is_shut:
            self._accept()

    def close(self) -> None:
        """Let nobody in any more."""
        if self._bound.fileno() >= 0:
            self._loop.remove_reader(self._bound.fileno())
            self._end(self._bound)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            if self.inside >= self.clients_max:
                self._shut()
                return
            try:
                client, _ = self._bound.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # tried again with the next look at who is inside
                log.warning("no client can be let in: %s", error)
                self._shut()
                return
            self._enter(self._let_in(client, self._make, self._tls))

    def let_in(self, client: socket.socket, make: Callable[[], asyncio.Protocol]) -> None:
        """Let a client in that another process met; `make` makes its protocol."""
        self._enter(self._let_in(client, make, None))

    def _enter(self, entering: Coroutine[Any, Any, None]) -> None:
        self.inside += 1
        task = self._loop.create_task(entering)
        self._entering.add(task)
        task.add_done_callback(self._entering.discard)

    async def _let_in(
        self, client: socket.socket, make: Callable[[], asyncio.Protocol], tls: ServerTls | None
    ) -> None:
        try:
            client.settimeout(0)
            if client.family != socket.AF_UNIX:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is None:
                await self._loop.connect_accepted_socket(make, client)
            else:
                await self._loop.connect_accepted_socket(
                    make, client, ssl=tls.context, ssl_handshake_timeout=HANDSHAKE_S
                )
        except OSError as error:  # it is gone again, or there were no keys to agree on
            self.inside -= 1
            self.handshakes_failed += self._tls is not None
            log.debug("a client left at the door: %s", error)
            client.close()

    def _shut(self) -> None:
        self.is_shut = True
        self.shut_times += 1
        log.warning("the house is full: %d clients are inside, others wait", self.inside)
        self._loop.remove_reader(self._bound.fileno())
