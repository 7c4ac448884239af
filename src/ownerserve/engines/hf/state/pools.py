"""Tensor pools addressed by slot: the bytes of every component and of every state block.

Owns device memory. Must never choose a slot, know a token, or look inside a model.

A pool is one byte tensor, a row for each slot, with typed views into it. So that a slot can be
copied, spilled and restored as bytes, and computed with as tensors, with no conversion:

    row of a pool:    | part | part | ...
    row of `state`:   | swa: parts | csa_overlap: parts | ... | tails |

A point component lies in a state block exactly as in its own pool: a snapshot is a byte copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ownerserve.cache.effects import (
    CopyBlock,
    CopyState,
    Effect,
    LoadPoint,
    ResetState,
    SavePoint,
)
from ownerserve.engines.hf.state.states import ComponentTensors, ModelStates
from ownerserve.kv.errors import InvalidInput, SpecMismatch


class DevicePool:
    """Slots of equal size, plus one hidden slot of zeros that pads short block tables."""

    def __init__(
        self, sections: Sequence[ComponentTensors], *, slots: int, device: torch.device
    ) -> None:
        self.slots = slots
        self.slot_bytes = sum(section.slot_bytes for section in sections)
        self._rows = torch.zeros((slots + 1, self.slot_bytes), dtype=torch.uint8, device=device)
        self._spans: dict[str, slice] = {}
        self._views: dict[tuple[str, str], Tensor] = {}
        offset = 0
        for section in sections:
            self._spans[section.name] = slice(offset, offset + section.slot_bytes)
            for part in section.parts:
                data = self._rows[:, offset : offset + part.payload_bytes].view(part.dtype)
                self._views[section.name, part.name] = _rows_as(data, part.shape)
                offset += part.padded_bytes

    @property
    def zero_slot(self) -> int:
        """The padding slot: always zero, so that padded entries are finite."""
        return self.slots

    def part(self, section: str, part: str) -> Tensor:
        """View [slots + 1, layers, rows, ...] of one part."""
        return self._views[section, part]

    def section_rows(self, section: str) -> Tensor:
        """View [slots + 1, bytes] of one section."""
        return self._rows[:, self._spans[section]]

    def copy(self, source: int, target: int) -> None:
        self._rows[self._checked(target)] = self._rows[self._checked(source)]

    def clear(self, slot: int) -> None:
        self._rows[self._checked(slot)] = 0

    def read(self, slot: int) -> bytes:
        """The slot's bytes; padding between parts is zero."""
        return self._rows[self._checked(slot)].cpu().numpy().tobytes()

    def write(self, slot: int, data: bytes) -> None:
        if len(data) != self.slot_bytes:
            raise SpecMismatch(f"{len(data)} bytes for a slot of {self.slot_bytes}")
        row = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._rows[self._checked(slot)] = row.to(self._rows.device)

    def read_many(self, slots: Sequence[int]) -> memoryview:
        """The bytes of `slots`, one after another: one gather, one copy to the host."""
        rows = self._rows[[self._checked(slot) for slot in slots]]
        return rows.cpu().numpy().reshape(-1).data

    def write_many(self, slots: Sequence[int], data: memoryview) -> None:
        """The inverse of `read_many`."""
        if len(data) != self.slot_bytes * len(slots):
            raise SpecMismatch(f"{len(data)} bytes for {len(slots)} slots of {self.slot_bytes}")
        # torch can't wrap read-only memory; this is the one copy of the bytes on the host.
        rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(len(slots), -1)
        self._rows[[self._checked(slot) for slot in slots]] = rows.to(self._rows.device)

    def _checked(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise InvalidInput("slot", f"{slot}", f"use 0 to {self.slots - 1}")
        return slot


def _rows_as(data: Tensor, shape: tuple[int, ...]) -> Tensor:
    """View [rows, elements], whose rows need not touch, as [rows, *shape]."""
    return data.view(data.shape[0], *shape)


class Pools:
    """One pool for each component, and `state` for the running sequences."""

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
        self._range = tuple(section.name for section in states.range_sections)
        self._components = {
            section.name: DevicePool((section,), slots=slots[section.name], device=device)
            for section in sections
        }
        self.state = DevicePool(states.live_sections, slots=state_slots, device=device)

    def component(self, name: str) -> DevicePool:
        return self._components[name]

    def perform(self, effect: Effect) -> None:
        """Do what the cache decided."""
        match effect:
            case LoadPoint(slots=slots, state=state):
                for name, slot in slots.items():
                    point = self._components[name].section_rows(name)
                    self.state.section_rows(name)[state] = point[slot]
            case SavePoint(state=state, slots=slots):
                for name, slot in slots.items():
                    live = self.state.section_rows(name)
                    self._components[name].section_rows(name)[slot] = live[state]
            case CopyBlock(slots=pairs):
                for name, (source, target) in pairs.items():
                    self._components[name].copy(source, target)
            case CopyState(source=source, target=target):
                self.state.copy(source, target)
            case ResetState(state=state):
                self.state.clear(state)
