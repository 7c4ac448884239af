"""A lend's memory says where it lies in the lender's own memory: what a reader needs that reads by
address. It goes beside `Lent` and `Grown`: to readers of the same host, and to all where an engine
is open by which others read so too.

    process   the lender's, as it is known on its host
    regions   its components' blocks, as addresses of that process
    blocks    of each artifact: which region, and the ids of its blocks
    engines   how the lender's engines are reached, by the road's name
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from ownerserve.kv.errors import UNREADABLE, InvalidInput, SpecMismatch
from ownerserve.kv.regions import Region, SharedMemory
from ownerserve.transfer.layout.places import RegionPlaces
from ownerserve.transfer.movers.process_name import ProcessName
from ownerserve.transfer.vocabulary import FramePiece, Runs


class BlocksOfArtifact(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An artifact's blocks: the index of its region, and their ids, little-endian int64."""

    region: int
    ids: bytes


class LentMemory(msgspec.Struct, frozen=True, array_like=True):
    """A `LentMemory` is where all that a ticket covers lies."""

    process: ProcessName
    regions: tuple[Region, ...]
    blocks: Mapping[bytes, BlocksOfArtifact]
    engines: Mapping[str, str] = {}


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(LentMemory)


def encode_memory(memory: LentMemory) -> bytes:
    """Return the bytes that go beside `Lent`."""
    return _encoder.encode(memory)


class LenderPlaces:
    """`LenderPlaces` find a lend's pieces in its lender's memory."""

    def __init__(self, data: bytes) -> None:
        """Take what a lender said. Raises InvalidInput for what is none, or says of its regions
        what can't be."""
        try:
            self._memory = _decoder.decode(data)
            self._places = [RegionPlaces(region) for region in self._memory.regions]
        except (*UNREADABLE, SpecMismatch, ValueError) as error:
            raise InvalidInput("lent memory", str(error), "send what `Lent` covers") from error

    def joined(self, data: bytes) -> LenderPlaces:
        """Return what the lender said before, with what it says now: of the same regions, more
        artifacts, or more of them. Raises as the constructor does."""
        told = LenderPlaces(data)
        blocks = {**self._memory.blocks, **told._memory.blocks}
        told._memory = msgspec.structs.replace(told._memory, blocks=blocks)
        return told

    @property
    def process(self) -> ProcessName:
        """Return the lender's process."""
        return self._memory.process

    @property
    def engines(self) -> Mapping[str, str]:
        """Return how the lender's engines are reached, by the road's name."""
        return self._memory.engines

    def shared(self) -> SharedMemory | None:
        """Return the memory object in which all regions lie; None where there is no such one."""
        found = {region.shared for region in self._memory.regions}
        return found.pop() if len(found) == 1 else None

    def runs(self, piece: FramePiece) -> Runs | None:
        """Return the lender's addresses of a piece; None where they were not said."""
        blocks = self._memory.blocks.get(piece.artifact)
        if blocks is None or not 0 <= blocks.region < len(self._places):
            return None
        try:
            ids = np.frombuffer(blocks.ids, "<i8").astype(np.int64)
            return self._places[blocks.region].runs(piece, (ids,))
        except (InvalidInput, ValueError):
            return None
