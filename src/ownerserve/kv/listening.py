"""Listeners are the ports that processes of this project open: here is the table of all of them,
and the one door through which each is opened.

A listener is on loopback unless its host says otherwise, and off loopback only where something is
asked of whoever comes: keys, or the operator's word that the network is guarded (docs/ports.md).
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from enum import Enum
from pathlib import Path

import msgspec

from ownerserve.kv.addresses import is_loopback
from ownerserve.kv.errors import InvalidInput

LOOPBACK = "127.0.0.1"
FREE = 0
"""A default port that stands for any free one; the process says which it took."""


class ServicePort(msgspec.Struct, frozen=True, kw_only=True):
    """A service port is one kind of listener: the options that place it, its default port, and
    `opened_by`, what is to be given before it may be off loopback."""

    name: str
    host_option: str
    port_option: str
    port: int
    opened_by: str


GATEWAY = ServicePort(
    name="gateway",
    host_option="--host",
    port_option="--port",
    port=8000,
    opened_by="--tenants-file, or --allow-remote where a proxy in front asks for keys",
)
ADMIN = ServicePort(
    name="gateway's admin",
    host_option="--admin-host",
    port_option="--admin-port",
    port=8900,
    opened_by="--admin-key-file",
)
DIRECTORY = ServicePort(
    name="directory",
    host_option="--host",
    port_option="--port",
    port=7700,
    opened_by="--curve-key-file",
)
WORKER = ServicePort(
    name="worker",
    host_option="--host",
    port_option="--port",
    port=8100,
    opened_by="--allow-remote, on a network where gateways alone reach it",
)
RPC = ServicePort(
    name="rpc",
    host_option="--rpc-host",
    port_option="--rpc-port",
    port=FREE,
    opened_by="--curve-key-file",
)
TRANSFER = ServicePort(
    name="transfer",
    host_option="--transfer-host",
    port_option="--transfer-port",
    port=FREE,
    opened_by="--curve-key-file",
)
LISTENERS = (GATEWAY, ADMIN, DIRECTORY, WORKER, RPC, TRANSFER)


class Protection(Enum):
    """A protection says what is asked of whoever reaches a listener."""

    OPEN = "open"
    """Nothing is asked: on loopback only."""
    KEYED = "keyed"
    """Nobody is answered without a key."""
    VOUCHED = "vouched"
    """Nothing is asked; the operator vouches for the network."""


def check_reach(listener: ServicePort, host: str, protection: Protection) -> None:
    """Raise InvalidInput for a host that others reach while nothing is asked of them."""
    if protection is Protection.OPEN and not is_loopback(host):
        problem = f"{host or 'every address'} is reachable from outside, and nothing is asked there"
        raise InvalidInput(
            listener.host_option, problem, f"use {LOOPBACK}, or give {listener.opened_by}"
        )


def open_listener(
    listener: ServicePort, host: str, port: int, *, protection: Protection
) -> socket.socket:
    """Return a bound socket, which takes connections once its server listens. Raises InvalidInput
    for a host that `check_reach` refuses, or a port that can't be had."""
    check_reach(listener, host, protection)
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        mend = f"use an address of this machine, like {LOOPBACK}"
        raise InvalidInput(listener.host_option, f"{host}: {error.strerror}", mend) from error
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(place)
    except OSError as error:
        bound.close()
        at = f"{host}:{port}: {error.strerror}"
        option = f"{listener.host_option}/{listener.port_option}"
        raise InvalidInput(option, at, "use a free port, or 0 for any") from error
    return bound


UNIX = "unix://"
"""What a place begins with that is a socket's file on this machine."""
OWN_MODE = 0o600
"""The user who runs the process, and nobody else, may connect to its Unix socket."""


def parse_unix(place: str, *, field: str) -> Path:
    """Return the file in "unix:///run/x.sock". Raises InvalidInput naming `field`."""
    mend = "write it like unix:///run/ownerserve/gateway.sock"
    text = place.removeprefix(UNIX)
    if not place.startswith(UNIX) or not text.startswith("/") or not text.isprintable():
        raise InvalidInput(field, f"{place[:80]!r} is no absolute path of a Unix socket", mend)
    if len(os.fsencode(text)) > PATH_BYTES_MAX:
        raise InvalidInput(field, f"{place[:80]}... is over {PATH_BYTES_MAX} bytes", mend)
    return Path(text)


PATH_BYTES_MAX = 107


def open_unix_listener(path: Path, mode: int, *, field: str) -> socket.socket:
    """Return a socket that is bound to a file with the permissions `mode`: nobody can connect
    before its server listens. Raises InvalidInput naming `field`, also where somebody serves there;
    what a dead server left is taken away."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _take_away_what_is_dead(path, field=field)
        bound.bind(str(path))
        path.chmod(mode)
    except OSError as error:
        bound.close()
        problem = f"{path}: {error.strerror or error}"
        raise InvalidInput(field, problem, "name a file in a folder of your own") from error
    except InvalidInput:
        bound.close()
        raise
    return bound


def _take_away_what_is_dead(path: Path, *, field: str) -> None:
    """Remove a socket's file at which nobody listens. Raises InvalidInput for what is alive, or no
    socket."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise InvalidInput(field, f"{path} is there, and no socket", "name another file")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise InvalidInput(field, f"{path}: somebody serves there", "stop it, or name another file")


def close_listener(bound: socket.socket) -> None:
    """Close a listener; a Unix socket's file goes with it."""
    if bound.family == socket.AF_UNIX:
        with suppress(OSError):
            Path(bound.getsockname()).unlink(missing_ok=True)
    bound.close()
