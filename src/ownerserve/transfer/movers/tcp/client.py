"""The side that reads over TCP: a `Mover` of one or several connections to one peer."""

from __future__ import annotations

import os
from threading import Lock

from ownerserve.transfer.movers.digests import Digests
from ownerserve.transfer.movers.tcp.backoff import Backoff
from ownerserve.transfer.movers.tcp.connection import PeerReading, ReaderConnection
from ownerserve.transfer.movers.tcp.settings import Peer, ReaderSettings, check_peer
from ownerserve.transfer.vocabulary import Ended, Read, ReadFailed, ReadFailure


class TcpMover:
    """A `TcpMover` reads from one peer over TCP. Owns which connection makes which read: the one
    that has least to do. Each read is asked for, brought and ended by one connection's thread."""

    def __init__(
        self, peer: Peer, digests: Digests, *, settings: ReaderSettings | None = None
    ) -> None:
        """Raises InvalidInput for a peer that is not to be connected to."""
        check_peer(peer)
        settings = settings or ReaderSettings()
        reading = PeerReading(peer, settings, digests, Backoff())
        self._connections = [
            ReaderConnection(reading, self._tell) for _ in range(settings.connections)
        ]
        self._ended: list[Ended] = []
        self._lock = Lock()
        self._closed = False
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    @property
    def name(self) -> str:
        """Return the road's name, a label of metrics."""
        return "tcp"

    @property
    def is_fenced(self) -> bool:
        """Tell that no byte is written after a read's end: its thread is the only writer."""
        return True

    @property
    def is_signed(self) -> bool:
        """Tell that a ReadLanded says that the ticket stood: the lender asks for it, and signs."""
        return True

    def start(self, read: Read) -> None:
        """Begin the read; its end comes from `ended`."""
        if self._closed:
            self._tell(ReadFailed(read.number, ReadFailure.CANCELLED))
        else:
            min(self._connections, key=len).start(read)

    def cancel(self, number: int) -> None:
        """Have the read end soon, as CANCELLED or as it ends anyway."""
        for connection in self._connections:
            connection.cancel(number)

    def ended(self) -> list[Ended]:
        """Return the ends that came since the last call."""
        with self._lock:
            told, self._ended = self._ended, []
            if told and self._event >= 0:
                os.eventfd_read(self._event)
            return told

    def fileno(self) -> int:
        """Return the eventfd that is readable while `ended` has something to tell; -1 once
        closed."""
        return self._event

    def close(self) -> None:
        """End all reads as CANCELLED, and every thread. What `ended` has not told yet it still
        does; the eventfd is closed."""
        if self._closed:
            return
        self._closed = True
        for connection in self._connections:
            connection.stop()
        for connection in self._connections:
            connection.join()
        with self._lock:
            os.close(self._event)
            self._event = -1

    def _tell(self, end: Ended) -> None:
        with self._lock:
            if not self._ended and self._event >= 0:
                os.eventfd_write(self._event, 1)
            self._ended.append(end)
