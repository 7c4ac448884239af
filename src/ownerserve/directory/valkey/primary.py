"""find_primary() finds the primary by one address, several, or a Sentinel that knows, and says in
one line why there is none.
"""

from __future__ import annotations

import ssl
from typing import Any

import redis
from redis import sentinel as redis_sentinel
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError
from redis.retry import Retry

from ownerserve.directory.valkey.source import PASSWORD_VARIABLE, ValkeySource
from ownerserve.kv.errors import InvalidInput, PeerLost

ACL_PAGE = "docs/directory.md has the rights that it needs"


class BackendRefused(PeerLost):
    """The operator must act: a server is there and will not have us. The message has the mend."""


def find_primary(source: ValkeySource, meta_key: bytes, *, timeout_s: float) -> Any:
    """Return a connection to the primary. Raises PeerLost when none is found, BackendRefused when
    one is that only an operator can open."""
    try:
        source.check_files()
        if source.scheme == "sentinel":
            return _asked_of_sentinel(source, timeout_s)
        return _asked_of_each(source, meta_key, timeout_s)
    except InvalidInput as error:  # a password's file
        raise BackendRefused(str(error)) from error


def _asked_of_each(source: ValkeySource, meta_key: bytes, timeout_s: float) -> Any:
    best: tuple[int, Any] | None = None
    why: PeerLost | None = None
    for host, port in source.addresses:
        client = None
        try:
            database = int(source.name or 0)
            client = _connect(source, host, port, database=database, timeout_s=timeout_s)
            if client.execute_command("ROLE")[0] == b"master":
                ordinal = int(client.hget(meta_key, "ordinal") or 0)
                if best is None or ordinal > best[0]:
                    best, client = (ordinal, client), None if best is None else best[1]
        except RedisError as error:
            found = explained(error, f"{host}:{port}")
            why = why if isinstance(why, BackendRefused) else found
        if client is not None:
            client.close()
    if best is not None:
        return best[1]
    if isinstance(why, BackendRefused):
        raise why
    cause = f": {why}{_hint(source)}" if why is not None else ""
    raise PeerLost(f"no primary answers at {_text(source)}{cause}")


def _asked_of_sentinel(source: ValkeySource, timeout_s: float) -> Any:
    options = _options(source, source.sentinel_user, source.sentinel_password(), timeout_s)
    try:
        module: Any = redis_sentinel
        sentinel = module.Sentinel(list(source.addresses), sentinel_kwargs=options)
        host, port = sentinel.discover_master(source.name)
    except RedisError as error:
        why = _why_silent(source, options)
        if isinstance(why, BackendRefused):
            raise why from error
        cause = "" if why is None else f": {why}{_hint(source)}"
        raise PeerLost(f"no sentinel knows {source.name} at {_text(source)}{cause}") from error
    try:
        return _connect(source, str(host), int(port), database=0, timeout_s=timeout_s)
    except RedisError as error:
        raise explained(error, f"{host}:{port}") from error


def _connect(source: ValkeySource, host: str, port: int, *, database: int, timeout_s: float) -> Any:
    options = _options(source, source.user, source.password(), timeout_s)
    return redis.Redis(host=host, port=port, db=database, single_connection_client=True, **options)


def _options(
    source: ValkeySource, user: str | None, password: str | None, timeout_s: float
) -> dict[str, Any]:
    # No retries below us: what was sent and not answered may be done, and only we know whether
    # asking again is harmless.
    options: dict[str, Any] = {
        "username": user,
        "password": password,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
    }
    if source.is_tls:
        options |= {
            "ssl": True,
            "ssl_cert_reqs": "required",
            "ssl_check_hostname": True,
            "ssl_min_version": ssl.TLSVersion.TLSv1_2,
            "ssl_ca_certs": None if source.ca_file is None else str(source.ca_file),
            "ssl_certfile": None if source.cert_file is None else str(source.cert_file),
            "ssl_keyfile": None if source.key_file is None else str(source.key_file),
        }
    return options


def _why_silent(source: ValkeySource, options: dict[str, Any]) -> PeerLost | None:
    """Return why a Sentinel can't be asked, first of what an operator must mend; None: all can."""
    found = None
    for host, port in source.addresses:
        try:
            with redis.Redis(host=host, port=port, **options) as client:
                client.ping()
        except RedisError as error:
            why = explained(error, f"{host}:{port}")
            if isinstance(why, BackendRefused):
                return why
            found = found or why
    return found


def _hint(source: ValkeySource) -> str:
    """Return what may be wrong where nothing comes back: each side waits for the other's first
    word."""
    if source.is_tls:
        return "; if it speaks no TLS write valkey://, sentinel://"
    return "; if it speaks TLS write valkeys://, sentinels://"


def explained(error: Exception, place: str) -> PeerLost:
    """Return what went wrong at `place` as one line: with the mend where an operator must act."""
    text = " ".join(str(error).split())[:300]
    if isinstance(error, NoPermissionError):
        return BackendRefused(f"valkey at {place}: {text}; {ACL_PAGE}")
    if isinstance(error, AuthenticationError) or text.startswith(("NOAUTH", "WRONGPASS")):
        mend = f"mend USER@ and ?password-file= of its URL, or {PASSWORD_VARIABLE}"
        return BackendRefused(f"valkey at {place} refuses the user or the password; {mend}")
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            mend = "name its authority in ?ca-file=, and the host as its certificate does"
            return BackendRefused(f"valkey at {place}: tls: {cause.verify_message}; {mend}")
        if isinstance(cause, ssl.SSLError):
            mend = "write valkey:// where it speaks none; ?cert-file=, ?key-file= where it asks"
            return BackendRefused(f"valkey at {place}: tls: {cause.reason or cause}; {mend}")
    return PeerLost(text or type(error).__name__)


def _causes(error: BaseException | None) -> list[BaseException]:
    """Return the error and what it came of, the nearest first."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _text(source: ValkeySource) -> str:
    return ", ".join(f"{host}:{port}" for host, port in source.addresses)
