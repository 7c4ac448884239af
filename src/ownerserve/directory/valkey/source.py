"""A source says where the Valkey memory is and how it is reached, in one URL without a secret.

    valkey://[USER@]HOST:PORT[,HOST:PORT...][/DB][?...]      of several primaries: highest term
    sentinel://[USER@]HOST:PORT[,HOST:PORT...]/NAME[?...]    the primary that Sentinel names
    valkeys://, sentinels://                                 the same over TLS

| after the ? | is |
|---|---|
| password-file | the password, alone in a file; without it OWNERSERVE_VALKEY_PASSWORD, if set |
| ca-file | PEM certificates that are believed, beside the system's |
| cert-file, key-file | who we are, where the server asks for certificates |
| sentinel-user, sentinel-password-file | for Sentinels that ask; never the primary's own |

A password in the URL is refused, and not shown: a command line is read by all of a machine.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import parse_qsl, unquote

import msgspec

from ownerserve.kv.addresses import parse_address
from ownerserve.kv.errors import InvalidInput

SCHEMES = ("valkey", "redis", "sentinel")
TLS_SCHEMES = {"valkeys": "valkey", "rediss": "redis", "sentinels": "sentinel"}
SYNTAX = "write valkey://HOST:PORT[,HOST:PORT] or sentinel://HOST:PORT/NAME"
PASSWORD_VARIABLE = "OWNERSERVE_VALKEY_PASSWORD"
PASSWORD_MAX_CHARACTERS = 4096
_OPTIONS = ("password-file", "ca-file", "cert-file", "key-file", "sentinel-user",
            "sentinel-password-file")  # fmt: skip


class ValkeySource(msgspec.Struct, frozen=True):
    """A source says where the Valkey memory is. `name`: Sentinel's name of it, or the number of the
    database. It holds no secret: passwords are read when a connection is made.
    """

    scheme: str
    addresses: tuple[tuple[str, int], ...]
    name: str
    is_tls: bool = False
    user: str | None = None
    password_file: Path | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    sentinel_user: str | None = None
    sentinel_password_file: Path | None = None
    field: str = "--backend"
    """What errors name."""

    def password(self) -> str | None:
        """Read the password of now: a file that was changed is read anew. Raises InvalidInput,
        which never shows it."""
        if self.password_file is not None:
            return _read_password(self.password_file, field=self.field)
        return os.environ.get(PASSWORD_VARIABLE) or None

    def check_files(self) -> None:
        """Raise InvalidInput for a certificate's file that can't be read."""
        for path in (self.ca_file, self.cert_file, self.key_file):
            if path is not None:
                try:
                    path.open("rb").close()
                except OSError as error:
                    problem = f"{path}: {error.strerror}"
                    raise InvalidInput(self.field, problem, "name a readable PEM file") from error

    def sentinel_password(self) -> str | None:
        """Read the password for Sentinel. Raises InvalidInput, which never shows it."""
        path = self.sentinel_password_file
        return None if path is None else _read_password(path, field=self.field)


def shown(url: str) -> str:
    """Return a URL for an error: without what stands before "@", which may be a secret."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    _, at, place = rest.rpartition("@")
    return f"{scheme}{separator}{'...@' if at else ''}{place}"[:120]


def parse_source(url: str, *, field: str = "--backend") -> ValkeySource:
    """Return the source that `url` names. Raises InvalidInput that names `field` when it names no
    server, or has a password in it; a password is shown in none.
    """
    given, separator, rest = url.partition("://")
    scheme = TLS_SCHEMES.get(given, given)
    before, at, behind = rest.partition("@")
    user, rest = (before, behind) if at else ("", rest)
    place, _, query = rest.partition("?")
    hosts, _, name = place.partition("/")
    if ":" in user or "password" in {key for key, _ in parse_qsl(query)}:
        mend = f"put it into a file, ?password-file=FILE (%40 for an @) or into {PASSWORD_VARIABLE}"
        raise InvalidInput(field, "has a password in it, which all of a machine may read", mend)
    if scheme not in SCHEMES or not separator or (scheme == "sentinel" and not name):
        raise InvalidInput(field, f"{shown(url)!r} is no address", SYNTAX)
    addresses = tuple(parse_address(one, field=field, mend=SYNTAX) for one in hosts.split(","))
    if scheme != "sentinel" and name and not (name.isascii() and name.isdigit()):
        raise InvalidInput(field, f"database {name[:80]!r}", "use a number")
    options = _options(query, field=field)
    is_tls = given in TLS_SCHEMES
    if not is_tls and {"ca-file", "cert-file", "key-file"} & options.keys():
        mend = f"write {given}s:// for TLS"
        raise InvalidInput(field, "has certificates and speaks no TLS", mend)
    files = {
        name.replace("-", "_"): Path(options[name]) for name in _OPTIONS[:4] if name in options
    }
    sentinel_file = options.get("sentinel-password-file")
    return ValkeySource(
        scheme,
        addresses,
        name,
        is_tls=is_tls,
        user=unquote(user) or None,
        sentinel_user=options.get("sentinel-user"),
        sentinel_password_file=None if sentinel_file is None else Path(sentinel_file),
        field=field,
        **files,
    )


def _options(query: str, *, field: str) -> dict[str, str]:
    """Return what stands behind the "?". Raises InvalidInput for a name that is none."""
    found: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in _OPTIONS or not value or name in found:
            mend = f"say each once, of {', '.join(_OPTIONS)}"
            raise InvalidInput(field, f"{name[:40]!r} behind its ?", mend)
        found[name] = value
    return found


def _read_password(path: Path, *, field: str) -> str:
    mend = "put the password alone into it"
    try:
        password = path.read_text().removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"{path}: {getattr(error, 'strerror', None) or 'is no text'}"
        raise InvalidInput(field, problem, mend) from error
    if not password or not password.isprintable() or len(password) > PASSWORD_MAX_CHARACTERS:
        raise InvalidInput(field, f"{path} holds no password", mend)
    return password
