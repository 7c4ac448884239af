"""Pools are paged state: tensors addressed by slot.

They own device memory: the bytes of every component and of every state block. They never choose a
slot, know a token, or look inside a model. Where the device is this host's memory, they say where
each slot lies (`Pools.regions`), for who may read it from outside (a ticket, cache.lends).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ownerserve.cache.effects import (
    CopyBlock,
    CopyState,
    Effect,
    LoadPoint,
    MoveBorder,
    ResetState,
    SavePoint,
)
from ownerserve.engines.hf.state.host_memory import ArenaMemory, arena_memory
from ownerserve.engines.hf.state.states import PART_ALIGN_BYTES, ComponentTensors, ModelStates
from ownerserve.kv.errors import InvalidInput, SpecMismatch
from ownerserve.kv.frame import Lane, PayloadSection
from ownerserve.kv.regions import Region


class DevicePool:
    """A `DevicePool` is slots of equal size, plus one hidden slot of zeros that pads short block
    tables.

    A pool is one byte tensor, a row for each slot, with typed views into it. So that a slot can be
    copied, spilled and restored as bytes, and computed with as tensors, with no conversion:

        row of a pool:    | part | part | ...
        row of `state`:   | swa: parts | csa_overlap: parts | ... | tails |

    A point component lies in a state block exactly as in its own pool: a snapshot is a byte copy.
    """

    def __init__(
        self, sections: Sequence[ComponentTensors], *, slots: int, device: torch.device
    ) -> None:
        width = sum(section.slot_bytes for section in sections)
        rows = torch.zeros((slots + 1, width), dtype=torch.uint8, device=device)
        self._lay(sections, rows, slots)

    def _lay(self, sections: Sequence[ComponentTensors], rows: Tensor, slots: int) -> None:
        self.slots = slots
        self.slot_bytes = rows.shape[1]
        self._rows = rows
        self._host: NDArray[np.uint8] | None = rows.numpy() if rows.device.type == "cpu" else None
        self._spans: dict[str, slice] = {}
        self._views: dict[tuple[str, str], Tensor] = {}
        self._sections = tuple(sections)
        offset = 0
        for section in sections:
            self._spans[section.name] = slice(offset, offset + section.slot_bytes)
            for part in section.parts:
                data = self._rows[:, offset : offset + part.payload_bytes].view(part.dtype)
                self._views[section.name, part.name] = _rows_as(data, part.shape)
                offset += part.padded_bytes

    @property
    def zero_slot(self) -> int:
        """`zero_slot` is the padding slot: always zero, so that padded entries are finite."""
        return self._rows.shape[0] - 1

    def part(self, section: str, part: str) -> Tensor:
        """Return the view [slots + 1, layers, rows, ...] of one part."""
        return self._views[section, part]

    def section_rows(self, section: str) -> Tensor:
        """Return the view [slots + 1, bytes] of one section."""
        return self._rows[:, self._spans[section]]

    def slot_row(self, slot: int) -> Tensor:
        """Return the view [bytes] of one slot."""
        return self._rows[self._checked(slot)]

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the bytes of slots to others: (source, target); no target is a source."""
        sources = [self._checked(source) for source, _ in pairs]
        targets = [self._checked(target) for _, target in pairs]
        if self._host is not None:
            self._host[targets] = self._host[sources]
        else:
            self._rows[targets] = self._rows[sources]

    def copy(self, source: int, target: int) -> None:
        """Copy the bytes of slot `source` into slot `target`."""
        self._rows[self._checked(target)] = self._rows[self._checked(source)]

    def clear(self, slot: int) -> None:
        """Zero the slot."""
        self._rows[self._checked(slot)] = 0

    def read(self, slot: int) -> bytes:
        """Return the slot's bytes; padding between parts is zero. Raises InvalidInput for no slot
        of the pool."""
        return self._rows[self._checked(slot)].cpu().numpy().tobytes()

    def write(self, slot: int, data: bytes) -> None:
        if len(data) != self.slot_bytes:
            raise SpecMismatch(f"{len(data)} bytes for a slot of {self.slot_bytes}")
        row = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._rows[self._checked(slot)] = row.to(self._rows.device)

    def read_many(self, slots: Sequence[int]) -> memoryview:
        """Return the bytes of `slots`, one after another: one copy, which is the result.

        In this host's memory NumPy copies row by row at memcpy's speed, where torch's indexing goes
        byte by byte; from a device it is one gather there and one copy to the host.
        """
        rows = [self._checked(slot) for slot in slots]
        found = self._host[rows] if self._host is not None else self._rows[rows].cpu().numpy()
        return found.reshape(-1).data

    def write_many(self, slots: Sequence[int], data: memoryview) -> None:
        """Write `data`, as `read_many` gives it, into `slots`: one copy. Raises SpecMismatch on a
        wrong length."""
        if len(data) != self.slot_bytes * len(slots):
            raise SpecMismatch(f"{len(data)} bytes for {len(slots)} slots of {self.slot_bytes}")
        rows = [self._checked(slot) for slot in slots]
        given = np.frombuffer(data, np.uint8).reshape(len(slots), self.slot_bytes)
        if self._host is not None:
            self._host[rows] = given
        else:  # torch can't wrap read-only memory: one copy on the host, one to the device
            self._rows[rows] = torch.from_numpy(given.copy()).to(self._rows.device)

    def lanes(self) -> tuple[tuple[Lane, ...], ...]:
        """Return where each part of each layer of the first section lies, in this host's memory.

        slot b of a lane    begins at lane.address + b * lane.block_bytes, which is negative
                            where slots are counted from the end
        """
        first, step = self._row_of(0), self._row_of(1) - self._row_of(0)
        base, pitch = self._rows.data_ptr(), self._rows.stride(0)
        found, offset = [], base + first * pitch
        for part in self._sections[0].parts:
            layers, counts = part.shape[0], part.shape[1:]
            item = part.dtype.itemsize
            strides = tuple(math.prod(counts[at + 1 :]) * item for at in range(len(counts)))
            layer_bytes = part.payload_bytes // layers
            found.append(
                tuple(
                    Lane(offset + layer * layer_bytes, step * pitch, counts, strides, item)
                    for layer in range(layers)
                )
            )
            offset += part.padded_bytes
        return tuple(found)

    def _checked(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise InvalidInput("slot", f"{slot}", f"use 0 to {self.slots - 1}")
        return self._row_of(slot)

    def _row_of(self, slot: int) -> int:
        """Return which row of the pool's memory is the slot's."""
        return slot


def _rows_as(data: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the view [rows, elements], whose rows need not touch, as [rows, *shape]."""
    return data.view(data.shape[0], *shape)


class ArenaPool(DevicePool):
    """An `ArenaPool` is one component's part of an arena: `slots` of its rows are its own now, from
    the first on (a range component's, whose last row is the zero slot), or from the last back."""

    def __init__(self, section: ComponentTensors, rows: Tensor, *, slots: int) -> None:
        self._lay((section,), rows, slots)


class PointPool(ArenaPool):
    """A `PointPool` has its slots from the last row back: what it may have, and has not, lies where
    blocks are."""

    def _row_of(self, slot: int) -> int:
        return self._rows.shape[0] - 1 - slot


class Arena:
    """An `Arena` is the memory that range blocks and point slots share, and where the border is.

        | block 0 | block 1 | ...  -->          <-- ... | point 1 | point 0 | zero |

    A block's row has every range component side by side, a point slot's every point component. All
    that changes sides is zero first: what is read and masked must be finite.
    """

    def __init__(
        self,
        ranges: Sequence[ComponentTensors],
        points: Sequence[ComponentTensors],
        *,
        blocks: int,
        point_slots: int,
        device: torch.device,
    ) -> None:
        self._block_bytes = max(sum(section.slot_bytes for section in ranges), PART_ALIGN_BYTES)
        self._point_bytes = sum(section.slot_bytes for section in points)
        size = blocks * self._block_bytes + point_slots * self._point_bytes
        zero = -(-size // self._block_bytes)
        self._end = zero * self._block_bytes
        self.memory: ArenaMemory = arena_memory((zero + 1) * self._block_bytes, device)
        self._bytes = self.memory.tensor
        self._blocks, self._points = blocks, point_slots
        self.pools: dict[str, DevicePool] = {}
        self._ranges, self._point_names = [s.name for s in ranges], [s.name for s in points]
        offset, rows = 0, self._bytes.view(zero + 1, self._block_bytes)
        for section in ranges:
            columns = rows[:, offset : offset + section.slot_bytes]
            self.pools[section.name] = ArenaPool(section, columns, slots=blocks)
            offset += section.slot_bytes
        offset, last = 0, self._bytes[self._end - point_slots * self._point_bytes : self._end]
        for section in points:
            columns = last.view(point_slots, -1)[:, offset : offset + section.slot_bytes]
            self.pools[section.name] = PointPool(section, columns, slots=point_slots)
            offset += section.slot_bytes

    def move_border(self, effect: MoveBorder) -> None:
        """Move what lies where it may no longer, then the border."""
        for name in self._ranges if effect.block_moves else ():
            self.pools[name].move(effect.block_moves)
        for name, moves in effect.point_moves.items():
            if moves:
                self.pools[name].move(moves)
        size = self._block_bytes
        self._bytes[effect.blocks * size : self._blocks * size] = 0
        size, end = self._point_bytes, self._end
        self._bytes[end - self._points * size : end - effect.points * size] = 0
        self._blocks, self._points = effect.blocks, effect.points
        for name in self._ranges:
            self.pools[name].slots = effect.blocks
        for name in self._point_names:
            self.pools[name].slots = effect.points


class Pools:
    """`Pools` are one pool for each component, in one arena, and `state` for the running
    sequences."""

    def __init__(
        self,
        states: ModelStates,
        slots: Mapping[str, int],
        *,
        state_slots: int,
        device: torch.device,
    ) -> None:
        sections = (*states.range_sections, *states.point_sections)
        names = {section.name for section in sections}
        if names != slots.keys():
            raise InvalidInput(
                "slots", f"given for {sorted(slots)}", f"give a count for each of {sorted(names)}"
            )
        self._arena = Arena(
            states.range_sections,
            states.point_sections,
            blocks=max((slots[one.name] for one in states.range_sections), default=0),
            point_slots=max((slots[one.name] for one in states.point_sections), default=0),
            device=device,
        )
        self._components = self._arena.pools
        self._payloads = {
            name: PayloadSection(name, parts) for name, parts in states.payload_parts().items()
        }
        self._regions: tuple[Region, ...] = ()
        self.state = DevicePool(states.live_sections, slots=state_slots, device=device)

    def component(self, name: str) -> DevicePool:
        """Return the pool of a component."""
        return self._components[name]

    def regions(self) -> tuple[Region, ...]:
        """Return where the slots of each component lie, in this host's memory; none on another
        device, and none of a component that has no slots. The same tuple until the border between
        range blocks and points moves, which changes how many there are and moves no address.
        """
        memory, pools = self._arena.memory, self._components
        if memory.tensor.device.type != "cpu":
            return ()
        if any(pools[one.section.name].slots != one.blocks for one in self._regions) or (
            len(self._regions) != sum(pool.slots > 0 for pool in pools.values())
        ):
            self._regions = tuple(
                Region(
                    section=self._payloads[name],
                    lanes=pool.lanes(),
                    blocks=pool.slots,
                    address=memory.tensor.data_ptr(),
                    bytes=len(memory.tensor),
                    shared=memory.shared,
                )
                for name, pool in pools.items()
                if pool.slots
            )
        return self._regions

    def perform(self, effect: Effect) -> None:
        """Perform one of the cache's effects."""
        match effect:
            case LoadPoint(slots=slots, state=state):
                for name, slot in slots.items():
                    self.state.section_rows(name)[state] = self._components[name].slot_row(slot)
            case SavePoint(state=state, slots=slots):
                for name, slot in slots.items():
                    live = self.state.section_rows(name)
                    self._components[name].slot_row(slot)[:] = live[state]
            case CopyBlock(slots=pairs):
                for name, (source, target) in pairs.items():
                    self._components[name].copy(source, target)
            case CopyState(source=source, target=target):
                self.state.copy(source, target)
            case ResetState(state=state):
                self.state.clear(state)
            case MoveBorder():
                self._arena.move_border(effect)
