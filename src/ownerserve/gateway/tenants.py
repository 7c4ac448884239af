"""The tenants file says which keys are let in, and whose they are: TOML.

    secret = "..."              # 32 characters and more; the same at all gateways of a fleet

    [tenants.acme]
    keys = ["sk-...", "sha256:..."]

    [tenants.globex]
    keys = ["sk-..."]
    share = "partners"          # with all tenants that say the same, and nobody else
    canary_share = 0.0          # of its sessions, in place of the gateway's --canary-share
    weight = 3                  # its share of a full fleet, beside others' 1
    class = "batch"             # all its turns are background work
    requests_per_minute = 600
    tokens_per_minute = 2_000_000

    [priorities]                # a tenant's classes share what it has
    inside = 16                 # later turns of its sessions, sub-agents, forks
    new = 4                     # first turns
    batch = 1

Owns nothing but the reading. No error shows a key or the secret.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from ownerserve.gateway.http.callers import Caller, KeyedCallers, Salting, digest_of
from ownerserve.kv.errors import UNREADABLE, InvalidInput
from ownerserve.router.entry.terms import Priorities, TenantTerms

OPTION = "--tenants-file"
FILE_BYTES_MAX = 4 << 20
KEY_MIN = 16
SECRET_MIN_CHARACTERS = 32
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


class _Tenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[str]
    share: str | None = None
    canary_share: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    weight: float = 1.0
    class_: Literal["batch", "interactive"] = msgspec.field(name="class", default="interactive")
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    secret: str
    tenants: dict[str, _Tenant]
    priorities: Priorities = Priorities()


def read_tenants(path: Path) -> KeyedCallers:
    """Return the callers that the file names. Raises InvalidInput that names the field at fault."""
    found = _read(path)
    if len(found.secret) < SECRET_MIN_CHARACTERS:
        problem = f"is shorter than {SECRET_MIN_CHARACTERS} characters"
        raise _wrong("secret", problem, "draw one: openssl rand -hex 32")
    if not found.tenants:
        raise _wrong("tenants", "names nobody", "add [tenants.NAME] with keys")
    secret, callers = found.secret.encode(), dict[bytes, Caller]()
    for name, tenant in found.tenants.items():
        salting = Salting(secret, _shared_by(name, tenant))
        terms = _terms(name, tenant, found.priorities)
        caller = Caller(name, salting, tenant.canary_share, terms)
        for field, digest in _digests(name, tenant):
            if digest in callers:
                problem = f"is {callers[digest].tenant}'s too"
                raise _wrong(field, problem, "give each tenant keys of its own")
            callers[digest] = caller
    return KeyedCallers(callers)


def _read(path: Path) -> _File:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidInput(OPTION, f"{path}: {error.strerror}", "name a readable file") from error
    if mode & stat.S_IRWXO:
        problem = f"{path} can be read or written by everybody (mode {stat.S_IMODE(mode):04o})"
        raise InvalidInput(
            OPTION, problem, "chmod 600 it, and change the keys if others were there"
        )
    if len(data) > FILE_BYTES_MAX:
        raise InvalidInput(OPTION, f"{path} is over {FILE_BYTES_MAX} bytes", "list fewer keys")
    try:
        return msgspec.toml.decode(data, type=_File)
    except InvalidInput as error:
        raise _wrong(error.field, error.problem, error.mend) from None
    except msgspec.ValidationError as error:  # it names fields and types, no values
        raise InvalidInput(OPTION, str(error), "see docs/gateway.md for its form") from None
    except (*UNREADABLE, ValueError) as error:
        line = re.search(r"line \d+", str(error))
        place = f"{path}, {line[0]}" if line else str(path)
        raise InvalidInput(
            OPTION, f"{place}: no TOML", "see docs/gateway.md for its form"
        ) from None


def _shared_by(name: str, tenant: _Tenant) -> str:
    """Return by whom a tenant's cached state is shared: itself, unless it is in a group."""
    for field, given in ((f"tenants.{name}", name), (f"tenants.{name}.share", tenant.share)):
        if given is not None and not _NAME.fullmatch(given):
            raise _wrong(field, "is no name", "use 1 to 64 letters, digits, `.`, `_` and `-`")
    return f"tenant/{name}" if tenant.share is None else f"group/{tenant.share}"


def _terms(name: str, tenant: _Tenant, priorities: Priorities) -> TenantTerms:
    """Return what a tenant may take. Raises InvalidInput for a number that is none of that."""
    try:
        return TenantTerms(
            name=name,
            weight=tenant.weight,
            is_batch=tenant.class_ == "batch",
            priorities=priorities,
            requests_per_minute=tenant.requests_per_minute,
            tokens_per_minute=tenant.tokens_per_minute,
        )
    except InvalidInput as error:
        field = f"tenants.{name}.{error.field}"
        raise _wrong(field, f"is {error.problem}", error.mend) from None


def _digests(name: str, tenant: _Tenant) -> Iterator[tuple[str, bytes]]:
    """Yield each key's field and digest."""
    if not tenant.keys:
        raise _wrong(f"tenants.{name}.keys", "is empty", "give it a key, or leave the tenant out")
    for number, key in enumerate(tenant.keys):
        field = f"tenants.{name}.keys[{number}]"
        if key.startswith("sha256:"):
            told = _DIGEST.fullmatch(key)
            if told is None:
                raise _wrong(field, "is no digest", "write sha256: and 64 hex digits")
            yield field, bytes.fromhex(told[1])
        elif len(key) < KEY_MIN or not key.isascii() or not key.isprintable() or " " in key:
            mend = f"use {KEY_MIN} and more printable ASCII characters without blanks"
            raise _wrong(field, "is no key", mend)
        else:
            yield field, digest_of(key.encode("ascii"))


def _wrong(field: str, problem: str, mend: str) -> InvalidInput:
    return InvalidInput(f"{OPTION}: {field}", problem, mend)
