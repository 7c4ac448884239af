"""The connections to one worker: the idle ones, kept for the next request.

Owns who is idle and who is not. The last one used is the first one taken: it is the least likely
to be stale.
"""

from __future__ import annotations

import asyncio

from ownerserve.gateway.config import Address
from ownerserve.gateway.http.access import Access
from ownerserve.gateway.http.upstream import UpstreamConnection

IDLE_MAX = 1024


class WorkerPool:
    """Connections to one worker."""

    def __init__(self, address: Address, access: Access, *, connect_timeout_s: float) -> None:
        self.address = address
        self.opened = 0
        self.reused = 0
        self._tls = access.tls if address.scheme == "https" else None
        self._connect_timeout_s = connect_timeout_s
        self._idle: dict[UpstreamConnection, None] = {}
        self._busy: set[UpstreamConnection] = set()

    @property
    def idle(self) -> int:
        return len(self._idle)

    def take(self) -> UpstreamConnection | None:
        """An idle connection, or None."""
        if not self._idle:
            return None
        connection, _ = self._idle.popitem()
        self._busy.add(connection)
        self.reused += 1
        return connection

    async def connect(self) -> UpstreamConnection:
        """A new connection. Raises OSError (TimeoutError among them) when there is none."""
        loop = asyncio.get_running_loop()
        connection = UpstreamConnection(self)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await loop.create_connection(
                    lambda: connection, self.address.host, self.address.port, ssl=self._tls
                )
        except UnicodeError as error:
            connection.abort()
            raise OSError(f"{self.address.host!r} is no host: {error}") from error
        except BaseException:
            connection.abort()  # cancelled just as it came about: nobody else would close it
            raise
        self.opened += 1
        return connection

    def begun(self, connection: UpstreamConnection) -> None:
        """`connection` is open, for whoever had it made."""
        self._busy.add(connection)

    def give_back(self, connection: UpstreamConnection) -> None:
        """`connection` has finished an exchange and may carry another."""
        self._busy.discard(connection)
        if len(self._idle) >= IDLE_MAX:
            connection.close()
            return
        connection.kept = True
        self._idle[connection] = None

    def forget(self, connection: UpstreamConnection) -> None:
        """`connection` is closed."""
        self._idle.pop(connection, None)
        self._busy.discard(connection)

    def found_out(self) -> None:
        """A probe found the worker out of reach: who has heard nothing since the last one that did
        waits no longer."""
        for connection in list(self._busy):
            connection.give_up_if_silent()

    def close_idle(self) -> None:
        for connection in list(self._idle):
            connection.close()
        self._idle.clear()
