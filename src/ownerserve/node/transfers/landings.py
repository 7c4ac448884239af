"""Landings are where the parts of brings come, each under its reservation:

    COMING ──> LANDED ──> gone   it came whole, and is its reader's until it is copied
       └─────> HELD ────> free   its bring is over, and somebody may still write there

All take of one capacity. A part without room is refused, and its turn computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from threading import Lock

import msgspec

from ownerserve.kv.frame import PayloadSection
from ownerserve.kv.units import GIB
from ownerserve.node.transfers.landing import Landing
from ownerserve.transfer.control.events import WantedArtifact

LANDING_BYTES = 8 * GIB
"""Room for as many parts as are waited for at once (BRINGS_AT_ONCE), of 160 KiB a token; or of half
as much a token, each with the one before it that is being copied."""


class LandingsFull(msgspec.Struct, frozen=True, gc=False):
    """No memory is left for a part: of the capacity, or of the machine."""

    used_bytes: int
    held_bytes: int


class LandingNumbers(msgspec.Struct, frozen=True, gc=False):
    """What metrics say of landings: bytes of those that are coming, that have landed and that are
    held; the age of the oldest that comes, and that is held; 0: there is none."""

    coming_bytes: int
    landed_bytes: int
    held_bytes: int
    oldest_coming_s: float
    oldest_held_s: float

    @property
    def used_bytes(self) -> int:
        """`used_bytes` are what they take in all."""
        return self.coming_bytes + self.landed_bytes + self.held_bytes


class _Reserved(msgspec.Struct, eq=False):
    landing: Landing
    bytes: int
    since_s: float
    is_held: bool = False


class Landings:
    """`Landings` own the memory of what comes, until it is whole or nobody writes there any more,
    and count it for as long as anybody has it. One thread calls them; any may ask for the
    numbers."""

    def __init__(
        self, sections: Mapping[str, PayloadSection], capacity_bytes: int = LANDING_BYTES
    ) -> None:
        self._sections = dict(sections)
        self._capacity = capacity_bytes
        self._reserved: dict[int, _Reserved] = {}
        self._landed: dict[int, int] = {}  # bytes, by reservation
        self._gone = deque[int]()
        """Reservations whose memory was let go of: amid anything, so nothing is locked for it."""
        self._lock = Lock()

    def reserve(
        self,
        reservation: int,
        part: Sequence[WantedArtifact],
        *,
        into: Landing | None,
        now_s: float,
    ) -> Landing | LandingsFull:
        """Return where the part comes; `into`: memory that others' shares of it come into too."""
        size = sum(one.bytes for one in part)
        now = self.numbers(now_s)
        full = LandingsFull(now.used_bytes, now.held_bytes)
        if now.used_bytes + size > self._capacity:
            return full
        try:
            landing = into or Landing(part, self._sections)
        except MemoryError:
            return full
        with self._lock:
            self._reserved[reservation] = _Reserved(landing, size, now_s)
        return landing

    def of(self, reservation: int) -> Landing:
        """Return where a part comes."""
        return self._reserved[reservation].landing

    def hold(self, reservation: int, now_s: float) -> None:
        """Keep the memory of a part that is wanted no more for who may still write there."""
        with self._lock:
            held = self._reserved[reservation]
            held.is_held, held.since_s = True, now_s

    def take(self, reservation: int) -> Landing:
        """Give a part that has come whole to its reader, whose it is until it is copied."""
        with self._lock:
            landed = self._reserved.pop(reservation)
            self._landed[reservation] = landed.bytes
        landed.landing.when_gone(partial(self._gone.append, reservation))
        return landed.landing

    def free(self, reservation: int) -> None:
        """Let go of a part's memory: nobody writes there any more."""
        with self._lock:
            del self._reserved[reservation]

    def numbers(self, now_s: float) -> LandingNumbers:
        """Return what metrics say of them now; any thread may call."""
        with self._lock:
            while self._gone:
                self._landed.pop(self._gone.popleft(), None)
            landed_bytes = sum(self._landed.values())
            held = [one for one in self._reserved.values() if one.is_held]
            coming = [one for one in self._reserved.values() if not one.is_held]
        return LandingNumbers(
            sum(one.bytes for one in coming),
            landed_bytes,
            sum(one.bytes for one in held),
            now_s - min((one.since_s for one in coming), default=now_s),
            now_s - min((one.since_s for one in held), default=now_s),
        )
