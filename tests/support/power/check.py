"""The check: open a state that a power cut left, by the real classes, and hold it to what was
promised.
"""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ownerserve.directory.terms import FILE_NAME, TermFile
from ownerserve.kv.clock import ManualClock
from ownerserve.store.disk.scan import records
from ownerserve.store.disk.tier import DiskTier
from ownerserve.store.format.convert import ByteOrder
from ownerserve.store.format.header import BLOCK
from ownerserve.store.format.model import (
    AlreadyStored,
    MissReason,
    ReadHit,
    ReadMiss,
    Want,
    WriteDone,
)
from ownerserve.store.format.segment import Segment, segment_path
from ownerserve.store.index.reader import IndexFailed
from ownerserve.store.tiers.backend import put
from ownerserve.store.tiers.blobs import DirectoryBlobs
from ownerserve.store.tiers.catalogue import parse
from ownerserve.store.tiers.remote import RemoteTier
from ownerserve.store.tiers.tiered import TieredStore
from tests.support.power.artifacts import (
    NUMBERS,
    ROOMY,
    is_convertible,
    layout,
    meta,
    open_disk,
    open_shared,
    payload,
    swapped,
)
from tests.support.power.cuts import State
from tests.support.power.promises import Promise

Tier = DiskTier | RemoteTier
PLACES = ("disk", "shared", "terms")
PAYLOADS = {number: payload(number) for number in NUMBERS}
METAS = {number: meta(number) for number in NUMBERS}
_NOW_S = 1.1e9


class Broken(NamedTuple):
    """What a state broke: `kind` is wrong, lost, returned, unopened or orphan."""

    kind: str
    detail: str


def lay_out(state: State, home: Path) -> None:
    """Write a state under an empty folder."""
    home.mkdir(parents=True)
    for path, data in state.items():
        if data is None:
            (home / path).mkdir()
            continue
        fd = os.open(home / path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(fd, data.rstrip(b"\0"))
        os.ftruncate(fd, len(data))
        os.close(fd)


def check(home: Path, promised: dict[str, Promise], rng: random.Random) -> list[Broken]:
    """Open everything under `home`; returns what was broken."""
    return [
        *_opened("disk", lambda: list(_disk(home, promised["disk"], rng))),
        *_opened("shared", lambda: list(_shared(home, promised["shared"], rng))),
        *_opened("terms", lambda: list(_terms(home, promised["terms"]))),
    ]


def _opened(place: str, step: Callable[[], list[Broken]]) -> list[Broken]:
    try:
        return step()
    except Exception:  # noqa: BLE001 - the root of a check: whatever it is, it is the finding
        return [Broken("unopened", f"{place}: {traceback.format_exc()[-1500:]}")]


def _disk(home: Path, promised: Promise, rng: random.Random) -> Iterator[Broken]:
    tier = open_disk(home, ManualClock(_NOW_S), ROOMY)
    try:
        _upkeep(tier)
        yield from _orphans(tier)
        yield from _hold(tier, "disk", promised, rng)
        yield from _converted(tier)
    finally:
        tier.close()
    if rng.random() < 0.125:
        again = open_disk(home, ManualClock(_NOW_S), ROOMY)
        try:
            yield from _read(again, "disk opened again", promised._replace(gone=frozenset()))
        finally:
            again.close()


def _shared(home: Path, promised: Promise, rng: random.Random) -> Iterator[Broken]:
    tier = open_shared(home, ManualClock(_NOW_S), ROOMY)
    yield from _hold(tier, "shared", promised, rng)
    listing = DirectoryBlobs(home / "shared" / "new" / "medium").list("catalogue/")
    listed = {parse(blob.key, blob.modified_s).record.meta.id for blob in listing}
    for number in promised.stored:
        if METAS[number].id not in listed:
            yield Broken("lost", f"shared: {number} stands and is in no listing")
    tier.close()


def _hold(tier: Tier, name: str, promised: Promise, rng: random.Random) -> Iterator[Broken]:
    first, last = rng.sample(NUMBERS, 2)
    if first not in promised.stored and first not in promised.gone:
        # What it says it has already, it must have: the caller throws its copy away.
        yield from _stored_anew(tier, name, first)
    yield from _read(tier, name, promised)
    yield from _stored_anew(tier, name, last)


def _upkeep(tier: DiskTier) -> None:
    """Let the store mend an index whose damage it comes upon later than at its opening."""
    with suppress(IndexFailed):
        for number in (None, *tier.core.home.segment_numbers()):
            list(tier.core.index.walk(segment=number))
    tier.expire(0)


def _read(tier: Tier, name: str, promised: Promise) -> Iterator[Broken]:
    for number in NUMBERS:
        outcome = tier.read([Want(METAS[number].id)])
        if isinstance(outcome, ReadMiss) and outcome.reason is MissReason.IO_ERROR:
            tier.expire(0)
            outcome = tier.read([Want(METAS[number].id)])
        if isinstance(outcome, ReadHit):
            if outcome.parts[0].data != PAYLOADS[number]:
                yield Broken("wrong", f"{name}: {number}")
            elif number in promised.gone:
                yield Broken("returned", f"{name}: {number}")
        elif number in promised.stored:
            yield Broken("lost", f"{name}: {number}, {outcome.reason}")


def _stored_anew(tier: Tier, name: str, number: int) -> Iterator[Broken]:
    outcome = put(tier, METAS[number], PAYLOADS[number])
    if isinstance(outcome, WriteDone | AlreadyStored):
        read = tier.read([Want(METAS[number].id)])
        if not isinstance(read, ReadHit):
            said = type(outcome).__name__
            yield Broken("lost", f"{name}: {number} right after {said}: {read.reason}")
        elif read.parts[0].data != PAYLOADS[number]:
            yield Broken("wrong", f"{name}: {number} after it was stored anew")


def _converted(tier: DiskTier) -> Iterator[Broken]:
    other = layout(ByteOrder.BIG).encode()
    standing = tier.find([METAS[n].id for n in NUMBERS if is_convertible(n)])
    for id_ in list(standing)[:1]:
        outcome = TieredStore([tier]).read([Want(id_, descriptor=other)])
        number = int.from_bytes(id_, "little")
        if isinstance(outcome, ReadHit) and outcome.parts[0].data != swapped(PAYLOADS[number]):
            yield Broken("wrong", f"disk: {number} converted")


def _orphans(tier: DiskTier) -> Iterator[Broken]:
    """Records that stand on disk and nobody knows of: no eviction gives their room back."""
    core = tier.core
    for number in core.home.segment_numbers():
        segment = Segment(segment_path(core.home.directory, number), os.O_RDONLY)
        found = {header.place.offset for header in records(segment, BLOCK, core.home.store_id)}
        known = {entry.offset for entry in core.index.walk(segment=number)}
        if found - known:
            yield Broken("orphan", f"segment {number}: {sorted(found - known)}")


def _terms(home: Path, promised: Promise) -> Iterator[Broken]:
    highest = max(promised.stored, default=0)
    started = TermFile(home / "control" / "new" / "directory").start().ordinal
    if started <= highest:
        yield Broken("lost", f"term {highest} was used and is given again as {started}")
    if list((home / "control" / "new" / "directory").glob("*")) != [
        home / "control" / "new" / "directory" / FILE_NAME
    ]:
        yield Broken("orphan", "terms: a file is left")
