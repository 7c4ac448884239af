"""A writer that lives through everything a store does, telling what was acknowledged.

    python crash_child.py DIR ACKS     appends one line to ACKS after each acknowledgement

Run under strace by test_crash.py, which kills it or fails its system calls.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ownerserve.kv.clock import ManualClock
from ownerserve.kv.errors import OwnerServeError
from ownerserve.kv.units import MIB
from ownerserve.store.disk.maintain import collect
from ownerserve.store.disk.tier import DiskOptions, DiskTier
from ownerserve.store.format.model import ArtifactKind, Meta, Want, WriteDone
from ownerserve.store.tiers.backend import Reservation
from ownerserve.store.tiers.buffers import BufferPool
from ownerserve.store.tiers.policy import KindLimits, TierLimits

RECORDS = 8
PAYLOAD = 20_000
OPTIONS = DiskOptions(limits=TierLimits(KindLimits(MIB), KindLimits(MIB)), segment_bytes=16 * 4096)


def meta(number: int) -> Meta:
    return Meta(
        id=number.to_bytes(32, "little"),
        kind=ArtifactKind.RANGE,
        component="csa_main",
        prefix_hash=bytes(32),
        first_token=0,
        end_token=128,
    )


def payload(number: int) -> bytes:
    return bytes([number % 251]) * PAYLOAD


def put(tier: DiskTier, numbers: list[int], tell: int) -> None:
    """One group commit."""
    reserved = []
    for number in numbers:
        item = tier.reserve(meta(number), PAYLOAD)
        if isinstance(item, Reservation):
            item.payload[:] = payload(number)
            reserved.append((number, item))
    outcomes = tier.commit([item for _, item in reserved])
    for (number, _), outcome in zip(reserved, outcomes, strict=True):
        if isinstance(outcome, WriteDone):
            os.write(tell, f"put {number}\n".encode())


def remove(tier: DiskTier, numbers: list[int], tell: int) -> None:
    """Announced before it starts: from then on either answer is right."""
    os.write(tell, "".join(f"removing {number}\n" for number in numbers).encode())
    gone = tier.remove([meta(number).id for number in numbers])
    if gone == len(numbers):
        os.write(tell, "".join(f"gone {number}\n" for number in numbers).encode())


def life(directory: Path, tell: int) -> None:
    """Create, commit, evict, compact, re-open, commit."""
    clock = ManualClock(1e9)
    tier = DiskTier(directory, clock, options=OPTIONS)
    put(tier, [1, 2, 3], tell)
    put(tier, [4, 5, 6, 7], tell)
    remove(tier, [2, 4, 5], tell)
    tier.read([Want(meta(1).id)])
    collect(tier.core, BufferPool(), share=0.9)
    tier.close()
    clock.advance(3600)
    tier = DiskTier(directory, clock, options=OPTIONS)
    put(tier, [8], tell)
    tier.close()


if __name__ == "__main__":
    acks = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        life(Path(sys.argv[1]), acks)
    except OwnerServeError as error:
        print(f"refused: {error}")
