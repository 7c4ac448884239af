"""opener_of() finds a directory by its address; it is the one place that knows what each scheme
stands for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ownerserve.directory.port import Directory
from ownerserve.kv.addresses import KEYED, PLAIN
from ownerserve.kv.errors import InvalidInput

if TYPE_CHECKING:  # it brings ZeroMQ
    from ownerserve.kv.wire.curve import FleetKey

FIELD = "--directory"
SYNTAX = (
    "write tcp://HOST:PORT, valkey://[USER@]HOST:PORT[,HOST:PORT] or sentinel://HOST:PORT/NAME,"
    " valkeys:// or sentinels:// for TLS"
)


def opener_of(
    url: str, key: FleetKey | None = None, *, field: str = FIELD
) -> Callable[[], Directory]:
    """Return a function that makes a client of the directory at `url`, for the thread that will ask
    it. The client connects when it is first asked.

    Raises InvalidInput that names `field` unless `url` is tcp://HOST:PORT,
    curve://HOST:PORT with a `key`, or what directory/valkey/source.py reads.
    """
    if url.startswith((KEYED, PLAIN)):
        from ownerserve.directory.rpc.client import DirectoryClient, check_address

        check_address(url, key, field=field)
        return partial(DirectoryClient, url, key=key)
    if "://" not in url:
        raise InvalidInput(field, f"{url.rpartition('@')[2][:80]!r} is no address", SYNTAX)
    from ownerserve.directory.valkey.directory import ValkeyDirectory
    from ownerserve.directory.valkey.source import parse_source

    return partial(ValkeyDirectory, parse_source(url, field=field))
