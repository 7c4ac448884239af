"""Reads under damage: records flipped, cut and swapped under every tier; wrong bytes counted.

    python -m tests.support.store.flipper --reads 1000000 --faults 100000

Prints one line for each tier; exits 1 if a single read gave bytes that were never written under
its id. The short form runs in test_wrong_bytes.py.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from ownerserve.kv.clock import ManualClock
from ownerserve.kv.units import GIB, MIB
from ownerserve.store.disk.maintain import collect
from ownerserve.store.disk.tier import DiskOptions, DiskTier
from ownerserve.store.format.model import ArtifactKind, Meta, MissReason, ReadHit, Want
from ownerserve.store.format.seal import Keys
from ownerserve.store.format.segment import segment_path
from ownerserve.store.tiers.backend import TierBackend, put
from ownerserve.store.tiers.blobs import DirectoryBlobs
from ownerserve.store.tiers.buffers import BufferPool
from ownerserve.store.tiers.memory import MemoryTier
from ownerserve.store.tiers.policy import KindLimits, TierLimits
from ownerserve.store.tiers.remote import RemoteTier, record_key
from tests.support.store.samples import bytes_held

RECORDS = 64
UNITS = 4
LIMITS = TierLimits(KindLimits(GIB), KindLimits(GIB))
KEY = b"k" * 32

Damage = Callable[[int, int, str], None]
"""(record, another record, how): harm what the tier stores."""


def meta(number: int) -> Meta:
    kind = ArtifactKind.POINT if number % 3 == 0 else ArtifactKind.RANGE
    tenant = bytes([1 + number % 5]) * 32 if number % 2 else b""
    id_ = number.to_bytes(32, "little")
    return Meta(id_, kind, "csa_main", id_, 0, 512, tenant=tenant, units=UNITS)


def payload(number: int, sizes: random.Random) -> bytes:
    return sizes.randbytes(UNITS * sizes.randrange(200, 3000))


def harm(stored: bytearray, other: bytes, how: str, dice: random.Random) -> None:
    """Change `stored` in place, never its length."""
    if how == "flip":
        for _ in range(dice.choice((1, 1, 1, 2, 8))):
            stored[dice.randrange(len(stored))] ^= 1 << dice.randrange(8)
    elif how == "cut":
        at = dice.randrange(len(stored))
        stored[at:] = bytes(len(stored) - at)
    else:
        size = min(len(stored), len(other))
        stored[:size] = other[:size]


def memory_damage(tier: MemoryTier, dice: random.Random) -> Damage:
    def damage(number: int, other: int, how: str) -> None:
        view = bytes_held(tier, meta(number).id)
        changed = bytearray(view)
        harm(changed, bytes(bytes_held(tier, meta(other).id)), how, dice)
        view[:] = changed

    return damage


def disk_damage(tier: DiskTier, dice: random.Random) -> Damage:
    def damage(number: int, other: int, how: str) -> None:
        found = tier.core.index.get_many([meta(number).id, meta(other).id])
        stored = []
        for entry in (found[meta(number).id], found[meta(other).id]):
            path = segment_path(tier.core.home.directory, entry.segment)
            with path.open("rb") as file:
                file.seek(entry.offset)
                stored.append(file.read(entry.header_bytes + entry.payload_bytes))
        changed = bytearray(stored[0])
        harm(changed, stored[1], how, dice)
        entry = found[meta(number).id]
        with segment_path(tier.core.home.directory, entry.segment).open("r+b") as file:
            file.seek(entry.offset)
            file.write(changed)

    return damage


def directory_damage(root: Path, dice: random.Random) -> Damage:
    def damage(number: int, other: int, how: str) -> None:
        path, second = (root / record_key(meta(n).id) for n in (number, other))
        changed = bytearray(path.read_bytes())
        harm(changed, second.read_bytes(), how, dice)
        path.write_bytes(changed[: dice.randrange(len(changed))] if how == "cut" else changed)

    return damage


def run(
    tier: TierBackend, damage: Damage, *, reads: int, faults: int, dice: random.Random
) -> Counter[str]:
    """`reads` reads with `faults` damaged records among them; what came of it."""
    truth: dict[int, bytes] = {}
    tally: Counter[str] = Counter()
    each = max(1, reads // faults)
    for number in range(RECORDS):
        truth[number] = payload(number, dice)
        put(tier, meta(number), truth[number])
    while tally["reads"] < reads:
        number, other = dice.sample(range(RECORDS), 2)
        damage(number, other, dice.choice(("flip", "flip", "cut", "swap")))
        tally["faults"] += 1
        for turn in range(each):
            wanted = number if turn == 0 else dice.randrange(RECORDS)
            check(tier, wanted, truth[wanted], tally=tally, dice=dice)
        tier.remove([meta(number).id])
        put(tier, meta(number), truth[number])
        if tally["faults"] % 2000 == 0 and isinstance(tier, DiskTier):
            collect(tier.core, BufferPool(), kept_s=-1)
    return tally


def check(
    tier: TierBackend, number: int, truth: bytes, *, tally: Counter[str], dice: random.Random
) -> None:
    first = dice.randrange(UNITS)
    end = dice.randrange(first + 1, UNITS + 1)
    if dice.random() < 0.5:
        first, end = 0, UNITS
    outcome = tier.read([Want(meta(number).id, first, end)])
    tally["reads"] += 1
    if isinstance(outcome, ReadHit):
        unit = len(truth) // UNITS
        right = outcome.parts[0].data == truth[first * unit : end * unit]
        tally["right" if right else "WRONG"] += 1
    else:
        tally[f"miss_{outcome.reason}"] += 1
        if outcome.reason is MissReason.CORRUPT:
            tally["found"] += 1


def all_tiers(root: Path, *, reads: int, faults: int, seed: int) -> dict[str, Counter[str]]:
    """Each tier with a third of the reads."""
    clock, dice = ManualClock(1e9), random.Random(seed)
    memory = MemoryTier(clock, LIMITS)
    disk = DiskTier(root / "disk", clock, options=DiskOptions(limits=LIMITS, segment_bytes=8 * MIB))
    blobs = DirectoryBlobs(root / "shared")
    remote = RemoteTier("directory", blobs, clock=clock, keys=Keys(KEY))
    tiers: list[tuple[TierBackend, Damage]] = [
        (memory, memory_damage(memory, dice)),
        (disk, disk_damage(disk, dice)),
        (remote, directory_damage(root / "shared", dice)),
    ]
    tallies = {}
    for tier, damage in tiers:
        share = reads // len(tiers)
        tallies[tier.name] = run(tier, damage, reads=share, faults=faults // len(tiers), dice=dice)
        tier.close()
    return tallies


def scratch() -> Path:
    """A directory in memory where there is one: the medium is not what is tested."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="ownerserve-flip-", dir=base))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reads", type=int, default=1_000_000)
    parser.add_argument("--faults", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("ownerserve.store").setLevel(logging.CRITICAL)
    root = scratch()
    try:
        tallies = all_tiers(root, reads=options.reads, faults=options.faults, seed=options.seed)
    finally:
        shutil.rmtree(root)
    for name, tally in tallies.items():
        print(name, dict(sorted(tally.items())))
    return 1 if any(tally["WRONG"] for tally in tallies.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
