"""A region is the memory in which an engine keeps one component's blocks, as others may read it.

    component   one of kv.frame's sections, e.g. `dense`
    lanes       lanes[part][layer]: where each part of each layer lies, in the frame's order
    block b     of a lane begins at lane.address + b * lane.block_bytes

Addresses are the owning process's. What is in a block changes unless a ticket (cache.lends) or a
reservation (cache.ingest) keeps it.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from ownerserve.kv.errors import SpecMismatch
from ownerserve.kv.frame import Lane, PayloadSection


class SharedMemory(msgspec.Struct, frozen=True):
    """A `SharedMemory` is a memfd that other processes of the host map: its `name`, which is
    `/proc/PID/fd/N` of the owning process, and the `address` and `bytes` at which that process has
    all of it. It is sealed against shrinking (F_SEAL_SHRINK): whoever touches a mapping of what
    shrank is killed. A POSIX shared memory object can't be sealed, hence is none."""

    name: str
    address: int
    bytes: int


class Region(msgspec.Struct, frozen=True):
    """A `Region` is one component's blocks: `section` says what a unit holds, `lanes` where a
    block has it, `blocks` how many there are. All lanes lie within [`address`, `address` +
    `bytes`).

        unit of the frame     |          B tokens          |     tables[group][unit * k + n]
        blocks of the engine  | block a | block b | block c |    k = 3: its first axis in k cuts

    `groups[layer]` is the block table (of several that one prefix may have) by which the layer's
    blocks are named; empty, where there is one. `shared`: the memory object that holds the region,
    where another process of this host may map it.
    """

    section: PayloadSection
    lanes: tuple[tuple[Lane, ...], ...]
    blocks: int
    address: int
    bytes: int
    groups: tuple[int, ...] = ()
    shared: SharedMemory | None = None

    def table(self, layer: int) -> int:
        """Return which block table names the layer's blocks."""
        return self.groups[layer] if self.groups else 0

    def blocks_a_unit(self, part: int, layer: int) -> int:
        """Count the blocks of the engine that hold a unit of that part of that layer. Raises
        SpecMismatch where they are no whole number."""
        whole, one = self.section.parts[part], self.lanes[part][layer]
        count, rest = divmod(whole.payload_bytes // whole.shape[0], one.bytes)
        if rest or not count:
            raise SpecMismatch(f"{whole.name} of {self.section.name}: blocks of {one.bytes} bytes")
        return count

    def check(self) -> None:
        """Raise SpecMismatch where the lanes are not those of the section, or leave the region."""
        name, parts = self.section.name, self.section.parts
        if [len(lanes) for lanes in self.lanes] != [part.shape[0] for part in parts]:
            raise SpecMismatch(f"{name}: lanes for other parts or layers than the section's")
        if self.groups and len(self.groups) != max(map(len, self.lanes)):
            raise SpecMismatch(f"{name}: {len(self.groups)} layers have a block table")
        counts: dict[int, int] = {}
        for part, lanes in enumerate(self.lanes):
            for layer, lane in enumerate(lanes):
                count, table = self.blocks_a_unit(part, layer), self.table(layer)
                if counts.setdefault(table, count) != count:
                    raise SpecMismatch(f"{name}: blocks of two lengths in one table")
                if not self._holds(lane):
                    raise SpecMismatch(f"{name}: a lane of {parts[part].name} leaves its region")

    def _holds(self, lane: Lane) -> bool:
        low, end = lane.reach
        last = (self.blocks - 1) * lane.block_bytes
        first = lane.address + min(0, last) + low
        return self.address <= first and lane.address + max(0, last) + end <= self.address + (
            self.bytes
        )


def blocks_of(lane: Lane, memory: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    """Return the bytes of the lane's first `count` blocks as a view [count, *counts, item bytes] of
    `memory`, in which the lane's address is a place. They lie within it: Region.check says so."""
    found: NDArray[np.uint8] = np.lib.stride_tricks.as_strided(
        memory[lane.address :],
        (count, *lane.counts, lane.item_bytes),
        (lane.block_bytes, *lane.strides, 1),
    )
    return found
