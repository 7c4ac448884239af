"""A gateway may have its directory in itself: `--directory embedded`. For one gateway, and workers
of its own machine, or with the fleet's keys of others too (`embedded:HOST:PORT`).

The service is the same as `ownerserve directory serve`: a thread and a port, which nodes ask and
this gateway too. On loopback it asks for no keys, elsewhere it does not start without. Its memory
ends with the gateway's: nodes tell the next one what they own and hold, and until then turns go by
what workers say that they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from ownerserve.cli.options import check_host
from ownerserve.directory.embedded import EmbeddedDirectory
from ownerserve.directory.opening import FIELD, opener_of
from ownerserve.directory.port import Directory
from ownerserve.directory.rpc.client import why_silent
from ownerserve.directory.rpc.server import DirectoryServer
from ownerserve.directory.terms import TermFile
from ownerserve.kv.addresses import KEYED, LAST_PORT, PLAIN, is_loopback
from ownerserve.kv.clock import Clock
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.listening import DIRECTORY, LOOPBACK
from ownerserve.kv.wire.curve import FleetKey

EMBEDDED = "embedded"


class OpenedDirectory(NamedTuple):
    """An opened directory is a client of it, where nodes reach it, if it is this process's own, and
    who says why it is silent."""

    client: Directory
    served_at: str | None
    why_silent: Callable[[], str]


class EmbeddedAt(NamedTuple):
    """An embedded directory listens here."""

    host: str
    port: int


def embedded_at(url: str) -> EmbeddedAt | None:
    """Return where "embedded", "embedded:PORT" or "embedded:HOST:PORT" listens; None for another
    address. Raises InvalidInput."""
    name, colon, place = url.partition(":")
    if name != EMBEDDED:
        return None
    if not colon:
        return EmbeddedAt(LOOPBACK, DIRECTORY.port)
    host, _, port = place.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) <= LAST_PORT):
        mend = "write embedded, embedded:7700 or embedded:10.0.0.5:7700"
        raise InvalidInput(FIELD, f"there is no port {port[:20]!r}", mend)
    host = host.strip("[]") or LOOPBACK
    check_host(host, field=FIELD)
    return EmbeddedAt(host, int(port))


def _why(url: str, key: FleetKey | None) -> str:
    """Say why nobody answers there; nothing of a Valkey, which is told in the log."""
    return why_silent(url, key) if url.startswith((KEYED, PLAIN)) else ""


@contextmanager
def opened(url: str | None, key: FleetKey | None, clock: Clock) -> Iterator[OpenedDirectory | None]:
    """Open the directory at `url` while inside, serving it here where that says so; None: none is
    asked. Raises InvalidInput."""
    if url is None:
        yield None
        return
    place = embedded_at(url)
    if place is None:
        yield OpenedDirectory(opener_of(url, key)(), None, partial(_why, url, key))
        return
    asked = None if is_loopback(place.host) else key
    directory = EmbeddedDirectory(clock, TermFile())
    server = DirectoryServer(directory, host=place.host, port=place.port, key=asked)
    server.start()
    try:
        client = opener_of(server.address, key)()
        yield OpenedDirectory(client, server.address, partial(_why, server.address, key))
    finally:
        server.stop()
