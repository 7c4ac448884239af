"""A layout says what a cache holds (components, slot sizes, the block length B), and a table where
a running sequence's part of it is.

    range component   one slot = the entries of one block of B tokens, in all layers that keep it
    point component   one slot = what is needed to go on at one boundary, in all layers that keep it
    state block       one slot = the live form of every point component of one running sequence,
                      and its tails: tokens that wait for their window of m to close

A layout is made from a model's geometry by the engine, and read by pools, tree and reports.

A tail is tokens that wait in a state block until a window of m of them makes one entry. Here are
the arithmetic of an append and each running sequence's book of it, in positions and counts: which
rows those are in memory is the engine's affair.

    m = 4, append [10, 19)     8   9 | 10  11 | 12 .. 15 | 16 17 18
                               waits |  taken, 2 entries |   left
    finalize                   [--- entry 2 --][ entry 3 ]              first_entry 2, entries 2
    carried, with overlap                      [12 .. 15]               for entry 4's other half

At a multiple of m nothing waits; a tail with overlap still carries its last window's rows (CSA:
the Ca half), which are a point component of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import msgspec

from ownerserve.kv.descriptor import TailForm
from ownerserve.kv.errors import InvalidInput, InvariantViolated
from ownerserve.kv.prefix import TOKEN_BYTES
from ownerserve.kv.specs import Coverage


class TailStep(msgspec.Struct, frozen=True):
    """A step is what an append does to one tail.

    `waiting` tokens waited before. With the first `taken` new ones they make `entries` entries,
    from number `first_entry` on: the finalize trigger fired that often. `left` tokens wait
    afterwards, and the rows of the positions in `carried` are kept for the next entry.
    """

    waiting: int
    first_entry: int
    entries: int
    taken: int
    left: int
    carried: range

    @property
    def end_entry(self) -> int:
        """Return how many entries the sequence has afterwards."""
        return self.first_entry + self.entries


def tail_step(start: int, tokens: int, *, period: int, overlap: int = 0) -> TailStep:
    """Append `tokens` at position `start` to a tail of windows of `period` tokens."""
    first, waiting = divmod(start, period)
    entries, left = divmod(waiting + tokens, period)
    closed = (first + entries) * period
    return TailStep(
        waiting=waiting,
        first_entry=first,
        entries=entries,
        taken=entries * period - waiting if entries else 0,
        left=left,
        carried=range(max(closed - overlap, 0), closed),
    )


class Tail(msgspec.Struct, frozen=True):
    """A tail is one kind of waiting state over all layers that have it; windows of `period` tokens.

    `overlap` rows of the last full window are needed at every boundary. `form` says how waiting
    tokens are held: a row each, or all of them as one row, an online softmax. A row has
    `row_bytes`, and the tail `slot_bytes` of a state block, over all layers.
    """

    name: str
    period: int
    overlap: int = 0
    form: TailForm = TailForm.RAW_ROWS
    row_bytes: int = 0
    slot_bytes: int = 0

    def __post_init__(self) -> None:
        if self.period < 1 or not 0 <= self.overlap <= self.period:
            raise InvalidInput(
                f"tails.{self.name}",
                f"windows of {self.period} tokens that overlap by {self.overlap}",
                "use a period of 1 or more and an overlap of 0 to the period",
            )

    def step(self, start: int, tokens: int) -> TailStep:
        """Return what an append of `tokens` at `start` does to this tail."""
        return tail_step(start, tokens, period=self.period, overlap=self.overlap)

    def rows_held(self, waiting: int) -> int:
        """Count the rows that `waiting` tokens take."""
        return min(waiting, 1) if self.form is TailForm.ONLINE else waiting


class TailBook(msgspec.Struct):
    """A book is one running sequence's tails at `position`: what waits in each, and what it has
    finalized.

    Kept append by append, not computed from `position`, so that a check has two sides to compare
    (invariant 12). Without tails it follows nothing.
    """

    tails: tuple[Tail, ...] = ()
    position: int = 0
    waiting: dict[str, int] = {}
    entries: dict[str, int] = {}

    @classmethod
    def at(cls, tails: Sequence[Tail], position: int) -> TailBook:
        """Make the book of a sequence restored at a boundary: every window is closed."""
        if not tails:
            return cls(position=position)
        entries = {}
        for tail in tails:
            entries[tail.name], rest = divmod(position, tail.period)
            if rest:
                raise InvariantViolated(f"invariant 12: {tail.name} waits at {position}")
        return cls(tuple(tails), position, dict.fromkeys(entries, 0), entries)

    def advance(self, tokens: int) -> None:
        """Note that `tokens` more are computed, and finalize each window they close."""
        self.position += tokens
        for tail in self.tails:
            closed, left = divmod(self.waiting[tail.name] + tokens, tail.period)
            self.entries[tail.name] += closed
            self.waiting[tail.name] = left

    def copy(self) -> TailBook:
        """Copy the book for a fork."""
        return TailBook(self.tails, self.position, dict(self.waiting), dict(self.entries))

    def require_at(self, start: int) -> None:
        """Raise InvariantViolated when an engine is about to append elsewhere than here."""
        if self.tails and start != self.position:
            raise InvariantViolated(
                f"invariant 12: computing from {start}, but the tails are at {self.position}"
            )


class Component(msgspec.Struct, frozen=True):
    """A component is one kind of state over all layers that keep it.

    `slot_bytes` is what a slot occupies, alignment padding included; `payload_bytes` what of it
    is information. Their ratio is the component's internal fragmentation.
    """

    name: str
    coverage: Coverage
    slot_bytes: int
    payload_bytes: int


class Layout(msgspec.Struct, frozen=True, dict=True):
    """A layout is all components of a model at one block length; `state_bytes` is one live state
    block.

    Every tail's window divides the block, so at a boundary no tail holds anything.
    """

    block_tokens: int
    components: tuple[Component, ...]
    state_bytes: int = 0
    tails: tuple[Tail, ...] = ()

    def __post_init__(self) -> None:
        names = [component.name for component in self.components]
        names += [tail.name for tail in self.tails]
        if len(set(names)) != len(names):
            raise InvalidInput("components", f"repeated name in {names}", "name each one once")
        if self.block_tokens < 1:
            raise InvalidInput("block_tokens", f"{self.block_tokens}", "use 1 or more")
        for tail in self.tails:
            if self.block_tokens % tail.period:
                raise InvalidInput(
                    "block_tokens",
                    f"{self.block_tokens} cuts a window of {tail.name}",
                    f"use a multiple of {tail.period}",
                )

    @cached_property
    def packed_block_bytes(self) -> int:
        """Return the bytes that one block's tokens take when packed (kv.prefix)."""
        return self.block_tokens * TOKEN_BYTES

    @cached_property
    def range_names(self) -> tuple[str, ...]:
        """Return the names of the range components."""
        return tuple(c.name for c in self.components if c.coverage is Coverage.RANGE)

    @cached_property
    def point_names(self) -> tuple[str, ...]:
        """Return the names of the point components."""
        return tuple(c.name for c in self.components if c.coverage is Coverage.POINT)

    def needed_at(self, position: int) -> tuple[str, ...]:
        """Return the parts of a state block without which nothing can go on at `position`: the
        point components, which include overlap rows, and each tail whose window is open there.
        """
        if not position:
            return ()
        open_tails = (tail.name for tail in self.tails if position % tail.period)
        return (*self.point_names, *open_tails)

    def boundary_at_or_before(self, position: int) -> int:
        """Return the last multiple of B that is <= `position`."""
        return position - position % self.block_tokens


class Table(msgspec.Struct):
    """A table holds the slots of one running sequence.

    `range` maps each range component to the slots of blocks 0, 1, ...: tokens [i*B, (i+1)*B) are in
    slot `range[component][i]`. `state` is the live state block, `tails` what waits in it.
    """

    range: dict[str, list[int]]
    state: int
    tails: TailBook = msgspec.field(default_factory=TailBook)
