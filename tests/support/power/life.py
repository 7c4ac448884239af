"""A life: what a node asks of its store, of a shared medium and of the directory's term file.

    python -m tests.support.power.life HOME NOTES SEED LIFE

Drawn by the seed. Before each step it notes what it tries, after it what was acknowledged
(`promises`). Run under strace by `recording`, which may kill it at any call.
"""

from __future__ import annotations

import inspect
import os
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ownerserve.directory.terms import TermFile
from ownerserve.kv.clock import ManualClock
from ownerserve.store.disk.maintain import collect
from ownerserve.store.disk.rotate import KeyChange, rotate_key
from ownerserve.store.disk.tier import DiskTier, Index
from ownerserve.store.format.convert import ByteOrder
from ownerserve.store.format.model import AlreadyStored, Want, WriteDone
from ownerserve.store.tiers.backend import Reservation
from ownerserve.store.tiers.buffers import BufferPool
from ownerserve.store.tiers.remote import RemoteTier
from ownerserve.store.tiers.tiered import TieredStore
from tests.support.power.artifacts import (
    NUMBERS,
    TENANTS,
    disk_folder,
    is_convertible,
    layout,
    meta,
    open_disk,
    open_shared,
    payload,
    tenant,
)

STEPS = 14
Tier = DiskTier | RemoteTier


