"""Strided copies move blocks from one layout to another where this process sees both: of a peer's
shared memory, or of what was read in raw order to an arena (`forms.staged`).

    both sides' axes, cut until they are the same ones     (count, step there, step here)
    those that follow a block table                        one copy for each, by NumPy, of all
    all others, with parts and layers where they are       layers at once
    equally far apart

One pass over memory: no list of rows is made, and none of what is on the way is kept.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ownerserve.kv.errors import InvalidInput, SpecMismatch
from ownerserve.kv.frame import Lane
from ownerserve.kv.regions import Region
from ownerserve.transfer.layout.places import Tables
from ownerserve.transfer.vocabulary import FramePiece


class _Step(msgspec.Struct, frozen=True):
    """A `_Step` leads to the next of an axis: so many bytes further, and blocks of the table."""

    bytes: int
    blocks: int = 0

    def times(self, count: int) -> _Step:
        return _Step(self.bytes * count, self.blocks * count)


_Axis = tuple[int, _Step]
_Pair = tuple[int, _Step, _Step]
_ITEMS = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


class _Grid(msgspec.Struct, frozen=True):
    """A `_Grid` is lanes of one form on one side: the first one, its block table, and the axes,
    of parts and layers, that lead to the others."""

    lane: Lane
    table: int
    axes: tuple[_Axis, ...]


class _Move(msgspec.Struct, frozen=True, gc=False):
    """A `_Move` is what one copy of a unit takes: of each side a block of the unit, and `place`,
    the indices of a view that choose a part of it."""

    source_block: int
    goal_block: int
    place: tuple[int, ...]


class _Plan(msgspec.Struct, frozen=True, eq=False):
    """A `_Plan` is one grid on both sides: a view [blocks, ...] of each, their tables, the blocks
    of a unit, and the moves of a unit."""

    source: NDArray[Any]
    goal: NDArray[Any]
    tables: tuple[int, int]
    each: tuple[int, int]
    moves: tuple[_Move, ...]


class StridedCopies:
    """`StridedCopies` bring pieces from one region of this process's memory to another."""

    def __init__(self, goal: Region, source: Region) -> None:
        """Take both sides. Raises SpecMismatch where they hold other sections, or cut their blocks
        where no common axes are."""
        goal.check()
        source.check()
        if goal.section != source.section:
            raise SpecMismatch(f"{source.section.name} as {goal.section.name}")
        self._goal, self._source = goal, source
        self._plans: dict[tuple[int, int], list[_Plan]] = {}

    def copy(self, piece: FramePiece, goal: Tables, source: Tables) -> None:
        """Copy the piece's units and layers; `goal` and `source` are each side's block ids, of its
        artifact's units from 0 on. Raises InvalidInput for what is not there."""
        layers = piece.first_layer, piece.end_layer
        if not 0 <= layers[0] < layers[1] <= self._goal.section.layers:
            raise InvalidInput("layers", f"{layers}", "ask for layers that the component has")
        if layers not in self._plans:
            self._plans[layers] = list(self._planned(range(*layers)))
        for plan in self._plans[layers]:
            source_table, goal_table = plan.tables
            from_ids = _ids(source[source_table], piece, plan.each[0], of=len(plan.source))
            to_ids = _ids(goal[goal_table], piece, plan.each[1], of=len(plan.goal))
            for there, here in zip(from_ids, to_ids, strict=True):
                for move in plan.moves:
                    taken = plan.source[(there[move.source_block], *move.place)]
                    plan.goal[(here[move.goal_block], *move.place)] = taken

    def _planned(self, layers: range) -> Iterator[_Plan]:
        regions = self._source, self._goal
        parts = range(len(self._goal.lanes))
        whole = [(parts, layers)]
        by_part = [(range(part, part + 1), layers) for part in parts]
        by_lane = [(part, range(at, at + 1)) for part, _ in by_part for at in layers]
        for cuts in (whole, by_part, by_lane):
            grids = [[_grid(region, *cut) for region in regions] for cut in cuts]
            if all(grid is not None for pair in grids for grid in pair):
                for (own, some), (source, goal) in zip(cuts, grids, strict=True):
                    assert source is not None and goal is not None
                    each = [region.blocks_a_unit(own[0], some[0]) for region in regions]
                    yield _plan(self._source, self._goal, source, goal, (each[0], each[1]))
                return


