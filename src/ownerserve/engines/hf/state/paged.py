"""Paged state is tensor pools addressed by slot, and the addresses that one forward reads and
writes.

Pools         own device memory: the bytes of every component and of every state block. They
              never choose a slot, know a token, or look inside a model
ForwardRows   own index tensors, made once a forward and shared by all layers. They never touch
              state, and never work out themselves what an append finalizes: that is the
              cache's `TailStep`, one for each row
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch
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
from ownerserve.cache.layout import Table, TailStep, tail_step
from ownerserve.engines.hf.state.states import PART_ALIGN_BYTES, ComponentTensors, ModelStates
from ownerserve.kv.errors import InvalidInput, InvariantViolated, SpecMismatch
from ownerserve.kv.frame import DENSE, WINDOW
from ownerserve.kv.registry.family import FULL, LINEAR, SLIDING


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
        self._rows[[self._checked(target) for _, target in pairs]] = self._rows[sources]

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
        """Return the bytes of `slots`, one after another: one gather, one copy to the host."""
        rows = self._rows[[self._checked(slot) for slot in slots]]
        return rows.cpu().numpy().reshape(-1).data

    def write_many(self, slots: Sequence[int], data: memoryview) -> None:
        """Write `data`, as `read_many` gives it, into `slots`. Raises SpecMismatch on a wrong
        length."""
        if len(data) != self.slot_bytes * len(slots):
            raise SpecMismatch(f"{len(data)} bytes for {len(slots)} slots of {self.slot_bytes}")
        # torch can't wrap read-only memory; this is the one copy of the bytes on the host.
        rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(len(slots), -1)
        self._rows[[self._checked(slot) for slot in slots]] = rows.to(self._rows.device)

    def _checked(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise InvalidInput("slot", f"{slot}", f"use 0 to {self.slots - 1}")
        return self._row_of(slot)

    def _row_of(self, slot: int) -> int:
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
        shape = (zero + 1) * self._block_bytes
        self._bytes = torch.zeros(shape, dtype=torch.uint8, device=device)
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
        self.state = DevicePool(states.live_sections, slots=state_slots, device=device)

    def component(self, name: str) -> DevicePool:
        """Return the pool of a component."""
        return self._components[name]

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


class EntryAddresses(msgspec.Struct, frozen=True):
    """`EntryAddresses` say where the entries of one range component are, for every row of a span.

    `blocks` [R, n] slots to gather; `count` entries to keep of them (the longest row's).
    `write_rows` [r] are the rows that have new entries; `write_slots`, `write_offsets` [r, k]
    the addresses of their last k, those at or above the floor.
    """

    blocks: Tensor
    count: int
    write_rows: Tensor
    write_slots: Tensor
    write_offsets: Tensor


class WindowAddresses(msgspec.Struct, frozen=True):
    """`WindowAddresses` are ring indices: `read` [R, h] of the rows before the span; `write` [R, k]
    of its last k rows.

    The row of position p is at p mod (W-1), so a ring says nothing of where it stands: who loads
    one must know the position.
    """

    read: Tensor
    write: Tensor
    read_positions: Tensor


class TailAddresses(msgspec.Struct, frozen=True):
    """`TailAddresses` say where the rows are that wait for their window of `rate` tokens to close.

    A closing chunk is the first `waiting` rows of the tail, then the span's first `closing` new
    ones. New rows from `first_left` on stay behind in the tails of `left_rows` [r], at `left`
    [r, k]. In a batch all rows get a chunk when one closes; those of the others mean nothing.
    """

    waiting: int
    closing: int
    first_left: int
    left_rows: Tensor
    left: Tensor


class ForwardRows:
    """`ForwardRows` are the rows of one forward over paged state: which run, from where, and their
    addresses.

    A forward is R sequences x q new tokens. R > 1 only with q = 1 (batched decode). Ragged lengths
    are padded: range components on the right with the pool's zero slot, windows on the left.

        positions of one row     0 ... start-1 | start ... start+q-1
                                 kept state    | this forward
    """

    def __init__(
        self,
        tables: Sequence[Table],
        starts: Sequence[int],
        *,
        new_tokens: int,
        block_tokens: int,
        device: torch.device,
        write_floor: int = 0,
    ) -> None:
        if len(tables) > 1 and (new_tokens > 1 or write_floor):
            raise InvariantViolated("a batch decodes one token a row, with no write floor")
        for table, start in zip(tables, starts, strict=True):
            table.tails.require_at(start)
        self.starts = starts
        self.new_tokens = new_tokens
        self.device = device
        self.states = torch.tensor([[table.state] for table in tables], device=device)
        self._tables = tables
        self._block_tokens = block_tokens
        self._write_floor = write_floor
        self._starts = torch.tensor([[start] for start in starts], device=device)
        self._steps: dict[int, list[TailStep]] = {}
        self._entries: dict[str, EntryAddresses] = {}
        self._windows: dict[int, WindowAddresses] = {}
        self._tails: dict[int, TailAddresses] = {}

    @property
    def rows(self) -> int:
        """`rows` counts the sequences of the forward."""
        return len(self.starts)

    def kept_window(self, window_tokens: int) -> int:
        """Return how many window rows precede the span, in the longest row."""
        return min(max(self.starts), window_tokens - 1)

    def positions(self) -> Tensor:
        """Return the positions [R, q] of the new tokens."""
        return self._starts + torch.arange(self.new_tokens, device=self.device)

    def steps(self, rate: int) -> list[TailStep]:
        """Return, for each row, what this forward does to its windows of `rate` tokens."""
        found = self._steps.get(rate)
        if found is None:
            new = self.new_tokens
            found = [tail_step(start, new, period=rate) for start in self.starts]
            self._steps[rate] = found
        return found

    def completed(self, rate: int) -> Tensor:
        """Return how many entries [R, 1] of ratio `rate` each row has after this forward."""
        return self._column(step.end_entry for step in self.steps(rate))

    def open_windows(self, rate: int) -> Tensor:
        """Return the first positions [R, 1] of the windows of `rate` tokens that the rows start
        in."""
        return self._column(step.first_entry * rate for step in self.steps(rate))

    def closing_rows(self, rate: int) -> Tensor:
        """Return the indices [r] of the rows that complete a window of `rate` tokens."""
        return self._indices(step.entries > 0 for step in self.steps(rate))

    def entries(self, component: str, rate: int, *, zero_slot: int) -> EntryAddresses:
        """Return the addresses in a component that keeps one entry for each `rate` tokens."""
        found = self._entries.get(component)
        if found is None:
            found = self._entries[component] = self._entry_addresses(component, rate, zero_slot)
        return found

    def window(self, window_tokens: int) -> WindowAddresses:
        """Return the addresses in a ring of W-1 rows."""
        found = self._windows.get(window_tokens)
        if found is None:
            ring, new = window_tokens - 1, self.new_tokens
            kept, written = self.kept_window(window_tokens), min(new, window_tokens - 1)
            read = self._starts + torch.arange(-kept, 0, device=self.device)
            write = self._starts + torch.arange(new - written, new, device=self.device)
            found = WindowAddresses(read.remainder(ring), write.remainder(ring), read)
            self._windows[window_tokens] = found
        return found

    def tail(self, rate: int) -> TailAddresses:
        """Return the addresses in the tail of a component of ratio `rate`."""
        found = self._tails.get(rate)
        if found is None:
            found = self._tails[rate] = self._tail_addresses(rate)
        return found

    def _column(self, values: Iterable[int]) -> Tensor:
        return torch.tensor([[value] for value in values], device=self.device)

    def _indices(self, chosen: Iterable[bool]) -> Tensor:
        rows = [row for row, wanted in enumerate(chosen) if wanted]
        return torch.tensor(rows, dtype=torch.int64, device=self.device)

    def _tail_addresses(self, rate: int) -> TailAddresses:
        steps = self.steps(rate)
        closes = any(step.entries for step in steps)
        if self.rows > 1:
            left_rows = self._indices(step.left > 0 for step in steps)
            waiting, closing, first_left = (rate - 1, 1, 0) if closes else (0, 0, 0)
        else:
            left_rows = self._indices([True])
            waiting = steps[0].waiting if closes else 0
            closing = first_left = steps[0].taken
        left = torch.arange(first_left, self.new_tokens, device=self.device)
        return TailAddresses(
            waiting=waiting,
            closing=closing,
            first_left=first_left,
            left_rows=left_rows,
            left=(self._starts[left_rows] + left).remainder(rate),
        )

    def _entry_addresses(self, component: str, rate: int, zero_slot: int) -> EntryAddresses:
        per_block = self._block_tokens // rate
        steps = self.steps(rate)
        count = max(step.end_entry for step in steps)
        blocks = self._block_table(component, rate, zero_slot=zero_slot)
        new = max(step.entries for step in steps)
        below_floor = max(0, self._write_floor // rate - steps[0].first_entry)
        written = torch.arange(min(below_floor, new), new, device=self.device)
        rows = self.closing_rows(rate)
        entries = self._column(step.first_entry for step in steps)[rows] + written
        return EntryAddresses(
            blocks=blocks,
            count=count,
            write_rows=rows,
            write_slots=blocks[rows].gather(1, entries // per_block),
            write_offsets=entries.remainder(per_block),
        )

    def _block_table(self, component: str, rate: int, *, zero_slot: int) -> Tensor:
        """Return the slots [R, n] of all blocks in use, short rows padded with the zero slot."""
        per_block = self._block_tokens // rate
        needed = [-(-step.end_entry // per_block) for step in self.steps(rate)]
        width = max(needed)
        rows = []
        for table, blocks in zip(self._tables, needed, strict=True):
            slots = table.range[component][:blocks]
            if len(slots) < blocks:
                raise InvariantViolated(f"{component}: {len(slots)} blocks reserved of {blocks}")
            rows.append(slots + [zero_slot] * (width - blocks))
        return torch.tensor(rows, dtype=torch.int64, device=self.device).view(self.rows, width)


# ---- masks of a batched decode
#
# transformers makes the masks of a single sequence itself. For rows of different lengths it is
# given finished additive masks [R, 1, 1, keys], 0 or the dtype's least number.


def batch_inputs(states: ModelStates, span: ForwardRows, *, dtype: torch.dtype) -> dict[str, Any]:
    """Return the keyword arguments that a model's forward needs beside the tokens of a batch."""
    uses = {name for plan in states.layers for name in plan.index}
    masks: dict[str, Tensor | None] = {}
    if WINDOW in uses:
        masks[SLIDING] = _window_mask(span, states.window_tokens, dtype=dtype)
    if DENSE in uses:
        masks[FULL] = _count_mask(span, 1, dtype=dtype)
        masks[LINEAR] = None
    inputs: dict[str, Any] = {"attention_mask": masks}
    if states.hca_rate:
        inputs["hca_padding"] = _count_mask(span, states.hca_rate, dtype=dtype)
    return inputs


def _window_mask(span: ForwardRows, window_tokens: int, *, dtype: torch.dtype) -> Tensor:
    """Return a mask that hides left padding: rows of positions below zero."""
    old = span.window(window_tokens).read_positions >= 0
    new = torch.ones((span.rows, span.new_tokens), dtype=torch.bool, device=span.device)
    return _additive(torch.cat((old, new), dim=1), dtype)


def _count_mask(span: ForwardRows, rate: int, *, dtype: torch.dtype) -> Tensor:
    """Return a mask that hides right padding: entries that a row does not have."""
    counts = span.completed(rate)
    longest = max(step.end_entry for step in span.steps(rate))
    return _additive(torch.arange(longest, device=span.device) < counts, dtype)


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None, None, :]
