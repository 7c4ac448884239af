"""A landing is host memory in which artifacts arrive, as the canonical frame lays them out.

    one area a component   | unit | unit | ... |    artifacts one behind another

Owns the memory, and lets go of it when nobody can write there any more.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        units: dict[str, int] = {}
        for one in artifacts:
            first = units.get(one.component, 0)
            units[one.component] = first + one.piece.end_unit
            self._at[one.piece.artifact] = (one.component, first, one.piece.end_unit)
        for name, count in units.items():
            memory = np.zeros(count * sections[name].unit_bytes, np.uint8)  # padding is zeros
            region = frame_region(sections[name], memory.ctypes.data, count)
            self._areas[name] = (memory, RegionPlaces(region))

    def runs(self, piece: FramePiece) -> Runs:
        """Return where the piece goes. Raises KeyError for an artifact that is not awaited."""
        component, first, units = self._at[piece.artifact]
        return self._areas[component][1].runs(piece, (np.arange(first, first + units),))

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
