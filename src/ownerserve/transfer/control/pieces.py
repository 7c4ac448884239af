"""Pieces, as arithmetic: cut for reading, clipped to what is wanted, and fitted together again.

layers ^   an artifact is a rectangle of units and layers, and a piece one within it.
       |   Pieces cover it when each cell is in one of them, and no cell is in two.
       +-----> units
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
from msgspec.structs import replace

from ownerserve.transfer.vocabulary import FramePiece

PIECE_BYTES = 1 << 20
"""A piece is cut down to so much, or to one layer of one unit."""


class SizedPiece(msgspec.Struct, frozen=True, gc=False):
    """A `SizedPiece` is a piece and its bytes, over all heads."""

    piece: FramePiece
    bytes: int


def cells(piece: FramePiece) -> int:
    """Count the layers of units that are in a piece."""
    return (piece.end_unit - piece.first_unit) * (piece.end_layer - piece.first_layer)


def cut(sized: SizedPiece, most_bytes: int = PIECE_BYTES) -> Iterator[FramePiece]:
    """Cut a piece into some of `most_bytes` at most: between units, else between layers too."""
    piece = sized.piece
    layers = piece.end_layer - piece.first_layer
    cell_bytes = max(1, -(-sized.bytes // max(1, cells(piece))))
    units = max(1, most_bytes // (cell_bytes * max(1, layers)))
    if units == 1:
        layers = min(layers, max(1, most_bytes // cell_bytes))
    for unit in range(piece.first_unit, piece.end_unit, units):
        for layer in range(piece.first_layer, piece.end_layer, layers):
            yield replace(
                piece,
                first_unit=unit,
                end_unit=min(unit + units, piece.end_unit),
                first_layer=layer,
                end_layer=min(layer + layers, piece.end_layer),
            )


def clip(sized: SizedPiece, wanted: FramePiece) -> SizedPiece | None:
    """Return what of a piece is in a wanted one of the same artifact; None: nothing."""
    piece = sized.piece
    first_unit = max(piece.first_unit, wanted.first_unit)
    end_unit = min(piece.end_unit, wanted.end_unit)
    first_layer = max(piece.first_layer, wanted.first_layer)
    end_layer = min(piece.end_layer, wanted.end_layer)
    if first_unit >= end_unit or first_layer >= end_layer:
        return None
    inside = replace(
        piece,
        first_unit=first_unit,
        end_unit=end_unit,
        first_layer=first_layer,
        end_layer=end_layer,
    )
    return SizedPiece(inside, sized.bytes * cells(inside) // cells(piece))


class Cover:
    """A `Cover` knows which cells of wanted pieces have come. It takes a piece that lies in a
    wanted one and touches no cell that is there."""

    def __init__(self, wanted: Iterable[FramePiece]) -> None:
        self._wanted = {piece.artifact: piece for piece in wanted}
        self._rows = {  # for each unit the layers that have come, as bits
            name: [0] * (piece.end_unit - piece.first_unit) for name, piece in self._wanted.items()
        }
        self.missing = sum(cells(piece) for piece in self._wanted.values())

    def takes(self, piece: FramePiece) -> bool:
        """Add the piece; False, and nothing changes, where it does not fit."""
        whole = self._wanted.get(piece.artifact)
        if whole is None or not (
            whole.first_unit <= piece.first_unit < piece.end_unit <= whole.end_unit
            and whole.first_layer <= piece.first_layer < piece.end_layer <= whole.end_layer
        ):
            return False
        row, bits = self._rows[piece.artifact], (1 << piece.end_layer) - (1 << piece.first_layer)
        units = range(piece.first_unit - whole.first_unit, piece.end_unit - whole.first_unit)
        if any(row[unit] & bits for unit in units):
            return False
        for unit in units:
            row[unit] |= bits
        self.missing -= cells(piece)
        return True
