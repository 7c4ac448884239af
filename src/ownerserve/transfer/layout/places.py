"""Places turn pieces of the frame into runs of one process's memory: by a template of one unit,
and the block ids of the piece's units.

    template   of a unit, in the frame's order: (begin, length, column)
    column     one block of a unit in one block table: its ids times the bytes between blocks
    runs       begin + id * block_bytes, for all units at once; neighbours that touch are one

Owns no memory and reads none. What depends on the region alone is worked out once; of a piece, all
is arrays: 128k tokens of 61 layers are some 125,000 runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.regions import Region
from ownerserve.transfer.layout.heads import with_heads
from ownerserve.transfer.vocabulary import FramePiece, Runs

Numbers = NDArray[np.int64]
Tables = Sequence[Numbers]
"""Block ids of an artifact's units [0, n), in order: an array for each block table."""

_Cut = tuple[int, int, int, int]


class _Column(msgspec.Struct, frozen=True):
    """A `_Column` is the blocks of one table that lie `block_bytes` apart."""

    table: int
    block_bytes: int
    blocks: int


class _Template(msgspec.Struct, frozen=True, eq=False):
    """A `_Template` is the elements of a unit: where each begins with block 0, its length, its
    column. Whether two elements touch, ids decide only where they are of two columns, and from unit
    to unit: where the columns `joints[0]` and `joints[1]` of the unit are `joints[2]` bytes apart.
    `joint` counts, from 1, which of these is between an element and the one before; 0: none."""

    begins: Numbers
    lengths: Numbers
    columns: Numbers
    joint: Numbers
    joints: Numbers
    sources: tuple[_Column, ...]


class RegionPlaces:
    """`RegionPlaces` say where pieces of one region's artifacts lie."""

    def __init__(self, region: Region) -> None:
        """Take the region. Raises SpecMismatch where its lanes are not its section's, or leave
        it."""
        region.check()
        self.region = region
        self._templates: dict[_Cut, _Template] = {}

    def runs(self, piece: FramePiece, tables: Tables) -> Runs:
        """Return where the piece's bytes lie, in their order. Raises InvalidInput for units,
        layers, heads or blocks that are not there."""
        template = self._template(piece)
        scaled = [self._scaled(column, piece, tables) for column in template.sources]
        blocks = scaled[0] if len(scaled) == 1 else np.concatenate(scaled, axis=1)
        # In one piece: of two, memory goes back to the system and comes again page by page.
        both = np.empty((2, len(blocks), len(template.begins)), np.int64)
        addresses, both[1] = both[0], template.lengths
        if blocks.shape[1] == 1:
            np.add(blocks, template.begins, out=addresses)
        else:
            np.take(blocks, template.columns, axis=1, out=addresses, mode="clip")
            addresses += template.begins
        return _joined(both, blocks, template)

    def _scaled(self, column: _Column, piece: FramePiece, tables: Tables) -> Numbers:
        """Return how far each unit's blocks of the column lie from block 0, [units, blocks]."""
        first, end = piece.first_unit * column.blocks, piece.end_unit * column.blocks
        if not 0 <= column.table < len(tables):
            problem = f"{len(tables)} given, {column.table} is asked for"
            raise InvalidInput("tables", problem, "give each block table that the region names")
        ids = np.asarray(tables[column.table], np.int64)
        if not 0 <= first < end <= len(ids):
            problem = f"[{piece.first_unit}, {piece.end_unit}) of {len(ids) // column.blocks}"
            raise InvalidInput("units", problem, "ask for units that the artifact has")
        ids = ids[first:end]
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.region.blocks:
            problem = f"{low} to {high} of {self.region.blocks}"
            raise InvalidInput("block ids", problem, "give blocks of this region")
        found: Numbers = ids.reshape(-1, column.blocks) * column.block_bytes
        return found

    # -- templates -----------------------------------------------------------------------------

    def _template(self, piece: FramePiece) -> _Template:
        layers, heads = (piece.first_layer, piece.end_layer), (piece.first_head, piece.end_head)
        cut = (*layers, *heads)
        found = self._templates.get(cut)
        if found is None:
            found = self._templates[cut] = self._made(range(*layers), range(*heads))
        return found

    def _made(self, layers: range, heads: range) -> _Template:
        region, parts = self.region, self.region.section.parts
        if not 0 <= layers.start < layers.stop <= region.section.layers:
            problem = f"[{layers.start}, {layers.stop}) of {region.section.layers}"
            raise InvalidInput("layers", problem, "ask for layers that the component has")
        is_whole = len(layers) == region.section.layers
        if not is_whole and len({part.shape[0] for part in parts}) > 1:
            problem = f"{region.section.name} has parts of unequal layers"
            raise InvalidInput("layers", problem, "ask for all of them")
        region = with_heads(region, heads) if heads.stop else region
        return _template_of(
            [
                _framed(region, part, layer)
                for part, lanes in enumerate(region.lanes)
                for layer in (layers if not is_whole else range(len(lanes)))
            ]
        )


