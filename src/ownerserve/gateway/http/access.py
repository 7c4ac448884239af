"""This module says how workers are reached: where, with which key, and whose certificates are
believed.

Owns key and certificates for one gateway. An operator whose workers want a key gives it here once;
it goes with every probe and every turn in place of the client's own, which then only tells tenants
apart.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from ownerserve.kv.addresses import parse_address
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.ids import WorkerId
from ownerserve.kv.listening import LOOPBACK, UNIX, parse_unix
from ownerserve.router.messages import Arm
from ownerserve.router.worker import WorkerRole

KEY_MAX_CHARACTERS = 4096


class Address(msgspec.Struct, frozen=True):
    """An address is where a worker listens. Its id is "host:port", or "unix:/path".

    `models`: what it serves, by its operator's word; none: what it says itself. `certified`: the
    name that an https worker's certificate must have, where that is not `host`. `path`: a Unix
    socket of this machine, in place of a port. `role`: which part of a turn it takes, by its
    operator's word, who vouches that its engine sends and takes state; None: as it says itself.
    `arm`: whose sessions run there, where the canary has workers of its own.
    """

    host: str
    port: int
    scheme: str = "http"
    models: tuple[str, ...] = ()
    certified: str | None = None
    path: str | None = None
    role: WorkerRole | None = None
    arm: Arm = Arm.MAIN

    @property
    def worker(self) -> WorkerId:
        """`worker` is the worker's name in this gateway."""
        return WorkerId(f"{self.host}:{self.port}" if self.path is None else f"unix:{self.path}")

    @property
    def url(self) -> str:
        """`url` names the worker as its operator does."""
        if self.path is not None:
            return f"{UNIX}{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


async def connected(
    address: Address, tls: ssl.SSLContext | None, make: Callable[[], asyncio.Protocol]
) -> asyncio.Transport:
    """Connect a protocol that `make` makes to the worker there, and return its transport; `tls`
    counts for https alone. Raises OSError when there is no connection, ConnectionRefusedError when
    nobody listens."""
    loop = asyncio.get_running_loop()
    if address.path is not None:
        try:
            transport, _ = await loop.create_unix_connection(make, address.path)
        except FileNotFoundError as error:
            raise ConnectionRefusedError(error.errno, f"{address.path} is not there") from error
        return transport
    is_tls = address.scheme == "https"
    try:
        transport, _ = await loop.create_connection(
            make,
            address.host,
            address.port,
            ssl=tls if is_tls else None,
            server_hostname=address.certified if is_tls else None,
        )
    except UnicodeError as error:
        raise OSError(f"{address.host!r} is no host: {error}") from error
    return transport


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
    """Return the address in "http://host:port", "https://host:port" or "unix:///path", with the
    models that the operator says it serves after "=" ("http://host:port=model-a,model-b") and its
    role before "+" ("prefill+http://host:port"); "http://host:port#canary" is the canary's. Raises
    InvalidInput."""
    mend = "write it like http://127.0.0.1:8001, or http://127.0.0.1:8001=model-a,model-b"
    place, terms = split_terms(url, field="worker", mend=mend)
    if place.startswith(UNIX):
        return terms.at(LOOPBACK, 0, path=str(parse_unix(place, field="worker")))
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
    return terms.at(parts.hostname, port, scheme=parts.scheme)


class WorkerTerms(msgspec.Struct, frozen=True):
    """A worker's terms are what an operator says of a worker beside its place."""

    models: tuple[str, ...]
    role: WorkerRole | None
    arm: Arm

    def at(
        self,
        host: str,
        port: int,
        *,
        scheme: str = "http",
        certified: str | None = None,
        path: str | None = None,
    ) -> Address:
        """Return the address of a worker at this place, of which these terms are said."""
        return Address(
            host, port, scheme, self.models, certified, path, role=self.role, arm=self.arm
        )


def split_terms(text: str, *, field: str, mend: str) -> tuple[str, WorkerTerms]:
    """Return the place in "role+place#arm=model,model", and the terms around it. Raises
    InvalidInput naming `field`."""
    place, assigned, names = text.partition("=")
    said, plus, rest = place.partition("+")
    role = None
    if plus and "/" not in said:
        role, place = parse_role(said), rest
    models = tuple(name.strip() for name in names.split(",")) if assigned else ()
    if not all(models):
        raise InvalidInput(field, f"{text[:200]!r} assigns no model", mend)
    place, _, fragment = place.partition("#")
    if fragment not in ("", *Arm):
        mend = "write #canary for a worker of the canary's, or nothing"
        raise InvalidInput(field, f"{text[:200]!r}: there is no arm {fragment[:80]!r}", mend)
    return place, WorkerTerms(models, role, Arm(fragment or Arm.MAIN))


def parse_role(said: str) -> WorkerRole:
    """Return the role that an operator gives a worker. Raises InvalidInput."""
    try:
        return WorkerRole(said)
    except ValueError as error:
        roles = ", ".join(role.value for role in WorkerRole)
        mend = f"write one of {roles}, like prefill+http://127.0.0.1:8001"
        raise InvalidInput("worker", f"{said[:80]!r} is no role", mend) from error


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
