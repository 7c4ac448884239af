"""Shared media that answer wrongly, over real ones, and a clock that is set."""

from __future__ import annotations

import random
from pathlib import Path

from ownerserve.store.tiers.blobs import DirectoryBlobs


class SteppingClock:
    """A wall clock that somebody sets, forward and back."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def now(self) -> float:
        return self.now_s

    def step(self, by_s: float) -> None:
        self.now_s += by_s


class SickReader(DirectoryBlobs):
    """A directory as a machine sees it that flips one bit of each read, anywhere."""

    def __init__(self, root: Path, dice: random.Random) -> None:
        super().__init__(root)
        self.dice = dice
        self.sick = True

    def get_into(self, key: str, offset: int, into: memoryview) -> int:
        count = super().get_into(key, offset, into)
        if self.sick and count > 64 and key.startswith("records/"):
            into[self.position(count)] ^= 1
        return count

    def position(self, count: int) -> int:
        return self.dice.randrange(count)


class StuckReader(SickReader):
    """One that flips the same bit of every read: two of its reads agree."""

    def position(self, count: int) -> int:
        return 40


class FakeMooncake:
    """The return codes measured on Mooncake Store 0.3.13, without a Mooncake."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.full = False

    def put(self, key: str, data: bytes) -> int:
        if self.full:
            return -200
        self.held.setdefault(key, data)  # an existing key keeps its old value, and says 0
        return 0

    def get(self, key: str) -> bytes:
        return self.held.get(key, b"")

    def is_exist(self, key: str) -> int:
        return int(key in self.held)

    def remove(self, key: str, *, force: bool) -> int:
        return 0 if self.held.pop(key, None) is not None else -704
