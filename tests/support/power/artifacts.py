"""The artifacts of the lives: same number, same meta, same bytes; and how their tiers are opened.

Every third belongs to a tenant, every fourth is a point, every fifth has a layout that readers
convert.
"""

from __future__ import annotations

import random
from pathlib import Path

from ownerserve.kv.clock import Clock
from ownerserve.store.disk.tier import DiskOptions, DiskTier, Index
from ownerserve.store.format.convert import ByteOrder, PayloadLayout
from ownerserve.store.format.model import ArtifactKind, Meta
from ownerserve.store.format.seal import Keys
from ownerserve.store.tiers.blobs import DirectoryBlobs
from ownerserve.store.tiers.policy import KindLimits, TierLimits
from ownerserve.store.tiers.remote import RemoteTier

PARENTS = ("disk", "shared", "control")
"""Folders that stand before the lives; each place makes its own below."""
NUMBERS = range(1, 37)
TENANTS = (b"a" * 32, b"b" * 32)
BLOCK_TOKENS = 64
SEGMENT_BYTES = 16 * 4096
LIMITS = TierLimits(KindLimits(420_000, 7200.0), KindLimits(130_000, 900.0))
SHARED_LIMITS = TierLimits(KindLimits(150_000, 7200.0), KindLimits(50_000, 900.0))
ROOMY = TierLimits()
SHARED_KEY = bytes(range(32))


def tenant(number: int) -> bytes:
    """Whose it is; empty: shared."""
    return TENANTS[number % 2] if number % 3 == 0 else b""


def layout(order: ByteOrder = ByteOrder.LITTLE) -> PayloadLayout:
    """One layer, 8 bytes a token, scalars of 2 bytes."""
    return PayloadLayout(
        engine="vllm",
        engine_version="0.32.0",
        layout_version=3,
        first_layer=0,
        end_layer=1,
        shard=0,
        shards=1,
        block_tokens=BLOCK_TOKENS,
        entries=BLOCK_TOKENS,
        entry_bytes=8,
        page_bytes=8 * BLOCK_TOKENS,
        scalar="bf16",
        scalar_bytes=2,
        byte_order=order,
    )


def is_convertible(number: int) -> bool:
    """Whether its layout is one that readers convert."""
    return number % 5 == 0


def units(number: int) -> int:
    """How many blocks it covers; one in nine is larger than a segment."""
    return 160 if number % 9 == 0 else 4 + 5 * (number % 7)


def payload(number: int) -> bytes:
    """Its bytes, which no other shares."""
    return random.Random(number).randbytes(units(number) * 8 * BLOCK_TOKENS)


def swapped(data: bytes) -> bytes:
    """The same scalars in the other byte order."""
    turned = bytearray(len(data))
    turned[::2], turned[1::2] = data[1::2], data[::2]
    return bytes(turned)


def meta(number: int) -> Meta:
    """Its meta."""
    is_point = number % 4 == 1 and not is_convertible(number)
    tokens = units(number) * BLOCK_TOKENS
    return Meta(
        id=number.to_bytes(32, "little"),
        kind=ArtifactKind.POINT if is_point else ArtifactKind.RANGE,
        component="csa_main",
        prefix_hash=number.to_bytes(32, "big"),
        first_token=tokens if is_point else 0,
        end_token=tokens,
        end_layer=1,
        tenant=tenant(number),
        descriptor=layout().encode() if is_convertible(number) else b"plain",
        units=1 if is_point else units(number),
    )


def disk_folder(home: Path) -> Path:
    """Where the store of the lives lies."""
    return home / "disk" / "new" / "store"


def open_disk(
    home: Path, clock: Clock, limits: TierLimits = LIMITS, index: Index = Index.KEPT
) -> DiskTier:
    """The store of the lives."""
    options = DiskOptions(limits=limits, segment_bytes=SEGMENT_BYTES, index=index)
    return DiskTier(disk_folder(home), clock, options=options)


def open_shared(home: Path, clock: Clock, limits: TierLimits = SHARED_LIMITS) -> RemoteTier:
    """The shared directory of the lives."""
    blobs = DirectoryBlobs(home / "shared" / "new" / "medium")
    keys = Keys(SHARED_KEY)
    return RemoteTier("shared", blobs, clock=clock, keys=keys, limits=limits)
