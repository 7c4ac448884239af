"""A worker's memory as the schedules see it: what stands in each block, layer and head.

    value    (number of the prefix that the block ends, layer, head), or GARBAGE

Equal prefixes have equal state, whoever computed it. Artifacts are cells of two blocks, named by
the prefix that they end.
"""

from __future__ import annotations

from typing import NamedTuple

from ownerserve.cache.layout import Component, Layout
from ownerserve.kv.prefix import pack
from ownerserve.kv.specs import Coverage
from ownerserve.transfer.vocabulary import FramePiece

B, LAYERS, HEADS, CELL = 4, 2, 2, 2
BLOCK_BYTES = B * 4
LAYOUT = Layout(B, (Component("kv", Coverage.RANGE, 64 * B, 64 * B),))
CELL_BYTES = CELL * 64 * B

Value = tuple[int, int, int]
GARBAGE: Value = (-1, -1, -1)
Place = tuple[int, int, int]
"""(slot, layer, head)."""


def tokens_of(symbols: tuple[int, ...]) -> bytes:
    """One block a symbol."""
    return b"".join(pack([symbol] * B) for symbol in symbols)


class Cell(NamedTuple):
    """What an artifact is of: blocks [first, first + CELL) of this prefix, which it ends."""

    tokens: bytes
    first: int


class Names:
    """What prefixes and artifacts are called."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._cells: dict[bytes, Cell] = {}

    def number(self, prefix: bytes) -> int:
        return self._numbers.setdefault(prefix, len(self._numbers))

    def value(self, tokens: bytes, block: int, *, layer: int, head: int) -> Value:
        return self.number(tokens[: (block + 1) * BLOCK_BYTES]), layer, head

    def cells(self, tokens: bytes) -> list[bytes]:
        """The artifacts of a prompt's whole cells, in order."""
        found = []
        for first in range(0, len(tokens) // BLOCK_BYTES - CELL + 1, CELL):
            prefix = tokens[: (first + CELL) * BLOCK_BYTES]
            name = b"artifact %d" % self.number(prefix)
            self._cells[name] = Cell(prefix, first)
            found.append(name)
        return found

    def cell(self, artifact: bytes) -> Cell:
        return self._cells[artifact]


def digest_of(values: list[Value]) -> bytes:
    return repr(values).encode()


def places(piece: FramePiece) -> list[tuple[int, int]]:
    """The (unit, layer) of a piece, in order."""
    return [
        (unit, layer)
        for unit in range(piece.first_unit, piece.end_unit)
        for layer in range(piece.first_layer, piece.end_layer)
    ]
