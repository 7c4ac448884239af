"""Tenants are told apart by vLLM's `cache_salt`: each salt's state bears a name that only this
store can make.

Owns the store's salt secret, read or made at start: STORE/salt.key, 32 random bytes, mode 0600.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ownerserve.kv.prefix import SALT_BYTES, tenant_salt

log = logging.getLogger("vllm.ownerserve")

SECRET_FILE = "salt.key"


class Tenants:
    """`Tenants` makes the salts of a store's tenants. `secret` None: salted requests have no name
    here."""

    def __init__(self, secret: bytes | None) -> None:
        self._secret = secret

    @classmethod
    def of(cls, store: Path) -> Tenants:
        """Return the tenants of a store; they have no names where its secret can't be read or
        made."""
        path = store / SECRET_FILE
        try:
            store.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                _write_once(path, os.urandom(SALT_BYTES))
            secret = path.read_bytes()
        except OSError as error:
            log.warning("%s; requests with a cache_salt are bypassed", error)
            return cls(None)
        return cls(secret)

    def salt(self, cache_salt: str | None) -> bytes | None:
        """Return the tenant's salt; empty for a request without a `cache_salt`, None where it can't
        be made."""
        if not cache_salt:
            return b""
        return None if self._secret is None else tenant_salt(self._secret, cache_salt)


def _write_once(path: Path, secret: bytes) -> None:
    """Write the secret unless there is one. Two engines may start at once: both end up with the
    first one's."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(partial, path)
    except FileExistsError:
        pass
    finally:
        partial.unlink()
