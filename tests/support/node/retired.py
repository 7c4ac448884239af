"""Landings whose memory is kept when nobody has it any more, full of poison: what a mover writes
there then is found."""

from __future__ import annotations

import weakref
from collections import deque
from types import SimpleNamespace

import numpy as np

from ownerserve.kv.units import MIB
from ownerserve.node.transfers import landing
from tests.support.node.toy_memory import POISON

KEPT_BYTES = 64 * MIB


class RetiredMemory:
    """The memory of all landings of this process, from `watch` on."""

    def __init__(self) -> None:
        self.standing = 0
        """Landings' areas that somebody still has."""
        self._late = 0
        self._retired: deque[np.ndarray] = deque()
        self._bytes = 0

    @property
    def numpy(self) -> SimpleNamespace:
        """What landings use of NumPy."""
        return SimpleNamespace(arange=np.arange, uint8=np.uint8, zeros=self._zeros)

    def watch(self) -> None:
        landing.np = self.numpy  # type: ignore[attr-defined]

    def _zeros(self, count: int, dtype: type[np.uint8]) -> np.ndarray:
        memory = np.zeros(count, dtype)
        lent = memory[:]  # what the landing has, and the views that others have of it
        self.standing += 1
        weakref.finalize(lent, self._retire, memory)
        return lent

    def _retire(self, memory: np.ndarray) -> None:
        self.standing -= 1
        memory.fill(POISON)
        self._retired.append(memory)
        self._bytes += memory.nbytes
        while self._bytes > KEPT_BYTES:
            self._look_at(self._retired.popleft())

    def _look_at(self, memory: np.ndarray) -> None:
        self._bytes -= memory.nbytes
        self._late += int((memory != POISON).sum())

    def late_bytes(self) -> int:
        """How many bytes were written into memory that was let go of."""
        while self._retired:
            self._look_at(self._retired.popleft())
        return self._late