def _ids(table: NDArray[np.int64], piece: FramePiece, each: int, *, of: int) -> list[list[int]]:
    """Return the piece's block ids, unit by unit. Below 0 they would count from a view's end."""
    first, end = piece.first_unit * each, piece.end_unit * each
    if not 0 <= first < end <= len(table):
        problem = f"[{piece.first_unit}, {piece.end_unit}) of {len(table) // each}"
        raise InvalidInput("units", problem, "ask for units that the artifact has")
    ids = np.asarray(table[first:end], np.int64)
    if int(ids.min()) < 0 or int(ids.max()) >= of:
        raise InvalidInput("block ids", f"not within {of}", "give blocks of this region")
    found: list[list[int]] = ids.reshape(-1, each).tolist()
    return found


def _grid(region: Region, parts: range, layers: range) -> _Grid | None:
    """Return the lanes as a grid; None where they are not alike, or not equally far apart."""
    first = region.lanes[parts[0]][layers[0]]
    begins = np.array([[region.lanes[part][at].address for at in layers] for part in parts])
    steps = [
        int(along[1] - along[0]) if len(along) > 1 else 0 for along in (begins[:, 0], begins[0])
    ]
    regular = (
        first.address
        + np.arange(len(parts))[:, None] * steps[0]
        + np.arange(len(layers)) * steps[1]
    )
    forms = {_form(region, part, at) for part in parts for at in layers}
    if len(forms) > 1 or not np.array_equal(begins, regular):
        return None
    axes = (len(parts), _Step(steps[0])), (len(layers), _Step(steps[1]))
    return _Grid(first, region.table(layers[0]), axes)


def _form(region: Region, part: int, layer: int) -> tuple[object, ...]:
    lane = region.lanes[part][layer]
    inside = lane.block_bytes, lane.counts, lane.strides, lane.item_bytes
    return (*inside, region.table(layer))


def _plan(
    from_region: Region, to_region: Region, source: _Grid, goal: _Grid, each: tuple[int, int]
) -> _Plan:
    pairs = _common(_axes(source.lane, each[0]), _axes(goal.lane, each[1]))
    loops = [pair for pair in pairs if pair[1].blocks or pair[2].blocks]
    inner = [
        (count, there, here)
        for (count, there), (_, here) in zip(source.axes, goal.axes, strict=True)
    ]
    inner += [pair for pair in pairs if pair not in loops]
    inner, row_bytes = [pair for pair in inner if pair[0] > 1], 1
    while inner and inner[-1][1].bytes == inner[-1][2].bytes == row_bytes:
        row_bytes *= inner.pop()[0]
    counts = [count for count, _, _ in (*loops, *inner)]
    steps = [
        [there.bytes for _, there, _ in (*loops, *inner)],
        [here.bytes for _, _, here in (*loops, *inner)],
    ]
    moves = []
    for place in itertools.product(*(range(count) for count, _, _ in loops)):
        there = sum(n * step.blocks for n, (_, step, _) in zip(place, loops, strict=True))
        here = sum(n * step.blocks for n, (_, _, step) in zip(place, loops, strict=True))
        moves.append(_Move(there, here, place))
    return _Plan(
        _view(from_region, source.lane, counts, steps[0], row_bytes),
        _view(to_region, goal.lane, counts, steps[1], row_bytes),
        (source.table, goal.table),
        each,
        tuple(moves),
    )


def _axes(lane: Lane, blocks: int) -> list[_Axis]:
    """Return the axes of a unit, outermost first, down to bytes."""
    inside = zip((*lane.counts, lane.item_bytes), (*lane.strides, 1), strict=True)
    return [(blocks, _Step(0, 1)), *((count, _Step(stride)) for count, stride in inside)]


def _common(source: Sequence[_Axis], goal: Sequence[_Axis]) -> list[_Pair]:
    """Return both sides' axes, outermost first, cut where one of them has a cut."""
    left, right = ([axis for axis in side if axis[0] > 1] for side in (source, goal))
    found = list[_Pair]()
    while left and right:
        (own, step), (other, their) = left.pop(), right.pop()
        count = min(own, other)
        if own % count or other % count:
            raise SpecMismatch(f"axes of {own} and {other} have no common cut")
        found.append((count, step, their))
        if own > count:
            left.append((own // count, step.times(count)))
        if other > count:
            right.append((other // count, their.times(count)))
    if left or right:
        raise SpecMismatch("blocks of two lengths")
    return found[::-1]


def _view(
    region: Region, lane: Lane, counts: Sequence[int], steps: Sequence[int], row_bytes: int
) -> NDArray[Any]:
    """Return rows of the region's blocks from the lane on, [blocks, *counts]. Raises ValueError
    where they would leave the region."""
    memory: Any = (ctypes.c_char * region.bytes).from_address(region.address)
    found: NDArray[Any] = np.ndarray(
        (region.blocks, *counts),
        np.dtype(_ITEMS.get(row_bytes, f"V{row_bytes}")),
        memory,
        lane.address - region.address,
        (lane.block_bytes, *steps),
    )
    return found
