"""This module says how workers are reached: where, with which key, and whose certificates are
believed.

Owns key and certificates for one gateway. An operator whose workers want a key gives it here once;
it goes with every probe and every turn in place of the client's own, which then only tells tenants
apart.
"""

from __future__ import annotations

import ssl
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from ownerserve.kv.addresses import parse_address
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import WorkerId

KEY_MAX_CHARACTERS = 4096


class Address(msgspec.Struct, frozen=True):
    """An address is where a worker listens. Its id is "host:port".

    `models`: what it serves, by its operator's word; none: what it says itself.
    """

    host: str
    port: int
    scheme: str = "http"
    models: tuple[str, ...] = ()

    @property
    def worker(self) -> WorkerId:
        """`worker` is the worker's name in this gateway: host:port."""
        return WorkerId(f"{self.host}:{self.port}")


class Access(msgspec.Struct, frozen=True):
    """An access is what goes with each request to a worker: `line`, a whole header line or nothing,
    and `tls` for workers at an https address."""

    line: bytes
    tls: ssl.SSLContext

    def __repr__(self) -> str:
        """Show nothing of the line, which has the key in it."""
        return f"Access({'with' if self.line else 'without'} a key)"


CREDENTIALS = frozenset({b"authorization", b"x-api-key"})
"""A client's headers that do not go on to a worker which wants the operator's key."""


def open_access(key: str | None, ca_file: Path | None) -> Access:
    """Make the access with `key`, the system's trust store and the authorities in `ca_file`. Raises
    InvalidInput for a file that can't be read."""
    if ca_file is None:
        tls = _system_trust()
    else:
        tls = _new_context()
        try:
            tls.load_verify_locations(cafile=ca_file)
        except OSError as error:  # ssl.SSLError too
            mend = "name a readable PEM file of certificates"
            raise InvalidInput("worker-ca-file", f"{ca_file}: {error}", mend) from error
    line = b"" if key is None else b"authorization: Bearer %b\r\n" % key.encode("ascii")
    return Access(line, tls)


def _new_context() -> ssl.SSLContext:
    tls = ssl.create_default_context()
    tls.set_alpn_protocols(["http/1.1"])
    return tls


@cache
def _system_trust() -> ssl.SSLContext:
    """Return the context that trusts what the system trusts, made once: reading its store takes 25
    ms."""
    return _new_context()


def read_key(path: Path, *, field: str) -> str:
    """Return the key in a file of one line, which the option `field` names. Raises InvalidInput,
    which never shows it."""
    mend = "put the key alone into it, in printable ASCII"
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        problem = f"{path}: {error.__class__.__name__}"
        raise InvalidInput(field, problem, mend) from error
    if not key or not key.isprintable() or " " in key or len(key) > KEY_MAX_CHARACTERS:
        raise InvalidInput(field, f"{path} holds no key", mend)
    return key


def parse_worker(url: str) -> Address:
    """Return the address in "http://host:port" or "https://host:port", with the models that the
    operator says it serves after "=": "http://host:port=model-a,model-b". Raises InvalidInput."""
    mend = "write it like http://127.0.0.1:8001, or http://127.0.0.1:8001=model-a,model-b"
    place, assigned, names = url.partition("=")
    models = tuple(name.strip() for name in names.split(","))
    if assigned and not all(models):
        raise InvalidInput("worker", f"{url!r} assigns no model", mend)
    try:
        parts = urlsplit(place)
        port = parts.port
    except ValueError as error:
        raise InvalidInput("worker", f"{url!r}: {error}", mend) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port is None:
        raise InvalidInput("worker", f"{url!r} is no http or https URL with a port", mend)
    if parts.path not in ("", "/") or parts.query:
        raise InvalidInput("worker", f"{url!r} has a path", mend)
    _check_host(place, parts.hostname, port)
    return Address(parts.hostname, port, parts.scheme, models if assigned else ())


def _check_host(place: str, host: str, port: int) -> None:
    """Raise InvalidInput for a host that no look-up takes: it would be asked for for ever."""
    mend = "write it like http://127.0.0.1:8001"
    if not place.isprintable() or " " in place:
        raise InvalidInput("worker", f"{place[:80]!r}: its host has a space or control in it", mend)
    try:
        name = host.encode("idna").decode("ascii")
    except UnicodeError as error:
        problem = f"{place[:80]!r}: its host has an empty part, or one over 63 characters"
        raise InvalidInput("worker", problem, mend) from error
    named = f"[{name.partition('%')[0]}]" if ":" in name else name
    parse_address(f"{named}:{port}", field="worker", mend=mend)
