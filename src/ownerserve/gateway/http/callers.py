"""Callers are who asks: told apart by the key that a request brings, before anything else of it is
looked at.

Without a list of keys anybody is a caller, and equal keys are one tenant; the keys are the workers'
to judge. With a list nobody else is let in (401), and a tenant's salt parts what engines keep of
its prompts from what they keep of others'.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping
from functools import lru_cache
from http import HTTPStatus
from typing import Protocol

import msgspec

from ownerserve.gateway.http.replies import Rejected
from ownerserve.router.entry.terms import NO_TERMS, TenantTerms
from ownerserve.router.requests.identity import tenant_of

_BEARER = b"bearer "
_DOMAIN = b"ownerserve/tenant-salt/1"


class Salting(msgspec.Struct, frozen=True):
    """A salting makes the salts of one tenant, or of all tenants of one share group, by the fleet's
    `secret`. Its repr shows none of it."""

    secret: bytes
    shared_by: str

    def salt(self, own: str) -> str:
        """Return the salt of a request: 64 hex digits. A client's `own` salt parts its prompts
        further, and never joins them to another tenant's."""
        return (_salt if own else _kept_salt)(self.secret, self.shared_by, own)

    def __repr__(self) -> str:
        return f"Salting({self.shared_by!r})"


def _salt(secret: bytes, shared_by: str, own: str) -> str:
    parts = (_DOMAIN, shared_by.encode(), own.encode("utf-8", "surrogatepass"))
    return hmac.digest(secret, b"\0".join(parts), "sha256").hex()


_kept_salt = lru_cache(1024)(_salt)


class Caller(msgspec.Struct, frozen=True):
    """A caller is a tenant: sessions of two never meet. `salting` None: what engines keep is parted
    by clients' own salts alone. `canary_share`: of its sessions; None: what the gateway has for
    all. `terms`: what it may take."""

    tenant: str
    salting: Salting | None = None
    canary_share: float | None = None
    terms: TenantTerms = NO_TERMS


class Callers(Protocol):
    """Callers say who brings a key."""

    def of(self, headers: Mapping[bytes, bytes]) -> Caller:
        """Return the caller by a request's lower-case headers. Raises Rejected for who is none."""
        ...


class Anybody:
    """Anybody is let in: who brings the same key is the same tenant."""

    def of(self, headers: Mapping[bytes, bytes]) -> Caller:
        """Return the tenant of the key, or of those who bring none."""
        return Caller(tenant_of(headers.get(b"authorization") or headers.get(b"x-api-key")))


class KeyedCallers:
    """Keyed callers are those whose keys are in a list, by the SHA-256 of each. What a request
    brings is compared with all of them, each in constant time."""

    def __init__(self, by_digest: Mapping[bytes, Caller]) -> None:
        self._keys = tuple(by_digest.items())

    @property
    def tenants(self) -> dict[str, Caller]:
        """The callers by their tenants' names."""
        return {caller.tenant: caller for _, caller in self._keys}

    def __eq__(self, other: object) -> bool:
        """Say whether both let the same callers in by the same keys."""
        return isinstance(other, KeyedCallers) and dict(self._keys) == dict(other._keys)

    def __hash__(self) -> int:
        return hash(frozenset(self._keys))

    def changed(self, change: Callable[[Caller], Caller]) -> KeyedCallers:
        """Return these callers by the same keys, each as `change` makes it."""
        return KeyedCallers({digest: change(caller) for digest, caller in self._keys})

    def of(self, headers: Mapping[bytes, bytes]) -> Caller:
        """Return the caller whose key the request brings, as `Authorization: Bearer` or
        `x-api-key`. Raises Rejected (401)."""
        told = digest_of(_key_in(headers))
        found: Caller | None = None
        for digest, caller in self._keys:
            if hmac.compare_digest(digest, told):
                found = caller
        if found is None:
            raise Rejected(
                HTTPStatus.UNAUTHORIZED,
                "invalid_api_key",
                "authorization: no key that this gateway knows;"
                " send `Authorization: Bearer KEY` or `x-api-key: KEY`",
            )
        return found


class ChangingCallers:
    """Changing callers are those of a list that may be replaced: who reads requests asks for the
    list of now, also on a connection that was opened under an earlier one."""

    def __init__(self, callers: Callers) -> None:
        self.now = callers

    def of(self, headers: Mapping[bytes, bytes]) -> Caller:
        """Return the caller by a request's lower-case headers. Raises Rejected for who is none."""
        return self.now.of(headers)


def digest_of(key: bytes) -> bytes:
    """Return what is kept of a key."""
    return hashlib.sha256(key).digest()


def _key_in(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the key that a request brings; empty when it brings none."""
    told = headers.get(b"authorization")
    if told is None:
        return headers.get(b"x-api-key", b"").strip()
    return told[len(_BEARER) :].strip() if told[: len(_BEARER)].lower() == _BEARER else b""
