"""Processes' memory in any known layout, with an artifact in some of its blocks."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import msgspec
import numpy as np
from hypothesis import strategies as st

from ownerserve.kv.frame import (
    CONV,
    CSA_MAIN,
    DENSE,
    ITEM_BYTES,
    MLA,
    RECURRENT,
    WINDOW,
    PayloadPart,
    PayloadSection,
)
from ownerserve.transfer.layout.arrays import Pool
from ownerserve.transfer.layout.heads import HEAD_AXIS
from ownerserve.transfer.layout.known import LAYOUTS
from ownerserve.transfer.layout.places import RegionPlaces
from ownerserve.transfer.vocabulary import FramePiece, Runs
from tests.support.transfer.naive import items

ARTIFACT = b"a" * 32
ATTENTION = ("combined", "headwise", "interleaved", "split", "tiled")
OF_SECTION = {
    DENSE: (*ATTENTION, "slots"),
    WINDOW: ("ring", "slots"),
    MLA: ("paged_rows", "slots"),
    CSA_MAIN: ("paged_rows", "slots"),
    CONV: ("states", "slots"),
    RECURRENT: ("states", "slots"),
}
"""The layouts in which a section may be."""
EACH = [(section, name) for section, names in OF_SECTION.items() for name in names]
PAIRS = [
    (section, one, other)
    for section, names in OF_SECTION.items()
    for one, other in itertools.product(names, names)
]


class Side(NamedTuple):
    """One process's memory, and the blocks of an artifact in it."""

    layout: str
    pool: Pool
    ids: list[int]
    places: RegionPlaces
    memory: np.ndarray

    def runs(self, piece: FramePiece) -> Runs:
        return self.places.runs(piece, [np.array(self.ids)])

    def taken(self, runs: Runs) -> bytes:
        """The bytes of runs, in their order."""
        begins = runs.addresses - self.memory.ctypes.data
        pairs = zip(begins.tolist(), runs.lengths.tolist(), strict=True)
        return b"".join(self.memory[at : at + size].tobytes() for at, size in pairs)

    def items(self, piece: FramePiece) -> list[tuple[int, int]]:
        """Where in the memory each item of a piece is, and its bytes."""
        section, found = self.pool.section, list[tuple[int, int]]()
        before = self.pool.address - self.memory.ctypes.data
        axis = HEAD_AXIS.get(section.name)
        for unit in range(piece.first_unit, piece.end_unit):
            for number, part in enumerate(section.parts):
                for layer in range(piece.first_layer, piece.end_layer):
                    places = items(self.layout, self.pool, self.ids, unit, number, layer)
                    indices = itertools.product(*map(range, part.shape[1:]))
                    for at, index in zip(places, indices, strict=True):
                        if (
                            not piece.end_head
                            or axis is None
                            or piece.first_head <= index[axis - 1] < piece.end_head
                        ):
                            found.append((before + at, ITEM_BYTES[part.dtype]))
        return found


def section_of(draw: st.DrawFn, name: str, rows: int) -> PayloadSection:
    few, dtype = st.integers(1, 3), draw(st.sampled_from(("bfloat16", "float32", "uint8")))
    layers, heads, dim = draw(few), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    if name in (DENSE, WINDOW):
        shapes = dict.fromkeys(("keys", "values"), (layers, rows, heads, dim))
    elif name == RECURRENT:
        shapes = {"state": (layers, heads, dim, draw(few))}
    elif name == CONV:
        shapes = {"columns": (layers, dim, draw(few))}
    else:
        shapes = {"rows": (layers, rows, dim)}
    parts = tuple(PayloadPart(part, shape, dtype) for part, shape in shapes.items())
    return PayloadSection(name, parts)


def side_of(draw: st.DrawFn, section: PayloadSection, layout: str, units: int) -> Side:
    rows = section.parts[0].shape[1]
    is_slot = layout in ("slots", "states")
    tokens = (
        1 if is_slot else draw(st.sampled_from([n for n in range(1, rows + 1) if not rows % n]))
    )
    each = 1 if is_slot else rows if layout == "ring" else rows // tokens
    blocks = units * each + draw(st.integers(0, 5))
    if draw(st.booleans()):
        first = draw(st.integers(0, blocks - units * each))
        ids = list(range(first, first + units * each))
    else:
        ids = draw(st.permutations(range(blocks)))[: units * each]
    align = draw(st.sampled_from((1, 16, 48)))
    before, dice = 16 * draw(st.integers(0, 3)), np.random.default_rng(draw(st.integers(0, 99)))
    size = LAYOUTS[layout](Pool(section, blocks, tokens, 0, align)).bytes
    memory = dice.integers(0, 256, before + size, dtype=np.uint8)
    pool = Pool(section, blocks, tokens, memory.ctypes.data + before, align)
    region = LAYOUTS[layout](pool)
    return Side(layout, pool, ids, RegionPlaces(region), memory)


@st.composite
def cases(draw: st.DrawFn, section_name: str, *layouts: str) -> tuple[list[Side], FramePiece]:
    units, rows = draw(st.integers(1, 4)), draw(st.sampled_from((1, 2, 4, 6, 32)))
    section = section_of(draw, section_name, rows)
    sides = [side_of(draw, section, layout, units) for layout in layouts]
    first_unit = draw(st.integers(0, units - 1))
    first_layer = draw(st.integers(0, section.layers - 1))
    piece = FramePiece(
        ARTIFACT,
        first_unit,
        draw(st.integers(first_unit + 1, units)),
        first_layer,
        draw(st.integers(first_layer + 1, section.layers)),
    )
    axis = HEAD_AXIS.get(section_name)
    if axis is not None and draw(st.booleans()):
        heads = section.parts[0].shape[axis]
        first = draw(st.integers(0, heads - 1))
        end = draw(st.integers(first + 1, heads))
        piece = msgspec.structs.replace(piece, first_head=first, end_head=end)
    return sides, piece


def check_runs(side: Side, runs: Runs) -> None:
    """No run leaves the region, none is empty, and neighbours that touch are one."""
    region = side.places.region
    assert runs.addresses.dtype == runs.lengths.dtype == np.int64
    assert (runs.lengths > 0).all() and (runs.addresses >= region.address).all()
    assert (runs.addresses + runs.lengths <= region.address + region.bytes).all()
    assert (runs.addresses[:-1] + runs.lengths[:-1] != runs.addresses[1:]).all()


def moved(piece: FramePiece, source: Side, goal: Side) -> np.ndarray:
    """The goal's memory with the piece in it, copied item by item."""
    expected = goal.memory.copy()
    for (here, size), (there, _) in zip(goal.items(piece), source.items(piece), strict=True):
        expected[here : here + size] = source.memory[there : there + size]
    return expected
