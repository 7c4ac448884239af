"""Copies move many pieces at once between an engine's memory and frames, by lists of where they
lie.

    engine's memory   | piece | ... | piece |    anywhere, in whatever order of its axes
    frame             | piece | piece | piece    side by side, as kv.frame lays a unit

A piece is one block of one part of one layer, or one token's row of it. Owns no memory and knows
no model, page or place: the codec lists pieces. `compiled.CompiledCopies` moves them by compiled
loops, `HostCopies` by NumPy where these are not to be had, and
`device.DeviceCopies` by a kernel, behind the same two calls.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ownerserve.kv.frame import Lane
from ownerserve.kv.units import MIB

log = logging.getLogger("vllm.ownerserve")

Offsets = NDArray[np.int64]

CALL_BYTES = 8 * MIB
"""What one call moves at most: its list of rows stays in the processor's cache."""
STAGED_BYTES = MIB
"""The same where axes change places on the way, which takes two steps."""
LEAST_RUN_BYTES = 32 * 1024
"""Where the frame has less of an allocation in one piece, what is copied from it is listed in the
frame too, at the price of a second copy."""
LEAST_ROW_BYTES = 16
"""Shorter rows are not listed one by one: a list has 8 bytes for each."""
PAGE_BYTES = 4096
MOST_TOUCHED_BYTES = 16 * PAGE_BYTES
"""Longer pieces are not touched before they are copied: each is a walk through memory itself."""

take, put, move = np.take, np.put, np.copyto
"""The three calls by which bytes move on a host."""


class Turned(msgspec.Struct, frozen=True, eq=False):
    """A `Turned` says how two axes of a piece change places: the last one of the frame, `lines` of
    `words` each, `line_bytes` apart, and the one that touches in the engine's memory, where words
    of a line are `word_step` bytes apart. The other axes begin at `own`, and in the frame at
    `frame`."""

    lines: int
    line_bytes: int
    words: int
    word_step: int
    own: Offsets
    frame: Offsets


