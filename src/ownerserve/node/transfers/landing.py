"""A landing is host memory in which artifacts arrive, as the canonical frame lays them out.

    one area a component   | unit | unit | ... |    artifacts one behind another

Owns the memory, and lets go of it when nobody can write there any more: each that brings a share of
it keeps it for as long as it may.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from weakref import finalize

import msgspec
import numpy as np

from ownerserve.kv.frame import ITEM_BYTES, Lane, PayloadSection
from ownerserve.kv.regions import Region
from ownerserve.transfer.control.events import WantedArtifact
from ownerserve.transfer.layout.places import RegionPlaces
from ownerserve.transfer.vocabulary import FramePiece, Runs


class Landing:
    """A `Landing` is room for some artifacts, of which the first units [0, end) are to come."""

    def __init__(
        self, artifacts: Sequence[WantedArtifact], sections: dict[str, PayloadSection]
    ) -> None:
        self._areas: dict[str, tuple[np.ndarray, RegionPlaces]] = {}
        self._at: dict[bytes, tuple[str, int, int]] = {}
        self.own_heads: Mapping[bytes, tuple[int, int]] = {}
        """Which heads of ours come of an artifact, where who lends counts them otherwise."""
        units: dict[str, int] = {}
        for one in artifacts:
            first = units.get(one.component, 0)
            units[one.component] = first + one.piece.end_unit
            self._at[one.piece.artifact] = (one.component, first, one.piece.end_unit)
        for name, count in units.items():
            memory = np.zeros(count * sections[name].unit_bytes, np.uint8)  # padding is zeros
            region = frame_region(sections[name], memory.ctypes.data, count)
            self._areas[name] = (memory, RegionPlaces(region))

    def when_gone(self, told: Callable[[], object]) -> None:
        """Have `told` hear once nobody has any of the memory: neither the landing nor what `data`
        gave of it. It is called on the thread that lets go of it, amid anything; where several let
        go at once, perhaps twice."""
        left = list(self._areas)

        def gone() -> None:
            left.pop()
            if not left:
                told()

        for memory, _ in self._areas.values():
            finalize(memory, gone)

    def runs(self, piece: FramePiece) -> Runs:
        """Return where the piece goes. Raises KeyError for an artifact that is not awaited."""
        component, first, units = self._at[piece.artifact]
        if (own := self.own_heads.get(piece.artifact)) is not None:
            piece = msgspec.structs.replace(piece, first_head=own[0], end_head=own[1])
        return self._areas[component][1].runs(piece, (np.arange(first, first + units),))

    def share(self, own_heads: Mapping[bytes, tuple[int, int]]) -> Landing:
        """Return the landing as one of the lender's ranks is read into it, which counts heads
        otherwise: what comes of it are our heads [first, end) of each artifact; both 0: all."""
        shared = copy(self)
        shared.own_heads = own_heads
        return shared

    def data(self, piece: FramePiece) -> memoryview:
        """Return the bytes of the piece's units, as records have them, padding included."""
        component, first, _ = self._at[piece.artifact]
        memory, places = self._areas[component]
        size = places.region.section.unit_bytes
        return memory.data[(first + piece.first_unit) * size : (first + piece.end_unit) * size]


def frame_region(section: PayloadSection, address: int, units: int) -> Region:
    """Return plain memory at `address` that holds units of the section as the frame has them, one
    behind another."""
    lanes = []
    for part, offsets in zip(section.parts, section.offsets(), strict=True):
        item = ITEM_BYTES[part.dtype]
        strides, count = [], item
        for extent in reversed(part.shape[1:]):
            strides.append(count)
            count *= extent
        lanes.append(
            tuple(
                Lane(address + at, section.unit_bytes, part.shape[1:], tuple(strides[::-1]), item)
                for at in offsets
            )
        )
    return Region(section, tuple(lanes), units, address, units * section.unit_bytes)
