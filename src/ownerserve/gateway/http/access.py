"""How workers are reached: the key that is presented to them, and whose certificates are believed.

Owns both for one gateway. An operator whose workers want a key gives it here once; it goes with
every probe and every turn in place of the client's own, which then only tells tenants apart.
"""

from __future__ import annotations

import ssl
from functools import cache
from pathlib import Path

import msgspec

from ownerserve.kv.errors import InvalidInput

KEY_MAX_CHARACTERS = 4096


class Access(msgspec.Struct, frozen=True):
    """`line` is a whole header line, or nothing; `tls` is for workers at an https address."""

    line: bytes
    tls: ssl.SSLContext

    def __repr__(self) -> str:
        """Nothing of the line, which has the key in it."""
        return f"Access({'with' if self.line else 'without'} a key)"


NOTHING: frozenset[bytes] = frozenset()
CREDENTIALS = frozenset({b"authorization", b"x-api-key"})
"""A client's headers that do not go on to a worker which wants the operator's key."""


def open_access(key: str | None, ca_file: Path | None) -> Access:
    """With the system's trust store and the authorities in `ca_file`. Raises InvalidInput."""
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
    """The context that trusts what the system trusts; reading its store takes 25 ms."""
    return _new_context()


def read_key(path: Path) -> str:
    """The key in a file of one line. Raises InvalidInput, which never shows it."""
    mend = "put the key alone into it, in printable ASCII"
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        problem = f"{path}: {error.__class__.__name__}"
        raise InvalidInput("worker-key-file", problem, mend) from error
    if not key or not key.isprintable() or " " in key or len(key) > KEY_MAX_CHARACTERS:
        raise InvalidInput("worker-key-file", f"{path} holds no key", mend)
    return key