class Form:
    """A `Form` is what pieces of one kind have in common: how one lies, and what bounds all."""

    def __init__(self, lane: Lane, within: range, *, grid: int) -> None:
        """Describe pieces like a block of `lane`. All are at addresses `within`, which are one
        allocation's; they begin at multiples of `grid` from its first, and at multiples of it in
        frames, and are as long as some of them."""
        self.lane, self._within, self.grid = lane, within, grid
        self.base = within.start
        self.piece_bytes, self.span_bytes = lane.bytes, lane.span_bytes

    @cached_property
    def rows(self) -> tuple[tuple[tuple[int, int], ...], int]:
        """`rows` of a piece are in one piece on both sides, in the frame's order, and begin at
        multiples of their length: the axes that count them, and that length."""
        axes, row_bytes = self.lane.rows()
        grain = math.gcd(row_bytes, self.grid, *(stride for _, stride in axes))
        return ((*axes, (row_bytes // grain, grain)), grain)

    @cached_property
    def staged(self) -> tuple[Form, tuple[int, ...]]:
        """`staged` is the same bytes in the order of the engine's memory, and where pieces and each
        axis of the frame are in an array of them."""
        lane = self.lane
        order = sorted(range(len(lane.counts)), key=lambda axis: -lane.strides[axis])
        own = msgspec.structs.replace(
            lane,
            counts=tuple(lane.counts[axis] for axis in order),
            strides=tuple(lane.strides[axis] for axis in order),
        )
        form = Form(own, self._within, grid=self.grid)
        return form, (0, *(1 + order.index(axis) for axis in range(len(order))))

    @cached_property
    def memory(self) -> NDArray[np.uint8]:
        """`memory` is all that the pieces are in, of a host, and nothing else: NumPy copies the
        whole array before it writes values into it that lie inside of it."""
        size = len(self._within) // self.rows[1] * self.rows[1]
        memory: Any = (ctypes.c_char * size).from_address(self.base)
        found: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        return found

    @cached_property
    def inside(self) -> Offsets:
        """`inside` is where the rows of a piece begin, in row lengths from its begin."""
        axes, grain = self.rows
        return _begins([(count, stride // grain) for count, stride in axes])

    @cached_property
    def strips(self) -> tuple[Offsets, Offsets, int]:
        """`strips` of a piece are its longest rows that are in one piece on both sides: where they
        begin in the engine's memory and in the frame, from the piece's begin, and their bytes."""
        axes, strip_bytes = self.lane.rows()
        own = _begins(axes)
        return own, np.arange(len(own)) * strip_bytes, strip_bytes

    @cached_property
    def turned(self) -> Turned | None:
        """`turned` is set where single words, not rows, are in one piece on both sides, since two
        axes change places."""
        axes, row_bytes = self.lane.rows()
        item = self.lane.item_bytes
        at = next((at for at, (_, stride) in enumerate(axes[:-1]) if stride == item), None)
        if at is None or row_bytes != item:
            return None
        in_frame = [item * math.prod(count for count, _ in axes[n + 1 :]) for n in range(len(axes))]
        (lines, _), (words, step) = axes[at], axes[-1]
        others = [n for n in range(len(axes) - 1) if n != at]
        return Turned(
            lines,
            in_frame[at],
            words,
            step,
            own=_begins([axes[n] for n in others]),
            frame=_begins([(axes[n][0], in_frame[n]) for n in others]),
        )


def _begins(axes: Sequence[tuple[int, int]]) -> Offsets:
    """Return where each combination of the axes, given as (count, stride), begins."""
    found = np.zeros(1, np.int64)
    for count, stride in axes:
        found = (found[:, None] + np.arange(count) * stride).reshape(-1)
    return found


class Pieces(msgspec.Struct, frozen=True, eq=False):
    """`Pieces` are to be copied together: their begins in the engine's memory, as addresses, and in
    the frame, as offsets, ascending there.

    `fresh` is set where blocks are scattered, and true for the pieces that are in pages of memory
    in which no other one begins, or the first one.
    """

    form: Form
    own: Offsets
    frame: Offsets
    fresh: NDArray[np.bool_] | None = None

    def runs(self, most_bytes: int) -> Iterator[Pieces]:
        """Yield the pieces in runs that touch in the frame, each of at most so many bytes, or one
        piece."""
        ends = np.flatnonzero(np.diff(self.frame) != self.form.piece_bytes) + 1
        yield from self._cut([0, *ends.tolist(), len(self.frame)], most_bytes)

    def batches(self, most_bytes: int) -> Iterator[Pieces]:
        """Yield the pieces in runs, or, where these would be short, as they come."""
        breaks = np.count_nonzero(np.diff(self.frame) != self.form.piece_bytes)
        if len(self.frame) * self.form.piece_bytes < LEAST_RUN_BYTES * (1 + breaks):
            yield from self._cut([0, len(self.frame)], most_bytes)
        else:
            yield from self.runs(most_bytes)

    def _cut(self, bounds: Sequence[int], most_bytes: int) -> Iterator[Pieces]:
        most = max(1, most_bytes // self.form.piece_bytes)
        for first, end in itertools.pairwise(bounds):
            for at in range(first, end, most):
                until = min(at + most, end)
                fresh = None if self.fresh is None else self.fresh[at:until]
                yield Pieces(self.form, self.own[at:until], self.frame[at:until], fresh)

    @property
    def bytes(self) -> int:
        """`bytes` is the bytes of all pieces."""
        return len(self.frame) * self.form.piece_bytes

    @property
    def frame_bytes(self) -> slice:
        """`frame_bytes` is what is between the begin of the first piece and the end of the last."""
        return slice(int(self.frame[0]), int(self.frame[-1]) + self.form.piece_bytes)

    @property
    def is_run(self) -> bool:
        """`is_run` tells whether the pieces touch in the frame."""
        return bool(np.all(np.diff(self.frame) == self.form.piece_bytes))


class Copies(Protocol):
    """`Copies` move pieces on one kind of device."""

    def gather(self, pieces: Pieces, frame: memoryview) -> None:
        """Copy the pieces out of the engine's memory into `frame`."""
        ...

    def scatter(self, pieces: Pieces, frame: memoryview) -> None:
        """Copy the pieces from `frame` into the engine's memory."""
        ...

    def settle(self) -> None:
        """Return when what was gathered is there."""
        ...


def host_copies() -> Copies:
    """Return what moves pieces in a host's memory: compiled loops where Numba is, which vLLM
    brings; else NumPy."""
    try:
        from ownerserve.engines.vllm.layout.compiled import CompiledCopies
    except ImportError as error:
        log.info("KV is copied by NumPy, which takes about twice as long: %s", error)
        return HostCopies()
    return CompiledCopies()


class HostCopies:
    """`HostCopies` move pieces in a host's memory: one call for some megabytes of rows. Holds
    nothing; the memory behind the addresses has to live."""

    def gather(self, pieces: Pieces, frame: memoryview) -> None:
        data, form = np.frombuffer(frame, np.uint8), pieces.form
        row, turns = f"V{form.grid}", form.rows[1] < LEAST_ROW_BYTES
        for batch in pieces.batches(STAGED_BYTES if turns else CALL_BYTES):
            is_run = batch.is_run
            into = data[batch.frame_bytes] if is_run else np.empty(batch.bytes, np.uint8)
            (_gather_turned if turns else _gather_rows)(batch, into)
            if not is_run:
                put(data.view(row), _frame_rows(batch), into.view(row), mode="clip")

    def scatter(self, pieces: Pieces, frame: memoryview) -> None:
        data, form = np.frombuffer(frame, np.uint8), pieces.form
        row, turns = f"V{form.grid}", form.rows[1] < LEAST_ROW_BYTES
        for batch in pieces.batches(STAGED_BYTES if turns else CALL_BYTES):
            if batch.is_run:
                source = data[batch.frame_bytes]
            else:
                source = np.empty(batch.bytes, np.uint8)
                take(data.view(row), _frame_rows(batch), out=source.view(row), mode="clip")
            (_scatter_turned if turns else _scatter_rows)(batch, source)

    def settle(self) -> None:
        """Return at once: calls of a host are over when they return."""


def _gather_turned(batch: Pieces, into: NDArray[np.uint8]) -> None:
    own, axes = batch.form.staged
    stage = np.empty(batch.bytes, np.uint8)
    _gather_rows(Pieces(own, batch.own, batch.frame), stage)
    move(_as_axes(into, batch.form), _as_axes(stage, own).transpose(axes))


def _scatter_turned(batch: Pieces, data: NDArray[np.uint8]) -> None:
    """Write rows whose axes change places: first whole rows beside one another, for in the frame
    they lie a power of two apart, where a processor's cache holds few of them; then turned."""
    own, axes = batch.form.staged
    stage = np.empty(batch.bytes, np.uint8)
    in_order = _as_axes(data, batch.form).transpose(np.argsort(axes).tolist())
    rows = np.ascontiguousarray(in_order.swapaxes(-1, -2))
    move(_as_axes(stage, own), rows.swapaxes(-1, -2))
    _scatter_rows(Pieces(own, batch.own, batch.frame), stage)


def _as_axes(data: NDArray[np.uint8], form: Form) -> NDArray[Any]:
    """Return `data` as [pieces, axes of a piece]."""
    typed: NDArray[Any] = data.view(f"u{form.lane.item_bytes}")
    return typed.reshape(-1, *form.lane.counts)


def _gather_rows(run: Pieces, into: NDArray[np.uint8]) -> None:
    row, memory = f"V{run.form.rows[1]}", run.form.memory
    _touch(run)
    take(memory.view(row), _listed(run), out=into.view(row), mode="clip")


def _scatter_rows(run: Pieces, data: NDArray[np.uint8]) -> None:
    row, memory = f"V{run.form.rows[1]}", run.form.memory
    _touch(run)
    put(memory.view(row), _listed(run), data.view(row), mode="clip")


def _touch(run: Pieces) -> None:
    """Read a byte of every page of memory that the run's fresh pieces are in: the translations of
    their addresses are then looked up side by side, and not each when a copy arrives there."""
    if run.fresh is not None and run.form.span_bytes <= MOST_TOUCHED_BYTES:
        pages = np.arange(0, run.form.span_bytes, PAGE_BYTES)
        at = run.own[run.fresh] - run.form.base
        np.take(run.form.memory, (at[:, None] + pages).reshape(-1), mode="clip")


def _frame_rows(batch: Pieces) -> Offsets:
    """Return where pieces lie in the frame, in rows of the grid's length."""
    grid = batch.form.grid
    found: Offsets = batch.frame[:, None] // grid + np.arange(batch.form.piece_bytes // grid)
    return found.reshape(-1)


def _listed(run: Pieces) -> Offsets:
    """Return where the rows of the run begin, in row lengths from the first piece that there can
    be, in the frame's order."""
    form = run.form
    begins = (run.own - form.base) // form.rows[1]
    found: Offsets = (begins[:, None] + form.inside).reshape(-1)
    return found
