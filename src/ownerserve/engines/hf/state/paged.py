"""The addresses in paged pools (state.pools) that one forward reads and writes.

`ForwardRows` own index tensors, made once a forward and shared by all layers. They never touch
state, and never work out themselves what an append finalizes: that is the cache's `TailStep`, one
for each row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from ownerserve.cache.layout import Table, TailStep, tail_step
from ownerserve.engines.hf.state.states import ModelStates
from ownerserve.kv.errors import InvariantViolated
from ownerserve.kv.frame import DENSE, WINDOW
from ownerserve.kv.registry.family import FULL, LINEAR, SLIDING


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
