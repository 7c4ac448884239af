"""The read arena is where a node's movers write that can't be fenced; what they verified there is
copied on to where everything else lands.

    goal ──> landed: copy ──> free                the slot is the next read's
         └─> unproven ─────── quiet: free         until then, which may be never, it is abandoned

Who has which bytes is ArenaBook's (transfer.movers.arena). Its memory is there until the process
ends: an engine that has it registered may write into it for as long.
"""

from __future__ import annotations

import ctypes
from threading import Lock

from ownerserve.transfer.layout.joining import join
from ownerserve.transfer.movers.arena import (
    ArenaBook,
    ArenaFull,
    ArenaNumbers,
    Slot,
    StagingMemory,
)
from ownerserve.transfer.vocabulary import Runs

_kept: list[StagingMemory] = []


class ReadArena:
    """A `ReadArena` owns the goals of reads that may be written late. One thread calls it; any may
    ask for its numbers."""

    def __init__(self, capacity_bytes: int) -> None:
        self.memory = StagingMemory(capacity_bytes)
        _kept.append(self.memory)
        self._book = ArenaBook(capacity_bytes)
        self._lock = Lock()
        self._slots: dict[int, tuple[Slot, Runs]] = {}
        self._unproven: set[int] = set()

    def goal(self, number: int, then: Runs) -> Runs | ArenaFull:
        """Return where a read is to write whose bytes go on to `then`."""
        with self._lock:
            slot = self._book.reserve(number, then.bytes)
        if isinstance(slot, ArenaFull):
            return slot
        self._slots[number] = slot, then
        return self.memory.runs(slot)

    def copy(self, number: int) -> None:
        """Copy on what a read has brought, which is verified."""
        slot, then = self._slots[number]
        copies = join(then, self.memory.runs(slot))
        sides = copies.goal.tolist(), copies.source.tolist(), copies.lengths.tolist()
        for goal, source, length in zip(*sides, strict=True):
            ctypes.memmove(goal, source, length)

    def unproven(self, number: int, now_s: float) -> None:
        """Abandon the slot of a read whose writer may write on."""
        with self._lock:
            self._book.abandon(number, now_s)
        self._unproven.add(number)

    def free(self, number: int) -> None:
        """Let the slot be used again: no writer of it is left. A read that got none is no error."""
        if self._slots.pop(number, None) is None:
            return
        with self._lock:
            if number in self._unproven:
                self._unproven.remove(number)
                self._book.quiet(number)
            else:
                self._book.give_back(number)

    def numbers(self, now_s: float) -> ArenaNumbers:
        """Return what metrics say of it now; any thread may call."""
        with self._lock:
            return self._book.numbers(now_s)
