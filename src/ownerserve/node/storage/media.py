"""An operator's words name the media of a node beside its device, and where a write goes.

Reads them and opens a shared medium; holds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ownerserve.kv.clock import Clock
from ownerserve.kv.errors import InvalidInput
from ownerserve.store.format.seal import Keys
from ownerserve.store.tiers import mooncake
from ownerserve.store.tiers.blobs import Blobs, DirectoryBlobs
from ownerserve.store.tiers.placement import OnEviction, WriteBack, WritePolicy, WriteThrough
from ownerserve.store.tiers.remote import RemoteTier
from ownerserve.store.tiers.s3 import S3Blobs

TIERS = ("memory", "disk", "remote")
"""Fastest first."""
DEFAULT_WRITE = "write-through"


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


def open_remote(where: str, clock: Clock) -> RemoteTier:
    """Open the shared medium at a directory, `s3://BUCKET/PREFIX` or `mooncake://NAMESPACE`.

    It has no key, so it keeps what belongs to no tenant and refuses the rest. Raises InvalidInput
    for what names no medium, OSError for one that can't be used.
    """
    return RemoteTier("remote", _blobs(where), clock=clock, keys=Keys())


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
