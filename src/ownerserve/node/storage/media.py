"""An operator's words name the media of a node beside its device, and where a write goes.

Reads them and opens a shared medium; holds nothing.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

from ownerserve.kv.clock import Clock
from ownerserve.kv.errors import InvalidInput
from ownerserve.store.format.seal import KEY_BYTES, Keys
from ownerserve.store.tiers import mooncake
from ownerserve.store.tiers.blobs import Backpressure, Blobs, DirectoryBlobs
from ownerserve.store.tiers.placement import OnEviction, WriteBack, WritePolicy, WriteThrough
from ownerserve.store.tiers.remote import RemoteTier
from ownerserve.store.tiers.s3 import S3Blobs

TIERS = ("memory", "disk", "remote")
"""Fastest first."""
DEFAULT_WRITE = "write-through"
AGREE_S = 5.0
"""How long a medium that is opened has to say which key it is sealed with."""


def write_policy(text: str, tiers: Sequence[str] = TIERS) -> WritePolicy:
    """Return the policy that `text` names over `tiers`, fastest first: `on-eviction`,
    `write-back[:TIER]` or `write-through[:TIER]`.

    Without a tier, and where neither it nor a lower one is there, the lowest is meant. Raises
    InvalidInput for other words.
    """
    name, colon, tier = text.partition(":")
    if colon and tier not in TIERS:
        raise InvalidInput("write", f"{text!r} names no tier", f"use {', '.join(TIERS)}")
    floor = TIERS.index(tier or TIERS[-1])
    lowest = max(len(tiers) - 1, 0)
    level = next((n for n, here in enumerate(tiers) if TIERS.index(here) >= floor), lowest)
    match name:
        case "write-through":
            return WriteThrough(level)
        case "write-back":
            return WriteBack(level)
        case "on-eviction" if not colon:
            return OnEviction()
    mend = "use on-eviction, write-back[:TIER] or write-through[:TIER]"
    raise InvalidInput("write", f"{text!r} is no way to write", mend)


def open_remote(where: str, clock: Clock, key_file: Path | None = None) -> RemoteTier:
    """Open the shared medium at a directory, `s3://BUCKET/PREFIX` or `mooncake://NAMESPACE`.

    With the key in `key_file`, the same for all who share the medium, every record there bears a
    MAC, and tenants' records may lie there. Without one it keeps what belongs to no tenant, which
    whoever can write the medium can forge, and refuses the rest. Raises InvalidInput for what names
    no medium and for a key that is not the medium's, OSError for a medium that can't be used.
    """
    keys = Keys() if key_file is None else Keys(_key(key_file))
    tier = RemoteTier("remote", _blobs(where), clock=clock, keys=keys)
    refused: list[InvalidInput] = []
    asking = Thread(target=_agree, args=(tier, refused), name="store-key", daemon=True)
    asking.start()
    asking.join(AGREE_S)
    if refused:
        raise refused[0]
    return tier


def _agree(tier: RemoteTier, refused: list[InvalidInput]) -> None:
    try:
        tier.agree()
    except InvalidInput as error:
        refused.append(error)
    except (OSError, Backpressure):
        pass  # out of reach now: the tier asks again before it is used


def _key(path: Path) -> bytes:
    try:
        key, mode = path.read_bytes(), path.stat().st_mode
    except OSError as error:
        mend = "name a file made by `ownerserve store new-key FILE`"
        raise InvalidInput("remote-key-file", str(error), mend) from error
    if len(key) != KEY_BYTES:
        problem = f"{path} has {len(key)} bytes"
        raise InvalidInput("remote-key-file", problem, f"give {KEY_BYTES} random bytes")
    if mode & stat.S_IRWXO:
        problem = f"everybody may use {path}"
        raise InvalidInput("remote-key-file", problem, f"chmod 600 {path}")
    return key


def _blobs(where: str) -> Blobs:
    scheme, found, rest = where.partition("://")
    if not found:
        return DirectoryBlobs(Path(where))
    name, _, prefix = rest.partition("/")
    match scheme:
        case "s3" if name:
            return S3Blobs(name, prefix)
        case "mooncake" if name and not prefix:
            return mooncake.set_up(name)
    mend = "name a directory, s3://BUCKET/PREFIX or mooncake://NAMESPACE"
    raise InvalidInput("remote", f"{where!r}", mend)
