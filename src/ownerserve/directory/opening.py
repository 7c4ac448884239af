"""A directory by its address: the one place that knows what each scheme stands for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ownerserve.directory.port import Directory

FIELD = "--directory"


def opener_of(url: str) -> Callable[[], Directory]:
    """What makes a client of the directory at `url`, for the thread that will ask it. The client
    connects when it is first asked.

    Raises InvalidInput unless `url` is tcp://HOST:PORT, valkey://HOST:PORT[,HOST:PORT] or
    sentinel://HOST:PORT/NAME.
    """
    if url.startswith("tcp://"):
        from ownerserve.directory.rpc.client import DirectoryClient, check_address

        check_address(url, field=FIELD)
        return partial(DirectoryClient, url)
    from ownerserve.directory.valkey.directory import ValkeyDirectory
    from ownerserve.directory.valkey.primary import parse_source

    return partial(ValkeyDirectory, parse_source(url, field=FIELD))
