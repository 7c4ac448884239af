"""The layout is what all processes of a gateway share, made once, before any of them is forked:
ports, mailboxes, the homes' table, the journal.

    port 8000   [ listener 0 ] [ listener 1 ] ..     SO_REUSEPORT: the kernel deals connections out
    port 8900   [ admin listener ]                   the front's
    mailbox 0 .. relays                              to each relay; the last is the front's own

The supervisor keeps all of it open, so that a process that is started again finds its listener with
whoever came meanwhile, and its mailbox with what was sent.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ownerserve.gateway.config import Config
from ownerserve.gateway.processes.journal import ChangeJournal
from ownerserve.gateway.processes.mail import Mailbox
from ownerserve.gateway.processes.table import PROCESSES_MAX, HomeTable
from ownerserve.gateway.service import bind_data_port, data_url
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.listening import ADMIN, open_listener
from ownerserve.kv.units import MIB

PROCESSES = "--processes"


class _BoundFile(NamedTuple):
    """The file of a Unix socket, and what it is since it was bound."""

    path: Path
    stat: os.stat_result


class ProcessLayout:
    """A layout of `processes` relays. Raises InvalidInput when a port can't be had."""

    def __init__(self, config: Config, processes: int) -> None:
        if not hasattr(socket, "SO_REUSEPORT") or not hasattr(socket, "SCM_RIGHTS"):
            raise InvalidInput(PROCESSES, "needs Linux", "use 1")
        if not 1 < processes <= PROCESSES_MAX:
            problem = f"{processes} are not 2 to {PROCESSES_MAX}"
            raise InvalidInput(PROCESSES, problem, "use one for each core that it may have")
        if config.bodies_max_bytes // processes < config.body_max_bytes:
            room = f"{config.bodies_max_bytes // processes // MIB} MiB each"
            problem = f"{room} is less than one body may have"
            mend = f"use {config.body_max_bytes * processes // MIB} or more"
            raise InvalidInput("--body-memory-mib", problem, mend)
        queue = config.queue
        for field, limit in (("running", queue.running_max), ("waiting", queue.waiting_max)):
            if limit is not None and limit < processes:
                problem = f"{limit} can't be shared by {processes} processes"
                raise InvalidInput(f"--max-{field}", problem, f"use {processes} or more")
        self.processes = processes
        self.listeners = _listeners(config, processes)
        self._file = _BoundFile(config.unix, config.unix.stat()) if config.unix else None
        self.data_url = data_url(config, self.listeners[0].getsockname()[1])
        self.admin = open_listener(
            ADMIN, config.admin_host, config.admin_port, protection=config.admin_protection
        )
        self.mailboxes = [Mailbox() for _ in range(processes)]
        self.table = HomeTable()
        self.journal = ChangeJournal()

    def close_listeners(self) -> None:
        """Let go of the data ports: whoever still has one says when nobody is let in any more."""
        for listener in self.listeners:
            listener.close()

    def remove_file(self) -> None:
        """Take the file of a Unix socket away, as nobody listens any more; another gateway's, which
        has taken its place, stays."""
        if self._file is None:
            return
        path, bound = self._file
        with suppress(OSError):
            if os.path.samestat(path.lstat(), bound):
                path.unlink()

    def keep_listener(self, process: int) -> socket.socket:
        """Return the listener of one relay, and let go of what is others' to listen at."""
        for number, listener in enumerate(self.listeners):
            if number != process:
                listener.close()
        self.admin.close()
        return self.listeners[process]

    def keep_admin(self) -> socket.socket:
        """Return the admin listener, and let go of the data ports."""
        self.close_listeners()
        return self.admin


def _listeners(config: Config, processes: int) -> list[socket.socket]:
    """Return as many listeners on the data port as there are relays; of a Unix socket there is one,
    and all have it.

    The port is taken alone first: a second gateway on it is an error, and does not get a share of
    the first one's clients.
    """
    alone = bind_data_port(config)
    if alone.family == socket.AF_UNIX:
        return [alone, *(alone.dup() for _ in range(1, processes))]
    place, family = alone.getsockname(), alone.family
    alone.close()
    listeners = []
    for _ in range(processes):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(place)
        listeners.append(listener)
    return listeners
