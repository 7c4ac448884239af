"""A pump passes bytes on between a client whose keys are here and the process that answers it: a
connection under TLS can't be given away, for its keys are in this process's memory.

    client ══ TLS ══ [ Half | Half ] ── a pair of Unix sockets ── the other process

Owns both transports from then on. Parses nothing and keeps nothing: who writes faster than the
other side reads is not read.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable


class Half(asyncio.Protocol):
    """A half writes what it reads to the `other` transport; `lost` is called as it ends."""

    def __init__(self, other: asyncio.Transport, lost: Callable[[Exception | None], None]) -> None:
        self._other = other
        self._lost = lost

    def data_received(self, data: bytes) -> None:
        if not self._other.is_closing():
            self._other.write(data)

    def pause_writing(self) -> None:
        if not self._other.is_closing():
            self._other.pause_reading()

    def resume_writing(self) -> None:
        if not self._other.is_closing():
            self._other.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._other.close()
        self._lost(exc)


async def pump(
    client: asyncio.Transport, here: socket.socket, lost: Callable[[Exception | None], None]
) -> None:
    """Pass bytes on between the client, which is not read meanwhile, and `here`, until one of them
    ends; `lost` is called as the client's does."""
    loop = asyncio.get_running_loop()
    try:
        far, _ = await loop.connect_accepted_socket(lambda: Half(client, _nothing), here)
    except OSError as error:
        client.abort()
        lost(error)
        return
    client.set_protocol(Half(far, lost))
    if client.is_closing():
        far.close()
        lost(None)
    else:
        client.resume_reading()


def _nothing(exc: Exception | None) -> None:
    """Do nothing: what there is to do is the other half's."""
