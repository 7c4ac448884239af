"""A stage is host memory in which records that were read from a store lie while peers read them.

    one memory, mapped once    | slot | slot |   free   | slot | ...    peers of this host map it
    a slot                     | unit | unit | ...                      units of one component

Owns the memory and who has which slot. A slot that is given back may be another's at once: who
reads it asks for its ticket after each read. Its pages are the system's again meanwhile.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Mapping
from contextlib import suppress
from threading import Lock

import msgspec
import numpy as np
from numpy.typing import NDArray

from ownerserve.kv.frame import PayloadSection
from ownerserve.kv.regions import Region, SharedMemory
from ownerserve.kv.sealed_memory import sealed_memory
from ownerserve.node.transfers.landing import frame_region
from ownerserve.transfer.layout.places import RegionPlaces
from ownerserve.transfer.movers.arena import ALIGN_BYTES, ArenaBook, ArenaFull, Slot

log = logging.getLogger("ownerserve.transfer")


class LendStage:
    """A `LendStage` has `size_bytes` bytes for units of the sections. Any thread may call."""

    def __init__(self, sections: Mapping[str, PayloadSection], size_bytes: int) -> None:
        self._size = max(ALIGN_BYTES, size_bytes // ALIGN_BYTES * ALIGN_BYTES)
        self._mapping, shared_as = _mapped(self._size)
        self._memory: NDArray[np.uint8] = np.frombuffer(self._mapping, np.uint8)
        address = int(self._memory.ctypes.data)
        shared = None if shared_as is None else SharedMemory(shared_as, address, self._size)
        self.regions: tuple[Region, ...] = tuple(
            msgspec.structs.replace(
                frame_region(section, address, self._size // section.unit_bytes), shared=shared
            )
            for section in sections.values()
            if section.unit_bytes <= self._size
        )
        self.places = {region.section.name: RegionPlaces(region) for region in self.regions}
        """Where the units of each component may lie; a block of them is a unit."""
        self._book = ArenaBook(self._size)
        self._slots: dict[int, list[Slot]] = {}
        self._numbers = 0
        self._lock = Lock()

    def take(self, number: int, units: Mapping[str, int]) -> dict[str, int] | None:
        """Take room for so many units of each component, under the number, and return the block at
        which those of each begin; None, and nothing is taken, where there is no such room."""
        first: dict[str, int] = {}
        with self._lock:
            for name, count in units.items():
                slot = self._reserve(name, count)
                if slot is None:
                    self._give_back(number)
                    return None
                self._slots.setdefault(number, []).append(slot)
                first[name] = -(-slot.offset // self._unit_bytes(name))
        return first

    def write(self, component: str, block: int, data: memoryview) -> None:
        """Write units, as records have them, from that block on."""
        begin = block * self._unit_bytes(component)
        self._memory[begin : begin + len(data)] = np.frombuffer(data, np.uint8)

    def give_back(self, number: int) -> None:
        """Free what was taken under the number; nothing is no error."""
        with self._lock:
            self._give_back(number)

    def used_bytes(self) -> int:
        """Return how many bytes are taken."""
        with self._lock:
            return self._book.numbers(0.0).reserved_bytes

    def _unit_bytes(self, component: str) -> int:
        return self.places[component].region.section.unit_bytes

    def _reserve(self, component: str, units: int) -> Slot | None:
        """Reserve a slot, longer by a unit, in which so many begin at a whole one."""
        if component not in self.places:
            return None
        self._numbers += 1
        slot = self._book.reserve(self._numbers, (units + 1) * self._unit_bytes(component))
        return None if isinstance(slot, ArenaFull) else slot

    def _give_back(self, number: int) -> None:
        for slot in self._slots.pop(number, ()):
            whole = -(-slot.bytes // ALIGN_BYTES) * ALIGN_BYTES
            with suppress(OSError):  # a memory that keeps its pages: they are used again
                self._mapping.madvise(mmap.MADV_REMOVE, slot.offset, whole)
            self._book.give_back(slot.number)


def _mapped(size: int) -> tuple[mmap.mmap, str | None]:
    """Return memory, and the name by which others of this host open it; None: they can't."""
    try:
        sealed = sealed_memory("ownerserve-stage", size)
    except (OSError, AttributeError) as error:  # a sandbox, or a system, without memfd
        log.info("what is lent from the store is not shared with other processes: %s", error)
        return mmap.mmap(-1, size), None
    return sealed.mapping, sealed.name
