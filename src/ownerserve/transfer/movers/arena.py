"""A staging arena is where movers write that can't be fenced; blocks are filled from it.

    FREE ── reserve ──> RESERVED ── give_back ──> FREE        the read landed and was copied out, or
                            │                                 failed, and no writer is left
                            └── abandon ──> ABANDONED         ReadUnproven: a writer may be left
                                                └── quiet ──> FREE        ReadQuiet

| state | its bytes are |
|---|---|
| FREE | nobody's; free stretches that touch are one |
| RESERVED | one read's goal |
| ABANDONED | nobody's to read and nobody's to write: counted, with an age, and used for nothing |

free + reserved + abandoned = capacity, after every step (invariant 1's way, checked by `check`).
`ArenaBook` is pure and owns who has which bytes; `StagingMemory` owns the bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from bisect import insort
from collections.abc import Callable

import msgspec
import numpy as np

from ownerserve.transfer.vocabulary import Runs

ALIGN_BYTES = 4096


class Slot(msgspec.Struct, frozen=True, gc=False):
    """A `Slot` is the bytes [offset, offset + bytes) of the arena, of one read by its `number`."""

    number: int
    offset: int
    bytes: int


class ArenaFull(msgspec.Struct, frozen=True, gc=False):
    """No stretch is free that is long enough: wait for one, or do without the read."""

    free_bytes: int
    abandoned_bytes: int


class ArenaNumbers(msgspec.Struct, frozen=True, gc=False):
    """What metrics say of an arena. `abandoned_total` counts slots, ever, and `refused_total` reads
    that found no room; `oldest_abandoned_s` is the age of the oldest that still is abandoned, 0
    without one."""

    capacity_bytes: int
    free_bytes: int
    reserved_bytes: int
    abandoned_bytes: int
    abandoned_total: int
    oldest_abandoned_s: float
    refused_total: int = 0


class _Abandoned(msgspec.Struct, frozen=True, gc=False):
    slot: Slot
    since_s: float


def _whole(size: int) -> int:
    """Return what a slot of that many bytes takes."""
    return max(1, -(-size // ALIGN_BYTES)) * ALIGN_BYTES


class ArenaBook:
    """`ArenaBook` owns which bytes of an arena are free, reserved or abandoned. The lowest free
    stretch that is long enough is taken."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes // ALIGN_BYTES * ALIGN_BYTES
        self._free: list[tuple[int, int]] = [(0, self._capacity)] if self._capacity else []
        """(begin, end), in order, none touching the next."""
        self._reserved: dict[int, Slot] = {}
        self._abandoned: dict[int, _Abandoned] = {}
        self._abandoned_total = self._refused_total = 0

    def reserve(self, number: int, size_bytes: int) -> Slot | ArenaFull:
        """Return room for a read's goal, which is its own until given back."""
        assert number not in self._reserved and number not in self._abandoned, "used once"
        need = _whole(size_bytes)
        for place, (begin, end) in enumerate(self._free):
            if end - begin >= need:
                rest = [(begin + need, end)] if end - begin > need else []
                self._free[place : place + 1] = rest
                slot = Slot(number, begin, size_bytes)
                self._reserved[number] = slot
                return slot
        self._refused_total += 1
        numbers = self.numbers(0.0)
        return ArenaFull(numbers.free_bytes, numbers.abandoned_bytes)

    def give_back(self, number: int) -> None:
        """Free the slot of a read that has ended with no writer left; raises KeyError for one that
        is abandoned or unknown."""
        self._release(self._reserved.pop(number))

    def abandon(self, number: int, now_s: float) -> None:
        """Give up the slot of a read that ended `ReadUnproven`; raises KeyError where it has
        none."""
        self._abandoned[number] = _Abandoned(self._reserved.pop(number), now_s)
        self._abandoned_total += 1

    def quiet(self, number: int) -> None:
        """Free an abandoned slot: its writer has stopped for good. Raises KeyError for another."""
        self._release(self._abandoned.pop(number).slot)

    def _release(self, slot: Slot) -> None:
        insort(self._free, (slot.offset, slot.offset + _whole(slot.bytes)))
        joined: list[tuple[int, int]] = []
        for begin, end in self._free:
            if joined and joined[-1][1] == begin:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((begin, end))
        self._free = joined

    def numbers(self, now_s: float) -> ArenaNumbers:
        """Return what metrics say of the arena now."""
        abandoned = self._abandoned.values()
        return ArenaNumbers(
            capacity_bytes=self._capacity,
            free_bytes=sum(end - begin for begin, end in self._free),
            reserved_bytes=sum(_whole(slot.bytes) for slot in self._reserved.values()),
            abandoned_bytes=sum(_whole(one.slot.bytes) for one in abandoned),
            abandoned_total=self._abandoned_total,
            oldest_abandoned_s=max((now_s - one.since_s for one in abandoned), default=0.0),
            refused_total=self._refused_total,
        )

    def check(self) -> None:
        """Assert that each byte is free, reserved or abandoned, and only one of them."""
        slots = [*self._reserved.values(), *(one.slot for one in self._abandoned.values())]
        taken = [(slot.offset, slot.offset + _whole(slot.bytes)) for slot in slots]
        at = 0
        for begin, end in sorted([*self._free, *taken]):
            assert begin == at, f"bytes [{at}, {begin}) are nobody's, or twice somebody's"
            at = end
        assert at == self._capacity
        touching = zip(self._free, self._free[1:], strict=False)
        assert all(former[1] < latter[0] for former, latter in touching)


class StagingMemory:
    """`StagingMemory` is the bytes of an arena: anonymous, in huge pages where the kernel has them,
    touched when first used.

    `register` is told its address and bytes, for a device that must know them first. Owns whatever
    an engine may still write into it by (`keep`): both end together.
    """

    def __init__(
        self, capacity_bytes: int, register: Callable[[int, int], object] | None = None
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._memory = mmap.mmap(-1, capacity_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        first = ctypes.c_ubyte.from_buffer(self._memory)
        self.address = ctypes.addressof(first)
        del first  # a mapping that is pointed into can't be closed
        self._writers: list[object] = []
        if register is not None:
            register(self.address, capacity_bytes)

    def runs(self, slot: Slot) -> Runs:
        """Return where the slot's bytes lie, as a read's goal."""
        addresses = np.array([self.address + slot.offset], np.int64)
        return Runs(addresses, np.array([slot.bytes], np.int64))

    def keep(self, writer: object) -> None:
        """Hold the engine's handle of what may still write here, for as long as this memory is: an
        engine frees by its handle what it writes by."""
        self._writers.append(writer)

    def holds(self, runs: Runs) -> bool:
        """Tell whether all of the runs lie in it."""
        offsets = runs.addresses - self.address
        ends = offsets + runs.lengths
        return bool(((offsets >= 0) & (runs.lengths >= 0) & (ends <= self.capacity_bytes)).all())

    def close(self) -> None:
        """Unmap it. Never while a slot is abandoned: its writer would write into what comes to lie
        at that address next."""
        self._memory.close()