class Teller:
    """A teller writes the notes, each in one call."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def say(self, what: str, where: str, numbers: Iterable[int]) -> None:
        """Note `what` of these numbers, at a tier."""
        words = [what, where, *map(str, sorted(numbers))]
        os.write(self._fd, (" ".join(words) + "\n").encode())

    def name_syncs(self) -> None:
        """Note before each sync who asks for it: the innermost functions of ours."""

        def named(call: Callable[[int], None]) -> Callable[[int], None]:
            def sync(fd: int) -> None:
                os.write(self._fd, f"sync {_site()}\n".encode())
                call(fd)

            return sync

        os.fsync, os.fdatasync = named(os.fsync), named(os.fdatasync)


def _site() -> str:
    names: list[str] = []
    frame = inspect.currentframe()
    while frame is not None and len(names) < 3:
        path = Path(frame.f_code.co_filename)
        if "ownerserve" in path.parts:
            names.append(f"{path.stem}.{frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(names)


class Life:
    """A life is one process's."""

    def __init__(self, home: Path, teller: Teller, rng: random.Random, clock: ManualClock) -> None:
        self._home, self._teller, self._rng, self._clock = home, teller, rng, clock
        self._gone: set[int] = set()
        self._disk = self._open_disk()
        self._shared = open_shared(home, clock)
        teller.say("stands", "shared", _standing(self._shared))

    def _open_disk(self, index: Index = Index.KEPT) -> DiskTier:
        disk = open_disk(self._home, self._clock, index=index)
        disk.on_removed = lambda metas: self._gone.update(
            int.from_bytes(gone.id, "little") for gone in metas
        )
        self._teller.say("stands", "disk", _standing(disk))
        return disk

    def live(self) -> None:
        """Take the steps."""
        self._terms()
        self._store(self._disk, "disk", 6)
        steps: Sequence[tuple[Callable[[], None], int]] = (
            (lambda: self._store(self._disk, "disk", 4), 8),
            (lambda: self._remove(self._disk, "disk"), 4),
            (lambda: self._purge(self._disk, "disk"), 1),
            (self._maintain, 4),
            (self._read, 2),
            (self._reopen, 2),
            (self._rebuild, 1),
            (self._rotate, 1),
            (lambda: self._store(self._shared, "shared", 2), 3),
            (lambda: self._remove(self._shared, "shared"), 2),
            (lambda: self._purge(self._shared, "shared"), 1),
            (self._terms, 1),
        )
        moves = [step for step, weight in steps for _ in range(weight)]
        for _ in range(STEPS):
            self._rng.choice(moves)()
            self._clock.advance(self._rng.choice((1.0, 60.0, 600.0)))

    def close(self) -> None:
        """End in order."""
        self._shared.close()
        self._disk.close()

    def _store(self, tier: Tier, where: str, most: int) -> None:
        numbers = self._rng.sample(NUMBERS, self._rng.randint(1, most))
        self._teller.say("try", where, numbers)
        before = _standing(tier)
        reserved, stored, self._gone = [], set(), set()
        for number in numbers:
            item = tier.reserve(meta(number), len(payload(number)))
            if isinstance(item, AlreadyStored):
                stored.add(number)
            elif isinstance(item, Reservation):
                item.payload[:] = payload(number)
                reserved.append((number, item))
        outcomes = tier.commit([item for _, item in reserved])
        for (number, _), outcome in zip(reserved, outcomes, strict=True):
            if isinstance(outcome, WriteDone | AlreadyStored):
                stored.add(number)
        standing = _standing(tier)  # what was there already may have made room for the others
        self._settle(where, stored & standing, before - standing)

    def _settle(self, where: str, stored: set[int], gone: set[int]) -> None:
        """One note for both: a cut sees all of the step acknowledged, or none."""
        lost = (gone | self._gone) - stored
        self._teller.say("done", where, [*stored, *(-number for number in lost)])

    def _remove(self, tier: Tier, where: str) -> None:
        standing = sorted(_standing(tier))
        numbers = self._rng.sample(standing, min(len(standing), self._rng.randint(1, 4)))
        self._teller.say("try", where, numbers)
        self._gone = set()
        count = tier.remove([meta(number).id for number in numbers])
        assert count == len(numbers), (count, numbers)
        self._settle(where, set(), set(numbers))

    def _purge(self, tier: Tier, where: str) -> None:
        whose = self._rng.choice(TENANTS)
        numbers = [number for number in NUMBERS if tenant(number) == whose]
        self._teller.say("try", where, numbers)
        self._gone = set()
        tier.purge(whose)
        self._settle(where, set(), set(numbers))

    def _maintain(self) -> None:
        self._teller.say("try", "disk", [])
        self._gone = set()
        if self._rng.random() < 0.3:
            self._disk.expire()
        collect(self._disk.core, BufferPool(), share=0.9)
        self._settle("disk", set(), set())

    def _read(self) -> None:
        """Reads move recency; some in another layout."""
        store = TieredStore([self._disk])
        for number in sorted(_standing(self._disk))[:1]:
            self._disk.price({meta(number).id: self._rng.random() * 100})
            other = layout(ByteOrder.BIG).encode() if is_convertible(number) else None
            store.read([Want(meta(number).id, descriptor=other)])

    def _reopen(self) -> None:
        self._disk.close()
        self._disk = self._open_disk()

    def _rebuild(self) -> None:
        self._disk.close()
        self._disk = self._open_disk(Index.MADE_ANEW)

    def _rotate(self) -> None:
        """The store's key is exchanged; a rotation that a kill cut short is finished by the next,
        and until then both keys open the store.
        """
        self._disk.close()
        rotate_key(
            disk_folder(self._home), KeyChange(), clock=self._clock, on_progress=lambda _: None
        )
        self._disk = self._open_disk()

    def _terms(self) -> None:
        term = TermFile(self._home / "control" / "new" / "directory").start()
        self._teller.say("done", "terms", [term.ordinal])


def _standing(tier: Tier) -> set[int]:
    found = tier.find([meta(number).id for number in NUMBERS])
    return {int.from_bytes(id_, "little") for id_ in found}


def main() -> None:
    """Live once."""
    home, notes, seed, number = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    teller = Teller(notes)
    teller.name_syncs()
    clock = ManualClock(1e9 + 1e6 * number)
    life = Life(home, teller, random.Random(f"{seed}/{number}"), clock)
    life.live()
    life.close()


if __name__ == "__main__":
    main()
