"""A fleet has CURVE keys: who has their file is of the fleet; nobody else is answered or believed.

One file, two secrets. A server proves that it has the servers' one, a client the clients'; between
them all is encrypted and can't be changed unseen (CurveZMQ). Whoever has the file can be either:
it keeps strangers out, and does not tell the fleet's own processes apart.

An address says whether it wants keys: curve://HOST:PORT does, tcp://HOST:PORT does not.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator

from ownerserve.kv.addresses import KEYED, PLAIN
from ownerserve.kv.errors import UNREADABLE, InvalidInput

log = logging.getLogger("ownerserve.wire")

OPTION = "--curve-key-file"
MAKE = "make one with `ownerserve directory keys --out FILE`"
FILE_BYTES_MAX = 4096
_DOMAIN = "ownerserve"
_WARNED_MAX = 1024
_ABOUT = """\
# A fleet's CURVE keys (docs/directory.md). Whoever has this file is of the fleet: keep it secret.
"""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    server_secret: str
    client_secret: str


class FleetKey:
    """A fleet's key is two CURVE pairs, the server's and the client's, in z85. Its repr shows none
    of them.
    """

    __slots__ = ("client_public", "client_secret", "server_public", "server_secret")

    def __init__(self, server_secret: bytes, client_secret: bytes) -> None:
        self.server_secret, self.client_secret = server_secret, client_secret
        self.server_public = zmq.curve_public(server_secret)
        self.client_public = zmq.curve_public(client_secret)


def read_fleet_key(path: Path, *, field: str = OPTION) -> FleetKey:
    """Return the keys in a file that `write_fleet_key` made. Raises InvalidInput naming `field`."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidInput(field, f"{path}: {error.strerror}", MAKE) from error
    if mode & stat.S_IRWXO:
        problem = f"{path} can be read or written by everybody (mode {stat.S_IMODE(mode):04o})"
        raise InvalidInput(field, problem, "chmod 600 it, and make a new one if others were there")
    try:
        found = msgspec.toml.decode(data, type=_File)
        return FleetKey(found.server_secret.encode(), found.client_secret.encode())
    except (*UNREADABLE, ValueError, zmq.ZMQError):
        problem = f"{path} holds no keys of a fleet"
        raise InvalidInput(field, problem, MAKE) from None  # its cause may show a secret


def write_fleet_key(path: Path, *, field: str) -> None:
    """Draw new keys into a new file that its owner alone may read. Raises InvalidInput naming
    `field`; a file that is there is never written over."""
    lines = [f'{name} = "{zmq.curve_keypair()[1].decode()}"\n' for name in _File.__struct_fields__]
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(_ABOUT + "".join(lines))
    except OSError as error:
        raise InvalidInput(field, f"{path}: {error.strerror}", "name another file") from error


def connect(
    client: zmq.Socket[bytes] | zmq.asyncio.Socket, address: str, key: FleetKey | None
) -> None:
    """Connect to a server by its address, with the keys that it wants. Raises InvalidInput when
    there are none, ZMQError for what is no address, and has closed the socket then."""
    try:
        if address.startswith(KEYED):
            _secure(client, address, key)
        client.setsockopt(zmq.IPV6, "[" in address)
        client.connect(PLAIN + address.removeprefix(KEYED).removeprefix(PLAIN))
    except (InvalidInput, zmq.ZMQError):
        client.close()
        raise


def _secure(
    client: zmq.Socket[bytes] | zmq.asyncio.Socket, address: str, key: FleetKey | None
) -> None:
    if key is None:
        raise InvalidInput(address, "wants the fleet's keys", f"give {OPTION}")
    client.curve_serverkey = key.server_public
    client.curve_publickey = key.client_public
    client.curve_secretkey = key.client_secret


class Guard:
    """A guard lets in who has the fleet's key, on sockets of a context of its own (ZeroMQ asks one
    guard a context).
    """

    def __init__(self, key: FleetKey) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._key = key
        self._warned: set[bytes] = set()
        self._thread = ThreadAuthenticator(self.context)
        self._thread.configure_curve_callback(_DOMAIN, self)
        self._thread.start()

    def secure(self, server: zmq.Socket[bytes]) -> None:
        """Make `server` ask for the fleet's key; to be called before it is bound."""
        server.curve_server = True
        server.curve_secretkey = self._key.server_secret
        server.curve_publickey = self._key.server_public
        server.zap_domain = _DOMAIN.encode()
        server.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer of ours nobody gets in

    def callback(self, domain: str, key: bytes) -> bool:
        """Tell the authenticator, which asks on its thread, whether the client with `key` is let
        in; a wrong key is logged once.
        """
        if key == self._key.client_public:
            return True
        if key not in self._warned and len(self._warned) < _WARNED_MAX:
            self._warned.add(key)
            log.warning("a client with another key (%s) is not let in", key.decode())
        return False

    def close(self) -> None:
        """Stop the authenticator and free the context; to be called after its sockets are
        closed.
        """
        self._thread.stop()
        self.context.destroy(linger=0)
