"""A gateway may have its directory in itself: `--directory embedded`. For one gateway, and the
workers of its own machine.

The service is the same as `ownerserve directory serve`: a thread and a port on loopback, which
nodes ask and this gateway too. Its memory ends with the gateway's: nodes tell the next one what
they own and hold, and until then turns go by what workers say that they hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ownerserve.directory.embedded import EmbeddedDirectory
from ownerserve.directory.opening import FIELD, opener_of
from ownerserve.directory.port import Directory
from ownerserve.directory.rpc.server import DirectoryServer
from ownerserve.directory.terms import TermFile
from ownerserve.kv.addresses import LAST_PORT
from ownerserve.kv.clock import Clock
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.listening import DIRECTORY
from ownerserve.kv.wire.curve import FleetKey

EMBEDDED = "embedded"


class OpenedDirectory(NamedTuple):
    """An opened directory is a client of it, and where nodes reach it, if it is this process's
    own."""

    client: Directory
    served_at: str | None


def port_of(url: str) -> int | None:
    """Return the port of "embedded" or "embedded:PORT"; None for another address. Raises
    InvalidInput."""
    name, colon, port = url.partition(":")
    if name != EMBEDDED:
        return None
    if not colon:
        return DIRECTORY.port
    if not (port.isascii() and port.isdigit() and int(port) <= LAST_PORT):
        raise InvalidInput(
            FIELD, f"there is no port {port[:20]!r}", "write embedded or embedded:7700"
        )
    return int(port)


@contextmanager
def opened(url: str | None, key: FleetKey | None, clock: Clock) -> Iterator[OpenedDirectory | None]:
    """Open the directory at `url` while inside, serving it here where that says so; None: none is
    asked. Raises InvalidInput."""
    if url is None:
        yield None
        return
    port = port_of(url)
    if port is None:
        yield OpenedDirectory(opener_of(url, key)(), None)
        return
    server = DirectoryServer(EmbeddedDirectory(clock, TermFile()), port=port)
    server.start()
    try:
        yield OpenedDirectory(opener_of(server.address)(), server.address)
    finally:
        server.stop()