class _Rows(msgspec.Struct, frozen=True, eq=False):
    """`_Rows` are what a unit has of one column, block by block: rows of `row_bytes` from
    `begins` on."""

    column: _Column
    begins: Numbers
    row_bytes: int


def _framed(region: Region, part: int, layer: int) -> _Rows:
    lane = region.lanes[part][layer]
    count = region.blocks_a_unit(part, layer)
    axes, row_bytes = lane.rows()
    begins = np.full(1, lane.address, np.int64)
    for axis, stride in axes:
        begins = (begins[:, None] + np.arange(axis) * stride).reshape(-1)
    column = _Column(region.table(layer), lane.block_bytes, count)
    return _Rows(column, begins, row_bytes)


def _template_of(unit: Sequence[_Rows]) -> _Template:
    sources = tuple(dict.fromkeys(rows.column for rows in unit))
    firsts, at = dict[_Column, int](), 0
    for source in sources:
        firsts[source] = at
        at += source.blocks
    listed = list[Numbers]()
    for rows in unit:
        count, blocks = len(rows.begins), rows.column.blocks
        columns = firsts[rows.column] + np.repeat(np.arange(blocks), count)
        lengths = np.full(count * blocks, rows.row_bytes, np.int64)
        listed.append(np.stack((np.tile(rows.begins, blocks), lengths, columns)))
    begin, length, column = np.concatenate(listed, axis=1)
    same = column[1:] == column[:-1]
    starts = np.append(True, ~(same & (begin[:-1] + length[:-1] == begin[1:])))
    kept = np.flatnonzero(starts)
    length = np.add.reduceat(length, kept)
    begin, column = begin[kept], column[kept]
    last = np.flatnonzero(column[1:] != column[:-1])
    apart = begin[last] + length[last] - begin[last + 1]
    pairs = np.stack((column[last], column[last + 1], apart))
    joints, inverse = np.unique(pairs, axis=1, return_inverse=True)
    joint = np.zeros(len(begin), np.int64)
    joint[last + 1] = 1 + inverse.reshape(-1)
    return _Template(begin, length, column, joint, joints, sources)


def _joined(both: Numbers, blocks: Numbers, template: _Template) -> Runs:
    """Return addresses and lengths, each [units, elements], as runs, those that touch as one.
    `blocks` are the columns."""
    addresses, lengths = both
    left, right, apart = template.joints
    inside = blocks[:, right] - blocks[:, left] == apart
    between = addresses[:-1, -1] + template.lengths[-1] == addresses[1:, 0]
    flat, sizes = addresses.reshape(-1), lengths.reshape(-1)
    if len(template.lengths) == 1 and between.all():  # whole units, one behind another
        return Runs(flat[:1], template.lengths * len(flat))
    if not inside.any() and not between.any():
        return Runs(flat, sizes)
    apart_there = np.ones((len(blocks), 1 + inside.shape[1]), np.bool_)
    np.logical_not(inside, out=apart_there[:, 1:])
    if np.array_equal(apart_there.min(axis=0), apart_there.max(axis=0)) and not between.any():
        return _alike(both, template, np.flatnonzero(apart_there[0][template.joint]))
    starts = np.take(apart_there, template.joint, axis=1)
    starts[1:, 0] = ~between
    first = np.flatnonzero(starts)
    if np.all(template.lengths == sizes[0]):
        return Runs(flat[first], np.diff(first, append=len(flat)) * sizes[0])
    return Runs(flat[first], np.add.reduceat(sizes, first))


def _alike(both: Numbers, template: _Template, kept: Numbers) -> Runs:
    """Return the runs of units that all begin their runs with the same elements, `kept`."""
    found = np.empty((2, both.shape[1], len(kept)), np.int64)
    np.take(both[0], kept, axis=1, out=found[0], mode="clip")
    found[1] = np.add.reduceat(template.lengths, kept)
    return Runs(found[0].reshape(-1), found[1].reshape(-1))
