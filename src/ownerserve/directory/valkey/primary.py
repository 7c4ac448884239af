"""find_primary() finds the primary by one address, several, or a Sentinel that knows.

valkey://HOST:PORT[,HOST:PORT...][/DB]       of several primaries: the one with the highest term
sentinel://HOST:PORT[,HOST:PORT...]/NAME
"""

from __future__ import annotations

from typing import Any

import msgspec
import redis
from redis import sentinel as redis_sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from ownerserve.kv.addresses import parse_address
from ownerserve.kv.errors import InvalidInput, PeerLost

SCHEMES = ("valkey", "redis", "sentinel")
SYNTAX = "write valkey://HOST:PORT[,HOST:PORT] or sentinel://HOST:PORT/NAME"


class ValkeySource(msgspec.Struct, frozen=True):
    """A source says where the Valkey memory is. `name`: Sentinel's name of it, or the number of the
    database.
    """

    scheme: str
    addresses: tuple[tuple[str, int], ...]
    name: str


def parse_source(url: str, *, field: str = "--backend") -> ValkeySource:
    """Return the source that `url` names. Raises InvalidInput that names `field` when it names no
    server.
    """
    scheme, separator, rest = url.partition("://")
    hosts, _, name = rest.partition("/")
    if scheme not in SCHEMES or not separator or (scheme == "sentinel" and not name):
        raise InvalidInput(field, f"{url[:80]!r} is no address", SYNTAX)
    addresses = [parse_address(one, field=field, mend=SYNTAX) for one in hosts.split(",")]
    if scheme != "sentinel" and name and not (name.isascii() and name.isdigit()):
        raise InvalidInput(field, f"database {name[:80]!r}", "use a number")
    return ValkeySource(scheme, tuple(addresses), name)


def find_primary(source: ValkeySource, meta_key: bytes, *, timeout_s: float) -> Any:
    """Return a connection to the primary. Raises PeerLost when none is found."""
    if source.scheme == "sentinel":
        return _asked_of_sentinel(source, timeout_s)
    best: tuple[int, Any] | None = None
    for host, port in source.addresses:
        client = _connect(host, port, database=int(source.name or 0), timeout_s=timeout_s)
        try:
            if client.execute_command("ROLE")[0] == b"master":
                ordinal = int(client.hget(meta_key, "ordinal") or 0)
                if best is None or ordinal > best[0]:
                    best = (ordinal, client)
                    continue
        except RedisError:
            pass
        client.close()
    if best is None:
        raise PeerLost(f"no primary answers at {_text(source)}")
    return best[1]


def _asked_of_sentinel(source: ValkeySource, timeout_s: float) -> Any:
    try:
        module: Any = redis_sentinel
        sentinel = module.Sentinel(list(source.addresses), socket_timeout=timeout_s)
        host, port = sentinel.discover_master(source.name)
    except RedisError as error:
        raise PeerLost(f"no sentinel knows {source.name} at {_text(source)}") from error
    return _connect(str(host), int(port), database=0, timeout_s=timeout_s)


def _connect(host: str, port: int, *, database: int, timeout_s: float) -> Any:
    # No retries below us: what was sent and not answered may be done, and only we know whether
    # asking again is harmless.
    return redis.Redis(
        host=host,
        port=port,
        db=database,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        single_connection_client=True,
    )


def _text(source: ValkeySource) -> str:
    return ", ".join(f"{host}:{port}" for host, port in source.addresses)
